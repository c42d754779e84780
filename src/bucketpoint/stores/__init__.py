"""The `Store` protocol, its implementations, and `open_store`, which finds the implementation for a URL."""

from bucketpoint.stores.base import (
    Buffers,
    Capabilities,
    CopiesInside,
    DeleteFailure,
    ExpiringDeletes,
    ManyRanges,
    ObjectInfo,
    OpensRanges,
    OpenUpload,
    Part,
    Range,
    RangeReply,
    Store,
)
from bucketpoint.stores.fsspec.conditions import proven
from bucketpoint.stores.fsspec.store import FsspecStore
from bucketpoint.stores.gcs.options import GCSOptions
from bucketpoint.stores.gcs.store import GCSStore
from bucketpoint.stores.local import LocalStore, this_url
from bucketpoint.stores.registry import FOLLOW_LINKS, accepts_url, as_url, check_url, open_store, parse_url
from bucketpoint.stores.s3.deletes import proven_deletes
from bucketpoint.stores.s3.options import S3Options
from bucketpoint.stores.s3.store import S3Store

__all__ = [
    "FOLLOW_LINKS",
    "Buffers",
    "Capabilities",
    "CopiesInside",
    "DeleteFailure",
    "ExpiringDeletes",
    "FsspecStore",
    "GCSOptions",
    "GCSStore",
    "LocalStore",
    "ManyRanges",
    "ObjectInfo",
    "OpenUpload",
    "OpensRanges",
    "Part",
    "Range",
    "RangeReply",
    "S3Options",
    "S3Store",
    "Store",
    "accepts_url",
    "as_url",
    "check_url",
    "open_store",
    "parse_url",
    "proven",
    "proven_deletes",
    "this_url",
]
