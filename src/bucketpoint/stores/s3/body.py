"""Bodies of S3 requests in the caller's memory, in the form that botocore expects."""

from __future__ import annotations

import io
import os
from typing import Any

from bucketpoint.stores.base import Buffers
from bucketpoint.stores.http_body import Pieces


class OutgoingBody(io.RawIOBase):
    """A file-like `Body` for botocore, which measures and rewinds it, and reads it if the payload is signed.

    boto3 does not send the bytes from this file: see `send_from_memory`.
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


def send_from_memory(request: Any, **_: Any) -> None:
    """Replace the body of a signed request by the caller's memory. Handler of botocore's `before-send` event."""
    if isinstance(request.body, OutgoingBody):
        request.body = Pieces(request.body.buffers)
    # Waiting for "100 Continue" would cost a round trip for every part. The header is not signed, so it can be removed.
    if "Expect" in request.headers:
        del request.headers["Expect"]
