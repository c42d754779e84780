"""Names of the scratch objects on which conditional requests are tried, and the errors that leave a trial undecided."""

from bucketpoint.errors import (
    BucketNotFoundError,
    CredentialsError,
    EndpointError,
    ThrottledError,
    TransientStoreError,
)

SCRATCH = ".bucketpoint-probe-"
"""Prefix of the names of scratch objects; random characters follow."""

UNDECIDED = (BucketNotFoundError, EndpointError, CredentialsError, ThrottledError, TransientStoreError)
"""Errors that do not tell if the store supports the condition that was tried."""
