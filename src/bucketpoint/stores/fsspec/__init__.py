"""`FsspecStore`, for any filesystem that fsspec knows, and drivers with additional features of some filesystems."""

from bucketpoint.stores.fsspec.store import FsspecStore

__all__ = ["FsspecStore"]
