"""PyTorch Distributed Checkpoint on object stores, with atomic commits, checksums and parallel transfers.

Each public name is imported on first use, so that the command line can list a bucket without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CheckpointDeletedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptDataError,
    CredentialsError,
    IncompleteSaveError,
    MetadataError,
    MismatchError,
    PolicyError,
    RanksDisagreeError,
    StoreError,
    UnsafeDataError,
)
from bucketpoint.version import __version__

if TYPE_CHECKING:
    from bucketpoint.catalog import latest_checkpoint
    from bucketpoint.dcp import (
        BucketReader,
        BucketWriter,
        CommitInfo,
        GCSReader,
        GCSWriter,
        LoadPlanner,
        LoadStats,
        S3Reader,
        S3Writer,
        SaveHandle,
        SavePlanner,
        SaveStats,
        async_save,
        load,
        rank_state,
        save,
        saved_ranks,
    )
    from bucketpoint.manager import CheckpointManager
    from bucketpoint.retention import RetentionPolicy
    from bucketpoint.staging import Stager, StagingOptions
    from bucketpoint.transfer import Progress, TransferOptions

__all__ = [
    "AccessDeniedError",
    "BucketReader",
    "BucketWriter",
    "BucketpointError",
    "CheckpointDeletedError",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CommitConflictError",
    "CommitInfo",
    "CorruptDataError",
    "CredentialsError",
    "GCSReader",
    "GCSWriter",
    "IncompleteSaveError",
    "LoadPlanner",
    "LoadStats",
    "MetadataError",
    "MismatchError",
    "PolicyError",
    "Progress",
    "RanksDisagreeError",
    "RetentionPolicy",
    "S3Reader",
    "S3Writer",
    "SaveHandle",
    "SavePlanner",
    "SaveStats",
    "Stager",
    "StagingOptions",
    "StoreError",
    "TransferOptions",
    "UnsafeDataError",
    "__version__",
    "async_save",
    "latest_checkpoint",
    "load",
    "rank_state",
    "save",
    "saved_ranks",
]

_ROOMS = {
    "CheckpointManager": "bucketpoint.manager",
    "Progress": "bucketpoint.transfer",
    "RetentionPolicy": "bucketpoint.retention",
    "Stager": "bucketpoint.staging",
    "StagingOptions": "bucketpoint.staging",
    "TransferOptions": "bucketpoint.transfer",
    "latest_checkpoint": "bucketpoint.catalog",
}
"""Packages of the names that are imported on first use, where it is not `bucketpoint.dcp`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_ROOMS.get(name, "bucketpoint.dcp")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
