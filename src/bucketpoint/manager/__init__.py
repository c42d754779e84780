"""What a training loop calls to save, restore and prune. Knows nothing of DCP's internals."""

from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.manager.restoring import Restored

__all__ = ["CheckpointManager", "Restored"]
