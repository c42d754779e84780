"""Google Cloud Storage, through its JSON API, and through its XML API for multipart uploads."""

from bucketpoint.stores.gcs.options import GCSOptions
from bucketpoint.stores.gcs.store import GCSStore

__all__ = ["GCSOptions", "GCSStore"]
