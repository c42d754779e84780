"""The stores that speak HTTP by themselves, on a scripted server: how each is made, and how its service answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bucketpoint.stores import ObjectInfo, Part
from bucketpoint.stores.gcs import GCSOptions, GCSStore
from bucketpoint.stores.gcs import client as gcs_client
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import client as s3_client
from kit.buffers import views
from kit.servers import s3_attempts
from stores.scripted import Answer, ScriptedServer, Seen
from stores.scripted import error as s3_error

Make = Callable[..., Any]

OBJECT = {"name": "k", "size": "5", "generation": "7"}
"""What GCS says of an object."""


CALLS: dict[str, Callable[[Any], object]] = {
    "put": lambda store: store.put("k", views(b"x")),
    "get": lambda store: store.get("k"),
    "read": lambda store: store.read_into("k", 0, views(bytearray(5))),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list("run/")),
    "delete": lambda store: store.delete(["k"]),
    "copy": lambda store: store.copy(ObjectInfo("k", 5, "7"), "c"),
    "create": lambda store: store.create_multipart("k"),
    "part": lambda store: store.put_part("k", "up", 1, views(b"x")),
    "complete": lambda store: store.complete_multipart("k", "up", [Part(1, 1, "e")]),
    "abort": lambda store: store.abort_multipart("k", "up"),
    "uploads": lambda store: list(store.list_multipart("run/")),
}
"""Calls of a store, by name."""


def s3_at(server: ScriptedServer | str, *, max_attempts: int | None = 3, **options: Any) -> S3Store:
    config = {
        **(s3_attempts(max_attempts)["config_kwargs"] if max_attempts else {}),
        **options.pop("config_kwargs", {}),
    }
    given = {"access_key": "a", "secret_key": "hush-hush", "config_kwargs": config, **options}
    return S3Store("bucket", S3Options(endpoint_url=_endpoint(server), **given))


def gcs_at(server: ScriptedServer | str, **options: Any) -> GCSStore:
    given = {"token": "anon", "max_attempts": 3, **options}
    return GCSStore("bucket", GCSOptions(endpoint_url=_endpoint(server), **given))


def _endpoint(server: ScriptedServer | str) -> str:
    return server if isinstance(server, str) else server.endpoint


def sent_by_each(store: S3Store | GCSStore, server: ScriptedServer, calls: Iterable[str]) -> dict[str, Seen]:
    """What each call puts on the wire: its first request, as some send others afterwards."""
    sent = {}
    for name in calls:
        before = len(server.seen)
        CALLS[name](store)
        sent[name] = server.seen[before]
    return sent


def gcs_reply(content: Any) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(content).encode())


def gcs_error(status: int, reason: str, message: str = "as scripted", **headers: str) -> Answer:
    """An error as the JSON API words it."""
    detail = {"code": status, "message": message, "errors": [{"reason": reason, "message": message}]}
    return Answer(status, {"Content-Type": "application/json", **headers}, json.dumps({"error": detail}).encode())


def _media_of(body: bytes) -> bytes:
    """The second part of a `multipart/related` body."""
    boundary = body.split(b"\r\n", 1)[0]
    return body.split(b"\r\n" + boundary)[1].split(b"\r\n\r\n", 1)[1]


@dataclass(frozen=True)
class Engine:
    """A store, and how its service words what all of them say.

    Attributes:
        at: the store `bucket` on a scripted server, with three attempts.
        options: by which clients are found, of no server.
        clients: the module that keeps clients.
        written: the reply to a put.
        failures: replies after which a put is sent again.
        error: a reply with an error, of a status and a code.
        identity: the header of a read that names the object's version.
        reads: what messages call a read of an object.
        sent: the bytes of the object in the body of a put.
    """

    scheme: str
    at: Make
    options: Make
    clients: ModuleType
    written: Answer
    failures: dict[str, Answer]
    error: Callable[[int, str], Answer]
    identity: tuple[str, str]
    reads: str
    sent: Callable[[bytes], bytes]

    def serving(self, content: bytes, **answer: Any) -> Callable[[Seen, int], Answer]:
        """A script that answers ranged reads of an object."""

        def script(request: Seen, number: int) -> Answer:
            start, _, end = request.headers["range"].removeprefix("bytes=").partition("-")
            body = content[int(start) : int(end) + 1]
            headers = {"Content-Range": f"bytes {start}-{end}/{len(content)}", self.identity[0]: self.identity[1]}
            return Answer(206, headers, body, **answer)

        return script


S3 = Engine(
    "s3",
    s3_at,
    S3Options,
    s3_client,
    written=Answer(headers={"ETag": '"etag"'}),
    failures={
        "internal": s3_error(500, "InternalError"),
        "throttled": s3_error(503, "SlowDown"),
        "dropped": Answer(drop=True),
    },
    error=s3_error,
    identity=("ETag", '"e"'),
    reads="GetObject",
    sent=lambda body: body,
)
GCS = Engine(
    "gs",
    gcs_at,
    GCSOptions,
    gcs_client,
    written=gcs_reply(OBJECT),
    failures={
        "internal": gcs_error(500, "backendError"),
        "throttled": gcs_error(429, "rateLimitExceeded"),
        "dropped": Answer(drop=True),
    },
    error=gcs_error,
    identity=("x-goog-generation", "7"),
    reads="objects.get",
    sent=_media_of,
)
ENGINES = {"s3": S3, "gcs": GCS}
