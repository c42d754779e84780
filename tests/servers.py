"""The servers of `bucketpoint.testing`, under the name by which the tests know them."""

from __future__ import annotations

from bucketpoint.testing.certificates import make_certificates
from bucketpoint.testing.servers import KMS_KEY, REGION, SUPERVISE, S3Server, free_port, minio, moto

__all__ = ["KMS_KEY", "REGION", "SUPERVISE", "S3Server", "free_port", "make_certificates", "minio", "moto"]
