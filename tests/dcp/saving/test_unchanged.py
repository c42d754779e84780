"""`unchanged="copy"`: items that did not change are copied by the store, on every store, and nothing else differs."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import bucketpoint.dcp.saving.uploads as module
import bucketpoint.stores.retry as retry_module
from bucketpoint import TransferOptions
from bucketpoint.errors import AccessDeniedError, CorruptDataError, StoreError, TransientStoreError
from dcp.saving.copied_saves import MIB, STORES, Refusing, Run, Watch, copy_any_size, lora, nbytes, run_on
from dcp.states import assert_loads, varied

LITTLE = 0.03
"""Share of a state that a save of `lora` may send: what is trained is 0.8 %."""


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    with run_on(getattr(request, "param", "path"), request, tmp_path) as found:
        yield found


on_every_store = pytest.mark.parametrize("run", STORES, indirect=True)


@on_every_store
def test_sends_little_of_mostly_frozen_weights_and_stands_alone(run: Run, tmp_path: Path) -> None:
    writer = run.writer()
    run.save(lora(1), 1, writer)
    watch = Watch(writer)
    run.save(lora(2), 2, writer)
    assert watch.sent < LITTLE * nbytes(lora(2))
    # The weights are one object; the others are too small for a request of their own.
    assert watch.calls["copy"] == 1
    run.delete(1)
    run.assert_holds(2, lora(2))
    run.download(2, tmp_path / "fetched")
    assert_loads(lora(2), FileSystemReader(tmp_path / "fetched"))
    assert run.verified(2).damage == []
    # Nothing is known of a process that has just begun but what the store tells.
    restarted = run.writer()
    watch = Watch(restarted)
    run.save(lora(3), 3, restarted)
    assert watch.sent < LITTLE * nbytes(lora(3))
    assert watch.calls["copy"] == 1
    run.delete(2)
    run.assert_holds(3, lora(3))
    assert run.verified(3).damage == []


def test_keeps_a_chain_of_copies_from_growing(run: Run) -> None:
    writer = run.writer()
    sizes = []
    for step in range(1, 6):
        run.save(lora(step), step, writer)
        _, found = run.objects(step)
        sizes.append(sum(info.size for path, info in found.items() if path.endswith(".distcp")))
        if step > 1:
            run.delete(step - 1)
    run.assert_holds(5, lora(5))
    # What is trained is dead in the copy, and once more in an object of its own; and no more at each save.
    assert sizes[-1] < 1.05 * sizes[0]
    assert len(set(sizes[1:])) == 1


def test_sends_everything_unless_a_writer_is_told_to_copy(run: Run) -> None:
    writer = run.writer(unchanged="send")
    run.save(lora(1), 1, writer)
    watch = Watch(writer)
    run.save(lora(2), 2, writer)
    assert watch.sent > nbytes(lora(2))
    assert not watch.calls["copy"]


# -- what happens to the source ---------------------------------------------------------------------------------------


def without(run: Run) -> None:
    store, found = run.objects(1)
    assert store.delete([info.key for info in found.values() if info.size > MIB]) == []


def replaced(run: Run) -> None:
    """Put other bytes of the same size where the weights lie, with the same table of digests."""
    store, found = run.objects(1)
    for info in found.values():
        if info.size > MIB:
            data = bytearray(store.get(info.key)[0])
            middle = len(data) // 2
            data[middle : middle + 1000] = bytes(1000)
            store.put(info.key, [memoryview(data)])


LOST: dict[str, Callable[[Run], None]] = {
    "object deleted": without,
    # fake-gcs-server ignores the condition of a copy.
    "object replaced": replaced,
    "checkpoint deleted": lambda run: run.delete(1),
}


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize(
    ("run", "restarted"),
    [*[(store, False) for store in ("minio", "gcs", "path", "memory")], ("path", True), ("minio", True)],
    indirect=["run"],
)
def test_sends_an_item_whose_source_is_gone_when_it_is_to_be_copied(
    run: Run, lost: str, restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = run.writer()
    run.save(lora(1), 1, writer)
    tried = []

    def copy_object(*args: Any) -> Any:
        tried.append(args)
        LOST[lost](run)
        return original(*args)

    original = module.copy_object
    monkeypatch.setattr(module, "copy_object", copy_object)
    writer = run.writer() if restarted else writer
    run.save(lora(2), 2, writer)
    assert len(tried) == 1
    run.assert_holds(2, lora(2))
    assert run.verified(2).damage == []
    # And the next one goes on from there.
    monkeypatch.undo()
    watch = Watch(writer)
    run.save(lora(3), 3, writer)
    assert watch.sent < LITTLE * nbytes(lora(3))
    run.assert_holds(3, lora(3))


@pytest.mark.parametrize(
    ("error", "acts"),
    [
        pytest.param(lambda: AccessDeniedError("403"), False, id="403"),
        pytest.param(lambda: TransientStoreError("500"), True, id="copied without an answer"),
        pytest.param(lambda: StoreError("copy failed: NotImplementedError"), False, id="no copies"),
        pytest.param(lambda: CorruptDataError("another size"), True, id="another size"),
    ],
)
def test_sends_everything_to_a_store_that_does_not_copy(
    run: Run, error: Callable[[], Exception], acts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_module, "pause", lambda seconds: None)
    writer = run.writer()
    watch = Watch(writer, lambda store: Refusing(store, error, acts=acts))
    for step in (1, 2, 3):
        run.save(lora(step), step, writer)
        run.assert_holds(step, lora(step))
        assert run.verified(step).damage == []
    assert watch.calls["copy"] >= 2


# -- kinds of items ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_any_size(monkeypatch)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("sent", [False, True], ids=["same process", "checkpoint process"])
def test_copies_every_kind_of_item_and_loads_it_back(run: Run, sent: bool, tmp_path: Path) -> None:
    writer = run.writer()
    for step in (1, 2, 3):
        # A checkpoint process gets another writer for each save, which knows what the store tells.
        used = pickle.loads(pickle.dumps(writer)) if sent else writer
        watch = Watch(used)
        run.save(varied(), step, used)
        run.assert_holds(step, varied())
        assert run.verified(step).damage == []
        if step > 1:
            assert watch.calls["copy"] >= 1
            run.delete(step - 1)
    # Tensors that are not laid out as they are stored are produced while they are sent, and have no digest.
    assert watch.sent < 0.1 * nbytes(varied())
    run.download(3, tmp_path / "fetched")
    assert_loads(varied(), FileSystemReader(tmp_path / "fetched"))


def test_limits_the_copies_under_way_on_a_rank_whatever_its_connections(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": {f"layer.{number}": torch.rand(MIB // 2) for number in range(12)}}
    writer = run.writer(target_object_bytes=MIB, transfer=TransferOptions(connections=16))
    run.save(state, 0, writer)
    copy, together = module.copy_object, threading.Barrier(module.COPIES_AT_ONCE)
    under_way: list[Any] = []
    seen: list[int] = []

    def counted(*arguments: Any) -> Any:
        under_way.append(arguments)
        seen.append(len(under_way))
        together.wait(60)
        # Time for a fifth one to begin, if there may be one.
        time.sleep(0.1)
        try:
            return copy(*arguments)
        finally:
            under_way.pop()

    monkeypatch.setattr(module, "copy_object", counted)
    run.save(state, 1, writer)
    assert (len(seen), max(seen)) == (12, module.COPIES_AT_ONCE)
    run.assert_holds(1, state)
