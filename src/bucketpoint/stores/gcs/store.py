"""`GCSStore`: one bucket of Google Cloud Storage, and its settings for `doctor`."""

from __future__ import annotations

import builtins
import contextlib
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from awscrt import checksums

from bucketpoint.errors import (
    AccessDeniedError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    UploadNotFoundError,
)
from bucketpoint.stores import http_store
from bucketpoint.stores.base import Buffers, Capabilities, DeleteFailure, ObjectInfo, OpenUpload, Part
from bucketpoint.stores.foreign import follow
from bucketpoint.stores.gcs.api import MAX_BATCH_CALLS, OBJECT_FIELDS, GCSBucket
from bucketpoint.stores.gcs.client import COMPLETE_TIMEOUT_S
from bucketpoint.stores.gcs.messages import BINARY, Incoming, described, seconds, with_metadata
from bucketpoint.stores.http_body import Pieces, crc_of, encoded_crc
from bucketpoint.stores.http_store import LENGTH, ContentRange, Reply, http_seconds

T = TypeVar("T")

_MAX_GENERATION = (1 << 63) - 1

# https://cloud.google.com/storage/quotas
# https://cloud.google.com/storage/docs/request-preconditions
CAPABILITIES = replace(http_store.CAPABILITIES, max_put_bytes=5 << 40, conditional_delete=True)


@dataclass(frozen=True)
class GCSStore(GCSBucket):
    """A bucket of GCS.

    An ETag of this store is an object's generation. Every write gives an object a new generation, and conditions and
    pinned reads name the generation. In a bucket with versioning, a pinned read also finds a generation that was
    replaced.

    Multipart uploads use the XML API. Parts are not objects: after completion no part is left to delete or to pay for.
    https://cloud.google.com/storage/docs/multipart-uploads
    """

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


@dataclass(frozen=True)
class BucketConfiguration:
    """Settings that decide how long a bucket keeps deleted objects.

    Attributes:
        versioning: True if replaced and deleted objects become noncurrent versions.
        soft_delete_s: seconds for which deleted objects are kept; 0 if soft delete is off, None if unknown.
        noncurrent_days: days after which lifecycle rules delete noncurrent versions.
    """

    versioning: bool
    soft_delete_s: int | None
    noncurrent_days: tuple[int, ...]


def bucket_configuration(store: GCSStore) -> BucketConfiguration:
    """Read the settings. Raises StoreError."""
    # https://cloud.google.com/storage/docs/json_api/v1/buckets#resource
    path, fields = store._path().removesuffix("/o"), "versioning,softDeletePolicy,lifecycle"
    found = store._call("buckets.get", None, "GET", path, {"fields": fields}).json()
    rules = found.get("lifecycle", {}).get("rule", [])
    days = [
        rule.get("condition", {}).get("daysSinceNoncurrentTime")
        for rule in rules
        if rule.get("action", {}).get("type") == "Delete"
    ]
    seconds = found.get("softDeletePolicy", {}).get("retentionDurationSeconds")
    return BucketConfiguration(
        versioning=bool(found.get("versioning", {}).get("enabled")),
        soft_delete_s=None if seconds is None else int(seconds),
        noncurrent_days=tuple(int(number) for number in days if number is not None),
    )
