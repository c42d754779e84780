"""Without megatron-core nothing here is collected: `make test-megatron` has it."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_*.py"]
