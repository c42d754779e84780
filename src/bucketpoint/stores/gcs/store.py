"""`GCSStore`: one bucket of Google Cloud Storage, through its JSON API and its XML API.

https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import builtins
import contextlib
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from awscrt import checksums

from bucketpoint.errors import (
    AccessDeniedError,
    Action,
    BucketNotFoundError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    UploadNotFoundError,
)
from bucketpoint.stores import http_store, retry
from bucketpoint.stores.base import (
    Buffers,
    Capabilities,
    DeleteFailure,
    ObjectInfo,
    OpenUpload,
    Part,
    crc_of,
    encoded_crc,
)
from bucketpoint.stores.foreign import follow
from bucketpoint.stores.gcs.client import COMPLETE_TIMEOUT_S, GCSClient, clients
from bucketpoint.stores.gcs.errors import SomeLeftError, failure_of, translated
from bucketpoint.stores.gcs.messages import (
    BINARY,
    GCSReply,
    Incoming,
    batch_answers,
    batch_of_deletes,
    described,
    seconds,
    with_metadata,
)
from bucketpoint.stores.gcs.options import GCSOptions
from bucketpoint.stores.http_body import Pieces
from bucketpoint.stores.http_store import LENGTH, ContentRange, HttpStore, Reply, http_seconds

T = TypeVar("T")

# https://cloud.google.com/storage/docs/batch
MAX_BATCH_CALLS = 100

# https://cloud.google.com/storage/docs/json_api/v1/objects/list
MAX_PAGE_KEYS = 1_000

OBJECT_FIELDS = "name,size,generation,timeCreated,crc32c"

_OF_BUCKET = frozenset({"objects.insert", "objects.list", "buckets.get"})
"""Operations for which HTTP 404 means that the bucket is missing. For the others, the object may be missing instead."""

_MAX_GENERATION = (1 << 63) - 1

# https://cloud.google.com/storage/quotas
# https://cloud.google.com/storage/docs/request-preconditions
CAPABILITIES = replace(http_store.CAPABILITIES, max_put_bytes=5 << 40, conditional_delete=True)


@dataclass(frozen=True)
class GCSStore(HttpStore):
    """A bucket of GCS.

    An ETag of this store is an object's generation. Every write gives an object a new generation, and conditions and
    pinned reads name the generation. In a bucket with versioning, a pinned read also finds a generation that was
    replaced.

    Multipart uploads use the XML API. Parts are not objects: after completion no part is left to delete or to pay for.
    https://cloud.google.com/storage/docs/multipart-uploads
    """

    options: GCSOptions = field(default_factory=GCSOptions)

    scheme = "gs"
    reads = "objects.get"
    clients = clients
    translated = staticmethod(translated)

    @property
    def _endpoint(self) -> str | None:
        return self.options.endpoint

    @property
    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, multipart=self.options.multipart)

    def put(
        self,
        key: str,
        body: Buffers,
        *,
        crc32c: int | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        generation = 0 if if_none_match else self._generation(key, if_match)
        metadata = {"name": key, "contentType": BINARY, "crc32c": encoded_crc(crc_of(body, crc32c))}
        if self.options.storage_class is not None:
            metadata["storageClass"] = self.options.storage_class
        query: dict[str, Any] = {"uploadType": "multipart", "fields": OBJECT_FIELDS}
        if generation is not None:
            query["ifGenerationMatch"] = generation
        if self.options.kms_key_name is not None:
            query["kmsKeyName"] = self.options.kms_key_name
        content_type, content = with_metadata(metadata, body)
        headers, path = {"Content-Type": content_type}, f"/upload{self._path()}"

        def insert() -> ObjectInfo:
            reply = self._call("objects.insert", key, "POST", path, query, headers=headers, body=content)
            resource = reply.json()
            # Only some emulators leave out the CRC32C.
            if resource.get("crc32c") not in (None, metadata["crc32c"]):
                raise CorruptDataError("the store has another CRC32C than was sent", url=self._url(key))
            return described(resource, key)

        return self._sent(body, crc32c, insert)

    def _open(self, key: str, wanted: str | None, if_match: str | None = None) -> Reply:
        generation = self._generation(key, if_match)
        query = {"alt": "media"} if generation is None else {"alt": "media", "generation": generation}
        headers = {} if wanted is None else {"Range": wanted}
        path = f"/download{self._path(key)}"
        try:
            reply = self._call("objects.get", key, "GET", path, query, headers=headers, stream=True)
        except ObjectNotFoundError:
            if generation is None:
                raise
            # 404 may mean that only this generation is missing. If the object is missing, `head` raises that error.
            self.head(key)
            replaced = PreconditionFailedError("the ETag of the object is not the expected one", url=self._url(key))
        else:
            length = reply.headers.get("Content-Length", "")
            received = int(length) if LENGTH.fullmatch(length) else None
            part = ContentRange.of(reply.status_code, reply.headers.get("Content-Range"))
            whole = received if part is None or part.whole is None else part.whole
            modified = http_seconds(reply.headers.get("Last-Modified"))
            info = ObjectInfo(key, whole or 0, reply.headers.get("x-goog-generation"), modified)
            return Reply(info, Incoming(reply.raw), received, part)
        raise replaced

    def head(self, key: str) -> ObjectInfo:
        return described(self._describe(key), key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages(prefix):
            for item in page.get("items", []):
                yield described(item, "")

    def list_folders(self, prefix: str) -> Iterator[str]:
        for page in self._pages(prefix, delimiter="/"):
            yield from page.get("prefixes", [])

    def delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        failed: builtins.list[DeleteFailure] = []
        for start in range(0, len(keys), MAX_BATCH_CALLS):
            failed += self._delete_batch(keys[start : start + MAX_BATCH_CALLS], {})
        return failed

    def delete_if(self, key: str, etag: str) -> None:
        query = {"ifGenerationMatch": self._generation(key, etag)}
        with contextlib.suppress(ObjectNotFoundError):
            self._call("objects.delete", key, "DELETE", self._path(key), query)

    def copy_from(self, other: GCSStore, source: ObjectInfo, target: str) -> ObjectInfo:
        query: dict[str, Any] = {}
        if source.etag is not None:
            query["ifSourceGenerationMatch"] = other._generation(source.key, source.etag)
        if self.options.kms_key_name is not None:
            query["destinationKmsKeyName"] = self.options.kms_key_name
        chosen = self.options.storage_class
        body = b"" if chosen is None else json.dumps({"storageClass": chosen, "contentType": BINARY}).encode()
        headers = {"Content-Type": "application/json"}
        path = f"{other._path(source.key)}/rewriteTo{self._path(target).removeprefix('/storage/v1')}"
        seen: set[Hashable] = set()
        while True:
            reply = self._call("objects.rewrite", source.key, "POST", path, query, headers=headers, body=body).json()
            if reply.get("done"):
                return described(reply.get("resource") or {}, target)
            # If a large object changes its location or storage class, the service needs several requests.
            query["rewriteToken"] = token = reply.get("rewriteToken")
            mark = token and (token, reply.get("totalBytesRewritten"))
            follow(mark, seen, "objects.rewrite", other._url(source.key))

    def create_multipart(self, key: str) -> str:
        options = self.options
        named = {
            "x-goog-storage-class": options.storage_class,
            "x-goog-encryption-kms-key-name": options.kms_key_name,
        }
        headers = {"Content-Type": BINARY, **{name: value for name, value in named.items() if value is not None}}
        operation = "create multipart upload"
        reply = self._call_xml(operation, key, "POST", {"uploads": ""}, headers=headers)
        upload_id = self._parsed(reply, operation).findtext("{*}UploadId")
        if not upload_id:
            raise StoreError("the reply that begins a multipart upload has no upload id", url=self.url, key=key)
        return upload_id

    def put_part(self, key: str, upload_id: str, number: int, body: Buffers, *, crc32c: int | None = None) -> Part:
        crc, content = crc_of(body, crc32c), Pieces(body)
        query = {"partNumber": number, "uploadId": upload_id}
        headers = {"Content-Type": BINARY, "x-goog-hash": f"crc32c={encoded_crc(crc)}"}
        # The `requests` library would send an empty iterable body with chunked encoding.
        sent = content if len(content) else b""

        def send() -> Part:
            reply = self._call_xml("upload part", key, "PUT", query, headers=headers, body=sent)
            return Part(number, len(content), reply.headers.get("ETag", "").strip('"'), crc)

        return self._sent(body, crc32c, send)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        ordered = sorted(parts, key=lambda part: part.number)
        root = ElementTree.Element("CompleteMultipartUpload")
        for part in ordered:
            entry = ElementTree.SubElement(root, "Part")
            ElementTree.SubElement(entry, "PartNumber").text = str(part.number)
            ElementTree.SubElement(entry, "ETag").text = f'"{part.etag}"'
        operation = "complete multipart upload"
        reply = self._call_xml(
            operation,
            key,
            "POST",
            {"uploadId": upload_id},
            headers={"Content-Type": "application/xml"},
            body=ElementTree.tostring(root),
            timeout=COMPLETE_TIMEOUT_S,
        )
        self._parsed(reply, operation)
        # The reply contains neither the generation nor the checksum of the object.
        try:
            resource = self._describe(key)
        except AccessDeniedError:
            # Without the permission to read, the object's checksum is not compared. The service has verified each part,
            # and loads verify their own checksums.
            return ObjectInfo(key, sum(part.size for part in ordered))
        if not _fits(resource.get("crc32c"), ordered):
            # Only this generation is deleted, permanently: even a bucket with versioning does not keep it.
            self._delete_batch([key], {key: str(resource["generation"])})
            raise CorruptDataError("the CRC32C of the object is not that of its parts", url=self.url, key=key)
        return described(resource, key)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(UploadNotFoundError):
            self._call_xml("abort multipart upload", key, "DELETE", {"uploadId": upload_id})

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        # https://cloud.google.com/storage/docs/xml-api/get-bucket-uploads
        operation, start = "list multipart uploads", dict[str, str]()
        seen: set[Hashable] = set()
        while self.options.multipart:
            reply = self._call_xml(operation, None, "GET", {"uploads": "", "prefix": prefix, **start})
            root = self._parsed(reply, operation)
            for entry in root.iterfind("{*}Upload"):
                key = entry.findtext("{*}Key") or ""
                yield OpenUpload(key, entry.findtext("{*}UploadId") or "", seconds(entry.findtext("{*}Initiated")))
            if root.findtext("{*}IsTruncated") != "true":
                return
            start = {
                "key-marker": root.findtext("{*}NextKeyMarker") or "",
                "upload-id-marker": root.findtext("{*}NextUploadIdMarker") or "",
            }
            follow("".join(start.values()), seen, operation, self.url)

    def settings(self, fields: str) -> dict[str, Any]:
        """Return these fields of the bucket's resource. Raises StoreError.

        https://cloud.google.com/storage/docs/json_api/v1/buckets#resource
        """
        return self._call("buckets.get", None, "GET", self._path().removesuffix("/o"), {"fields": fields}).json()

    def _path(self, key: str | None = None) -> str:
        """Return the API path of the object `key`, or of the bucket's collection of objects."""
        objects = f"/storage/v1/b/{quote(self.bucket, safe='')}/o"
        return objects if key is None else f"{objects}/{quote(key, safe='')}"

    def _billed(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """Return the query of a JSON API request, with the project that pays for the request, if one is set."""
        payer = self.options.user_project
        return dict(query) if payer is None else {**query, "userProject": payer}

    def _call(
        self, operation: str, key: str | None, method: str, path: str, query: Mapping[str, Any], **request: Any
    ) -> GCSReply:
        """Send one request of the JSON API and return the reply."""
        return self._send(operation, key, method, path, self._billed(query), **request)

    def _call_xml(
        self, operation: str, key: str | None, method: str, query: Mapping[str, Any], **request: Any
    ) -> GCSReply:
        """Send one request of the XML API, whose error codes distinguish a missing bucket, object and upload."""
        path = f"/{quote(self.bucket, safe='')}" + ("" if key is None else f"/{quote(key, safe='/~')}")
        payer = self.options.user_project
        headers = {**request.pop("headers", {}), **({} if payer is None else {"x-goog-user-project": payer})}
        return self._send(operation, key, method, path, query, headers=headers, **request)

    def _send(
        self, operation: str, key: str | None, method: str, path: str, query: Mapping[str, Any], **request: Any
    ) -> GCSReply:
        client = self.client
        failure: StoreError
        try:
            reply: GCSReply = client.request(
                method, path, operation=operation, url=self._url(key), query=query, **request
            )
        except ObjectNotFoundError as error:
            failure = error if operation not in _OF_BUCKET and self._exists() else self._not_found()
        else:
            client.buckets.add(self.bucket)
            return reply
        raise failure

    def _parsed(self, reply: GCSReply, operation: str) -> ElementTree.Element:
        """Parse a reply of the XML API."""
        failure: StoreError
        try:
            root = ElementTree.fromstring(reply.content)
            # Like S3, GCS may report an error with status 200, if the reply began before the outcome was known.
            if root.tag.rpartition("}")[2] != "Error":
                return root
            failure = failure_of(reply.status_code, reply.content, operation, self.url)[0]
        except ElementTree.ParseError:
            failure = StoreError(f"{operation} failed: the reply is not XML", url=self.url)
        raise failure

    def _exists(self) -> bool:
        """Return True if the bucket exists, or these credentials may not list it. Remembers a bucket that exists."""
        client = self.client
        if self.bucket in client.buckets:
            return True
        query = self._billed({"maxResults": 1, "fields": "kind"})
        try:
            client.request("GET", self._path(), operation="objects.list", url=self.url, query=query)
        except ObjectNotFoundError:
            return False
        except StoreError:
            # Without the right to list, the bucket counts as existing: the caller's error stays "object not found".
            return True
        client.buckets.add(self.bucket)
        return True

    def _not_found(self) -> BucketNotFoundError:
        return BucketNotFoundError("the bucket does not exist", url=self.url)

    def _describe(self, key: str) -> dict[str, Any]:
        """Return the fields `OBJECT_FIELDS` of an object's resource. Raises ObjectNotFoundError."""
        return self._call("objects.get", key, "GET", self._path(key), {"fields": OBJECT_FIELDS}).json()

    def _pages(self, prefix: str, **query: Any) -> Iterator[dict[str, Any]]:
        fields = f"kind,nextPageToken,prefixes,items({OBJECT_FIELDS})"
        wanted = {"prefix": prefix, "maxResults": MAX_PAGE_KEYS, **query, "fields": fields}
        seen: set[Hashable] = set()
        while True:
            page = self._call("objects.list", prefix, "GET", self._path(), wanted).json()
            yield page
            if not page.get("nextPageToken"):
                return
            wanted["pageToken"] = page["nextPageToken"]
            follow(str(wanted["pageToken"]), seen, "objects.list", self._url(prefix))

    def _delete_batch(self, keys: Sequence[str], generations: Mapping[str, str]) -> builtins.list[DeleteFailure]:
        client = self.client
        failed: dict[str, DeleteFailure] = {}
        left = list(keys)

        def attempt() -> None:
            nonlocal left
            sent, left = left, []
            refusal: StoreError | None = None
            for key, status, body in self._send_batch(client, sent, generations):
                failed.pop(key, None)
                if status < 300:
                    client.buckets.add(self.bucket)
                elif status == 404:
                    if not self._exists():
                        raise self._not_found()
                else:
                    failure, code = failure_of(status, body, "objects.delete", self._url(key))
                    failed[key] = DeleteFailure(key, code or str(status), failure.message, failure.remedy)
                    if failure.action is not Action.FATAL:
                        left.append(key)
                        refusal = SomeLeftError(failure.message, url=self.url)
                        refusal.action = failure.action
            if refusal is not None:
                raise refusal

        with contextlib.suppress(SomeLeftError):
            retry.run(attempt, client.policy)
        return list(failed.values())

    def _send_batch(
        self, client: GCSClient, keys: Sequence[str], generations: Mapping[str, str]
    ) -> Iterator[tuple[str, int, bytes]]:
        paths = []
        for key in keys:
            query = urlencode(self._billed({"generation": generations[key]} if key in generations else {}))
            paths.append(f"{self._path(key)}{query and '?'}{query}")
        content_type, body = batch_of_deletes(paths)
        reply = client.request(
            "POST",
            "/batch/storage/v1",
            operation="a batch of objects.delete",
            url=self.url,
            headers={"Content-Type": content_type},
            body=body,
        )
        answers = batch_answers(reply.headers.get("Content-Type", ""), reply.content)
        for number, key in enumerate(keys):
            # A call without an answer may or may not have been executed: it is retried, as after status 503.
            status, answer = answers.get(number, (503, b""))
            yield key, status, answer

    def _sent(self, body: Buffers, crc32c: int | None, send: Callable[[], T]) -> T:
        """Send a body, and once more if the service refuses it although it matches its checksum.

        The body may have been damaged in transit. GCS answers "invalid" in that case, but also to many other faults.
        """
        try:
            return send()
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            message, url = error.message, error.url
        if crc32c is not None and crc_of(body) != crc32c:
            raise CorruptDataError(message, url=url)
        return send()

    def _generation(self, key: str, etag: str | None) -> int | None:
        if etag is None:
            return None
        generation = int(etag) if etag.isdecimal() and len(etag) < 20 else 0
        if not 0 < generation <= _MAX_GENERATION:
            # No object in this bucket ever had this ETag, which is invalid or belongs to another store.
            raise PreconditionFailedError("the ETag of the object is not the expected one", url=self._url(key))
        return generation


def _fits(reported: Any, parts: Sequence[Part]) -> bool:
    """Return True if an object's reported CRC32C matches those of its parts, or if any of these is unknown."""
    if not reported:
        return True
    crc = 0
    for part in parts:
        if part.crc32c is None:
            return True
        if part.size:
            crc = int(checksums.combine_crc32c(crc, part.crc32c, part.size))
    return bool(encoded_crc(crc) == reported)
