"""torch_checkpointing: a storage for its checkpoints in a bucket, which commits without a copy.

`BucketStorageConfig` is the `storage_config` of a `CheckpointManager`, saver or reader of torch_checkpointing.
"""

try:
    import torch_checkpointing as _needed  # noqa: F401
except ModuleNotFoundError as error:  # pragma: no cover
    raise ModuleNotFoundError(
        "bucketpoint.integrations.torch_checkpointing needs another package: pip install torch_checkpointing==0.1.1",
        name=error.name,
    ) from error

from bucketpoint.integrations.torch_checkpointing.storage import (
    BucketStorage,
    BucketStorageConfig,
    MissingFileError,
    OccupiedError,
    sweep,
)

__all__ = ["BucketStorage", "BucketStorageConfig", "MissingFileError", "OccupiedError", "sweep"]
