"""Uploads, downloads and copies of objects, in parallel and within one memory budget."""

from bucketpoint.transfer.download import Block, Extent, Request, Whole, plan_requests
from bucketpoint.transfer.long_reads import fetch
from bucketpoint.transfer.options import Meter, Progress, ProgressCallback, TransferOptions
from bucketpoint.transfer.tasks import BufferPool, TaskGroup
from bucketpoint.transfer.upload import ObjectSource, Segment, Uploaded, upload_objects

__all__ = [
    "Block",
    "BufferPool",
    "Extent",
    "Meter",
    "ObjectSource",
    "Progress",
    "ProgressCallback",
    "Request",
    "Segment",
    "TaskGroup",
    "TransferOptions",
    "Uploaded",
    "Whole",
    "fetch",
    "plan_requests",
    "upload_objects",
]
