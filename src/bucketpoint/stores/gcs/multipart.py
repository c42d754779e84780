"""Multipart uploads through GCS's XML API.

Parts are not objects: after completion there is nothing to delete, and nothing more is billed.

https://cloud.google.com/storage/docs/multipart-uploads
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from awscrt import checksums

from bucketpoint.errors import AccessDeniedError, CorruptDataError, StoreError, UploadNotFoundError
from bucketpoint.stores.base import Buffers, ObjectInfo, OpenUpload, Part
from bucketpoint.stores.foreign import follow
from bucketpoint.stores.gcs.answer import GCSReply, described, seconds
from bucketpoint.stores.gcs.api import Bucket
from bucketpoint.stores.gcs.body import BINARY
from bucketpoint.stores.gcs.client import COMPLETE_TIMEOUT_S
from bucketpoint.stores.gcs.errors import failure_of
from bucketpoint.stores.http_body import Pieces, crc_of, encoded_crc


def create(bucket: Bucket, key: str) -> str:
    headers = {"Content-Type": BINARY}
    if bucket.options.storage_class is not None:
        headers["x-goog-storage-class"] = bucket.options.storage_class
    if bucket.options.kms_key_name is not None:
        headers["x-goog-encryption-kms-key-name"] = bucket.options.kms_key_name
    reply = _call(bucket, "create multipart upload", key, "POST", {"uploads": ""}, headers=headers)
    upload_id = _parsed(reply, "create multipart upload", bucket).findtext("{*}UploadId")
    if not upload_id:
        raise StoreError("the reply that begins a multipart upload has no upload id", url=bucket.url, key=key)
    return upload_id


def put_part(bucket: Bucket, key: str, upload_id: str, number: int, body: Buffers, crc32c: int | None) -> Part:
    crc = crc_of(body, crc32c)
    content = Pieces(body)
    reply = _call(
        bucket,
        "upload part",
        key,
        "PUT",
        {"partNumber": number, "uploadId": upload_id},
        headers={"Content-Type": BINARY, "x-goog-hash": f"crc32c={encoded_crc(crc)}"},
        # The `requests` library would send an empty iterable body with chunked encoding.
        body=content if len(content) else b"",
    )
    return Part(number, len(content), reply.headers.get("ETag", "").strip('"'), crc)


def complete(bucket: Bucket, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
    ordered = sorted(parts, key=lambda part: part.number)
    root = ElementTree.Element("CompleteMultipartUpload")
    for part in ordered:
        entry = ElementTree.SubElement(root, "Part")
        ElementTree.SubElement(entry, "PartNumber").text = str(part.number)
        ElementTree.SubElement(entry, "ETag").text = f'"{part.etag}"'
    reply = _call(
        bucket,
        "complete multipart upload",
        key,
        "POST",
        {"uploadId": upload_id},
        headers={"Content-Type": "application/xml"},
        body=ElementTree.tostring(root),
        timeout=COMPLETE_TIMEOUT_S,
    )
    _parsed(reply, "complete multipart upload", bucket)
    # The reply contains neither the generation nor the checksum of the object.
    try:
        resource = bucket.describe(key)
    except AccessDeniedError:
        # Without the permission to read, neither can be checked. The service compared each part with a checksum, and
        # loads compare their own checksums.
        return ObjectInfo(key, sum(part.size for part in ordered))
    if not _fits(resource.get("crc32c"), ordered):
        bucket.delete([key], {key: str(resource["generation"])})
        raise CorruptDataError("the CRC32C of the object is not that of its parts", url=bucket.url, key=key)
    return described(resource, key)


def abort(bucket: Bucket, key: str, upload_id: str) -> None:
    try:
        _call(bucket, "abort multipart upload", key, "DELETE", {"uploadId": upload_id})
    except UploadNotFoundError:
        return


def open_uploads(bucket: Bucket, prefix: str) -> Iterator[OpenUpload]:
    """Yield the open uploads. See https://cloud.google.com/storage/docs/xml-api/get-bucket-uploads."""
    start: dict[str, Any] = {}
    seen: set[Hashable] = set()
    while True:
        reply = _call(bucket, "list multipart uploads", None, "GET", {"uploads": "", "prefix": prefix, **start})
        root = _parsed(reply, "list multipart uploads", bucket)
        for entry in root.iterfind("{*}Upload"):
            key = entry.findtext("{*}Key") or ""
            yield OpenUpload(key, entry.findtext("{*}UploadId") or "", seconds(entry.findtext("{*}Initiated")))
        if root.findtext("{*}IsTruncated") != "true":
            return
        start = {
            "key-marker": root.findtext("{*}NextKeyMarker") or "",
            "upload-id-marker": root.findtext("{*}NextUploadIdMarker") or "",
        }
        follow("".join(start.values()), seen, "list multipart uploads", bucket.url)


def _fits(reported: Any, parts: Sequence[Part]) -> bool:
    """Return True if the reported CRC32C of an object fits those of its parts, or if one of these is not known."""
    if not reported:
        return True
    crc = 0
    for part in parts:
        if part.crc32c is None:
            return True
        if part.size:
            crc = int(checksums.combine_crc32c(crc, part.crc32c, part.size))
    return bool(encoded_crc(crc) == reported)


def _call(
    bucket: Bucket,
    operation: str,
    key: str | None,
    method: str,
    query: dict[str, Any],
    headers: Mapping[str, str] | None = None,
    **request: Any,
) -> GCSReply:
    """Send one request of the XML API, whose error codes distinguish a missing bucket, object and upload."""
    path = f"/{quote(bucket.name, safe='')}" + ("" if key is None else f"/{quote(key, safe='/~')}")
    payer = bucket.options.user_project
    billed = {**(headers or {})} if payer is None else {**(headers or {}), "x-goog-user-project": payer}
    return bucket.call(operation, key, method, path, query=query, headers=billed, of_object=True, **request)


def _parsed(reply: GCSReply, operation: str, bucket: Bucket) -> ElementTree.Element:
    failure: StoreError
    try:
        root = ElementTree.fromstring(reply.content)
        # Like S3, the service may report an error in a reply with status 200 that began before the outcome was known.
        if root.tag.rpartition("}")[2] != "Error":
            return root
        failure = failure_of(reply.status_code, reply.content, operation, bucket.url)[0]
    except ElementTree.ParseError:
        failure = StoreError(f"{operation} failed: the reply is not XML", url=bucket.url)
    raise failure
