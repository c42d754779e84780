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
from bucketpoint.stores.foreign import ForeignAnswer, causes, speaks_plainly
from bucketpoint.stores.http_body import BrokenBody
from bucketpoint.stores.redact import clean, describe

T = TypeVar("T")

# The JSON API's reasons (https://cloud.google.com/storage/docs/json_api/v1/status-codes), and the XML API's codes
# (https://cloud.google.com/storage/docs/xml-api/reference-status). For all other codes the status decides.
KIND_BY_CODE: dict[str, type[StoreError]] = {
    "rateLimitExceeded": ThrottledError,
    "userRateLimitExceeded": ThrottledError,
    "quotaExceeded": ThrottledError,
    "authError": CredentialsError,
    "required": CredentialsError,
    "userProjectMissing": AccessDeniedError,
    "userProjectAccountProblem": AccessDeniedError,
    "UserProjectMissing": AccessDeniedError,
    "NoSuchBucket": BucketNotFoundError,
    "NoSuchKey": ObjectNotFoundError,
    "NoSuchUpload": UploadNotFoundError,
    "ExpiredToken": CredentialsError,
    "InvalidSecurity": CredentialsError,
    "SignatureDoesNotMatch": CredentialsError,
    "BadDigest": CorruptDataError,
    "CrcMismatch": CorruptDataError,
    "InvalidDigest": CorruptDataError,
    "SlowDown": ThrottledError,
}

KIND_BY_STATUS: dict[int, type[StoreError]] = {
    401: CredentialsError,
    403: AccessDeniedError,
    404: ObjectNotFoundError,
    408: TransientStoreError,
    # Two requests changed one object at once:
    # https://cloud.google.com/storage/docs/json_api/v1/status-codes#409_Conflict
    409: TransientStoreError,
    412: PreconditionFailedError,
    416: CorruptDataError,
    429: ThrottledError,
    503: ThrottledError,
}

_PAYER_CODES = frozenset({"userProjectMissing", "UserProjectMissing"})

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

# Permissions by operation, as named in messages. https://cloud.google.com/storage/docs/access-control/iam-json and
# https://cloud.google.com/storage/docs/access-control/iam-xml
_CREATE = "storage.objects.create, and storage.objects.delete where it replaces an object"
RIGHT_BY_OPERATION: dict[str, str] = {
    "buckets.get": "storage.buckets.get",
    "objects.insert": _CREATE,
    "objects.compose": f"storage.objects.get, {_CREATE}",
    "objects.rewrite": f"storage.objects.get, {_CREATE}",
    "objects.get": "storage.objects.get",
    "objects.list": "storage.objects.list",
    "objects.delete": "storage.objects.delete",
    "create multipart upload": "storage.multipartUploads.create and storage.objects.create",
    "upload part": "storage.multipartUploads.create and storage.objects.create",
    "complete multipart upload": "storage.multipartUploads.create and storage.objects.create",
    "abort multipart upload": "storage.multipartUploads.abort",
    "list multipart uploads": "storage.multipartUploads.list",
}
_PAYER_REMEDY = "The bucket charges the requester: pass requester_pays='the-project-to-charge'"


def failures() -> tuple[type[BaseException], ...]:
    """Return the exceptions of the client library.

    Not a constant, because the library is an optional dependency, and takes half a second to import.
    """
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
    """Return the bucketpoint error for an exception of the client library.

    The error keeps no reference to the library's exception, which contains headers.
    """
    if isinstance(error, StoreError):
        return error
    if isinstance(error, ForeignAnswer):
        return error.error(operation, url)
    kind = _kind(error)
    text = describe(error)
    if kind is EndpointError and endpoint is not None:
        text = f"{clean(endpoint)} cannot be reached: {describe(_reason(error))}"
    remedy = _PLAIN if speaks_plainly(error) else _REMEDIES.get(kind)
    failure = kind(f"{operation} failed: {text}", url=url, remedy=remedy)
    if kind in (EndpointError, TransientStoreError):
        failure.action = _action(error)
    return failure


def _action(error: BaseException) -> Action:
    """Return the reaction to a failure without an answer."""
    import requests.exceptions

    if any(isinstance(one, ssl.SSLCertVerificationError | FileNotFoundError) for one in causes(error)):
        return Action.FATAL
    if speaks_plainly(error) or (_stays_so(error) and not isinstance(error, requests.exceptions.SSLError)):
        return Action.FATAL
    # No HTTP, or a reply that ended early, which resets and timeouts are not.
    early = any(isinstance(one, http.client.HTTPException | BrokenBody) for one in causes(error))
    cut_off = any(isinstance(one, ConnectionError | TimeoutError) for one in causes(error))
    return Action.RETRY if early and not cut_off else Action.OUTAGE


def translated(act: Callable[[], T], operation: str, url: str, endpoint: str | None = None) -> T:
    """Call `act`, and raise the bucketpoint error for an exception of the client library.

    Raised outside the except block, so that the library's exception, which holds the request with its headers, does not
    become the `__context__` of the error.
    """
    try:
        return act()
    except failures() as error:
        failure = translate(error, operation, url, endpoint)
    raise failure


def _reason(error: BaseException) -> BaseException:
    """Return the cause of a failed connection, without the exceptions that requests and urllib3 wrap around it."""
    inner = error.args[0] if error.args else None
    if not isinstance(inner, urllib3.exceptions.MaxRetryError) or inner.reason is None:
        return error
    return inner.reason.__cause__ if isinstance(inner.reason.__cause__, OSError) else inner.reason


def _stays_so(error: BaseException) -> bool:
    """Return True if retrying cannot reach the endpoint: the certificate or the URL is wrong."""
    import requests.exceptions

    return isinstance(
        error,
        requests.exceptions.SSLError
        | requests.exceptions.InvalidURL
        | requests.exceptions.InvalidSchema
        | requests.exceptions.MissingSchema,
    )


def _kind(error: BaseException) -> type[StoreError]:
    import google.auth.exceptions
    import requests.exceptions

    if isinstance(error, google.auth.exceptions.TransportError):
        return EndpointError
    if isinstance(error, google.auth.exceptions.GoogleAuthError):
        # An overloaded metadata server or token service sets `retryable`.
        return TransientStoreError if error.retryable else CredentialsError
    if _stays_so(error) or isinstance(error, requests.exceptions.ProxyError | requests.exceptions.ConnectTimeout):
        return EndpointError
    if isinstance(error, requests.exceptions.ConnectionError):
        inner = error.args[0] if error.args else None
        never = isinstance(inner, urllib3.exceptions.MaxRetryError) and isinstance(
            inner.reason, urllib3.exceptions.NewConnectionError
        )
        return EndpointError if never else TransientStoreError
    return TransientStoreError


def failure_of(status: int, body: bytes, operation: str, url: str) -> tuple[StoreError, str]:
    """Return the error for a reply with this status and this JSON or XML body, which may be empty, and its code."""
    code, message = _details(body)
    kind = KIND_BY_CODE.get(code) or KIND_BY_STATUS.get(status)
    if kind is None:
        kind = TransientStoreError if status >= 500 or status == 200 else StoreError
    text = f"{operation} failed: {code or 'no error code'} (HTTP {status})"
    if message:
        text += f": {message.rstrip('.')}"
    remedy = _REMEDIES.get(kind)
    if code in _PAYER_CODES:
        remedy = _PAYER_REMEDY
    elif kind is AccessDeniedError and operation in RIGHT_BY_OPERATION:
        remedy = f"This request needs {RIGHT_BY_OPERATION[operation]}. {remedy}"
    failure = kind(text, url=url, remedy=remedy)
    if status in (502, 504):
        # A proxy, or Google's front end, that does not reach the service.
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
    except (ValueError, TypeError, KeyError, AttributeError):
        return "", ""
