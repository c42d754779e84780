"""`S3Exchange`: sends a request from the caller's memory, and accepts an answer only if it is the store's.

botocore accepts any answer with status 200: it would take a login page for a successful PUT or an empty listing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import urllib3
from botocore.awsrequest import AWSResponse

from bucketpoint.errors import Action, CorruptDataError
from bucketpoint.stores.base import Buffers
from bucketpoint.stores.foreign import ANSWER_BYTES, ERROR_BYTES, ForeignAnswer, read_within, root_of
from bucketpoint.stores.http_body import Pieces
from bucketpoint.stores.s3.errors import OPERATIONS
from bucketpoint.stores.s3.options import S3Service

_CRC, _ID, _REGION = "x-amz-checksum-crc32c", "x-amz-request-id", "x-amz-bucket-region"

_WRITES = frozenset({"PutObject", "UploadPart"})


class OutgoingBody(io.RawIOBase):
    """A file-like `Body` for botocore, which measures and rewinds it, and reads it if the payload is signed.

    The bytes are not sent from this file: see `send_from_memory`.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = [view for view in buffers if view.nbytes]
        self._size = sum(view.nbytes for view in self.buffers)
        self._position = 0

    def __len__(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = min(max(base + offset, 0), self._size)
        return self._position

    def readinto(self, room: Any) -> int:
        start, done = self._position, 0
        for view in self.buffers:
            if done == len(room):
                break
            if start < view.nbytes:
                piece = view[start : start + len(room) - done]
                room[done : done + len(piece)] = piece
                done += len(piece)
            start = max(start - view.nbytes, 0)
        self._position += done
        return done


def send_from_memory(request: Any) -> None:
    """Replace the body of a signed request by the caller's memory."""
    if isinstance(request.body, OutgoingBody):
        request.body = Pieces(request.body.buffers)
    # Waiting for "100 Continue" would cost a round trip for every part. The header is not signed, so it can be removed.
    if "Expect" in request.headers:
        del request.headers["Expect"]


class S3Exchange:
    """Handler of a boto3 client's `before-send` event, which sends the request and checks the answer.

    AWS's answers have a request id, and those to writes repeat the sent checksum. Other services are observed: once an
    answer had one of these headers, an answer without it is not the store's.

    Args:
        session: botocore's HTTP session. None if botocore keeps it elsewhere: botocore then sends requests unchecked.
    """

    def __init__(self, session: Any, service: S3Service) -> None:
        self._session = session
        self._habits = {_ID, *_WRITES} if service.name == "aws" else set()

    def __call__(self, request: Any, event_name: str = "", **_: Any) -> Any:
        """Send a request and return the answer.

        Raises:
            ForeignAnswer: something other than the store answered.
        """
        send_from_memory(request)
        if self._session is None:
            return None
        operation = event_name.rpartition(".")[2]
        # Otherwise the session would read the whole body, whatever its length.
        request.stream_output = True
        answer = self._session.send(request)
        status = answer.status_code
        headers = {str(name).lower(): str(value) for name, value in answer.headers.items()}
        if operation == "GetObject" and 200 <= status < 300:
            if reason := self._reason(operation, status, headers, None, None):
                body = answer.raw.read(1024)
                answer.raw.close()
                raise ForeignAnswer(reason, status, headers, body)
            return answer
        limit = ERROR_BYTES if status >= 300 else ANSWER_BYTES
        body, whole = read_within(answer.raw.stream(), limit, getattr(answer.raw, "close", bool))
        sent = request.headers.get(_CRC)
        sent = sent.decode() if isinstance(sent, bytes) else sent
        reason = (
            self._reason(operation, status, headers, body, sent) if whole else f"it is longer than {limit >> 20} MiB"
        )
        if reason is not None and status < 500 and status not in (408, 429):
            raise ForeignAnswer(reason, status, headers, body)
        if status < 300 and operation in _WRITES and sent is not None and headers.get(_CRC, sent) != sent:
            failure = CorruptDataError(f"the store has the CRC32C {headers[_CRC]}, expected {sent}")
            failure.action = Action.RETRY
            raise failure
        return AWSResponse(
            answer.url, status, answer.headers, urllib3.HTTPResponse(io.BytesIO(body), preload_content=False)
        )

    def _reason(
        self, operation: str, status: int, headers: Mapping[str, str], body: bytes | None, sent: str | None
    ) -> str | None:
        """Return the reason why an answer is not the store's; None if it may be the store's.

        Args:
            body: the answer's body; None if it is the content of an object.
        """
        if status >= 300:
            reason = _error_reason(operation, status, headers, body or b"")
        else:
            reason = _success_reason(operation, headers, body)
        failed = status >= 300 or root_of(body or b"") == "Error"
        if reason is None and not failed and _ID in self._habits and _ID not in headers:
            reason = "it has no request id"
        if reason is None and status < 300 and operation in _WRITES:
            if operation in self._habits and sent is not None and _CRC not in headers:
                reason = "it does not repeat the checksum"
            elif _CRC in headers:
                self._habits.add(operation)
        if reason is None and _ID in headers:
            self._habits.add(_ID)
        return reason


def _success_reason(operation: str, headers: Mapping[str, str], body: bytes | None) -> str | None:
    known = OPERATIONS.get(operation)
    reads, roots = (known.kind in ("get", "head"), known.replies) if known is not None else (False, ())
    if (reads or operation in _WRITES) and not headers.get("etag"):
        return "it has no ETag"
    if reads and _ID not in headers and "html" in headers.get("content-type", ""):
        return "it is a web page"
    if known is not None and not reads and not roots and body:
        return "it has a body"
    root = root_of(body) if body else None
    if roots and root not in (*roots, "Error"):
        return f"its body is not a {roots[0]}"
    if body and (root is None or root.lower() == "html"):
        return "its body is not XML"
    return None


def _error_reason(operation: str, status: int, headers: Mapping[str, str], body: bytes) -> str | None:
    if body:
        return None if root_of(body) == "Error" else "its body is not an error of S3"
    if status < 400 and "location" in headers and _REGION not in headers:
        return "it is a redirect"
    if status == 304:
        return "the request did not ask whether anything has changed"
    # Saves and restores take 404 for "no checkpoint here", so it is accepted only from the store. Answers to HEAD are
    # not checked: they have no body, and some servers give them the content type of a web page.
    if status == 404 and _ID not in headers and not operation.startswith("Head"):
        return "it does not name the missing key or bucket"
    return None
