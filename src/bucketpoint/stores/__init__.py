"""The `Store` protocol, its implementations, and `open_store`, which finds the implementation for a URL."""

from bucketpoint.stores.base import (
    Capabilities,
    CopiesInside,
    DeleteFailure,
    ExpiringDeletes,
    ObjectInfo,
    OpensRanges,
    OpenUpload,
    Part,
    RangeReply,
    Store,
    delete_all,
    pinned,
    proven,
    proven_deletes,
)
from bucketpoint.stores.local import LocalStore, this_url
from bucketpoint.stores.registry import FOLLOW_LINKS, accepts_url, as_url, check_url, open_store, parse_url

__all__ = [
    "FOLLOW_LINKS",
    "Capabilities",
    "CopiesInside",
    "DeleteFailure",
    "ExpiringDeletes",
    "LocalStore",
    "ObjectInfo",
    "OpenUpload",
    "OpensRanges",
    "Part",
    "RangeReply",
    "Store",
    "accepts_url",
    "as_url",
    "check_url",
    "delete_all",
    "open_store",
    "parse_url",
    "pinned",
    "proven",
    "proven_deletes",
    "this_url",
]
