"""Amazon S3 and other services with the S3 protocol, through boto3 or the AWS Common Runtime."""

from bucketpoint.stores.s3.options import S3Options
from bucketpoint.stores.s3.store import S3Store

__all__ = ["S3Options", "S3Store"]
