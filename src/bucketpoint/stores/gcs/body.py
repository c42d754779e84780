"""Bodies of GCS requests sent from the caller's memory, and replies received into it."""

from __future__ import annotations

import email
import email.policy
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bucketpoint.stores.base import Buffers
from bucketpoint.stores.http_body import Pieces

BINARY = "application/octet-stream"

_NUMBER = re.compile(r"[0-9]{1,9}")


def with_metadata(metadata: Mapping[str, Any], body: Buffers) -> tuple[str, Pieces]:
    """Return the content type and the body of a JSON API upload in one request (`uploadType=multipart`).

    https://cloud.google.com/storage/docs/uploading-objects#uploading-an-object
    """
    boundary = os.urandom(16).hex()
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(metadata)}\r\n"
        f"--{boundary}\r\nContent-Type: {BINARY}\r\n\r\n"
    )
    tail = f"\r\n--{boundary}--\r\n"
    whole = [memoryview(head.encode()), *body, memoryview(tail.encode())]
    return f'multipart/related; boundary="{boundary}"', Pieces(whole)


def batch_of_deletes(paths: Sequence[str]) -> tuple[str, bytes]:
    """Return the content type and the body of a batch request that deletes these resources.

    https://cloud.google.com/storage/docs/batch
    """
    boundary = os.urandom(16).hex()
    calls = [
        f"--{boundary}\r\nContent-Type: application/http\r\nContent-Transfer-Encoding: binary\r\n"
        f"Content-ID: <call+{number}>\r\n\r\nDELETE {path} HTTP/1.1\r\n\r\n\r\n"
        for number, path in enumerate(paths)
    ]
    return f'multipart/mixed; boundary="{boundary}"', ("".join(calls) + f"--{boundary}--\r\n").encode()


def batch_answers(content_type: str, body: bytes) -> dict[int, tuple[int, bytes]]:
    """Return the status and the body of the answers in a batch reply, by the number of the call."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    found: dict[int, tuple[int, bytes]] = {}
    for part in email.message_from_bytes(head + body, policy=email.policy.HTTP).iter_parts():
        payload = part.get_payload(decode=True)
        number = str(part.get("Content-ID", "")).strip().rstrip(">").rpartition("+")[2]
        if not isinstance(payload, bytes) or not _NUMBER.fullmatch(number):
            continue
        top, _, content = payload.partition(b"\r\n\r\n")
        words = top.split(b" ", 2)
        if len(words) > 1 and len(words[1]) == 3 and words[1].isdigit():
            found[int(number)] = int(words[1]), content
    return found


class Incoming:
    """Adapter of a streamed reply of the `requests` library to the interface that `http_body.receive` expects."""

    def __init__(self, raw: Any) -> None:
        self._raw_stream = raw

    def readinto(self, view: memoryview) -> int:
        data = self._raw_stream.read(len(view), decode_content=False)
        view[: len(data)] = data
        return len(data)

    def read(self) -> bytes:
        rest: bytes = self._raw_stream.read(decode_content=False)
        return rest

    def close(self) -> None:
        self._raw_stream.close()
