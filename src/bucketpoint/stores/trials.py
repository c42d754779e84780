"""Names of the scratch objects on which conditional requests are tried, and the errors that leave a trial undecided."""

import secrets

from bucketpoint.errors import BucketNotFoundError, CredentialsError, EndpointError, ThrottledError, TransientStoreError

SCRATCH = ".bucketpoint-probe-"
"""Prefix of the names of scratch objects; random characters follow."""

UNDECIDED = (BucketNotFoundError, EndpointError, CredentialsError, ThrottledError, TransientStoreError)
"""Errors that leave open whether the store supports the condition."""


def scratch_key(prefix: str) -> str:
    """Return a new key for a scratch object below `prefix`."""
    return f"{prefix}{prefix and '/'}{SCRATCH}{secrets.token_hex(8)}"
