"""Where bytes live: the `Store` protocol, its implementations, and the way from a URL to one of them."""

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
from bucketpoint.stores.fsspec import FsspecStore, proven
from bucketpoint.stores.gcs import GCSStore
from bucketpoint.stores.gcs_options import GCSOptions
from bucketpoint.stores.local import LocalStore
from bucketpoint.stores.open import accepts_url, as_url, open_store, parse_url
from bucketpoint.stores.s3 import S3Store
from bucketpoint.stores.s3_deletes import proven_deletes
from bucketpoint.stores.s3_options import S3Options

__all__ = [
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
    "open_store",
    "parse_url",
    "proven",
    "proven_deletes",
]
