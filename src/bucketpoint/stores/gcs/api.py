"""Requests to one GCS bucket through the JSON API, shared by the store and its uploads.

https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from bucketpoint.errors import Action, BucketNotFoundError, CorruptDataError, ObjectNotFoundError, StoreError
from bucketpoint.stores import retry
from bucketpoint.stores.base import Buffers, DeleteFailure, ObjectInfo
from bucketpoint.stores.client_cache import FirstEnvironment
from bucketpoint.stores.foreign import follow
from bucketpoint.stores.gcs.answer import GCSReply, described
from bucketpoint.stores.gcs.body import BINARY, batch_answers, batch_of_deletes, with_metadata
from bucketpoint.stores.gcs.client import GCSClient, client_for
from bucketpoint.stores.gcs.errors import failure_of, translated
from bucketpoint.stores.gcs.options import GCSOptions
from bucketpoint.stores.http_body import crc_of, encoded_crc

# https://cloud.google.com/storage/docs/batch
MAX_BATCH_CALLS = 100

# https://cloud.google.com/storage/docs/json_api/v1/objects/list
MAX_PAGE_KEYS = 1_000

OBJECT_FIELDS = "name,size,generation,timeCreated,crc32c"


class _SomeLeft(StoreError):
    """Some calls of a batch failed and have to be retried."""


@dataclass(frozen=True)
class Bucket:
    """A bucket with the options and the environment with which it is reached."""

    name: str
    options: GCSOptions
    pin: FirstEnvironment

    @property
    def url(self) -> str:
        return f"gs://{self.name}"

    @property
    def identity(self) -> str:
        endpoint = self.options.endpoint
        if endpoint is None:
            return self.url
        parts = urlsplit(endpoint)
        # Without the text before an "@", which may hold credentials.
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{self.name}"

    def path(self, key: str | None = None) -> str:
        """Return the API path of the object `key`, or of the bucket's collection of objects."""
        objects = f"/storage/v1/b/{quote(self.name, safe='')}/o"
        return objects if key is None else f"{objects}/{quote(key, safe='')}"

    def billed(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """Return the query of a JSON API request, with the project that pays for the request, if one is set."""
        payer = self.options.user_project
        return dict(query) if payer is None else {**query, "userProject": payer}

    def client(self) -> GCSClient:
        """Return the client of the bucket's options.

        Raises:
            StoreError: there are no credentials, or they cannot be used.
        """
        return translated(lambda: client_for(self.options, self.pin), "making the GCS client", self.url)

    def call(
        self,
        operation: str,
        key: str | None,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        of_object: bool = False,
        **request: Any,
    ) -> GCSReply:
        """Send one request and return the reply.

        Args:
            of_object: HTTP 404 may mean that the object is missing, rather than the bucket.
        """
        client = self.client()
        url = f"{self.url}/{key}" if key else self.url
        failure: StoreError
        try:
            reply = client.request(method, path, operation=operation, url=url, query=query, **request)
        except ObjectNotFoundError as error:
            failure = error if of_object and self.exists() else self.not_found()
        else:
            client.buckets.add(self.name)
            return reply
        raise failure

    def exists(self) -> bool:
        """Return True if the bucket exists, as far as these credentials can see. A bucket found is remembered."""
        client = self.client()
        if self.name in client.buckets:
            return True
        query = self.billed({"maxResults": 1, "fields": "kind"})
        try:
            client.request("GET", self.path(), operation="objects.list", url=self.url, query=query)
        except ObjectNotFoundError:
            return False
        except StoreError:
            # Without the permission to list, assume that the bucket exists: the caller's error stays "object not
            # found".
            return True
        client.buckets.add(self.name)
        return True

    def describe_bucket(self, fields: str) -> dict[str, Any]:
        """Return some fields of the bucket's resource. Needs storage.buckets.get."""
        path, query = self.path().removesuffix("/o"), self.billed({"fields": fields})
        return self.call("buckets.get", None, "GET", path, query=query).json()

    def not_found(self) -> BucketNotFoundError:
        return BucketNotFoundError("the bucket does not exist", url=self.url)

    # -- objects ------------------------------------------------------------------------------------------------------

    def insert(
        self,
        key: str,
        body: Buffers,
        *,
        crc32c: int | None,
        generation: int | None = None,
    ) -> ObjectInfo:
        """Write a whole object in one request; the service compares the body with the CRC32C.

        Args:
            generation: write only if the object has this generation; 0 means only if there is no object.
        """
        metadata = {"name": key, "contentType": BINARY, "crc32c": encoded_crc(crc_of(body, crc32c))}
        if self.options.storage_class is not None:
            metadata["storageClass"] = self.options.storage_class
        query: dict[str, Any] = {"uploadType": "multipart", "fields": OBJECT_FIELDS}
        if generation is not None:
            query["ifGenerationMatch"] = generation
        if self.options.kms_key_name is not None:
            query["kmsKeyName"] = self.options.kms_key_name
        content_type, content = with_metadata(metadata, body)
        reply = self.call(
            "objects.insert",
            key,
            "POST",
            f"/upload{self.path()}",
            query=self.billed(query),
            headers={"Content-Type": content_type},
            body=content,
        )
        resource = reply.json()
        # Only some emulators leave it out.
        if resource.get("crc32c") not in (None, metadata["crc32c"]):
            raise CorruptDataError("the store has another CRC32C than was sent", url=f"{self.url}/{key}")
        return described(resource, key)

    def describe(self, key: str) -> dict[str, Any]:
        """Return the fields `OBJECT_FIELDS` of an object's resource. Raises ObjectNotFoundError."""
        query = self.billed({"fields": OBJECT_FIELDS})
        reply = self.call("objects.get", key, "GET", self.path(key), query=query, of_object=True)
        return reply.json()

    def pages(self, prefix: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing."""
        wanted = self.billed(
            {
                "prefix": prefix,
                "maxResults": MAX_PAGE_KEYS,
                **query,
                "fields": f"kind,nextPageToken,prefixes,items({OBJECT_FIELDS})",
            }
        )
        seen: set[Hashable] = set()
        while True:
            page = self.call("objects.list", prefix, "GET", self.path(), query=wanted).json()
            yield page
            if not page.get("nextPageToken"):
                return
            wanted["pageToken"] = page["nextPageToken"]
            follow(str(wanted["pageToken"]), seen, "objects.list", f"{self.url}/{prefix}")

    def delete(self, keys: Sequence[str], generations: Mapping[str, str] | None = None) -> list[DeleteFailure]:
        """Delete many objects, 100 per request. Missing objects count as deleted.

        Args:
            generations: by key, the only generation to delete. It is deleted permanently: a bucket with versioning does
                not keep it as a noncurrent version.
        """
        failed: list[DeleteFailure] = []
        for start in range(0, len(keys), MAX_BATCH_CALLS):
            failed += self._delete_batch(list(keys[start : start + MAX_BATCH_CALLS]), generations or {})
        return failed

    def _delete_batch(self, keys: list[str], generations: Mapping[str, str]) -> list[DeleteFailure]:
        client = self.client()
        failed: dict[str, DeleteFailure] = {}
        left = keys

        def attempt() -> None:
            nonlocal left
            sent, left = left, []
            refusal: StoreError | None = None
            for key, status, body in self._send_batch(client, sent, generations):
                failed.pop(key, None)
                if status < 300:
                    client.buckets.add(self.name)
                elif status == 404:
                    if not self.exists():
                        raise self.not_found()
                else:
                    failure, code = failure_of(status, body, "objects.delete", f"{self.url}/{key}")
                    failed[key] = DeleteFailure(key, code or str(status), failure.message, failure.remedy)
                    if failure.action is not Action.FATAL:
                        left.append(key)
                        refusal = _SomeLeft(failure.message, url=self.url)
                        refusal.action = failure.action
            if refusal is not None:
                raise refusal

        with contextlib.suppress(_SomeLeft):
            retry.run(attempt, client.policy)
        return list(failed.values())

    def _send_batch(
        self, client: GCSClient, keys: Sequence[str], generations: Mapping[str, str]
    ) -> Iterator[tuple[str, int, bytes]]:
        paths = []
        for key in keys:
            query = urlencode(self.billed({"generation": generations[key]} if key in generations else {}))
            paths.append(f"{self.path(key)}{query and '?'}{query}")
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
            # A call without an answer may have been executed or not: treat it like one that the service failed at.
            status, answer = answers.get(number, (503, b""))
            yield key, status, answer
