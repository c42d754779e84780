"""The CRT engine: large bodies are transferred by awscrt's S3 client, whose threads run without the Python interpreter.

boto3 still makes and signs every request and parses every reply, so that requests, retries and the meaning of replies
are decided in one place for both engines. Only the transfer of the bytes differs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import awscrt.exceptions
import awscrt.http
import awscrt.io
import awscrt.s3
import botocore.awsrequest
import botocore.exceptions

from bucketpoint.errors import BucketpointError, StoreError
from bucketpoint.stores.base import Buffers
from bucketpoint.stores.http_body import Delivered, scatter
from bucketpoint.stores.s3.body import OutgoingBody

LARGE_BYTES = 1 << 20
"""Size below which boto3 sends a body: a request costs less there, and the CRT would gain nothing."""

SENT, RECEIVED = ("UploadPart", "PutObject"), ("GetObject",)
"""The operations whose bodies may be large."""

_FEWEST_BODIES = 2

_EXTRA = "pip install 'awscrt>=0.38'"

_destination: ContextVar[Buffers | None] = ContextVar("bucketpoint_crt_destination", default=None)

# Prefixes of the names of awscrt's error codes for requests that did not reach the endpoint at all.
_NOT_REACHED = ("AWS_IO_DNS_", "AWS_IO_SOCKET_", "AWS_ERROR_IO_SOCKET_")
_NOT_TRUSTED = ("AWS_IO_TLS_", "AWS_ERROR_IO_TLS_")
# awscrt's error for a body that is longer than the range asked for.
_TOO_LONG = "AWS_ERROR_DEST_COPY_TOO_SMALL"
_BROKEN_OFF = ("AWS_IO_SOCKET_CLOSED", "AWS_IO_SOCKET_NOT_CONNECTED")


@contextlib.contextmanager
def receiving_into(buffers: Buffers) -> Iterator[None]:
    """Offer `buffers` to the CRT for the body of a GetObject that this thread makes in the block.

    The body may already be in the buffers when that call returns.
    """
    token = _destination.set(buffers)
    try:
        yield
    finally:
        _destination.reset(token)


def bodies_at_once() -> int:
    """Return the number of bodies that one client sends at once: one per core that this process may use, at least two.

    The CRT copies a whole body before it sends it. More copies than cores are not sent sooner, but use new memory, and
    touching new memory costs more CPU than encrypting the body. Fewer copies reuse the same memory.
    """
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    return max(cores, _FEWEST_BODIES)


class CrtTransport:
    """Sender of the large requests of one boto3 client: a handler of the client's `before-send` event.

    Args:
        connections: most connections to the endpoint. Fewer bodies are sent at once: see `bodies_at_once`.
        verify: as in botocore: a file of certificates, False, or None for the system's certificates.
    """

    def __init__(self, endpoint_url: str, region: str, *, connections: int, verify: str | bool | None) -> None:
        if not hasattr(awscrt.s3, "S3RetryMode"):
            raise BucketpointError('engine="crt" needs a newer awscrt: this one does retries of its own', remedy=_EXTRA)
        parts = urlsplit(endpoint_url)
        self._endpoint = endpoint_url
        self._region = region
        self._connections = connections
        self._verify = verify
        self._secure = parts.scheme == "https"
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(bodies_at_once())
        # In a forked child the client has no threads, and destroying it would wait for them for ever. So the fork
        # handler holds a reference to this list, which keeps the client alive in the child.
        self._native: list[Any] = []
        os.register_at_fork(after_in_child=lambda kept=self._native: None)
        weakref.finalize(self, _release, self._native, os.getpid())

    def send(self, request: Any, event_name: str = "", **_: Any) -> Any:
        """Send a request and return the response, or return None for a request that boto3 is to send itself."""
        operation = event_name.rpartition(".")[2]
        moved: Buffers = ()
        if operation in SENT and isinstance(request.body, OutgoingBody):
            moved = request.body.buffers
        elif operation in RECEIVED:
            moved = _destination.get() or ()
        if sum(view.nbytes for view in moved) < LARGE_BYTES:
            return None
        with self._room if operation in SENT else contextlib.nullcontext():
            return _exchange(self._client(), request, operation, self._endpoint, moved)

    def close(self) -> None:
        """Close idle connections. The next request opens new connections."""
        with self._lock:
            self._native.clear()

    def _client(self) -> Any:
        with self._lock:
            if not self._native:
                self._native.append(self._made())
            return self._native[0]

    def _made(self) -> Any:
        group = awscrt.io.EventLoopGroup()
        bootstrap = awscrt.io.ClientBootstrap(group, awscrt.io.DefaultHostResolver(group))
        return awscrt.s3.S3Client(
            bootstrap=bootstrap,
            region=self._region,
            tls_mode=awscrt.s3.S3RequestTlsMode.ENABLED if self._secure else awscrt.s3.S3RequestTlsMode.DISABLED,
            tls_connection_options=self._tls() if self._secure else None,
            max_active_connections_override=self._connections,
            retry_config=awscrt.s3.S3RetryConfig(retry_mode=awscrt.s3.S3RetryMode.NONE),
        )

    def _tls(self) -> Any:
        options = awscrt.io.TlsContextOptions()
        if self._verify is False:
            options.verify_peer = False
        elif isinstance(self._verify, str):
            options.override_default_trust_store_from_path(None, self._verify)
        return awscrt.io.ClientTlsContext(options).new_connection_options()


def _release(native: list[Any], pid: int) -> None:
    if os.getpid() == pid:
        native.clear()


def _exchange(client: Any, request: Any, operation: str, endpoint: str, moved: Buffers) -> Any:
    """Send one request through the CRT and return the response."""
    target = moved if operation in RECEIVED else ()
    status, received = 0, 0
    answered: Sequence[tuple[str, str]] = ()
    failure: Exception | None = None

    def on_headers(status_code: int, headers: Sequence[tuple[str, str]], **_: Any) -> None:
        nonlocal status, answered
        status, answered = status_code, headers

    def on_body(chunk: Any, offset: int, **_: Any) -> None:
        nonlocal received
        scatter(memoryview(chunk), target, received)
        received += len(chunk)

    kind = awscrt.s3.S3RequestType
    sent = client.make_request(
        # A GET_OBJECT of one part sends the same request as DEFAULT, but receives the body into reused memory.
        type=kind.GET_OBJECT if target else kind.DEFAULT,
        part_size=sum(view.nbytes for view in target) or None,
        operation_name=operation,
        request=_http_request(request, OutgoingBody(moved) if operation in SENT else None),
        on_headers=on_headers,
        on_body=on_body,
    )
    try:
        sent.finished_future.result()
        body = Delivered(received=received)
    except awscrt.s3.S3ResponseError as error:
        status, answered, body = int(error.status_code or 0), error.headers or (), Delivered(error.body or b"")
    except awscrt.exceptions.AwsCrtError as error:
        failure = _failure(error, request, endpoint)
    except BaseException:
        # The CRT's threads read or write the caller's memory until the request has ended, so wait for that.
        sent.cancel()
        sent.shutdown_event.wait()
        raise
    if failure is not None:
        raise failure
    return botocore.awsrequest.AWSResponse(request.url, status, dict(answered), body)


def _http_request(request: Any, body: Any) -> Any:
    url = urlsplit(request.url)
    headers = awscrt.http.HttpHeaders([("Host", _host(url))])
    for name, value in request.headers.items():
        if name.lower() not in ("host", "expect"):
            headers.add(name, value.decode() if isinstance(value, bytes) else str(value))
    path = f"{url.path}?{url.query}" if url.query else url.path
    return awscrt.http.HttpRequest(request.method, path, headers, body)


def _failure(error: Any, request: Any, endpoint: str) -> Any:
    """Return the exception that boto3 would raise, without a reference to the request."""
    name = str(error.name)
    if name == _TOO_LONG:
        return StoreError("the store ignored the range of a read", url=request.url.partition("?")[0])
    if name.startswith(_NOT_TRUSTED):
        return botocore.exceptions.SSLError(endpoint_url=endpoint, error=name)
    if name.startswith(_NOT_REACHED) and name not in _BROKEN_OFF:
        return botocore.exceptions.EndpointConnectionError(endpoint_url=endpoint)
    return ConnectionError(f"{name}: {error.message}")


def _host(url: Any) -> str:
    """Return the Host header as boto3 signs it: without a default port and without user info before an "@"."""
    default = {"http": 80, "https": 443}.get(url.scheme)
    host = str(url.netloc).rpartition("@")[2]
    return host.removesuffix(f":{default}") if url.port == default else host
