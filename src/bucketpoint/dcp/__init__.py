"""What DCP calls: writer and reader. Knows no details of any cloud."""

from bucketpoint.dcp.async_save import SaveHandle, async_save
from bucketpoint.dcp.planner import LoadPlanner
from bucketpoint.dcp.reader import BucketReader, S3Reader
from bucketpoint.dcp.writer import BucketWriter, S3Writer

__all__ = ["BucketReader", "BucketWriter", "LoadPlanner", "S3Reader", "S3Writer", "SaveHandle", "async_save"]
