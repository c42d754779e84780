"""The XML API's multipart uploads, as Google documents them, in front of a server that has the JSON API only.

fake-gcs-server has no multipart uploads. This server has nothing else: it keeps parts, checks what the documentation
says is checked, writes a completed object to the server behind it, and passes every other request on. No pytest here.
"""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from awscrt import checksums

from gcs_server import GCSServer
from stores.scripted import Answer, Seen, scripted

JSON_API = ("/storage/", "/upload/", "/download/", "/batch/", "/_internal/")
# https://cloud.google.com/storage/quotas#requests
MIN_PART_BYTES = 5 << 20
MAX_PARTS = 10_000
MAX_LISTED = 1000
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
STARTED = "2026-01-02T03:04:05.678Z"


@dataclass
class Upload:
    bucket: str
    key: str
    headers: dict[str, str]
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


class Refused(Exception):
    """An error of the XML API: https://cloud.google.com/storage/docs/xml-api/reference-status"""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class Uploads:
    """The uploads under way. `headers` are those that each began with, by key."""

    def __init__(self, behind: GCSServer) -> None:
        self.behind = behind
        self.open: dict[str, Upload] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def create(self, bucket: str, key: str, headers: dict[str, str]) -> bytes:
        self._check_bucket(bucket)
        with self._lock:
            name = f"upload-{next(self._numbers)}"
            self.open[name] = Upload(bucket, key, headers)
            self.headers[key] = headers
        return document("InitiateMultipartUploadResult", {"Bucket": bucket, "Key": key, "UploadId": name})

    def put(self, name: str, number: int, body: bytes, claimed: str | None) -> str:
        upload = self._find(name)
        if not 1 <= number <= MAX_PARTS:
            raise Refused(400, "InvalidArgument")
        crc = base64.b64encode(checksums.crc32c(body).to_bytes(4, "big")).decode()
        if claimed is not None and claimed != f"crc32c={crc}":
            raise Refused(400, "BadDigest")
        etag = f'"{crc.rstrip("=")}-{number}"'
        upload.parts[number] = etag, body
        return etag

    def complete(self, name: str, document_: bytes) -> bytes:
        upload = self._find(name)
        listed = [
            (int(part.findtext("PartNumber") or 0), part.findtext("ETag") or "")
            for part in ElementTree.fromstring(document_).iterfind("Part")
        ]
        numbers = [number for number, _ in listed]
        if numbers != sorted(set(numbers)):
            raise Refused(400, "InvalidPartOrder")
        bodies = []
        for number, etag in listed:
            if number not in upload.parts or upload.parts[number][0] != etag:
                raise Refused(400, "InvalidPart")
            bodies.append(upload.parts[number][1])
        if any(len(body) < MIN_PART_BYTES for body in bodies[:-1]):
            raise Refused(400, "EntityTooSmall")
        with self._lock:
            if self.open.pop(name, None) is None:
                raise Refused(404, "NoSuchUpload")
        self.behind.write(upload.bucket, upload.key, b"".join(bodies))
        described = {"Bucket": upload.bucket, "Key": upload.key, "ETag": '"of-no-use"'}
        return document("CompleteMultipartUploadResult", described)

    def abort(self, name: str) -> None:
        self._find(name)
        del self.open[name]

    def listed(self, bucket: str, query: dict[str, str]) -> bytes:
        self._check_bucket(bucket)
        limit = min(int(query.get("max-uploads", MAX_LISTED)), MAX_LISTED)
        after = query.get("key-marker", ""), query.get("upload-id-marker", "")
        found = sorted(
            (upload.key, name)
            for name, upload in self.open.items()
            if upload.bucket == bucket and upload.key.startswith(query.get("prefix", ""))
        )
        found = [entry for entry in found if entry > after]
        more = len(found) > limit
        described: dict[str, Any] = {"Bucket": bucket, "IsTruncated": "true" if more else "false"}
        if more:
            described["NextKeyMarker"], described["NextUploadIdMarker"] = found[limit - 1]
        described["Upload"] = [
            {"Key": key, "UploadId": name, "StorageClass": "STANDARD", "Initiated": STARTED}
            for key, name in found[:limit]
        ]
        return document("ListMultipartUploadsResult", described)

    def answer(self, request: Seen, number: int) -> Answer:
        if request.path.startswith(JSON_API):
            return self._passed_on(request)
        _, bucket, *rest = request.path.split("/", 2)
        query = parse_qs(urlsplit(request.target).query, keep_blank_values=True)
        try:
            named = {name: values[0] for name, values in query.items()}
            return self._multipart(request, unquote(bucket), unquote(rest[0] if rest else ""), named)
        except Refused as error:
            # The namespace is that of replies: errors have none.
            said = f"<?xml version='1.0'?><Error><Code>{error.code}</Code><Message>It is so.</Message></Error>"
            return Answer(error.status, body=said.encode())

    def _multipart(self, request: Seen, bucket: str, key: str, query: dict[str, str]) -> Answer:
        name = query.get("uploadId", "")
        if request.method == "POST" and "uploads" in query:
            return Answer(body=self.create(bucket, key, request.headers))
        if request.method == "GET" and "uploads" in query:
            return Answer(body=self.listed(bucket, query))
        if request.method == "PUT" and name:
            part = int(query["partNumber"])
            return Answer(headers={"ETag": self.put(name, part, request.body, request.headers.get("x-goog-hash"))})
        if request.method == "POST" and name:
            return Answer(body=self.complete(name, request.body))
        if request.method == "DELETE" and name:
            self.abort(name)
            return Answer(204)
        raise Refused(400, "InvalidArgument")

    def _passed_on(self, request: Seen) -> Answer:
        # https://cloud.google.com/storage/docs/request-preconditions: the server behind ignores it of deletions.
        path, _, query = request.target.partition("?")
        wanted = parse_qs(query).get("ifGenerationMatch")
        if request.method == "DELETE" and wanted:
            bucket, key = (unquote(name) for name in path.removeprefix("/storage/v1/b/").split("/o/"))
            if key in self.behind.keys(bucket) and self.behind.generation(bucket, key) != wanted[0]:
                refusal = {"error": {"code": 412, "errors": [{"reason": "conditionNotMet"}], "message": "It is so."}}
                return Answer(412, body=json.dumps(refusal).encode())
        connection = http.client.HTTPConnection(urlsplit(self.behind.endpoint).netloc, timeout=60)
        try:
            headers = {name: value for name, value in request.headers.items() if name not in ("host", "connection")}
            connection.request(request.method, request.target, request.body, headers)
            reply = connection.getresponse()
            of_message = ("connection", "content-length", "transfer-encoding")
            kept = {name: value for name, value in reply.getheaders() if name.lower() not in of_message}
            return Answer(reply.status, kept, reply.read())
        finally:
            connection.close()

    def _find(self, name: str) -> Upload:
        upload = self.open.get(name)
        if upload is None:
            raise Refused(404, "NoSuchUpload")
        return upload

    def _check_bucket(self, bucket: str) -> None:
        buckets = json.loads(self.behind.ask("GET", "/storage/v1/b?project=test"))
        if bucket not in [entry["name"] for entry in buckets.get("items", [])]:
            raise Refused(404, "NoSuchBucket")


@dataclass(frozen=True)
class XMLServer(GCSServer):
    """A server with multipart uploads."""

    kind: str = "xml"
    uploads: Uploads | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "uploads": "xml"}

    def open_uploads(self, bucket: str, prefix: str = "") -> list[str]:
        assert self.uploads is not None
        opened = [upload.key for upload in self.uploads.open.values() if upload.bucket == bucket]
        return sorted(key for key in opened if key.startswith(prefix))


@contextmanager
def with_multipart(behind: GCSServer) -> Iterator[XMLServer]:
    """A server on a port of its own, on a thread of this process."""
    uploads = Uploads(behind)
    with scripted(uploads.answer, remembers=False) as server:
        yield XMLServer(server.endpoint, pid=behind.pid, uploads=uploads)


def document(name: str, content: dict[str, Any]) -> bytes:
    root = ElementTree.Element(name, xmlns=NAMESPACE)
    _fill(root, content)
    return ElementTree.tostring(root, xml_declaration=True, encoding="UTF-8")


def _fill(element: ElementTree.Element, content: dict[str, Any]) -> None:
    for name, value in content.items():
        for entry in value if isinstance(value, list) else [value]:
            child = ElementTree.SubElement(element, name)
            if isinstance(entry, dict):
                _fill(child, entry)
            else:
                child.text = str(entry)
