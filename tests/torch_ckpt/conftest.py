"""Without torch_checkpointing nothing here is collected: `make test-torch-checkpointing` has it."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch_checkpointing") else ["test_*.py"]
