"""Bodies of requests to GCS, in the caller's memory; and answers, limited in size and refused if they are not GCS's."""

from __future__ import annotations

import datetime
import email
import email.policy
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bucketpoint.stores.base import Buffers, ObjectInfo
from bucketpoint.stores.foreign import ANSWER_BYTES, ERROR_BYTES, ForeignAnswer, read_within, root_of
from bucketpoint.stores.gcs.errors import OPERATIONS
from bucketpoint.stores.http_body import Pieces

BINARY = "application/octet-stream"

_NUMBER = re.compile(r"[0-9]{1,9}")
_BLOCK_BYTES = 64 << 10
# A header of every answer of Google's own front end.
_ID = "x-guploader-uploadid"


@dataclass(frozen=True)
class GCSReply:
    """A reply with its body. `raw` is the unread body of a streamed object."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes
    raw: Any

    def json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.content)
        return parsed


def received(reply: Any, operation: str, *, stream: bool) -> GCSReply:
    """Receive a reply of `requests` and its body; with `stream`, leave the body of an object unread.

    Raises:
        ForeignAnswer: something other than GCS answered.
    """
    status, named = reply.status_code, reply.headers
    headers = {name.lower(): value for name, value in named.items()}
    if stream and status < 300:
        if not headers.get("x-goog-generation"):
            start = reply.raw.read(1024)
            reply.close()
            raise ForeignAnswer("it has no generation", status, headers, start)
        return GCSReply(status, named, b"", reply.raw)
    limit = ERROR_BYTES if status >= 300 else ANSWER_BYTES
    body, whole = read_within(reply.iter_content(_BLOCK_BYTES), limit, reply.close)
    found = GCSReply(status, named, body, None)
    reason = _reason(operation, found, headers) if whole else f"it is longer than {limit >> 20} MiB"
    if reason is not None and status < 500 and status not in (408, 429):
        raise ForeignAnswer(reason, status, headers, body)
    return found


def _reason(operation: str, reply: GCSReply, headers: Mapping[str, str]) -> str | None:
    """Return the reason why an answer is not GCS's; None if it may be GCS's."""
    status, body = reply.status_code, reply.content
    root = root_of(body)
    if status >= 300:
        if status < 400:
            return "it is a redirect"
        if _ID in headers:
            return None
        html = "html" in headers.get("content-type", "") or (root is not None and root != "Error")
        return "its body is not an error of GCS" if html or (status == 404 and not body) else None
    if operation == "upload part":
        return None if headers.get("etag") and not body else "it does not answer the upload of a part"
    expected = next(iter(OPERATIONS[operation].replies), None) if operation in OPERATIONS else None
    if expected is not None and expected[0].isupper():
        return None if root in (expected, "Error") else f"its body is not a {expected}"
    if operation == "a batch of objects.delete":
        return None if headers.get("content-type", "").startswith("multipart/mixed") else "it does not answer a batch"
    if expected is not None:
        try:
            named: Any = reply.json()
            # Parsed here, where a malformed answer can still be refused. The caller parses it again.
            for resource in (named, named.get("resource", {}), *named.get("items", ())):
                described(resource, "")
            "".join(named.get("prefixes", ()))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return "its body is not JSON of GCS"
        return None if expected in named else f"it has no {expected}"
    return "its body is a web page" if root is not None or "html" in headers.get("content-type", "") else None


def described(resource: Mapping[str, Any], key: str) -> ObjectInfo:
    """Convert an object's resource to its description. The ETag is the generation, which every write changes."""
    generation = resource.get("generation")
    return ObjectInfo(
        str(resource.get("name") or key),
        int(resource.get("size") or 0),
        None if generation is None else str(generation),
        seconds(resource.get("timeCreated")),
    )


def seconds(moment: str | None) -> float | None:
    """Convert an RFC 3339 time in UTC, with any number of decimals, to seconds since the epoch; None if malformed."""
    whole, _, digits = (moment or "").rstrip("Z").partition(".")
    try:
        parsed = datetime.datetime.fromisoformat(f"{whole}+00:00")
    except ValueError:
        return None
    return parsed.timestamp() + (float(f"0.{digits}") if digits.isdecimal() else 0.0)


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
    """Return the status and the body of each answer in a batch reply, by the number of the call."""
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
    """Adapter of a streamed reply of the `requests` library to the interface that `http_body.Receiver` expects."""

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
