"""`GCSStore`: one bucket of Google Cloud Storage."""

from __future__ import annotations

import builtins
import contextlib
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from bucketpoint.errors import CorruptDataError, ObjectNotFoundError, PreconditionFailedError, StoreError
from bucketpoint.stores import http_store
from bucketpoint.stores.base import Buffers, Capabilities, DeleteFailure, ObjectInfo, OpenUpload, Part
from bucketpoint.stores.client_cache import FirstEnvironment
from bucketpoint.stores.foreign import follow
from bucketpoint.stores.gcs import multipart as gcs_multipart
from bucketpoint.stores.gcs.answer import described
from bucketpoint.stores.gcs.api import Bucket
from bucketpoint.stores.gcs.body import BINARY, Incoming
from bucketpoint.stores.gcs.client import close_client
from bucketpoint.stores.gcs.errors import translated
from bucketpoint.stores.gcs.options import GCSOptions
from bucketpoint.stores.http_body import crc_of
from bucketpoint.stores.http_store import LENGTH, ContentRange, HttpStore, Reply, http_seconds

T = TypeVar("T")

_MAX_GENERATION = (1 << 63) - 1

# https://cloud.google.com/storage/quotas
# https://cloud.google.com/storage/docs/request-preconditions
CAPABILITIES = replace(http_store.CAPABILITIES, max_put_bytes=5 << 40, conditional_delete=True)


@dataclass(frozen=True)
class GCSStore(HttpStore):
    """A bucket of GCS. A store pickles as configuration only; each process makes the client at the first use.

    The ETags of this store are object generations: every write gives an object a new generation, and conditions and
    pinned reads name the generation. In a bucket with versioning a pinned read also finds a generation that was
    replaced.

    `put` and `put_part` read the body's memory until they return, and again for each retry: the memory must not change
    meanwhile.
    """

    options: GCSOptions = field(default_factory=GCSOptions)
    pin: FirstEnvironment = field(default_factory=FirstEnvironment, init=False, repr=False, compare=False)

    @property
    def url(self) -> str:
        return self._requests.url

    @property
    def identity(self) -> str:
        return self._requests.identity

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
        return self._sent(body, crc32c, lambda: self._requests.insert(key, body, crc32c=crc32c, generation=generation))

    def _open(self, key: str, wanted: str | None, if_match: str | None = None) -> Reply:
        generation = self._generation(key, if_match)
        bucket = self._requests
        query: dict[str, Any] = {"alt": "media"}
        if generation is not None:
            query["generation"] = generation
        try:
            reply = bucket.call(
                "objects.get",
                key,
                "GET",
                f"/download{bucket.path(key)}",
                query=bucket.billed(query),
                headers={} if wanted is None else {"Range": wanted},
                stream=True,
                of_object=True,
            )
        except ObjectNotFoundError:
            if generation is None:
                raise
            # 404 may mean that only this generation is missing. A second request, only after a failed read, shows it.
            self.head(key)
            replaced = PreconditionFailedError("the ETag of the object is not the expected one", url=self._url(key))
        else:
            length = reply.headers.get("Content-Length", "")
            received = int(length) if LENGTH.fullmatch(length) else None
            part = ContentRange.of(reply.status_code, reply.headers.get("Content-Range"))
            whole = received if part is None or part.whole is None else part.whole
            return Reply(_info(key, reply, whole or 0), Incoming(reply.raw), received, part)
        raise replaced

    def head(self, key: str) -> ObjectInfo:
        return described(self._requests.describe(key), key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        start = {} if start_after is None else {"startOffset": start_after}
        for page in self._requests.pages(prefix, **start):
            for item in page.get("items", []):
                info = described(item, "")
                if info.key != start_after:
                    yield info

    def list_folders(self, prefix: str) -> Iterator[str]:
        for page in self._requests.pages(prefix, delimiter="/"):
            yield from page.get("prefixes", [])

    def delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        return self._requests.delete(keys)

    def delete_if(self, key: str, etag: str) -> bool:
        bucket = self._requests
        query = bucket.billed({"ifGenerationMatch": self._generation(key, etag)})
        with contextlib.suppress(ObjectNotFoundError):
            bucket.call("objects.delete", key, "DELETE", bucket.path(key), query=query, of_object=True)
        return True

    def copy_from(self, other: GCSStore, source: ObjectInfo, target: str) -> ObjectInfo:
        """Copy an object from a bucket that this store's credentials can read."""
        bucket = self._requests
        query: dict[str, Any] = {}
        if source.etag is not None:
            query["ifSourceGenerationMatch"] = other._generation(source.key, source.etag)
        if self.options.kms_key_name is not None:
            query["destinationKmsKeyName"] = self.options.kms_key_name
        chosen = self.options.storage_class
        body = b"" if chosen is None else json.dumps({"storageClass": chosen, "contentType": BINARY}).encode()
        path = f"{other._requests.path(source.key)}/rewriteTo{bucket.path(target).removeprefix('/storage/v1')}"
        seen: set[Hashable] = set()
        while True:
            reply = bucket.call(
                "objects.rewrite",
                source.key,
                "POST",
                path,
                query=bucket.billed(query),
                headers={"Content-Type": "application/json"},
                body=body,
                of_object=True,
            ).json()
            if reply.get("done"):
                return described(reply.get("resource") or {}, target)
            # The service rewrites a large object that changes location or storage class in several requests.
            query["rewriteToken"] = token = reply.get("rewriteToken")
            mark = token and (token, reply.get("totalBytesRewritten"))
            follow(mark, seen, "objects.rewrite", other._url(source.key))

    def create_multipart(self, key: str) -> str:
        return gcs_multipart.create(self._requests, key)

    def put_part(self, key: str, upload_id: str, number: int, body: Buffers, *, crc32c: int | None = None) -> Part:
        send = gcs_multipart.put_part
        return self._sent(body, crc32c, lambda: send(self._requests, key, upload_id, number, body, crc32c))

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        return gcs_multipart.complete(self._requests, key, upload_id, parts)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        gcs_multipart.abort(self._requests, key, upload_id)

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        if self.options.multipart:
            yield from gcs_multipart.open_uploads(self._requests, prefix)

    def close(self) -> None:
        close_client(self.options, self.pin)

    def _sent(self, body: Buffers, crc32c: int | None, send: Callable[[], T]) -> T:
        """Send a body, once more if it is refused although it fits its checksum: it may have been damaged on the way.

        The service answers "invalid" to a body that does not fit its checksum, but also to many other faults.
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

    @property
    def _requests(self) -> Bucket:
        return Bucket(self.bucket, self.options, self.pin)

    def _generation(self, key: str, etag: str | None) -> int | None:
        if etag is None:
            return None
        generation = int(etag) if etag.isdecimal() and len(etag) < 20 else 0
        if not 0 < generation <= _MAX_GENERATION:
            # The ETag of another store, or an invalid one: no object in this bucket ever had it.
            raise PreconditionFailedError("the ETag of the object is not the expected one", url=self._url(key))
        return generation

    def _translated(self, act: Callable[[], None], key: str) -> None:
        translated(act, "objects.get", self._url(key))


def _info(key: str, reply: Any, size: int) -> ObjectInfo:
    """Describe an object from the headers of a read."""
    return ObjectInfo(
        key, size, reply.headers.get("x-goog-generation"), http_seconds(reply.headers.get("Last-Modified"))
    )
