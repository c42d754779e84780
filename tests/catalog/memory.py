"""A store in memory that counts its requests, fails where it is told to, and dies after request k. And a run on it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.errors import (
    AccessDeniedError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    TransientStoreError,
    UploadNotFoundError,
)
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import StepTemplate
from bucketpoint.format.metadata.codec import encode_metadata, record_from_metadata
from bucketpoint.stores import Capabilities, DeleteFailure, ObjectInfo, OpenUpload

START = 1_700_000_000.0
PAGE = 1000
_stores = itertools.count(1)


class KilledError(BaseException):
    """The process is gone: nothing catches it on the way."""


@dataclass
class Fault:
    """At request number `at` from now: `kill`, before or after the store acts, or `fail` with a transient error."""

    at: int
    how: str
    acts: bool


@dataclass
class MemoryStore:
    """Objects in a dictionary, with the semantics that `tests/stores/test_contract.py` demands of every store."""

    now: float = START
    objects: dict[str, tuple[bytes, str, float]] = field(default_factory=dict)
    open_uploads: dict[str, OpenUpload] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    fault: Fault | None = None
    between: Callable[[int, str], None] | None = None
    """Called before each request with its number and name: what others do meanwhile."""
    refused: set[str] = field(default_factory=set)
    """Keys that no delete removes."""
    exact_uploads: bool = False
    identity: str = field(default_factory=lambda: f"memory://store-{next(_stores)}")
    _etags: Any = field(default_factory=lambda: itertools.count(1))
    _requests: int = 0

    url = "memory://store"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(True, False, True, True, lists_uploads=not self.exact_uploads, conditional_delete=True)

    def _request(self, name: str, act: Callable[[], Any]) -> Any:
        self.calls[name] += 1
        self._requests += 1
        if self.between is not None:
            between, self.between = self.between, None
            try:
                between(self._requests, name)
            finally:
                self.between = between
        fault = self.fault
        if fault is None:
            return act()
        fault.at -= 1
        if fault.at > 0:
            return act()
        if fault.acts and fault.at == 0:
            act()
        if fault.how == "kill":
            # And whatever the dead process does while its stack unwinds does not happen.
            raise KilledError()
        self.fault = None
        raise TransientStoreError("the store is away")

    def put(
        self,
        key: str,
        body: Sequence[memoryview],
        *,
        crc32c: int | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        def act() -> ObjectInfo:
            there = self.objects.get(key)
            if if_none_match and there is not None:
                raise PreconditionFailedError("it exists", key=key)
            if if_match is not None and (there is None or there[1] != if_match):
                raise PreconditionFailedError("it is another", key=key)
            data = b"".join(body)
            # Of the bytes alone, as S3 makes them: what is written again as it was cannot be told from it.
            self.objects[key] = (data, hashlib.md5(data, usedforsecurity=False).hexdigest(), self.now)
            return self._info(key)

        return self._request("put", act)

    def get(self, key: str, *, max_bytes: int | None = None, first: int | None = None) -> tuple[bytes, ObjectInfo]:
        return self._request("get", lambda: (self._there(key, max_bytes)[0][:first], self._info(key)))

    def head(self, key: str) -> ObjectInfo:
        return self._request("head", lambda: self._info(key))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        after = start_after or ""
        while True:
            page = self._request("list", lambda after=after: self._page(prefix, after))
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1].key

    def list_folders(self, prefix: str) -> Iterator[str]:
        found = self._request(
            "list_folders",
            lambda: sorted(
                {prefix + key[len(prefix) :].split("/")[0] + "/" for key in self.objects if self._below(key, prefix)}
            ),
        )
        yield from found

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        failures: list[DeleteFailure] = []
        for start in range(0, len(keys), PAGE):
            batch = keys[start : start + PAGE]

            def act(batch: Sequence[str] = batch) -> list[DeleteFailure]:
                for key in batch:
                    if key not in self.refused:
                        self.objects.pop(key, None)
                return [DeleteFailure(key, "AccessDenied", "no") for key in batch if key in self.refused]

            failures += self._request("delete", act)
        return failures

    def delete_if(self, key: str, etag: str) -> bool:
        def act() -> bool:
            there = self.objects.get(key)
            if there is not None and there[1] != etag:
                raise PreconditionFailedError("it is another", key=key)
            if there is not None and key in self.refused:
                raise AccessDeniedError("no", key=key)
            self.objects.pop(key, None)
            return True

        return self._request("delete_if", act)

    def create_multipart(self, key: str) -> str:
        name = f"upload-{next(self._etags)}"
        self.open_uploads[name] = OpenUpload(key, name, self.now)
        return name

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._request("abort", lambda: self.open_uploads.pop(upload_id, None))

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        def act() -> list[OpenUpload]:
            uploads = list(self.open_uploads.values())
            if self.exact_uploads:
                return [one for one in uploads if one.key == prefix]
            return [one for one in uploads if one.key.startswith(prefix)]

        yield from self._request("list_multipart", act)

    def _page(self, prefix: str, after: str) -> list[ObjectInfo]:
        return [self._info(key) for key in sorted(self.objects) if key.startswith(prefix) and key > after][:PAGE]

    @staticmethod
    def _below(key: str, prefix: str) -> bool:
        return key.startswith(prefix) and "/" in key[len(prefix) :]

    def _there(self, key: str, most: int | None = None) -> tuple[bytes, str, float]:
        if key not in self.objects:
            raise ObjectNotFoundError("no such key", key=key)
        if most is not None and len(self.objects[key][0]) > most:
            raise CorruptDataError("too large", key=key)
        return self.objects[key]

    def _info(self, key: str) -> ObjectInfo:
        data, etag, modified = self._there(key)
        return ObjectInfo(key, len(data), etag, modified)

    def complete_multipart(self, key: str, upload_id: str, parts: Any) -> ObjectInfo:
        raise UploadNotFoundError("not needed here")


@contextlib.contextmanager
def killed(store: MemoryStore, at: int, *, acts: bool = False) -> Iterator[None]:
    """What runs within is killed at its request number `at`, before or after the store acts."""
    store.fault = Fault(at, "kill", acts)
    try:
        with pytest.raises(KilledError):
            yield
    finally:
        store.fault = None


def memory_catalog(store: MemoryStore, template: str = "step-{step}", prefix: str = "run") -> Catalog:
    return Catalog(f"{store.url}/{prefix}", store, prefix, StepTemplate(template), clock=lambda: store.now)  # type: ignore[arg-type]


def metadata_bytes(token: str, objects: int = 0, **facts: Any) -> tuple[bytes, dict[str, bytes]]:
    """Metadata of one model item and one of an optimizer, of so many `objects` more, and the objects that it names."""
    paths = {group: keys.data_path(token, 0, group, 0) for group in ("model", "optim")}
    paths |= {f"model{number}": keys.data_path(token, number, "model", 0) for number in range(1, objects + 1)}
    storage = {
        MetadataIndex(f"{group}.w"): _StorageInfo(relative_path=path, offset=0, length=10)
        for group, path in paths.items()
    }
    names = {index.fqn: BytesStorageMetadata() for index in storage}
    metadata = Metadata(dict(names), planner_data={name: (name,) for name in names}, storage_data=storage)  # type: ignore[arg-type]
    sizes = {path: {"size": 10, "etag": None} for path in paths.values()}
    known = {"token": token, "torch": str(torch.__version__), "world_size": 1, "objects": sizes, **facts}
    data = encode_metadata(metadata, bucketpoint=known)
    return data, {path: (group.encode() * 10)[:10] for group, path in paths.items()}


def save(
    catalog: Catalog, step: int, *, token: str | None = None, objects: int = 0, kind: str = "full", **about: Any
) -> str:
    """One save as a writer makes it: intent, data, commit, record. Returns the token."""
    store: Any = catalog.store
    token = token or keys.new_token()
    log = SaveLog(catalog, kind=kind, **about)
    url = catalog.url_of(step)
    log.begin(url, token)
    folder, _ = catalog.folder_of(url)
    data, content = metadata_bytes(token, objects, created=catalog.clock(), **log.facts(url))
    for path, body in content.items():
        store.put(catalog.key(f"{folder}/{path}"), [memoryview(body)])
    info = store.put(catalog.metadata_key(folder), [memoryview(data)])
    record = record_from_metadata(data, metadata_etag=info.etag)
    log.committed(url, record)
    return token


def commit_without_a_record(catalog: Catalog, step: int, **facts: object) -> str:
    """A save whose record is late, or whose coordinator was killed after the commit. Returns the token."""
    token, url, store = keys.new_token(), catalog.url_of(step), catalog.store
    SaveLog(catalog).begin(url, token)
    data, content = metadata_bytes(token, created=catalog.clock(), **SaveLog(catalog).facts(url), **facts)
    for path, body in {**content, ".metadata": data}.items():
        store.put(catalog.key(f"step-{step}/{path}"), [memoryview(body)])
    return token
