"""The checkpoint manager, with which a training loop saves, restores and prunes."""

from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.manager.restoring import Restored
from bucketpoint.manager.saving import ManagerStatus

__all__ = ["CheckpointManager", "ManagerStatus", "Restored"]
