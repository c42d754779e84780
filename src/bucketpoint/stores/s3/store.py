"""`S3Store`: one bucket through boto3. It makes the requests and interprets the replies."""

from __future__ import annotations

import base64
import builtins
import contextlib
import http.client
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import botocore

from bucketpoint.errors import (
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    UploadNotFoundError,
)
from bucketpoint.stores import retry
from bucketpoint.stores.base import (
    Buffers,
    Capabilities,
    DeleteFailure,
    ObjectInfo,
    OpenUpload,
    Part,
    RangeReply,
    Store,
)
from bucketpoint.stores.client_cache import FirstEnvironment
from bucketpoint.stores.http_body import OpenReply, crc_of, discard, encoded_crc, receive
from bucketpoint.stores.s3.body import OutgoingBody
from bucketpoint.stores.s3.client import S3Client, client_for, close_client, http_session, renew_client
from bucketpoint.stores.s3.crt import receiving_into
from bucketpoint.stores.s3.deletes import SignedDelete, tried
from bucketpoint.stores.s3.errors import FAILURES, translate, why_kept
from bucketpoint.stores.s3.options import S3Options
from bucketpoint.stores.s3.services import S3Service

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MIN_PART_BYTES = 5 << 20
MAX_PART_BYTES = 5 << 30
MAX_PARTS = 10_000
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html
MAX_PUT_BYTES = 5 << 30
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
MAX_COPY_BYTES = 5 << 30
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html
MAX_DELETE_KEYS = 1_000

CAPABILITIES = Capabilities(
    conditional_put=True,
    checksums=True,
    multipart=True,
    pinned_reads=True,
    min_part_bytes=MIN_PART_BYTES,
    max_part_bytes=MAX_PART_BYTES,
    max_parts=MAX_PARTS,
    max_put_bytes=MAX_PUT_BYTES,
)
"""Capabilities of Amazon S3. `S3Store.capabilities` removes those that another service lacks: see `s3.services`."""

_COPY_PART_BYTES = 1 << 30

_AWS_DOMAINS = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu")

_LIST_MARKS = {"ContinuationToken": "NextContinuationToken"}
_UPLOAD_MARKS = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}

_GONE = frozenset({"NoSuchKey", "NoSuchVersion"})


@dataclass(frozen=True)
class S3Store:
    """A bucket of S3. A store pickles as configuration only; each process makes the client at the first use.

    `put` and `put_part` read the body's memory until they return, again for each retry: it must not change meanwhile.
    """

    bucket: str
    options: S3Options = field(default_factory=S3Options)
    pin: FirstEnvironment = field(default_factory=FirstEnvironment, init=False, repr=False, compare=False)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def identity(self) -> str:
        endpoint = urlsplit(self._client().api.meta.endpoint_url)
        host = endpoint.hostname or ""
        # At AWS the bucket's name is enough: regional, dual-stack and private endpoints all lead to the same bucket.
        if host.endswith(_AWS_DOMAINS):
            return self.url
        # Without the text before an "@", which may hold credentials.
        return f"{endpoint.scheme}://{endpoint.netloc.rpartition('@')[2]}/{self.bucket}"

    @property
    def capabilities(self) -> Capabilities:
        service = self.service
        found = self._client().deletes.get(self.bucket, service)
        return replace(
            CAPABILITIES,
            conditional_put=service.conditional_put,
            checksums=service.checksums,
            lists_uploads=service.lists_uploads,
            conditional_delete=found.conditional_delete,
            # A request that is not signed does not expire.
            expiring_delete=found.expiring_delete and self._signs(),
        )

    def prove_deletes(self, prefix: str) -> Capabilities:
        """Return the capabilities, after a trial of deletions below `prefix` if those of the service are unknown."""
        service, found = self.service, self._client().deletes
        if not (service.conditional_delete or service.expiring_delete or self.bucket in found):
            found[self.bucket] = tried(self, prefix)
        return self.capabilities

    def _signs(self) -> bool:
        api = self._client().api
        return api.meta.config.signature_version is not botocore.UNSIGNED and http_session(api) is not None

    @property
    def service(self) -> S3Service:
        """The service behind the endpoint, and its features, as far as the options or the endpoint tell."""
        return self._client().service

    def put(
        self,
        key: str,
        body: Buffers,
        *,
        crc32c: int | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        content = OutgoingBody(body)
        parameters = self._checksum(body, crc32c)
        if not self.service.conditional_put:
            self._look(key, if_none_match, if_match)
        elif if_none_match:
            parameters["IfNoneMatch"] = "*"
        elif if_match is not None:
            parameters["IfMatch"] = _quoted(if_match)
        try:
            reply = self._call("PutObject", key, Key=key, Body=content if len(content) else b"", **parameters)
        except ObjectNotFoundError as error:
            if if_match is None:
                raise
            # S3 answers If-Match on a missing key with 404. For the caller the condition did not hold.
            gone = PreconditionFailedError(error.message, url=error.url)
        else:
            return ObjectInfo(key, len(content), _unquoted(reply.get("ETag")))
        raise gone

    def _look(self, key: str, if_none_match: bool, if_match: str | None) -> None:
        """Check a condition by HEAD if the service has no conditional writes. A write before the put is not noticed."""
        if not if_none_match and if_match is None:
            return
        try:
            etag = self.head(key).etag
        except ObjectNotFoundError:
            if if_match is None:
                return
            etag = None
        if if_none_match or etag != if_match:
            raise PreconditionFailedError("the object is not the one expected", url=self._url(key))

    def get(self, key: str, *, max_bytes: int | None = None, first: int | None = None) -> tuple[bytes, ObjectInfo]:
        wanted = {} if first is None else {"Range": f"bytes=0-{first - 1}"}
        try:
            reply = self._call("GetObject", key, Key=key, **wanted)
        except CorruptDataError:
            if first is None:
                raise
            # The range of an empty object is invalid: it has no first byte.
            return self.get(key, max_bytes=max_bytes)
        size = int(reply.get("ContentLength") or 0)
        info = _info(key, reply, _whole_size(reply, size))
        if max_bytes is not None and size > max_bytes:
            discard(reply["Body"])
            raise CorruptDataError(
                f"the object has {info.size} bytes, and at most {max_bytes} were expected", url=self._url(key)
            )
        data = bytearray(size)
        self._receive(key, reply["Body"], [memoryview(data)])
        return bytes(data), info

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        size = sum(view.nbytes for view in buffers)
        if size:
            # The CRT receives the bytes into the buffers before it returns the reply.
            with receiving_into(buffers) if self.options.engine == "crt" else contextlib.nullcontext():
                reply = self.open_range(key, offset, size, if_match=if_match)
            reply.receive(buffers)

    def open_range(self, key: str, offset: int, nbytes: int, *, if_match: str | None = None) -> RangeReply:
        condition = {} if if_match is None else {"IfMatch": _quoted(if_match)}
        reply = self._call("GetObject", key, Key=key, Range=f"bytes={offset}-{offset + nbytes - 1}", **condition)
        length = reply.get("ContentLength")
        partial = reply["ResponseMetadata"]["HTTPStatusCode"] == http.client.PARTIAL_CONTENT
        if not partial and (offset or length != nbytes):
            discard(reply["Body"])
            raise StoreError("the store ignored the range of a read", url=self._url(key))
        if length is not None and length != nbytes:
            discard(reply["Body"])
            raise CorruptDataError(
                f"the object ends before the range does: {length} of the {nbytes} bytes from {offset} are there",
                url=self._url(key),
            )
        body = reply["Body"]
        return OpenReply(body, nbytes, lambda buffers, filled: self._receive(key, body, buffers, filled))

    def head(self, key: str) -> ObjectInfo:
        reply = self._call("HeadObject", key, Key=key)
        return _info(key, reply, reply["ContentLength"])

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        start = {} if start_after is None else {"StartAfter": start_after}
        for page in self._pages("ListObjectsV2", prefix, _LIST_MARKS, Prefix=prefix, **start):
            for entry in page.get("Contents", []):
                yield _info(entry["Key"], entry, entry["Size"])

    def list_folders(self, prefix: str) -> Iterator[str]:
        for page in self._pages("ListObjectsV2", prefix, _LIST_MARKS, Prefix=prefix, Delimiter="/"):
            for entry in page.get("CommonPrefixes", []):
                yield str(entry["Prefix"])

    def delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        failures: builtins.list[DeleteFailure] = []
        for start in range(0, len(keys), MAX_DELETE_KEYS):
            batch = [{"Key": key} for key in keys[start : start + MAX_DELETE_KEYS]]
            reply = self._call("DeleteObjects", None, Delete={"Objects": batch, "Quiet": True})
            failures += [
                DeleteFailure(entry.get("Key", ""), entry.get("Code", ""), why_kept(entry))
                for entry in reply.get("Errors", [])
                if entry.get("Code") not in _GONE
            ]
        return failures

    def delete_if(self, key: str, etag: str) -> bool:
        if self.capabilities.conditional_delete:
            return self.delete_unseen(key, etag)
        try:
            found = self.head(key).etag
        except ObjectNotFoundError:
            return True
        if found != etag:
            raise PreconditionFailedError("the object is not the one expected", url=self._url(key))
        self._call("DeleteObject", key, Key=key)
        return True

    def delete_unseen(self, key: str, etag: str) -> bool:
        """Delete like `delete_if`, but always by the service's own condition, even if it may not be honoured."""
        with contextlib.suppress(ObjectNotFoundError):
            self._call("DeleteObject", key, Key=key, IfMatch=_quoted(etag))
        return True

    def expiring_delete(self, key: str, seconds: int) -> Callable[[], bool]:
        """Sign a deletion that expires: see `ExpiringDeletes`."""
        try:
            return SignedDelete.of(self._client(), self.bucket, key, seconds, self._url(key))
        except FAILURES as error:
            failure = translate(error, "signing DeleteObject", self._url(key))
        raise failure

    def copy(self, source: str, target: str) -> ObjectInfo:
        return self.copy_from(self, self.head(source), target)

    def can_copy_from(self, other: Store) -> bool:
        """Return True if `copy_from` can work between these two stores: they are buckets of one service."""
        if not isinstance(other, S3Store) or not self._shares_endpoint(other):
            return False
        # A copy reads and writes with one set of credentials and keys. Only trying tells if those may read.
        return self.options == other.options or "SSECustomerKey" not in other.options.request_parameters()

    def _shares_endpoint(self, other: S3Store) -> bool:
        return self.identity.removesuffix(self.bucket) == other.identity.removesuffix(other.bucket)

    def copy_from(self, other: S3Store, source: ObjectInfo, target: str) -> ObjectInfo:
        """Copy the object that `other.head` described, from a bucket that this store's credentials can read."""
        origin: dict[str, Any] = {"CopySource": {"Bucket": other.bucket, "Key": source.key}}
        if source.etag is not None:
            # The size decides how to copy, so the copied object must be the one whose size was measured.
            origin["CopySourceIfMatch"] = _quoted(source.etag)
        if source.size > MAX_COPY_BYTES:
            return self._copy_in_parts(source, origin, target)
        reply = self._call("CopyObject", target, Key=target, **origin)
        return ObjectInfo(target, source.size, _unquoted(reply["CopyObjectResult"].get("ETag")))

    def _copy_in_parts(self, source: ObjectInfo, origin: dict[str, Any], target: str) -> ObjectInfo:
        # Without a checksum algorithm: the bytes do not pass through this process, and S3 computes checksums itself.
        upload_id = str(self._call("CreateMultipartUpload", target, Key=target)["UploadId"])
        step = min(_COPY_PART_BYTES, MAX_COPY_BYTES)
        parts: builtins.list[Part] = []
        try:
            for number, start in enumerate(range(0, source.size, step), 1):
                end = min(start + step, source.size)
                reply = self._call(
                    "UploadPartCopy",
                    target,
                    Key=target,
                    UploadId=upload_id,
                    PartNumber=number,
                    CopySourceRange=f"bytes={start}-{end - 1}",
                    **origin,
                )
                parts.append(Part(number, end - start, _unquoted(reply["CopyPartResult"]["ETag"]) or ""))
            return self.complete_multipart(target, upload_id, parts)
        except BaseException:
            self.abort_multipart(target, upload_id)
            raise

    def create_multipart(self, key: str) -> str:
        algorithm = {"ChecksumAlgorithm": "CRC32C"} if self.service.checksums else {}
        return str(self._call("CreateMultipartUpload", key, Key=key, **algorithm)["UploadId"])

    def put_part(self, key: str, upload_id: str, number: int, body: Buffers, *, crc32c: int | None = None) -> Part:
        content = OutgoingBody(body)
        checksum = self._checksum(body, crc32c)
        reply = self._call(
            "UploadPart",
            key,
            Key=key,
            UploadId=upload_id,
            PartNumber=number,
            Body=content if len(content) else b"",
            **checksum,
        )
        sent = _decoded_crc(checksum["ChecksumCRC32C"]) if checksum else None
        return Part(number, len(content), _unquoted(reply["ETag"]) or "", sent)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        ordered = sorted(parts, key=lambda part: part.number)
        listed = [
            {
                "PartNumber": part.number,
                "ETag": _quoted(part.etag),
                **({} if part.crc32c is None else {"ChecksumCRC32C": encoded_crc(part.crc32c)}),
            }
            for part in ordered
        ]
        reply = self._call(
            "CompleteMultipartUpload", key, Key=key, UploadId=upload_id, MultipartUpload={"Parts": listed}
        )
        return ObjectInfo(key, sum(part.size for part in ordered), _unquoted(reply.get("ETag")))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        try:
            self._call("AbortMultipartUpload", key, Key=key, UploadId=upload_id)
        except UploadNotFoundError:
            return

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        for page in self._pages("ListMultipartUploads", prefix, _UPLOAD_MARKS, Prefix=prefix):
            for entry in page.get("Uploads", []):
                started = entry.get("Initiated")
                yield OpenUpload(entry["Key"], entry["UploadId"], started.timestamp() if started else None)

    def close(self) -> None:
        close_client(self.options, self.pin)

    def _checksum(self, body: Buffers, crc32c: int | None) -> dict[str, Any]:
        if not self.service.checksums:
            return {}
        return {"ChecksumCRC32C": encoded_crc(crc_of(body, crc32c))}

    def _receive(self, key: str, body: Any, buffers: Buffers, *filled: Callable[[], None]) -> None:
        try:
            receive(body, buffers, *filled)
            return
        except FAILURES as error:
            failure = translate(error, "GetObject", self._url(key))
        raise failure

    def _call(self, operation: str, key: str | None, **parameters: Any) -> Any:
        used: S3Client | None = None

        def attempt() -> Any:
            nonlocal used
            used = client = self._client()
            try:
                return client.call(operation, Bucket=self.bucket, **parameters)
            except FAILURES as error:
                failure = translate(error, operation, self._url(key), region=client.region)
            # Raised here, outside the except block, so that boto3's exception, which holds the request, does not become
            # the `__context__` of this error.
            raise failure

        def refresh() -> bool:
            return used is not None and renew_client(self.options, used, self.pin)

        client = self._client()
        return retry.run(attempt, client.policy, gate=client.gate, refresh=refresh)

    def _pages(self, operation: str, prefix: str, marks: dict[str, str], **parameters: Any) -> Iterator[Any]:
        """Yield the pages of a listing. `marks` maps the parameters of the next request to fields of the last page."""
        while True:
            page = self._call(operation, prefix, **parameters)
            yield page
            if not page.get("IsTruncated"):
                return
            following = {name: page[field] for name, field in marks.items() if page.get(field)}
            if not following or all(parameters.get(name) == value for name, value in following.items()):
                raise StoreError(f"{operation} does not say where its next page begins", url=self._url(prefix))
            parameters.update(following)

    def _client(self) -> S3Client:
        try:
            return client_for(self.options, self.pin)
        except FAILURES as error:
            failure = translate(error, "making the S3 client", self.url)
        raise failure

    def _url(self, key: str | None) -> str:
        return f"{self.url}/{key}" if key else self.url


def _info(key: str, entry: dict[str, Any], size: int | None) -> ObjectInfo:
    modified = entry.get("LastModified")
    return ObjectInfo(key, int(size or 0), _unquoted(entry.get("ETag")), modified.timestamp() if modified else None)


def _whole_size(reply: dict[str, Any], received: int) -> int:
    """Return the size of the whole object from the reply to a ranged read: `bytes 0-9/1234` (RFC 9110, 14.4)."""
    whole = str(reply.get("ContentRange") or "").rpartition("/")[2]
    return int(whole) if whole.isdecimal() else received


def _quoted(etag: str) -> str:
    return f'"{etag}"'


def _unquoted(etag: str | None) -> str | None:
    return None if etag is None else etag.strip('"')


def _decoded_crc(encoded: str) -> int:
    return int.from_bytes(base64.b64decode(encoded), "big")
