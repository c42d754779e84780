"""Without the trackers nothing here is collected: `make test-tracking` has them."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if all(map(importlib.util.find_spec, ("mlflow", "tensorboard", "wandb"))) else ["test_*.py"]
