"""Which checkpoints there are. Knows nothing of DCP's internals."""

from bucketpoint.manager.catalog import latest_checkpoint

__all__ = ["latest_checkpoint"]
