"""Bodies of S3 requests in the caller's memory, in the form that botocore expects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from bucketpoint.stores.base import Buffers
from bucketpoint.stores.http_body import pieces


class OutgoingBody:
    """A file-like `Body` for botocore, which measures and rewinds it, and reads it if the payload is signed.

    The bytes sent to the service are not read from this file: see `send_from_memory`.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = [view for view in buffers if view.nbytes]
        self._size = sum(view.nbytes for view in self.buffers)
        self._position = 0

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = min(max(base + offset, 0), self._size)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = self._size - self._position
        wanted = left if size is None or size < 0 else min(size, left)
        taken: list[memoryview] = []
        start = 0
        need = wanted
        for view in self.buffers:
            if not need:
                break
            skip = max(self._position - start, 0)
            if skip < view.nbytes:
                piece = view[skip : skip + need]
                taken.append(piece)
                need -= piece.nbytes
                self._position += piece.nbytes
            start += view.nbytes
        return b"".join(taken)


class _Pieces:
    """The iterable that urllib3 sends.

    It has `seek`, because botocore rewinds a body before a retry. It has no `read`, because urllib3 would then copy the
    body block by block.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers

    def __iter__(self) -> Iterator[memoryview | bytes]:
        return pieces(self._buffers)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return 0


def send_from_memory(request: Any, **_: Any) -> None:
    """Replace the body of a signed request by the caller's memory. Handler of botocore's `before-send` event."""
    if isinstance(request.body, OutgoingBody):
        request.body = _Pieces(request.body.buffers)
    # Waiting for "100 Continue" would cost a round trip for every part. The header is not signed, so it can be removed.
    if "Expect" in request.headers:
        del request.headers["Expect"]
