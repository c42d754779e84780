"""From what boto3 raises to the kinds in `bucketpoint.errors`: by error code, HTTP status and type, never by text."""

from __future__ import annotations

import http.client
import ssl
from typing import Any

import botocore.exceptions as boto
import botocore.parsers
import urllib3.exceptions

from bucketpoint.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CorruptDataError,
    CredentialsError,
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientStoreError,
    UploadNotFoundError,
    WrongRegionError,
)

KIND_BY_CODE: dict[str, type[StoreError]] = {
    "NoSuchBucket": BucketNotFoundError,
    "NoSuchKey": ObjectNotFoundError,
    "NoSuchVersion": ObjectNotFoundError,
    "NotFound": ObjectNotFoundError,
    "NoSuchUpload": UploadNotFoundError,
    "AccessDenied": AccessDeniedError,
    "AccessDeniedException": AccessDeniedError,
    "AllAccessDisabled": AccessDeniedError,
    "AccountProblem": AccessDeniedError,
    "MethodNotAllowed": AccessDeniedError,
    "ExpiredToken": CredentialsError,
    "ExpiredTokenException": CredentialsError,
    "TokenRefreshRequired": CredentialsError,
    "InvalidToken": CredentialsError,
    "InvalidClientTokenId": CredentialsError,
    "InvalidAccessKeyId": CredentialsError,
    "InvalidSecurity": CredentialsError,
    "SignatureDoesNotMatch": CredentialsError,
    "MissingSecurityHeader": CredentialsError,
    "NotSignedUp": CredentialsError,
    "RequestExpired": CredentialsError,
    "RequestTimeTooSkewed": CredentialsError,
    "UnrecognizedClientException": CredentialsError,
    "PermanentRedirect": WrongRegionError,
    "TemporaryRedirect": WrongRegionError,
    "Redirect": WrongRegionError,
    "AuthorizationHeaderMalformed": WrongRegionError,
    "IllegalLocationConstraintException": WrongRegionError,
    "IncorrectEndpoint": WrongRegionError,
    "PreconditionFailed": PreconditionFailedError,
    "ConditionalRequestConflict": PreconditionFailedError,
    "SlowDown": ThrottledError,
    "SlowDownRead": ThrottledError,
    "SlowDownWrite": ThrottledError,
    "ServiceUnavailable": ThrottledError,
    "Throttling": ThrottledError,
    "ThrottlingException": ThrottledError,
    "RequestLimitExceeded": ThrottledError,
    "TooManyRequests": ThrottledError,
    "RequestTimeout": TransientStoreError,
    "InternalError": TransientStoreError,
    "OperationAborted": TransientStoreError,
    "IncompleteBody": TransientStoreError,
    "BadDigest": CorruptDataError,
    "InvalidDigest": CorruptDataError,
    "XAmzContentChecksumMismatch": CorruptDataError,
    "XAmzContentSHA256Mismatch": CorruptDataError,
    "InvalidChecksum": CorruptDataError,
    "InvalidRange": CorruptDataError,
}

KIND_BY_STATUS: dict[int, type[StoreError]] = {
    301: WrongRegionError,
    307: WrongRegionError,
    401: CredentialsError,
    403: AccessDeniedError,
    404: ObjectNotFoundError,
    408: TransientStoreError,
    412: PreconditionFailedError,
    416: CorruptDataError,
    429: ThrottledError,
    503: ThrottledError,
}

# Order matters: the first match wins, and subclasses stand before their bases.
KIND_BY_TYPE: tuple[tuple[type[BaseException], type[StoreError]], ...] = (
    (boto.NoCredentialsError, CredentialsError),
    (boto.PartialCredentialsError, CredentialsError),
    (boto.CredentialRetrievalError, CredentialsError),
    (boto.ProfileNotFound, CredentialsError),
    (boto.UnauthorizedSSOTokenError, CredentialsError),
    (boto.SSOTokenLoadError, CredentialsError),
    (boto.TokenRetrievalError, CredentialsError),
    (boto.InvalidConfigError, CredentialsError),
    (boto.RefreshWithMFAUnsupportedError, CredentialsError),
    (boto.SSLError, EndpointError),
    (boto.EndpointConnectionError, EndpointError),
    (boto.ConnectTimeoutError, EndpointError),
    (boto.ProxyConnectionError, EndpointError),
    (boto.InvalidProxiesConfigError, EndpointError),
    (boto.ReadTimeoutError, TransientStoreError),
    (boto.ConnectionClosedError, TransientStoreError),
    (boto.IncompleteReadError, TransientStoreError),
    (boto.ResponseStreamingError, TransientStoreError),
    (botocore.parsers.ResponseParserError, TransientStoreError),
    (boto.HTTPClientError, TransientStoreError),
    (urllib3.exceptions.HTTPError, TransientStoreError),
    (http.client.HTTPException, TransientStoreError),
    (ssl.SSLError, TransientStoreError),
    (OSError, TransientStoreError),
)


def translate(error: BaseException, operation: str, url: str, *, region: str | None = None) -> StoreError:
    """The error of our own that says the same. It holds nothing of boto3's, which pickles badly and carries headers."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, boto.ClientError):
        return _from_reply(error.response, operation, url, region)
    kind = next((kind for known, kind in KIND_BY_TYPE if isinstance(error, known)), StoreError)
    return kind(f"{operation} failed: {_describe(error)}", url=url)


def _describe(error: BaseException) -> str:
    # The text of an EndpointConnectionError names the URL of the request, and that of a proxy error the proxy's; both
    # are free of credentials. A ConnectionClosedError's request, which does carry the signature, is not in its text.
    return f"{type(error).__name__}: {error}"


def _from_reply(reply: dict[str, Any], operation: str, url: str, region: str | None) -> StoreError:
    detail = reply.get("Error", {})
    meta = reply.get("ResponseMetadata", {})
    code = str(detail.get("Code", ""))
    status = int(meta.get("HTTPStatusCode", 0))
    kind = KIND_BY_CODE.get(code) or KIND_BY_STATUS.get(status)
    if kind is None:
        kind = TransientStoreError if status >= 500 or status == 200 else StoreError
    text = f"{operation} failed: {code or 'no error code'} (HTTP {status})"
    message = str(detail.get("Message", ""))
    # A reply to HEAD has no body, and botocore then puts the status in the place of the code.
    if message and not code.isdigit():
        text += f": {message.rstrip('.')}"
    if request_id := meta.get("RequestId"):
        text += f" (request {request_id})"
    if kind is WrongRegionError:
        right = _region_named_by(reply)
        if right and right != region:
            return kind(text, url=url, remedy=f"The bucket is in {right}: set AWS_REGION={right} (or region=)")
    return kind(text, url=url)


def _region_named_by(reply: dict[str, Any]) -> str | None:
    headers = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or reply.get("Error", {}).get("Region")
    return str(region) if region else None
