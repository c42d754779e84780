"""Translation of boto3's errors to the classes in `bucketpoint.errors`, by error code, HTTP status and exception type.

The tables here also decide which failures are retried (`Action`); `retry` decides how often and for how long. The text
of an error is never used.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable, Collection
from typing import Any, TypeVar

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
    UnsupportedRequestError,
    UploadNotFoundError,
    WrongRegionError,
)
from bucketpoint.stores.cutoff import TooSlowError
from bucketpoint.stores.foreign import (
    ARCHIVED,
    Asked,
    ErrorRule,
    ForeignAnswer,
    Operation,
    RuleKey,
    answer_text,
    answers,
    asked_by,
    causes,
    raise_translated,
    rule_for,
    speaks_plainly,
)
from bucketpoint.stores.http_body import BrokenBody
from bucketpoint.stores.redact import describe

T = TypeVar("T")

_RETRY, _OUTAGE = Action.RETRY, Action.OUTAGE
_REFRESH, _FATAL = Action.REFRESH, Action.FATAL


FAILURES = (
    StoreError,
    boto.BotoCoreError,
    boto.ClientError,
    botocore.parsers.ResponseParserError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
    RecursionError,
    # botocore's parser raises ValueError for a malformed number or time in a reply.
    ValueError,
    ForeignAnswer,
)
"""Exceptions that a request can raise."""


_KEY = (
    "Check the encryption key (SSEKMSKeyId in request_kwargs, or the bucket's default key): it must exist in this "
    "region, be enabled, and allow these credentials to encrypt and decrypt"
)

_SIGNATURE = "The secret key is not that of the access key ID, or a proxy changed the request: check both keys"
_CLOCK = "Set this machine's clock, which is more than 15 minutes from the store's: `timedatectl`, or its NTP service"
_QUOTA = (
    "The store is full, or a quota is used up: raise it, or delete one checkpoint's folder with another tool, and prune"
)
_SMALLER = "Send smaller parts with TransferOptions(part_bytes=...), or raise the limit on requests"
_LOCKED = "Object Lock protects the object: wait for the end of its retention, or remove the legal hold"
_PLAIN = "The server answers without TLS: write the endpoint with http://, or name its port for https"
_LINE_BREAK = (
    "A header of the request has a line break: look for one in the access key and the session token "
    "(AWS_SESSION_TOKEN), such as the end of the file that it was read from"
)
_NO_CREDENTIALS = (
    "Set credentials: AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or an instance role; anon=true in "
    "storage_options for a public bucket"
)

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
RULES: dict[RuleKey, ErrorRule] = {
    **answers("NoSuchBucket NoSuchAccessPoint", BucketNotFoundError),
    **answers(
        "InvalidBucketName",
        StoreError,
        "Check the bucket's name: S3 allows 3 to 63 lower-case letters, digits, hyphens and dots",
    ),
    **answers("NoSuchKey NoSuchVersion NotFound 404", ObjectNotFoundError),
    **answers(
        "KeyTooLongError InvalidURI XMinioInvalidObjectName XMinioInvalidResourceName",
        StoreError,
        "Pass a shorter URL (a key has at most 1,024 bytes, on MinIO 255 between two slashes), without //, . and ..",
    ),
    # The object is in an archive class, to which a lifecycle rule moved it. Once restored, the checkpoint is readable.
    **answers("InvalidObjectState", StoreError, ARCHIVED),
    # MinIO's code for an object under retention.
    **answers("ObjectLocked", AccessDeniedError, _LOCKED),
    # Errors of the SSE-KMS key, from AWS (with status 400) and MinIO (kms:KeyNotFound with 404).
    # https://docs.aws.amazon.com/kms/latest/APIReference/API_GenerateDataKey.html#API_GenerateDataKey_Errors
    # https://github.com/minio/minio/blob/master/internal/kms/errors.go
    # Not AccessDeniedError, which callers may take for a missing object: S3 answers so without the right to list.
    **answers(
        "KMS.DisabledException KMS.InvalidKeyUsageException KMS.KMSInvalidStateException KMS.NotFoundException "
        "kms:InvalidCiphertextException kms:KeyNotFound kms:NotAuthorized",
        StoreError,
        _KEY,
    ),
    **answers("NoSuchUpload", UploadNotFoundError),
    **answers(
        "AccessDenied AccessDeniedException AllAccessDisabled AccountProblem MethodNotAllowed 403", AccessDeniedError
    ),
    # The session has expired. boto3 does not renew credentials from a file, a process or a mounted token, so these are
    # refreshed here. XAdminUserNotFound is versitygw's code, with status 404.
    **answers(
        "ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken InvalidClientTokenId InvalidAccessKeyId "
        "UnrecognizedClientException XAdminUserNotFound",
        CredentialsError,
        action=_REFRESH,
    ),
    **answers("InvalidSecurity MissingSecurityHeader NotSignedUp 401", CredentialsError),
    **answers("SignatureDoesNotMatch", CredentialsError, _SIGNATURE),
    **answers("RequestExpired RequestTimeTooSkewed", CredentialsError, _CLOCK),
    **answers(
        "PermanentRedirect TemporaryRedirect Redirect AuthorizationHeaderMalformed IllegalLocationConstraintException "
        "IncorrectEndpoint 301 307",
        WrongRegionError,
    ),
    # Never retried: only the caller, who set the condition, can distinguish a lost answer from another writer.
    **answers("PreconditionFailed ConditionalRequestConflict 412", PreconditionFailedError, asked=Asked.CONDITION),
    **answers(
        "SlowDown SlowDownRead SlowDownWrite ServiceUnavailable Throttling ThrottlingException ThrottledException "
        "BandwidthLimitExceeded RequestLimitExceeded RequestThrottled TooManyRequests 429 503",
        ThrottledError,
    ),
    # Codes of Ceph (with status 403) and MinIO.
    **answers("QuotaExceeded XMinioAdminBucketQuotaExceeded XMinioStorageFull", StoreError, _QUOTA),
    **answers("EntityTooLarge 413", StoreError, _SMALLER),
    **answers("RequestTimeout InternalError OperationAborted IncompleteBody 408", TransientStoreError),
    # The body was damaged in transit: the store compared the checksum, and stored nothing.
    **answers("BadDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch", CorruptDataError, action=_RETRY),
    **answers("InvalidDigest InvalidChecksum InvalidRange 416", CorruptDataError),
    # A service other than AWS does not support a condition, a checksum header, or encryption.
    **answers("NotImplemented 501", UnsupportedRequestError),
    # A proxy cannot reach the store.
    **answers("502 504", TransientStoreError, action=_OUTAGE),
}


_COPIES = (
    "s3:GetObject for what is copied and s3:PutObject for the copy, and for a source with tags s3:GetObjectTagging "
    "and s3:PutObjectTagging"
)

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations.html
OPERATIONS: dict[str, Operation] = {
    "AbortMultipartUpload": Operation("abort_multipart", "s3:AbortMultipartUpload"),
    "CompleteMultipartUpload": Operation(
        "complete_multipart", "s3:PutObject", replies=("CompleteMultipartUploadResult",)
    ),
    "CopyObject": Operation("copy", _COPIES, replies=("CopyObjectResult",)),
    "CreateSession": Operation("head", "s3express:CreateSession", ("CreateSessionResult",)),
    "CreateMultipartUpload": Operation("create_multipart", "s3:PutObject", replies=("InitiateMultipartUploadResult",)),
    "DeleteObject": Operation("delete", "s3:DeleteObject, and s3:GetObject where it names an ETag", role="pruner"),
    "DeleteObjects": Operation("delete", "s3:DeleteObject", ("DeleteResult",), "pruner"),
    "GetObject": Operation("get", "s3:GetObject"),
    "HeadObject": Operation("head", "s3:GetObject"),
    "ListMultipartUploads": Operation(
        "list_multipart", "s3:ListBucketMultipartUploads", ("ListMultipartUploadsResult",), "pruner"
    ),
    "ListObjectsV2": Operation("list", "s3:ListBucket", ("ListBucketResult",), "reader"),
    "PutObject": Operation("put", "s3:PutObject"),
    "UploadPart": Operation("put_part", "s3:PutObject"),
    "UploadPartCopy": Operation("copy", _COPIES, replies=("CopyPartResult", "CopyObjectResult")),
}

_GRANTED = "`bucketpoint doctor URL --role {0} --iam` prints the policy of the role {0}, which grants it"
_UNTOLD = "Without s3:ListBucket the store gives the same answer for a missing object"
_UNKNOWN_REQUEST = (
    "`bucketpoint doctor` finds the features that this store lacks, and names the option that switches each off: "
    '{"conditional_puts": false} or {"checksums": false} in storage_options'
)
_CONDITIONS = frozenset({"IfNoneMatch", "IfMatch", "CopySourceIfMatch"})
_ENCRYPTION = ("SSECustomerKey", "SSEKMSKeyId", "ServerSideEncryption")
"""Parameters that request encryption, the most specific first."""

# Order matters: the first match wins, so subclasses come before their base classes.
RULE_BY_TYPE: tuple[tuple[type[BaseException], ErrorRule], ...] = (
    (boto.NoCredentialsError, ErrorRule(CredentialsError, _FATAL, _NO_CREDENTIALS)),
    (boto.PartialCredentialsError, ErrorRule(CredentialsError, _FATAL, _NO_CREDENTIALS)),
    # The source of the credentials may be down only for a while: retried until the deadline.
    (boto.CredentialRetrievalError, ErrorRule(CredentialsError, _OUTAGE)),
    (boto.ProfileNotFound, ErrorRule(CredentialsError, _FATAL)),
    (boto.UnauthorizedSSOTokenError, ErrorRule(CredentialsError, _FATAL)),
    (boto.SSOTokenLoadError, ErrorRule(CredentialsError, _FATAL)),
    (boto.TokenRetrievalError, ErrorRule(CredentialsError, _FATAL)),
    (boto.InvalidConfigError, ErrorRule(CredentialsError, _FATAL)),
    (boto.RefreshWithMFAUnsupportedError, ErrorRule(CredentialsError, _FATAL)),
    (boto.SSLError, ErrorRule(EndpointError, _OUTAGE)),
    (
        boto.EndpointProviderError,
        ErrorRule(EndpointError, _FATAL, "Check endpoint_url, the region and the ARN, if any"),
    ),
    (boto.EndpointConnectionError, ErrorRule(EndpointError, _OUTAGE)),
    (boto.ConnectTimeoutError, ErrorRule(EndpointError, _OUTAGE)),
    (boto.ProxyConnectionError, ErrorRule(EndpointError, _OUTAGE)),
    (boto.InvalidProxiesConfigError, ErrorRule(EndpointError, _FATAL)),
    (boto.IncompleteReadError, ErrorRule(TransientStoreError, _RETRY)),
    (botocore.parsers.ResponseParserError, ErrorRule(TransientStoreError, _RETRY)),
    (ValueError, ErrorRule(TransientStoreError, _RETRY)),
    (BrokenBody, ErrorRule(TransientStoreError, _RETRY)),
    (boto.HTTPClientError, ErrorRule(TransientStoreError, _OUTAGE)),
    (urllib3.exceptions.HTTPError, ErrorRule(TransientStoreError, _OUTAGE)),
    # A reply that is not HTTP, or ended early, is no outage; resets and timeouts (OSError) are outages.
    (http.client.HTTPException, ErrorRule(TransientStoreError, _RETRY)),
    (OSError, ErrorRule(TransientStoreError, _OUTAGE)),
    # The store redirects every request and names no region: botocore asks for the region, is redirected, asks again.
    (RecursionError, ErrorRule(WrongRegionError, _FATAL)),
)

_UNKNOWN = ErrorRule(StoreError, _FATAL)
_UNTRUSTED = ErrorRule(EndpointError, _FATAL)
_UNENCRYPTED = ErrorRule(EndpointError, _FATAL, _PLAIN)


def translate(
    error: BaseException, operation: str, url: str, *, region: str | None = None, asked: Collection[str] = ()
) -> StoreError:
    """Return the bucketpoint error for an exception of boto3.

    The error keeps no reference to boto3's exception, which does not pickle well and contains headers.

    Args:
        asked: names of the request's parameters.
    """
    if isinstance(error, StoreError):
        error.url = error.url or url
        return error
    if isinstance(error, ForeignAnswer):
        return error.error(operation, url)
    if isinstance(error, boto.ClientError):
        # For a directory bucket, botocore sends CreateSession before the operation.
        named = "CreateSession" if error.operation_name == "CreateSession" else operation
        return _from_reply(error.response, named, url, region, asked)
    if isinstance(error, boto.HTTPClientError) and isinstance(error.kwargs.get("error"), RecursionError):
        error = error.kwargs["error"]
    error = next((one for one in causes(error) if isinstance(one, TooSlowError)), error)
    rule = next((rule for known, rule in RULE_BY_TYPE if isinstance(error, known)), _UNKNOWN)
    if any(isinstance(one, ssl.SSLCertVerificationError | FileNotFoundError) for one in causes(error)):
        rule = _UNTRUSTED
    elif speaks_plainly(error):
        rule = _UNENCRYPTED
    elif isinstance(error, boto.HTTPClientError) and any(type(one) is ValueError for one in causes(error)):
        rule = ErrorRule(CredentialsError, _FATAL, _LINE_BREAK)
    return rule.error(f"{operation} failed: {describe(error)}", url)


def translated(
    act: Callable[[], T], operation: str, url: str, *, region: str | None = None, asked: Collection[str] = ()
) -> T:
    """Call `act`, and raise the bucketpoint error for an exception of boto3: see `translate`."""
    return raise_translated(act, FAILURES, lambda error: translate(error, operation, url, region=region, asked=asked))


def why_kept(entry: dict[str, Any]) -> tuple[str, str | None]:
    """Return the reason why an object was not deleted, from its entry in the reply to DeleteObjects, and the remedy."""
    message = str(entry.get("Message", ""))
    rule = RULES.get(str(entry.get("Code", "")))
    if rule is None or rule.kind is not AccessDeniedError or rule.remedy is not None:
        return message, None if rule is None else rule.remedy
    return (
        f"{message.rstrip('.')}. It needs the permission {OPERATIONS['DeleteObjects'].right}",
        _GRANTED.format("pruner"),
    )


def _from_reply(
    reply: dict[str, Any], operation: str, url: str, region: str | None, asked: Collection[str]
) -> StoreError:
    detail = reply.get("Error", {})
    meta = reply.get("ResponseMetadata", {})
    code = str(detail.get("Code", ""))
    status = int(meta.get("HTTPStatusCode", 0))
    # A reply to HEAD has no body, and botocore then uses the status as the code.
    named = bool(code) and not code.isdigit()
    conditions = () if _CONDITIONS.isdisjoint(asked) else (Asked.CONDITION,)
    kind = asked_by(OPERATIONS[operation].kind if operation in OPERATIONS else None)
    code, answered = (code, status) if named else ("", int(code or status))
    rule = rule_for(RULES, code, answered, (*conditions, kind))
    text = answer_text(operation, code, status, str(detail.get("Message", "")) if named else "")
    if request_id := meta.get("RequestId"):
        text += f" (request {request_id})"
    if rule.kind is BucketNotFoundError:
        # The key would not help the reader: often the first request of a call is for an internal object.
        url = "/".join(url.split("/")[:3])
    if rule.kind is WrongRegionError:
        right = meta.get("HTTPHeaders", {}).get("x-amz-bucket-region") or detail.get("Region")
        if right and right != region:
            return rule.error(text, url, f"The bucket is in {right}: set AWS_REGION={right} (or region=)")
    return rule.error(text, url, _remedy(rule, operation, asked))


def _remedy(rule: ErrorRule, operation: str, asked: Collection[str]) -> str | None:
    """Return a remedy for this operation or these parameters; None if that of the rule or its error class is better."""
    if rule.remedy is not None:
        return None
    if rule.kind is AccessDeniedError and operation in OPERATIONS:
        _, right, _, role = OPERATIONS[operation]
        more = _UNTOLD if right == "s3:GetObject" else _GRANTED.format(role)
        return f"This request needs the permission {right}. {more}"
    if rule.kind is not UnsupportedRequestError:
        return None
    parameter = next((parameter for parameter in _ENCRYPTION if parameter in asked), None)
    # With a condition, the condition was refused: the store has already accepted data with the same encryption.
    if parameter is None or not _CONDITIONS.isdisjoint(asked):
        return _UNKNOWN_REQUEST
    return (
        f"The request asks for encryption by {parameter} in request_kwargs, and the service does not support it: leave "
        "the parameter out, or set the service up for encryption"
    )
