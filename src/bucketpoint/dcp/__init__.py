"""The parts that DCP calls: writer, reader, planners, and `save`, `load` and `async_save` around them."""

from bucketpoint.dcp.async_save import SaveHandle, async_save
from bucketpoint.dcp.deadline.api import load, save
from bucketpoint.dcp.planning.load_planner import LoadPlanner
from bucketpoint.dcp.planning.rank_state import rank_state, saved_ranks
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.dcp.reader import BucketReader
from bucketpoint.dcp.s3_and_gcs import GCSReader, GCSWriter, S3Reader, S3Writer
from bucketpoint.dcp.saving.commit_info import CommitInfo, OnCommit
from bucketpoint.dcp.stats import LoadStats, SaveStats, Spread
from bucketpoint.dcp.writer import BucketWriter

__all__ = [
    "BucketReader",
    "BucketWriter",
    "CommitInfo",
    "GCSReader",
    "GCSWriter",
    "LoadPlanner",
    "LoadStats",
    "OnCommit",
    "S3Reader",
    "S3Writer",
    "SaveHandle",
    "SavePlanner",
    "SaveStats",
    "Spread",
    "async_save",
    "load",
    "rank_state",
    "save",
    "saved_ranks",
]
