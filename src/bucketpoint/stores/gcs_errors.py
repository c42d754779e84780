"""From what GCS and its client raise to the kinds in `bucketpoint.errors`: by code, status and type, never by text."""

from __future__ import annotations

import http.client
import json
import xml.etree.ElementTree as ElementTree
from typing import Any

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
from bucketpoint.stores.wording import describe

# The JSON API's reasons (https://cloud.google.com/storage/docs/json_api/v1/status-codes), and the XML API's codes
# (https://cloud.google.com/storage/docs/xml-api/reference-status). What is not here is decided by its status.
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
    # Two requests met at one object: https://cloud.google.com/storage/docs/json_api/v1/status-codes#409_Conflict
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
        "A trainer needs storage.objects.create, get and delete (which replacing is), and "
        "storage.multipartUploads.create and abort; a reader needs storage.objects.get"
    ),
}
_PAYER_REMEDY = "The bucket's owner lets the requester pay: pass requester_pays='the-project-to-charge'"


def failures() -> tuple[type[BaseException], ...]:
    """What the client library raises. Not a constant: the library is an extra, and half a second to import."""
    import google.auth.exceptions
    import requests.exceptions

    return (
        StoreError,
        google.auth.exceptions.GoogleAuthError,
        requests.exceptions.RequestException,
        urllib3.exceptions.HTTPError,
        http.client.HTTPException,
        OSError,
    )


def translate(error: BaseException, operation: str, url: str) -> StoreError:
    """The error of our own that says the same. It holds nothing of the client library's, which carries headers."""
    if isinstance(error, StoreError):
        return error
    kind = _kind(error)
    made = kind(f"{operation} failed: {describe(error)}", url=url, remedy=_REMEDIES.get(kind))
    if kind is EndpointError and not _stays_so(error):
        made.action = Action.RETRY
    return made


def _stays_so(error: BaseException) -> bool:
    """Whether an endpoint will not be reached a moment later either: its certificate, or its URL, is at fault."""
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
        # A metadata server or a token service that is overloaded says so.
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


def from_reply(status: int, body: bytes, operation: str, url: str) -> StoreError:
    """The error that a reply of this status stands for, by its JSON or XML body where it has one."""
    return failure_of(status, body, operation, url)[0]


def failure_of(status: int, body: bytes, operation: str, url: str) -> tuple[StoreError, str]:
    """`from_reply`, and the service's own code for it."""
    code, message = _details(body)
    kind = KIND_BY_CODE.get(code) or KIND_BY_STATUS.get(status)
    if kind is None:
        kind = TransientStoreError if status >= 500 or status == 200 else StoreError
    text = f"{operation} failed: {code or 'no error code'} (HTTP {status})"
    if message:
        text += f": {message.rstrip('.')}"
    remedy = _PAYER_REMEDY if code in _PAYER_CODES else _REMEDIES.get(kind)
    return kind(text, url=url, remedy=remedy), code


def _details(body: bytes) -> tuple[str, str]:
    """The reason and the message that the body of an error gives; empty where it gives none."""
    if body.lstrip().startswith(b"<"):
        try:
            root = ElementTree.fromstring(body)
        except ElementTree.ParseError:
            return "", ""
        return root.findtext("{*}Code") or "", root.findtext("{*}Message") or ""
    try:
        error: Any = json.loads(body)["error"]
        reasons = error.get("errors") or [{}]
        return str(reasons[0].get("reason") or ""), str(error.get("message") or "")
    except (ValueError, TypeError, KeyError, AttributeError):
        return "", ""
