"""Requests to one GCS bucket through the JSON API and the XML API, shared by all methods of the store.

https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import contextlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from bucketpoint.errors import Action, BucketNotFoundError, ObjectNotFoundError, StoreError
from bucketpoint.stores import retry
from bucketpoint.stores.base import DeleteFailure
from bucketpoint.stores.foreign import follow
from bucketpoint.stores.gcs.client import GCSClient, clients
from bucketpoint.stores.gcs.errors import failure_of, translated
from bucketpoint.stores.gcs.messages import GCSReply, batch_answers, batch_of_deletes
from bucketpoint.stores.gcs.options import GCSOptions
from bucketpoint.stores.http_store import HttpStore

# https://cloud.google.com/storage/docs/batch
MAX_BATCH_CALLS = 100

# https://cloud.google.com/storage/docs/json_api/v1/objects/list
MAX_PAGE_KEYS = 1_000

OBJECT_FIELDS = "name,size,generation,timeCreated,crc32c"

_OF_BUCKET = frozenset({"objects.insert", "objects.list", "buckets.get"})
"""Operations for which HTTP 404 means that the bucket is missing. For the others, the object may be missing instead."""


class _SomeLeft(StoreError):
    """Error of a batch: some of its calls failed and have to be retried."""


@dataclass(frozen=True)
class GCSBucket(HttpStore):
    """The requests to one bucket; base class of `GCSStore`."""

    options: GCSOptions = field(default_factory=GCSOptions)

    scheme = "gs"
    reads = "objects.get"
    clients = clients
    translated = staticmethod(translated)

    @property
    def _endpoint(self) -> str | None:
        return self.options.endpoint

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

    def _delete_batch(self, keys: Sequence[str], generations: Mapping[str, str]) -> list[DeleteFailure]:
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
