"""Translation of GCS errors to the classes in `bucketpoint.errors`, by code, status and type, never by text."""

from __future__ import annotations

import http.client
import json
import ssl
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any, TypeVar

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
)
from bucketpoint.stores.foreign import (
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
from bucketpoint.stores.redact import clean, describe

T = TypeVar("T")

_REMEDIES: dict[type[StoreError], str] = {
    EndpointError: "Check the network, STORAGE_EMULATOR_HOST or endpoint_url, and the CA bundle",
    CredentialsError: (
        "Refresh the credentials: `gcloud auth application-default login`, GOOGLE_APPLICATION_CREDENTIALS, or the "
        "workload's service account"
    ),
    AccessDeniedError: (
        "A trainer needs storage.objects.create, get and delete (to replace objects), and "
        "storage.multipartUploads.create and abort; a reader needs storage.objects.get"
    ),
}

_PLAIN = "The server answers without TLS: write endpoint_url with http://, or name its port for https"


_CREATE = "storage.objects.create, and storage.objects.delete where it replaces an object"
_COPY = f"storage.objects.get, {_CREATE}"
_UPLOAD = "storage.multipartUploads.create and storage.objects.create"

# https://cloud.google.com/storage/docs/access-control/iam-json and
# https://cloud.google.com/storage/docs/access-control/iam-xml
OPERATIONS: dict[str, Operation] = {
    # Descriptions of a bucket and of an object are GET requests, so their kind is "get" and not "head".
    "buckets.get": Operation("get", "storage.buckets.get"),
    "objects.insert": Operation("put", _CREATE, ("generation",)),
    "objects.rewrite": Operation("copy", _COPY, ("done",)),
    "objects.get": Operation("get", "storage.objects.get", ("generation",)),
    "objects.list": Operation("list", "storage.objects.list", ("kind",)),
    "objects.delete": Operation("delete", "storage.objects.delete"),
    "a batch of objects.delete": Operation("delete", "storage.objects.delete"),
    "create multipart upload": Operation("create_multipart", _UPLOAD, ("InitiateMultipartUploadResult",)),
    "upload part": Operation("put_part", _UPLOAD),
    "complete multipart upload": Operation("complete_multipart", _UPLOAD, ("CompleteMultipartUploadResult",)),
    "abort multipart upload": Operation("abort_multipart", "storage.multipartUploads.abort"),
    "list multipart uploads": Operation(
        "list_multipart", "storage.multipartUploads.list", ("ListMultipartUploadsResult",)
    ),
}

_KEPT = (
    "A retention policy, an object retention or a hold keeps the object: wait for its end, release it (`gcloud storage "
    "objects update --no-temporary-hold`), or use a bucket without one"
)
_BILLING = "The project or its billing account is disabled: enable billing for the project that owns the bucket"
_PERIMETER = "A perimeter of VPC Service Controls refuses the request: add an ingress rule, or run inside the perimeter"
_ORGANISATION = "A constraint of the organisation policy refuses the request: ask who administers the organisation"
_KMS = (
    "Check the Cloud KMS key (kms_key_name, or the bucket's default key): it must be enabled, in the bucket's "
    "location, and grant roles/cloudkms.cryptoKeyEncrypterDecrypter to the project's Cloud Storage service agent"
)
_CSEK = "The object is encrypted with a customer-supplied key, which is not supported: rewrite it without one"
_PAYER_REMEDY = "The bucket charges the requester: pass requester_pays='the-project-to-charge'"


# Reasons of the JSON API (https://cloud.google.com/storage/docs/json_api/v1/status-codes) and codes of the XML API
# (https://cloud.google.com/storage/docs/xml-api/reference-status). `failure_of` makes the codes begin in lower case.
RULES: dict[RuleKey, ErrorRule] = {
    **answers("rateLimitExceeded userRateLimitExceeded quotaExceeded slowDown 429 503", ThrottledError),
    **answers(
        "authError required expiredToken invalidSecurity signatureDoesNotMatch 401",
        CredentialsError,
        _REMEDIES[CredentialsError],
    ),
    **answers("userProjectMissing", AccessDeniedError, _PAYER_REMEDY),
    **answers("accountDisabled userProjectAccountProblem accountProblem", AccessDeniedError, _BILLING),
    **answers("vpcServiceControls securityPolicyViolated", AccessDeniedError, _PERIMETER),
    **answers("orgPolicyConstraintFailed", AccessDeniedError, _ORGANISATION),
    **answers("retentionPolicyNotMet objectUnderActiveHold", AccessDeniedError, _KEPT),
    **answers(
        "cloudKmsBadKey cloudKmsDecryptionKeyNotFound cloudKmsDisabledKey cloudKmsEncryptionKeyNotFound "
        "cloudKmsKeyLocationNotAllowed",
        StoreError,
        _KMS,
    ),
    **answers("resourceIsEncryptedWithCustomerEncryptionKey", StoreError, _CSEK),
    **answers("noSuchBucket", BucketNotFoundError),
    **answers("noSuchKey notFound 404", ObjectNotFoundError),
    **answers("noSuchUpload", UploadNotFoundError),
    **answers("badDigest crcMismatch invalidDigest requestedRangeNotSatisfiable invalidRange 416", CorruptDataError),
    **answers("conditionNotMet preconditionFailed 412", PreconditionFailedError, asked=Asked.CONDITION),
    **answers("403", AccessDeniedError, _REMEDIES[AccessDeniedError]),
    # Two requests changed one object at once:
    # https://cloud.google.com/storage/docs/json_api/v1/status-codes#409_Conflict
    **answers("408 409 conflict", TransientStoreError),
}

_GENERAL = frozenset({"", "forbidden", "insufficientPermissions", "accessDenied"})
"""Codes of a missing permission. GCS also uses them for a hold or a KMS key, which only the message shows."""
_OTHERWISE = {
    Asked.READ: "If the message names a Cloud KMS key, grant roles/cloudkms.cryptoKeyDecrypter to the service agent",
    Asked.WRITE: (
        "If the message names a hold, release it; if it names a Cloud KMS key, grant "
        "roles/cloudkms.cryptoKeyEncrypterDecrypter on it to the Cloud Storage service agent"
    ),
    Asked.DELETE: "If the message names a hold, release it",
}


class SomeLeftError(StoreError):
    """Error of a batch: some of its calls failed and have to be retried."""


def failures() -> tuple[type[BaseException], ...]:
    """Return exceptions of the client library, imported only here: it is optional, and its import takes 0.5 s."""
    import google.auth.exceptions
    import requests.exceptions

    return (
        StoreError,
        google.auth.exceptions.GoogleAuthError,
        requests.exceptions.RequestException,
        urllib3.exceptions.HTTPError,
        http.client.HTTPException,
        OSError,
        ForeignAnswer,
    )


def translate(error: BaseException, operation: str, url: str, endpoint: str | None = None) -> StoreError:
    """Return the bucketpoint error for an exception of the client library. Drops the exception: it contains headers."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, ForeignAnswer):
        return error.error(operation, url)
    rule = _rule_for(error)
    text = describe(error)
    if rule.kind is EndpointError and endpoint is not None:
        text = f"{clean(endpoint)} cannot be reached: {describe(_reason(error))}"
    return rule.error(f"{operation} failed: {text}", url)


def _rule_for(error: BaseException) -> ErrorRule:
    """Return the rule for a failure without an answer."""
    import google.auth.exceptions as google_auth
    import requests.exceptions as http_errors

    chain = list(causes(error))

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(one, kinds) for one in chain)

    kind: type[StoreError] = TransientStoreError
    if isinstance(error, google_auth.GoogleAuthError) and not isinstance(error, google_auth.TransportError):
        # `retryable` is True for an overloaded metadata server or token service.
        if not error.retryable:
            return RULES[401]
    elif speaks_plainly(error):
        return ErrorRule(EndpointError, Action.FATAL, _PLAIN)
    elif has(ssl.SSLCertVerificationError, FileNotFoundError) or isinstance(
        error, http_errors.InvalidURL | http_errors.InvalidSchema | http_errors.MissingSchema
    ):
        return ErrorRule(EndpointError, Action.FATAL, _REMEDIES[EndpointError])
    elif has(
        google_auth.TransportError,
        http_errors.SSLError,
        http_errors.ProxyError,
        http_errors.ConnectTimeout,
        urllib3.exceptions.NewConnectionError,
    ):
        kind = EndpointError
    # A reply that is not HTTP, or ended early, is no outage; resets and timeouts are outages.
    early = has(http.client.HTTPException, BrokenBody) and not has(ConnectionError, TimeoutError)
    return ErrorRule(kind, Action.RETRY if early else Action.OUTAGE, _REMEDIES.get(kind))


def translated(act: Callable[[], T], operation: str, url: str, endpoint: str | None = None) -> T:
    """Call `act`, and raise the bucketpoint error for an exception of the client library."""
    return raise_translated(act, failures(), lambda error: translate(error, operation, url, endpoint))


def _reason(error: BaseException) -> BaseException:
    """Return the cause of a failed connection, without the exceptions that requests and urllib3 wrap around it."""
    inner = error.args[0] if error.args else None
    if not isinstance(inner, urllib3.exceptions.MaxRetryError) or inner.reason is None:
        return error
    return inner.reason.__cause__ if isinstance(inner.reason.__cause__, OSError) else inner.reason


def failure_of(
    status: int, body: bytes, operation: str, url: str, *, conditional: bool = False
) -> tuple[StoreError, str]:
    """Return the error for a reply, and the error code in its JSON or XML body, which may be empty.

    Args:
        conditional: the request named a generation that the object must have.
    """
    code, message = _details(body)
    name, known = code[:1].lower() + code[1:], OPERATIONS.get(operation)
    asked = asked_by(known.kind if known is not None else None)
    rule = rule_for(RULES, name, status, (Asked.CONDITION, asked) if conditional else (asked,))
    remedy = None
    if rule is RULES[403] and name not in _GENERAL:
        remedy = "The code and the message above name the reason, which is not a missing permission"
    elif rule is RULES[403] and known is not None:
        parts = (f"This request needs {known.right}", rule.remedy, _OTHERWISE.get(asked))
        remedy = ". ".join(part for part in parts if part)
    failure = rule.error(answer_text(operation, code, status, message), url, remedy)
    if status in (502, 504):
        # A proxy, or Google's front end, cannot reach the service.
        failure.action = Action.OUTAGE
    return failure, code


def _details(body: bytes) -> tuple[str, str]:
    """Return the reason and the message in the body of an error reply; empty if it has none."""
    if body.lstrip().startswith(b"<"):
        try:
            root = ElementTree.fromstring(body)
        except ElementTree.ParseError:
            return "", ""
        # The message is only "Access denied."; the details name the account and the missing permission.
        texts = [root.findtext("{*}Message"), root.findtext("{*}Details")]
        return root.findtext("{*}Code") or "", ": ".join(text.rstrip(".") for text in texts if text)
    try:
        error: Any = json.loads(body)["error"]
        reasons = error.get("errors") or [{}]
        return str(reasons[0].get("reason") or ""), str(error.get("message") or "")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "", ""
