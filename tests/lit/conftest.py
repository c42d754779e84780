"""Without Lightning nothing here is collected: `make test-lightning` has it."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("lightning") else ["test_*.py"]
