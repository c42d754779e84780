"""PyTorch Distributed Checkpoint on object stores, with atomic commits, checksums and parallel transfers.

Except for the errors, public names are imported on first use, so the command line lists a bucket without torch.
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
    from bucketpoint.catalog.catalog import latest_checkpoint
    from bucketpoint.dcp.api import load, save
    from bucketpoint.dcp.async_save import SaveHandle, async_save
    from bucketpoint.dcp.planning.load_planner import LoadPlanner
    from bucketpoint.dcp.planning.rank_state import rank_state, saved_ranks
    from bucketpoint.dcp.planning.save_planner import SavePlanner
    from bucketpoint.dcp.reader import BucketReader
    from bucketpoint.dcp.s3_and_gcs import GCSReader, GCSWriter, S3Reader, S3Writer
    from bucketpoint.dcp.stats import CommitInfo, LoadStats, SaveStats
    from bucketpoint.dcp.writer import BucketWriter
    from bucketpoint.manager import CheckpointManager
    from bucketpoint.retention import RetentionPolicy
    from bucketpoint.staging.pool import StagingOptions
    from bucketpoint.staging.stager import Stager
    from bucketpoint.transfer.options import NodeCopy, TransferOptions

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
    "NodeCopy",
    "PolicyError",
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

_MODULES = {name: module for module, *names in map(str.split, (
    "catalog.catalog latest_checkpoint", "dcp.async_save SaveHandle async_save", "dcp.api load save",
    "dcp.planning.load_planner LoadPlanner", "dcp.planning.rank_state rank_state saved_ranks",
    "dcp.planning.save_planner SavePlanner", "dcp.reader BucketReader", "dcp.stats CommitInfo LoadStats SaveStats",
    "dcp.s3_and_gcs GCSReader GCSWriter S3Reader S3Writer",
    "dcp.writer BucketWriter", "manager CheckpointManager", "retention RetentionPolicy",
    "staging.pool StagingOptions", "staging.stager Stager",
    "transfer.options NodeCopy TransferOptions",
)) for name in names}  # fmt: skip
"""Modules of the names that are imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"bucketpoint.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
