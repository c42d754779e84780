"""A store in memory that counts its requests, and dies at request k. And a run on it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tests.simulation.bucket import Bucket, Held, View
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.errors import AccessDeniedError, TransientStoreError
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import StepTemplate
from bucketpoint.format.metadata.codec import encode_metadata
from bucketpoint.format.metadata.plain import read_record
from bucketpoint.retention import Entry, Row
from bucketpoint.stores import DeleteFailure

T = TypeVar("T")

START = 1_700_000_000.0
_stores = itertools.count(1)

_NAMES = {"LIST folders": "list_folders", "LIST uploads": "list_multipart", "DELETE if-match": "delete_if"}
"""Names by which tests count requests, where they are not the method's in HTTP."""


class KilledError(BaseException):
    """The process is gone: nothing catches it on the way."""


@dataclass
class Fault:
    """At request number `at` from now, before or after the store acts: a kill of the process, or a transient error."""

    at: int
    acts: bool
    kills: bool = True


class _Objects(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, Held(*value))


class MemoryStore(View):
    """The simulation's bucket as one process sees it, whose requests are counted, and end where a test says.

    Attributes:
        between: called before each request with its number and name: what others do meanwhile.
        refused: keys that no delete removes.
    """

    url = "memory://store"
    identity: str = ""

    def __init__(self, *, dates_writes: bool = True) -> None:
        super().__init__(Bucket(lambda: self.now, page=1000, dates_writes=dates_writes, objects=_Objects()))
        self.identity = f"memory://store-{next(_stores)}"
        self.now = START
        self.objects, self.open_uploads = self.bucket.objects, self.bucket.uploads
        self.calls: Counter[str] = Counter()
        self.fault: Fault | None = None
        self.between: Callable[[int, str], None] | None = None
        self.refused: set[str] = set()
        self._requests = 0

    def _request(self, name: str, key: str, act: Callable[[Any], T]) -> T:
        name = _NAMES.get(name) or name.split()[0].lower()
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
            return act(None)
        fault.at -= 1
        if fault.at > 0:
            return act(None)
        if fault.acts and fault.at == 0:
            act(None)
        if fault.kills:
            # And whatever the dead process does while its stack unwinds does not happen.
            raise KilledError()
        self.fault = None
        raise TransientStoreError("the store is away")

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        super().delete([key for key in keys if key not in self.refused])
        return [DeleteFailure(key, "AccessDenied", "no") for key in keys if key in self.refused]

    def delete_if(self, key: str, etag: str) -> None:
        if key in self.refused:
            raise AccessDeniedError("no", key=key)
        super().delete_if(key, etag)


def died(
    store: MemoryStore, at: int, what: Callable[..., object], *given: Any, acts: bool = False, **more: Any
) -> bool:
    """Whether somebody who does this is killed at their request number `at`; else they are through before."""
    store.fault = Fault(at, acts)
    try:
        what(*given, **more)
    except KilledError:
        return True
    finally:
        store.fault = None
    return False


def memory_catalog(store: MemoryStore, template: str = "step-{step}", prefix: str = "run") -> Catalog:
    return Catalog(f"{store.url}/{prefix}", store, prefix, StepTemplate(template), clock=lambda: store.now)


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
    record = read_record(data, metadata_etag=info.etag)
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


def saved_run(*steps: int) -> tuple[MemoryStore, Catalog]:
    """Return a new store, and the catalog of a run in it that has saved these steps."""
    store = MemoryStore()
    catalog = memory_catalog(store)
    for step in steps:
        save(catalog, step)
    return store, catalog


def order(step: int, id: str, action: Any = "delete") -> Entry:  # noqa: A002 (as in `Row.id`)
    """Return the entry of a plan for one checkpoint."""
    return Entry.told(Row(step, 0.0, id), action, ())
