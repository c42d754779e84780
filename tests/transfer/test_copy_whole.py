"""Copies inside one store: what `copy_whole` adds to `Store.copy`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bucketpoint.errors import CorruptDataError, PreconditionFailedError, TransientStoreError
from bucketpoint.stores import LocalStore, ObjectInfo
from bucketpoint.transfer.copy import copy_whole
from transfer.wrappers import CountingStore, FailingStore


def test_adds_one_request_to_the_copy_itself(tmp_path: Path) -> None:
    inner = LocalStore(str(tmp_path))
    source = inner.put("k", [memoryview(b"content")])
    store: Any = CountingStore(inner)
    assert copy_whole(store, source, "t") == inner.head("t")
    assert store.calls == {"copy": 1, "head": 1}
    assert inner.get("t")[0] == b"content"


def test_leaves_a_transient_failure_to_the_caller_who_has_the_bytes(tmp_path: Path) -> None:
    inner = LocalStore(str(tmp_path))
    source = inner.put("k", [memoryview(b"content")])
    store: Any = FailingStore(inner, lambda name, number: number == 1, lambda: TransientStoreError("the store is away"))
    with pytest.raises(TransientStoreError):
        copy_whole(store, source, "t")


def test_refuses_a_source_that_is_replaced_during_a_copy_without_a_condition(tmp_path: Path) -> None:
    class Careless(CountingStore):
        def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
            self.inner.put("k", [memoryview(b"another")])
            return self.inner.copy(replace(source, etag=None), target)

    store: Any = Careless(LocalStore(str(tmp_path)))
    source = store.put("k", [memoryview(b"content")])
    with pytest.raises(PreconditionFailedError):
        copy_whole(store, source, "t")


def test_refuses_a_replaced_source_at_once(tmp_path: Path) -> None:
    store: Any = CountingStore(LocalStore(str(tmp_path)))
    source = store.put("k", [memoryview(b"content")])
    store.put("k", [memoryview(b"another")])
    with pytest.raises(PreconditionFailedError):
        copy_whole(store, source, "t")
    assert store.calls["copy"] == 1


def test_treats_a_copy_of_another_size_as_corrupt(tmp_path: Path) -> None:
    class Short(CountingStore):
        def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
            return replace(self.inner.copy(source, target), size=3)

    store: Any = Short(LocalStore(str(tmp_path)))
    source = store.put("k", [memoryview(b"content")])
    with pytest.raises(CorruptDataError, match="3 bytes, and the original 7") as caught:
        copy_whole(store, source, "t")
    assert "/t" in str(caught.value)
