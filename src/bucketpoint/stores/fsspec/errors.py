"""Translation of the exceptions of fsspec's filesystems to the classes in `bucketpoint.errors`.

Each filesystem raises the exceptions of its client library: built-in exceptions of Python, or exceptions with an HTTP
status in some attribute. Both are looked for along the chain of causes; the text of an exception is never used.
"""

from __future__ import annotations

import errno
import http.client
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CredentialsError,
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from bucketpoint.stores.redact import describe

CHECK_ENDPOINT = "Check the endpoint, the host or the connection string in storage_options, and the network"

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_UNREACHABLE = (ConnectionRefusedError, socket.gaierror)
_PASSING = (TimeoutError, ConnectionError)

# s3fs translates InternalError, RequestTimeout and SlowDown to such numbers. Only Linux has EREMOTEIO.
_PASSING_NUMBERS = frozenset(
    {errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, getattr(errno, "EREMOTEIO", errno.EBUSY)}
)
_UNREACHABLE_NUMBERS = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH})

_RIGHTS = {
    **dict.fromkeys(("put", "create_multipart", "put_part", "complete_multipart", "abort_multipart"), "write"),
    **dict.fromkeys(("get", "head"), "read"),
    "list_multipart": "list",
    "copy": "read and to write",
}
"""Permission that an operation needs, for messages, if it is not the operation's name."""

_REFUSED = frozenset({http.client.CONFLICT, http.client.PRECONDITION_FAILED})
_TOO_MANY = frozenset({http.client.TOO_MANY_REQUESTS, http.client.SERVICE_UNAVAILABLE})


def translate(error: Exception, operation: str, url: str, options: Mapping[str, Any] | None = None) -> StoreError:
    """Return the bucketpoint error for an exception. A `StoreError` is returned unchanged.

    Args:
        options: options of the filesystem, whose secrets the exception may quote.
    """
    if isinstance(error, StoreError):
        return error
    kind, remedy = _kind(error, operation)
    # Only the first line: in further lines Azure's library quotes the reply.
    text = error.message if isinstance(error, BucketpointError) else describe(error, options).partition("\n")[0]
    return kind(f"{operation} failed: {text}", url=url, remedy=remedy)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an exception or in one of its causes, or None."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        # botocore's errors have the status in the response, azure's in `status_code`, aiohttp's in `status`, gcsfs's in
        # `code`.
        held = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        for value in (held, *(getattr(one, name, None) for name in ("status_code", "status", "code"))):
            if isinstance(value, int) and not isinstance(value, bool) and 300 <= value < 600:
                return value
    return None


def _kind(error: Exception, operation: str) -> tuple[type[StoreError], str | None]:
    if isinstance(error, FileExistsError):
        return PreconditionFailedError, None
    if isinstance(error, _MISSING):
        return ObjectNotFoundError, None
    status = status_of(error)
    if status in _REFUSED:
        return PreconditionFailedError, None
    if status == http.client.NOT_FOUND:
        return ObjectNotFoundError, None
    if status == http.client.UNAUTHORIZED:
        return CredentialsError, "Check the credentials in storage_options"
    if status == http.client.FORBIDDEN or isinstance(error, PermissionError):
        lacking = f"The credentials lack the right to {_RIGHTS.get(operation, operation)} here"
        return AccessDeniedError, f"{lacking}. A trainer needs to write and to read; a reader, to read"
    if status in _TOO_MANY:
        return ThrottledError, None
    if status is not None and status >= http.client.INTERNAL_SERVER_ERROR:
        return TransientStoreError, None
    chain = list(_chain(error))
    if any(isinstance(one, _UNREACHABLE) or _number(one) in _UNREACHABLE_NUMBERS for one in chain):
        return EndpointError, CHECK_ENDPOINT
    if status is None and any(isinstance(one, _PASSING) or _number(one) in _PASSING_NUMBERS for one in chain):
        return TransientStoreError, None
    return StoreError, None


def _number(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        # azure and aiohttp keep a wrapped exception in these attributes, and do not always chain it as a cause.
        inner = getattr(one, "inner_exception", None) or getattr(one, "os_error", None)
        waiting += [inner if isinstance(inner, BaseException) else None, one.__context__, one.__cause__]
