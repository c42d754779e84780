"""Lightning and Fabric: checkpoints of a `Trainer` and of a `Fabric`, saved to and loaded from URLs.

`bucket_strategy` makes strategies that save sharded and in the background, and resume on another number of ranks;
`BucketCheckpoint` saves by a retention policy; `BucketCheckpointIO` keeps plain checkpoints of one file.
"""

from __future__ import annotations

try:
    import lightning  # noqa: F401 (the modules below need it)
except ModuleNotFoundError as error:  # pragma: no cover
    raise ModuleNotFoundError(
        "bucketpoint.integrations.lightning needs Lightning: pip install 'lightning>=2.5'", name=error.name
    ) from error

from bucketpoint.integrations.lightning.fabric import bucket_strategy
from bucketpoint.integrations.lightning.trainer import BucketCheckpoint, BucketCheckpointIO

__all__ = ["BucketCheckpoint", "BucketCheckpointIO", "bucket_strategy"]
