"""Any filesystem that fsspec knows, and the additional features of some filesystems."""

from bucketpoint.stores.fsspec.store import FsspecStore

__all__ = ["FsspecStore"]
