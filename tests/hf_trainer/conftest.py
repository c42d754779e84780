"""Without transformers nothing here is collected: `make test-transformers` has it."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = (
    [] if importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate") else ["test_*.py"]
)
