"""PyTorch Distributed Checkpoint on object stores: whole or not at all, checksummed, and fast."""

from bucketpoint.dcp import BucketReader, BucketWriter, S3Reader, S3Writer
from bucketpoint.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    BucketpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptDataError,
    CredentialsError,
    EndpointError,
    IncompleteCheckpointError,
    IncompleteSaveError,
    InvalidURLError,
    MetadataError,
    MismatchError,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
    TransientStoreError,
    UnsafeDataError,
    WrongRegionError,
)
from bucketpoint.manager import latest_checkpoint
from bucketpoint.transfer import Progress, TransferOptions
from bucketpoint.version import __version__

__all__ = [
    "AccessDeniedError",
    "BucketNotFoundError",
    "BucketReader",
    "BucketWriter",
    "BucketpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CommitConflictError",
    "CorruptDataError",
    "CredentialsError",
    "EndpointError",
    "IncompleteCheckpointError",
    "IncompleteSaveError",
    "InvalidURLError",
    "MetadataError",
    "MismatchError",
    "ObjectNotFoundError",
    "Progress",
    "S3Reader",
    "S3Writer",
    "StoreError",
    "ThrottledError",
    "TransferOptions",
    "TransientStoreError",
    "UnsafeDataError",
    "WrongRegionError",
    "__version__",
    "latest_checkpoint",
]
