"""`S3Store`: one bucket, accessed through boto3."""

from __future__ import annotations

import builtins
import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import urlsplit

import botocore
import botocore.exceptions
import botocore.parsers
from botocore.awsrequest import AWSRequest

from bucketpoint.errors import (
    AccessDeniedError,
    CredentialsError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    UploadNotFoundError,
)
from bucketpoint.stores import http_store, retry
from bucketpoint.stores.base import (
    UNDECIDED,
    Buffers,
    Capabilities,
    DeleteFailure,
    ObjectInfo,
    OpenUpload,
    Part,
    Store,
    check_conditions,
    crc_of,
    encoded_crc,
    scratch_key,
)
from bucketpoint.stores.cutoff import give_up_when_cut
from bucketpoint.stores.foreign import follow
from bucketpoint.stores.http_store import ContentRange, HttpStore, Reply, http_seconds
from bucketpoint.stores.s3.client import S3Client, clients, http_session, renewed_client
from bucketpoint.stores.s3.errors import FAILURES, OPERATIONS, translate, translated, why_kept
from bucketpoint.stores.s3.exchange import OutgoingBody
from bucketpoint.stores.s3.options import SERVICES, S3Options, S3Service

# https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
MAX_COPY_BYTES = 5 << 30
# MinIO sends nothing until the copy is complete, and cancels it at the client's read timeout. To copy 1 GiB in 60 s it
# needs 18 MB/s; for 5 GiB, 90 MB/s.
SILENT_COPY_BYTES = 1 << 30
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html
MAX_DELETE_KEYS = 1_000

# https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html
CAPABILITIES = replace(http_store.CAPABILITIES, max_put_bytes=5 << 30)
"""Capabilities of Amazon S3. `S3Store.capabilities` removes those that another service lacks: see `s3.options`."""

_LIST_MARKS = {"ContinuationToken": "NextContinuationToken"}
_UPLOAD_MARKS = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}

_GONE = frozenset({"NoSuchKey", "NoSuchVersion"})

# Seconds of the trial of deletions: the lifetime of a request that must arrive in time, the shortest possible lifetime,
# and a wait that is certainly longer than the shortest lifetime.
_LONG_S, _SHORT_S, _WAIT_S = 60, 1, 2.5


@dataclass(frozen=True)
class S3Store(HttpStore):
    """A bucket of an S3-compatible service."""

    options: S3Options = field(default_factory=S3Options)

    scheme = "s3"
    reads = "GetObject"
    clients = clients
    translated = staticmethod(translated)

    @property
    def _endpoint(self) -> str | None:
        endpoint = str(self.client.api.meta.endpoint_url)
        # On AWS a bucket's name is unique: regional, dual-stack and private endpoints all lead to the same bucket.
        return None if (urlsplit(endpoint).hostname or "").endswith(SERVICES["aws"].hosts) else endpoint

    @property
    def capabilities(self) -> Capabilities:
        client, service = self.client, self.service
        deletes = client.deletes.get(self.bucket, service)
        signs = client.api.meta.config.signature_version is not botocore.UNSIGNED
        return replace(
            CAPABILITIES,
            conditional_put=service.conditional_put,
            checksums=service.checksums,
            lists_uploads=service.lists_uploads,
            conditional_delete=deletes.conditional_delete,
            # A request that is not signed does not expire.
            expiring_delete=deletes.expiring_delete and signs and http_session(client.api) is not None,
        )

    def prove_deletes(self, prefix: str) -> Capabilities:
        service, deletes = self.service, self.client.deletes
        if not (service.conditional_delete or service.expiring_delete or self.bucket in deletes):
            deletes[self.bucket] = self._tried(prefix)
        return self.capabilities

    def _tried(self, prefix: str) -> S3Service:
        """Return the service with its support for deletions, by a trial of at most nine small requests and 3 s."""
        key = scratch_key(prefix)
        try:
            conditional = _works(lambda: self._deletes_if_matched(key))
            expiring = not conditional and _works(lambda: self._refuses_late_deletes(key))
        finally:
            with contextlib.suppress(StoreError):
                self.delete([key])
        return replace(self.service, conditional_delete=conditional, expiring_delete=expiring)

    def _deletes_if_matched(self, key: str) -> bool:
        before = self.put(key, [memoryview(b"first")]).etag or ""
        now = self.put(key, [memoryview(b"second")]).etag or ""
        try:
            self._delete_matched(key, before)
        except PreconditionFailedError:
            # The second deletion must succeed: a service that refuses every condition would never delete anything.
            self._delete_matched(key, now)
            return True
        return False

    def _refuses_late_deletes(self, key: str) -> bool:
        self.put(key, [memoryview(b"third")])
        if not self.expiring_delete(key, _LONG_S)():
            return False
        self.put(key, [memoryview(b"third")])
        late = self.expiring_delete(key, _SHORT_S)
        retry.pause(_WAIT_S)
        return not late()

    @property
    def service(self) -> S3Service:
        """The service that the options or the endpoint identify, with its features."""
        service: S3Service = self.client.service
        return service

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
        parameters = _checksum(self._crc(body, crc32c))
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
            # The time of the reply, by the service's clock: the reply does not contain the object's modification time.
            date = reply["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
            return ObjectInfo(key, len(content), _unquoted(reply.get("ETag")), http_seconds(date))
        raise gone

    def _look(self, key: str, if_none_match: bool, if_match: str | None) -> None:
        """Check a condition by HEAD for a service without conditional writes. Misses writes between HEAD and PUT."""
        if not if_none_match and if_match is None:
            return
        present = None
        with contextlib.suppress(ObjectNotFoundError):
            present = self.head(key)
        check_conditions(present, self._url(key), if_none_match=if_none_match, if_match=if_match)

    def _open(self, key: str, wanted: str | None, if_match: str | None = None) -> Reply:
        given = {"Range": wanted, "IfMatch": None if if_match is None else _quoted(if_match)}
        reply = self._call("GetObject", key, Key=key, **{name: value for name, value in given.items() if value})
        length = reply.get("ContentLength")
        part = ContentRange.of(reply["ResponseMetadata"]["HTTPStatusCode"], reply.get("ContentRange"))
        whole = length if part is None or part.whole is None else part.whole
        return Reply(_info(key, reply, whole), reply["Body"], length, part)

    def head(self, key: str) -> ObjectInfo:
        reply = self._call("HeadObject", key, Key=key)
        return _info(key, reply, reply["ContentLength"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages("ListObjectsV2", prefix, _LIST_MARKS, Prefix=prefix):
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
                DeleteFailure(entry.get("Key", ""), entry.get("Code", ""), *why_kept(entry))
                for entry in reply.get("Errors", [])
                if entry.get("Code") not in _GONE
            ]
        return failures

    def delete_if(self, key: str, etag: str) -> None:
        if self.capabilities.conditional_delete:
            self._delete_matched(key, etag)
            return
        with contextlib.suppress(ObjectNotFoundError):
            check_conditions(self.head(key), self._url(key), if_match=etag)
            self._call("DeleteObject", key, Key=key)

    def _delete_matched(self, key: str, etag: str) -> None:
        """Delete like `delete_if`, but always with If-Match, even if it is unknown whether the service honours it."""
        with contextlib.suppress(ObjectNotFoundError):
            self._call("DeleteObject", key, Key=key, IfMatch=_quoted(etag))

    def expiring_delete(self, key: str, seconds: int) -> Callable[[], bool]:
        return translated(lambda: self._signed_delete(key, seconds), "signing DeleteObject", self._url(key))

    def _signed_delete(self, key: str, seconds: int) -> Callable[[], bool]:
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-presigned-url.html
        client, url, operation = self.client, self._url(key), "DeleteObject"
        api = client.api
        # The whole second, by this machine's clock, after which the service refuses the request.
        ends = int(time.time()) + seconds
        given = {**client.parameters[operation], "Bucket": self.bucket, "Key": key}
        signed_url = api.generate_presigned_url(botocore.xform_name(operation), Params=given, ExpiresIn=seconds)
        model = api.meta.service_model.operation_model(operation)
        # Parameters that are sent as headers are signed, too, so the request must contain these headers.
        members = {name: model.input_shape.members[name].serialization for name in given}
        headers = {
            where["name"]: str(given[name]) for name, where in members.items() if where.get("location") == "header"
        }

        def send() -> bool:
            # Time of the reply by the service's clock; 0 without a reply.
            when = 0.0
            try:
                request = AWSRequest(
                    "DELETE", signed_url, headers={**headers, "User-Agent": api.meta.config.user_agent}
                )
                reply = client.exchange(request.prepare(), operation)
                content = {"status_code": reply.status_code, "headers": reply.headers, "body": reply.content}
                when = http_seconds(reply.headers.get("Date")) or time.time()
                if reply.status_code < 300:
                    return True
                answer = botocore.parsers.create_parser("rest-xml").parse(content, model.output_shape)
                raise botocore.exceptions.ClientError(answer, operation)
            except FAILURES as error:
                refusal = translate(error, operation, url, region=client.region)
            if isinstance(refusal, ObjectNotFoundError):
                return True
            # A service answers an expired request like one without permission. Its clock decides which it was.
            if isinstance(refusal, AccessDeniedError | CredentialsError) and when >= ends:
                return False
            raise refusal

        return send

    def can_copy_from(self, other: Store) -> bool:
        if not super().can_copy_from(other):
            return False
        # A copy reads with this store's credentials and SSE-C key. Only a trial shows whether this is permitted.
        options = cast("S3Store", other).options
        return self.options == options or "SSECustomerKey" not in options.request_parameters()

    def copy_from(self, other: S3Store, source: ObjectInfo, target: str) -> ObjectInfo:
        # CopySource accepts the ARN of an access point only with a slash before the name.
        bucket = other.bucket.replace(":accesspoint:", ":accesspoint/")
        origin: dict[str, Any] = {"CopySource": {"Bucket": bucket, "Key": source.key}}
        if source.etag is not None:
            # The size decides how to copy, so the source must still be the object of this size.
            origin["CopySourceIfMatch"] = _quoted(source.etag)
        try:
            if source.size > self._copy_bytes:
                return self._copy_in_parts(source, origin, target)
            reply = self._call("CopyObject", target, Key=target, **origin)
            # The reply does not contain the size.
            return ObjectInfo(target, source.size, _unquoted(reply["CopyObjectResult"].get("ETag")))
        except (ObjectNotFoundError, PreconditionFailedError) as error:
            # Only the source can be missing or have another ETag, but the message names the target.
            failure = type(error)(error.message, url=other._url(source.key))
        raise failure

    @property
    def _copy_bytes(self) -> int:
        return MAX_COPY_BYTES if self.service.answers_early else SILENT_COPY_BYTES

    def _copy_in_parts(self, source: ObjectInfo, origin: dict[str, Any], target: str) -> ObjectInfo:
        # Without a checksum algorithm: the bytes do not pass through this process, and S3 computes checksums itself.
        upload_id = str(self._call("CreateMultipartUpload", target, Key=target)["UploadId"])
        step = self._copy_bytes
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
        crc = self._crc(body, crc32c)
        reply = self._call(
            "UploadPart",
            key,
            Key=key,
            UploadId=upload_id,
            PartNumber=number,
            Body=content if len(content) else b"",
            **_checksum(crc),
        )
        return Part(number, len(content), _unquoted(reply["ETag"]) or "", crc)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        ordered = sorted(parts, key=lambda part: part.number)
        listed = [
            {
                "PartNumber": part.number,
                "ETag": _quoted(part.etag),
                **_checksum(part.crc32c),
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

    def _crc(self, body: Buffers, crc32c: int | None) -> int | None:
        return crc_of(body, crc32c) if self.service.checksums else None

    def _call(self, operation: str, key: str | None, **parameters: Any) -> Any:
        used: S3Client | None = None
        stale: S3Client | None = None

        def attempt() -> Any:
            nonlocal used, stale
            if stale is not None:
                renew = functools.partial(self.clients.renew, self.options, self.pin, stale, renewed_client)
                translated(lambda: give_up_when_cut(renew, "fetching new credentials"), operation, self._url(key))
                stale = None
            used = client = self.client
            return translated(
                lambda: client.call(operation, Bucket=self.bucket, **parameters),
                operation,
                self._url(key),
                region=client.region,
                asked={*client.parameters[operation], *parameters},
            )

        def refresh() -> bool:
            nonlocal stale
            stale, options = used, self.options
            fixed = options.anon or options.access_key or options.client_kwargs.get("aws_access_key_id")
            # Newer credentials in the environment are used only if the environment still leads to the same store.
            return used is not None and not fixed and self.clients.is_same_place(self.options, self.pin)

        client = self.client
        return retry.run(attempt, client.policy, gate=client.gate, refresh=refresh, kind=OPERATIONS[operation].kind)

    def _pages(self, operation: str, prefix: str, marks: dict[str, str], **parameters: Any) -> Iterator[Any]:
        """Yield the pages of a listing. `marks` maps the parameters of the next request to fields of the last page."""
        seen: set[Hashable] = set()
        while True:
            page = self._call(operation, prefix, **parameters)
            yield page
            if not page.get("IsTruncated"):
                return
            following = {name: page[field] for name, field in marks.items() if page.get(field)}
            follow(tuple(following.items()), seen, operation, self._url(prefix))
            parameters.update(following)


def _works(trial: Callable[[], bool]) -> bool:
    try:
        return trial()
    except UNDECIDED:
        raise
    except StoreError:
        return False


def _info(key: str, entry: dict[str, Any], size: int | None) -> ObjectInfo:
    modified = entry.get("LastModified")
    return ObjectInfo(key, int(size or 0), _unquoted(entry.get("ETag")), modified.timestamp() if modified else None)


def _checksum(crc32c: int | None) -> dict[str, str]:
    return {} if crc32c is None else {"ChecksumCRC32C": encoded_crc(crc32c)}


def _quoted(etag: str) -> str:
    return f'"{etag}"'


def _unquoted(etag: str | None) -> str | None:
    return None if etag is None else etag.strip('"')
