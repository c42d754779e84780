"""What DCP calls: writer and reader. Knows no details of any cloud."""

from bucketpoint.dcp.async_save import SaveHandle, async_save
from bucketpoint.dcp.cooperative import Bandwidths
from bucketpoint.dcp.one_call import load, save
from bucketpoint.dcp.planner import LoadPlanner
from bucketpoint.dcp.rank_state import rank_state, saved_ranks
from bucketpoint.dcp.reader import BucketReader, GCSReader, S3Reader
from bucketpoint.dcp.save_planner import SavePlanner
from bucketpoint.dcp.writer import BucketWriter, GCSWriter, S3Writer

__all__ = [
    "Bandwidths",
    "BucketReader",
    "BucketWriter",
    "GCSReader",
    "GCSWriter",
    "LoadPlanner",
    "S3Reader",
    "S3Writer",
    "SaveHandle",
    "SavePlanner",
    "async_save",
    "load",
    "rank_state",
    "save",
    "saved_ranks",
]
