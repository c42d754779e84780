"""From what boto3 raises to the kinds in `bucketpoint.errors` and what each calls for: by code, HTTP status and type.

The one table of what is tried again. Never by text. How often and how long is the business of `retry`.
"""

from __future__ import annotations

import http.client
import ssl
from typing import Any, NamedTuple

import botocore.exceptions as boto
import botocore.parsers
import urllib3.exceptions

from bucketpoint.errors import (
    AccessDeniedError,
    Action,
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
from bucketpoint.stores.wording import describe

_RETRY, _THROTTLE, _REFRESH, _FATAL = Action.RETRY, Action.THROTTLE, Action.REFRESH, Action.FATAL


FAILURES = (
    StoreError,
    boto.BotoCoreError,
    boto.ClientError,
    botocore.parsers.ResponseParserError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
    RecursionError,
)
"""Exceptions that a request can raise."""


class Rule(NamedTuple):
    """The kind of error that a failure becomes, and what it calls for."""

    kind: type[StoreError]
    action: Action


# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
RULE_BY_CODE: dict[str, Rule] = {
    "NoSuchBucket": Rule(BucketNotFoundError, _FATAL),
    "NoSuchKey": Rule(ObjectNotFoundError, _FATAL),
    "NoSuchVersion": Rule(ObjectNotFoundError, _FATAL),
    "NotFound": Rule(ObjectNotFoundError, _FATAL),
    "NoSuchUpload": Rule(UploadNotFoundError, _FATAL),
    "AccessDenied": Rule(AccessDeniedError, _FATAL),
    "AccessDeniedException": Rule(AccessDeniedError, _FATAL),
    "AllAccessDisabled": Rule(AccessDeniedError, _FATAL),
    "AccountProblem": Rule(AccessDeniedError, _FATAL),
    "MethodNotAllowed": Rule(AccessDeniedError, _FATAL),
    # A session that has ended, as other sources than boto3's own renew it: a file, a process, a mounted token.
    "ExpiredToken": Rule(CredentialsError, _REFRESH),
    "ExpiredTokenException": Rule(CredentialsError, _REFRESH),
    "TokenRefreshRequired": Rule(CredentialsError, _REFRESH),
    "InvalidToken": Rule(CredentialsError, _REFRESH),
    "InvalidClientTokenId": Rule(CredentialsError, _REFRESH),
    "InvalidAccessKeyId": Rule(CredentialsError, _REFRESH),
    "UnrecognizedClientException": Rule(CredentialsError, _REFRESH),
    "InvalidSecurity": Rule(CredentialsError, _FATAL),
    "SignatureDoesNotMatch": Rule(CredentialsError, _FATAL),
    "MissingSecurityHeader": Rule(CredentialsError, _FATAL),
    "NotSignedUp": Rule(CredentialsError, _FATAL),
    "RequestExpired": Rule(CredentialsError, _FATAL),
    "RequestTimeTooSkewed": Rule(CredentialsError, _FATAL),
    "PermanentRedirect": Rule(WrongRegionError, _FATAL),
    "TemporaryRedirect": Rule(WrongRegionError, _FATAL),
    "Redirect": Rule(WrongRegionError, _FATAL),
    "AuthorizationHeaderMalformed": Rule(WrongRegionError, _FATAL),
    "IllegalLocationConstraintException": Rule(WrongRegionError, _FATAL),
    "IncorrectEndpoint": Rule(WrongRegionError, _FATAL),
    # Conditions are the caller's: only it can tell an answer that was lost from another writer.
    "PreconditionFailed": Rule(PreconditionFailedError, _FATAL),
    "ConditionalRequestConflict": Rule(PreconditionFailedError, _FATAL),
    "SlowDown": Rule(ThrottledError, _THROTTLE),
    "SlowDownRead": Rule(ThrottledError, _THROTTLE),
    "SlowDownWrite": Rule(ThrottledError, _THROTTLE),
    "ServiceUnavailable": Rule(ThrottledError, _THROTTLE),
    "Throttling": Rule(ThrottledError, _THROTTLE),
    "ThrottlingException": Rule(ThrottledError, _THROTTLE),
    "ThrottledException": Rule(ThrottledError, _THROTTLE),
    "BandwidthLimitExceeded": Rule(ThrottledError, _THROTTLE),
    "RequestLimitExceeded": Rule(ThrottledError, _THROTTLE),
    "RequestThrottled": Rule(ThrottledError, _THROTTLE),
    "TooManyRequests": Rule(ThrottledError, _THROTTLE),
    "RequestTimeout": Rule(TransientStoreError, _RETRY),
    "InternalError": Rule(TransientStoreError, _RETRY),
    "OperationAborted": Rule(TransientStoreError, _RETRY),
    "IncompleteBody": Rule(TransientStoreError, _RETRY),
    # The body was damaged on the way: the store has seen that, and took nothing.
    "BadDigest": Rule(CorruptDataError, _RETRY),
    "XAmzContentChecksumMismatch": Rule(CorruptDataError, _RETRY),
    "XAmzContentSHA256Mismatch": Rule(CorruptDataError, _RETRY),
    "InvalidDigest": Rule(CorruptDataError, _FATAL),
    "InvalidChecksum": Rule(CorruptDataError, _FATAL),
    "InvalidRange": Rule(CorruptDataError, _FATAL),
    # A condition or a checksum that a service other than AWS does not know.
    "NotImplemented": Rule(StoreError, _FATAL),
}

# For replies without a code, as those to HEAD are, and for codes that nobody has heard of.
RULE_BY_STATUS: dict[int, Rule] = {
    301: Rule(WrongRegionError, _FATAL),
    307: Rule(WrongRegionError, _FATAL),
    401: Rule(CredentialsError, _FATAL),
    403: Rule(AccessDeniedError, _FATAL),
    404: Rule(ObjectNotFoundError, _FATAL),
    408: Rule(TransientStoreError, _RETRY),
    412: Rule(PreconditionFailedError, _FATAL),
    416: Rule(CorruptDataError, _FATAL),
    429: Rule(ThrottledError, _THROTTLE),
    501: Rule(StoreError, _FATAL),
    503: Rule(ThrottledError, _THROTTLE),
}

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
RIGHT_BY_OPERATION: dict[str, str] = {
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "CompleteMultipartUpload": "s3:PutObject",
    "CopyObject": "s3:GetObject for what is copied and s3:PutObject for the copy",
    "CreateMultipartUpload": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject, and s3:GetObject where it names an ETag",
    "DeleteObjects": "s3:DeleteObject",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListObjectsV2": "s3:ListBucket",
    "PutObject": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "UploadPartCopy": "s3:GetObject for what is copied and s3:PutObject for the copy",
}

_UNTOLD = "To those without s3:ListBucket the store says the same of what is not there"
_ROLES = (
    "Saves need s3:PutObject, s3:GetObject and s3:AbortMultipartUpload below the checkpoint's URL, finding the latest "
    "s3:ListBucket of the bucket, pruning s3:DeleteObject too"
)
_UNKNOWN_REQUEST = (
    "`bucketpoint doctor` finds what this store cannot do, and names the option that does without: "
    '{"conditional_puts": false} or {"checksums": false} in storage_options'
)

# Order matters: the first match wins, and subclasses stand before their bases.
RULE_BY_TYPE: tuple[tuple[type[BaseException], Rule], ...] = (
    (boto.NoCredentialsError, Rule(CredentialsError, _FATAL)),
    (boto.PartialCredentialsError, Rule(CredentialsError, _FATAL)),
    (boto.CredentialRetrievalError, Rule(CredentialsError, _RETRY)),
    (boto.ProfileNotFound, Rule(CredentialsError, _FATAL)),
    (boto.UnauthorizedSSOTokenError, Rule(CredentialsError, _FATAL)),
    (boto.SSOTokenLoadError, Rule(CredentialsError, _FATAL)),
    (boto.TokenRetrievalError, Rule(CredentialsError, _FATAL)),
    (boto.InvalidConfigError, Rule(CredentialsError, _FATAL)),
    (boto.RefreshWithMFAUnsupportedError, Rule(CredentialsError, _FATAL)),
    (boto.SSLError, Rule(EndpointError, _RETRY)),
    (boto.EndpointConnectionError, Rule(EndpointError, _RETRY)),
    (boto.ConnectTimeoutError, Rule(EndpointError, _RETRY)),
    (boto.ProxyConnectionError, Rule(EndpointError, _RETRY)),
    (boto.InvalidProxiesConfigError, Rule(EndpointError, _FATAL)),
    (boto.ReadTimeoutError, Rule(TransientStoreError, _RETRY)),
    (boto.ConnectionClosedError, Rule(TransientStoreError, _RETRY)),
    (boto.IncompleteReadError, Rule(TransientStoreError, _RETRY)),
    (boto.ResponseStreamingError, Rule(TransientStoreError, _RETRY)),
    (botocore.parsers.ResponseParserError, Rule(TransientStoreError, _RETRY)),
    (boto.HTTPClientError, Rule(TransientStoreError, _RETRY)),
    (urllib3.exceptions.HTTPError, Rule(TransientStoreError, _RETRY)),
    (http.client.HTTPException, Rule(TransientStoreError, _RETRY)),
    (ssl.SSLError, Rule(TransientStoreError, _RETRY)),
    (OSError, Rule(TransientStoreError, _RETRY)),
    # A store that redirects every request and names no region: botocore asks for it, is redirected, and asks again.
    (RecursionError, Rule(WrongRegionError, _FATAL)),
)

_UNKNOWN = Rule(StoreError, _FATAL)
_FAILING = Rule(TransientStoreError, _RETRY)
_UNTRUSTED = Rule(EndpointError, _FATAL)


def translate(error: BaseException, operation: str, url: str, *, region: str | None = None) -> StoreError:
    """The error of our own that says the same. It holds nothing of boto3's, which pickles badly and carries headers."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, boto.ClientError):
        return _from_reply(error.response, operation, url, region)
    if isinstance(error, boto.HTTPClientError) and isinstance(error.kwargs.get("error"), RecursionError):
        error = error.kwargs["error"]
    rule = next((rule for known, rule in RULE_BY_TYPE if isinstance(error, known)), _UNKNOWN)
    if _is_untrusted(error):
        rule = _UNTRUSTED
    return _made(rule, f"{operation} failed: {describe(error)}", url=url)


def why_kept(entry: dict[str, Any]) -> str:
    """Why an object was not deleted, by its entry in the reply to DeleteObjects."""
    message = str(entry.get("Message", ""))
    rule = RULE_BY_CODE.get(str(entry.get("Code", "")))
    if rule is None or rule.kind is not AccessDeniedError:
        return message
    return f"{message.rstrip('.')}. It needs the permission {RIGHT_BY_OPERATION['DeleteObjects']}"


def _made(rule: Rule, message: str, *, url: str, remedy: str | None = None) -> StoreError:
    made = rule.kind(message, url=url, remedy=remedy)
    made.action = rule.action
    return made


def _is_untrusted(error: BaseException, depth: int = 6) -> bool:
    """Whether a certificate was not accepted, somewhere among what the libraries have wrapped around that."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    inner = [getattr(error, "kwargs", {}).get("error"), getattr(error, "reason", None), *error.args, error.__cause__]
    return depth > 0 and any(_is_untrusted(one, depth - 1) for one in inner if isinstance(one, BaseException))


def _from_reply(reply: dict[str, Any], operation: str, url: str, region: str | None) -> StoreError:
    detail = reply.get("Error", {})
    meta = reply.get("ResponseMetadata", {})
    code = str(detail.get("Code", ""))
    status = int(meta.get("HTTPStatusCode", 0))
    rule = RULE_BY_CODE.get(code) or RULE_BY_STATUS.get(status)
    if rule is None:
        rule = _FAILING if status >= 500 or status == 200 else _UNKNOWN
    # A reply to HEAD has no body, and botocore then puts the status in the place of the code.
    named = bool(code) and not code.isdigit()
    text = f"{operation} failed: {code if named else 'no error code'} (HTTP {status})"
    message = str(detail.get("Message", ""))
    if message and named:
        text += f": {message.rstrip('.')}"
    if request_id := meta.get("RequestId"):
        text += f" (request {request_id})"
    if rule.kind is WrongRegionError:
        right = _region_named_by(reply)
        if right and right != region:
            return _made(rule, text, url=url, remedy=f"The bucket is in {right}: set AWS_REGION={right} (or region=)")
    return _made(rule, text, url=url, remedy=_remedy(rule.kind, operation, code, status))


def _remedy(kind: type[StoreError], operation: str, code: str, status: int) -> str | None:
    """What to do, where the operation or the code tells more than the kind of error does."""
    if kind is AccessDeniedError and operation in RIGHT_BY_OPERATION:
        right = RIGHT_BY_OPERATION[operation]
        more = _UNTOLD if right == "s3:GetObject" else _ROLES
        return f"This request needs the permission {right}. {more}"
    if code == "NotImplemented" or status == 501:
        return _UNKNOWN_REQUEST
    return None


def _region_named_by(reply: dict[str, Any]) -> str | None:
    headers = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or reply.get("Error", {}).get("Region")
    return str(region) if region else None
