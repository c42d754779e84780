"""Copied objects hold bytes that no item uses, and the last checkpoint is untrusted: no tool and no save is misled."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.summary import summarise
from bucketpoint.dcp.copy import copy_checkpoint, plan_copy
from bucketpoint.errors import BucketpointError, TransientStoreError
from bucketpoint.format.metadata.codec import decode_metadata, encode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.metadata.thinning import Outline
from bucketpoint.stores import open_store
from bucketpoint.transfer.checksum import DIGEST_BYTES
from dcp.saving.copied_saves import Refusing, Run, Watch, lora, nbytes

HUGE = (1 << 62) - 1


@dataclass
class Last:
    """The last checkpoint of a run, to be altered: its metadata, its facts, and the one object of the weights."""

    folder: Path
    metadata: Any
    facts: dict[str, Any]
    path: str

    @classmethod
    def of(cls, run: Run) -> Last:
        folder = Path(run.url(1))
        metadata = decode_metadata((folder / ".metadata").read_bytes())
        facts = dict(extra(metadata))
        path = max(facts["objects"], key=lambda path: facts["objects"][path]["size"])
        return cls(folder, metadata, facts, path)

    @property
    def infos(self) -> list[Any]:
        """The items of the weights, the largest first."""
        found = [info for info in self.metadata.storage_data.values() if info.relative_path == self.path]
        return sorted(found, key=lambda info: -info.length)

    @property
    def object(self) -> Path:
        return self.folder / self.path

    def pin(self) -> None:
        """Name the object's present size and ETag, as if it had been committed so."""
        info = open_store(str(self.folder))[0].head(self.path)
        self.facts["objects"][self.path] = {"size": info.size, "etag": info.etag}

    def store(self) -> None:
        (self.folder / ".metadata").write_bytes(encode_metadata(self.metadata, bucketpoint=self.facts))


def exchange(last: Last, *names: str) -> None:
    one, other = last.infos[0], last.infos[1]
    for name in names:
        left, right = getattr(one, name), getattr(other, name)
        setattr(one, name, right)
        setattr(other, name, left)


def each(last: Last, name: str, value: Callable[[Any], Any]) -> None:
    for info in last.infos:
        setattr(info, name, value(getattr(info, name, None)))


def fact(last: Last, name: str, value: Any) -> None:
    last.facts["objects"][last.path] = {**last.facts["objects"][last.path], name: value}


def of_another(last: Last, path: str) -> None:
    each(last, "relative_path", lambda _: path)
    last.facts["objects"][path] = last.facts["objects"][last.path]


def rewrite(last: Last, alter: Callable[[bytearray], None]) -> None:
    data = bytearray(last.object.read_bytes())
    alter(data)
    last.object.write_bytes(data)
    last.pin()


def other_bytes(data: bytearray) -> None:
    data[100_000:200_000] = os.urandom(100_000)


def table_of(data: bytearray) -> tuple[int, int]:
    """How many digests the table at the end of an object has, and where they begin; the offsets come after them."""
    count = int.from_bytes(data[-24:-16], "little")
    return count, len(data) - 24 - count * (DIGEST_BYTES + 8)


def no_digests(data: bytearray) -> None:
    count, at = table_of(data)
    data[at : at + count * DIGEST_BYTES] = os.urandom(count * DIGEST_BYTES)


def exchanged_digests(data: bytearray) -> None:
    count, at = table_of(data)
    digests = [bytes(data[at + number * DIGEST_BYTES :][:DIGEST_BYTES]) for number in range(count)]
    data[at : at + count * DIGEST_BYTES] = b"".join(reversed(digests))


def wrong_offsets(data: bytearray) -> None:
    count, _ = table_of(data)
    data[-24 - 8 * count : -24] = b"".join(number.to_bytes(8, "little") for number in range(count))


def cut(data: bytearray) -> None:
    del data[: len(data) // 2]


ALTERED: dict[str, Callable[[Last], None]] = {
    "offsets exchanged": lambda last: exchange(last, "offset"),
    "places exchanged": lambda last: exchange(last, "offset", "bp_crc"),
    "checksums exchanged": lambda last: exchange(last, "bp_crc"),
    "no checksums": lambda last: each(last, "bp_crc", lambda _: None),
    "offset beyond the end": lambda last: each(last, "offset", lambda offset: offset + HUGE // 2),
    "huge length": lambda last: each(last, "length", lambda _: HUGE),
    "longer": lambda last: each(last, "length", lambda length: length + 1),
    "other payload": lambda last: each(last, "bp_po", lambda at: at and at + 8),
    "negative offset": lambda last: each(last, "offset", lambda _: -1),
    "a list for an offset": lambda last: each(last, "offset", lambda _: [1]),
    "transformed": lambda last: each(last, "transform_descriptors", lambda _: ["zstd"]),
    "table elsewhere": lambda last: each(last, "bp_to", lambda _: 7) or each(last, "bp_tn", lambda _: 4096),  # type: ignore[func-returns-value]
    "path above": lambda last: of_another(last, "../step-0/data/x.distcp"),
    "path of the root": lambda last: of_another(last, "/etc/passwd"),
    "size of nothing": lambda last: fact(last, "size", 0),
    "huge size": lambda last: fact(last, "size", 1 << 59),
    "size off by one": lambda last: fact(last, "size", last.object.stat().st_size - 1),
    "negative size": lambda last: fact(last, "size", -5),
    "a number for an ETag": lambda last: fact(last, "etag", 7),
    "no ETag": lambda last: fact(last, "etag", None),
    "a header in the ETag": lambda last: fact(last, "etag", "x\r\nX-Evil: 1"),
    "no objects": lambda last: last.facts.update(objects={}),
    "objects of text": lambda last: last.facts.update(objects="all"),
    "a newer format": lambda last: last.facts.update(format=99),
    "other bytes": lambda last: rewrite(last, other_bytes),
    "digests of nothing": lambda last: rewrite(last, no_digests),
    "digests exchanged": lambda last: rewrite(last, exchanged_digests),
    "wrong offsets in the table": lambda last: rewrite(last, wrong_offsets),
    "cut in half": lambda last: rewrite(last, cut),
}


def loads_or_raises(run: Run, step: int) -> bool:
    """Return True if the checkpoint holds what was saved; False if a load of it raises. Other values are a failure."""
    try:
        run.assert_holds(step, lora(step))
    except dcp.CheckpointException as failure:
        errors = [error for error, _ in failure.failures.values()]
    else:
        return True
    assert all(isinstance(error, BucketpointError) for error in errors), errors
    return False


@pytest.mark.parametrize("altered", ALTERED)
def test_copies_no_altered_checkpoint_as_something_else(tmp_path: Path, altered: str) -> None:
    run = Run(str(tmp_path / "run"))
    run.save(lora(1), 1, run.writer())
    last = Last.of(run)
    ALTERED[altered](last)
    last.store()
    run.save(lora(2), 2, run.writer())
    # Who can write to the bucket can store other bytes under the digests of ours, which are copied, and not believed.
    assert loads_or_raises(run, 2) is (altered != "other bytes")


@pytest.mark.parametrize(
    "data", [None, b"", b"junk", b"\x80\x02.", bytes(100)], ids=["foreign", "empty", "text", "pickle", "zeros"]
)
def test_compares_with_no_checkpoint_that_it_cannot_read(tmp_path: Path, data: bytes | None) -> None:
    run = Run(str(tmp_path / "run"))
    writer: Any = dcp.FileSystemWriter(run.url(1)) if data is None else run.writer()
    run.save(lora(1), 1, writer)
    if data is not None:
        Path(run.url(1), ".metadata").write_bytes(data)
    run.save(lora(2), 2, run.writer())
    assert loads_or_raises(run, 2)


def test_sends_an_item_of_the_same_digest_but_other_bytes_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who chooses the bytes can make two items with one digest. Here any two have.
    for name in ("unchanged", "object_layout"):
        monkeypatch.setattr(f"bucketpoint.dcp.saving.{name}.digest", lambda view, seed: bytes(DIGEST_BYTES))
    monkeypatch.setattr("bucketpoint.transfer.upload.fold", lambda *args: bytes(DIGEST_BYTES))
    run = Run(str(tmp_path / "run"))
    run.save({"w": torch.zeros(1 << 19)}, 1, run.writer())
    run.save({"w": torch.ones(1 << 19)}, 2, run.writer())
    run.assert_holds(2, {"w": torch.ones(1 << 19)})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two checkpoints, of which the second has copied objects, without the first."""
    run = Run(str(tmp_path / "run"))
    writer = run.writer()
    run.save(lora(1), 1, writer)
    watch = Watch(writer)
    run.save(lora(2), 2, writer)
    assert watch.calls["copy"] == 1
    run.delete(1)
    return run


def test_loads_a_copy_of_it_elsewhere_and_copies_from_it_again(run: Run, tmp_path: Path) -> None:
    other = Run(str(tmp_path / "other"))
    copy_checkpoint(plan_copy(open_checkpoint(run.url(2)), other.url(2)))
    other.assert_holds(2, lora(2))
    assert other.verified(2).damage == []
    writer = other.writer()
    watch = Watch(writer)
    other.save(lora(3), 3, writer)
    other.assert_holds(3, lora(3))
    assert watch.sent < 0.03 * nbytes(lora(3))


def test_misleads_neither_gc_nor_a_summary_by_its_dead_bytes(run: Run, tmp_path: Path) -> None:
    before = sorted(Path(run.url(2)).rglob("*"))
    assert not sweep(open_catalog(run.root), older_than=3600, deep=True).failures
    assert sorted(Path(run.url(2)).rglob("*")) == before
    run.assert_holds(2, lora(2))
    plain = Run(str(tmp_path / "plain"))
    plain.save(lora(2), 2, plain.writer(unchanged="send"))
    ours, theirs = (summarise(open_checkpoint(each.url(2))) for each in (run, plain))
    assert ours.entries == theirs.entries


def test_deletes_what_a_copy_without_an_answer_left_by_gc(tmp_path: Path) -> None:
    run = Run(str(tmp_path / "run"))
    writer = run.writer()
    Watch(writer, lambda store: Refusing(store, lambda: TransientStoreError("no answer"), acts=True))
    for step in (1, 2):
        run.save(lora(step), step, writer)
    data = sorted(Path(run.url(2)).rglob("*-model-*.distcp"), key=lambda path: path.stat().st_mtime_ns)
    assert len(data) == 3
    (left,) = (path for path in data if path.name.endswith("-model-0.distcp"))
    os.utime(left, (0, 0))
    assert [key.rpartition("/")[2] for key in sweep(open_catalog(run.root), deep=True).objects] == [left.name]
    run.assert_holds(2, lora(2))
    assert run.verified(2).damage == []


def test_keeps_what_was_copied_when_it_is_thinned_to_its_weights(run: Run) -> None:
    path = Path(run.url(2), ".metadata")
    data = Outline(path.read_bytes()).thinned()
    gone = {info.relative_path for index, info in decode_metadata(path.read_bytes()).storage_data.items()} - {
        info.relative_path for info in decode_metadata(data).storage_data.values()
    }
    for each in gone:
        Path(run.url(2), each).unlink()
    path.write_bytes(data)
    weights = {"model": lora(2)["model"], "step": 2, "note": lora(2)["note"]}
    run.assert_holds(2, weights)
    # What is left of it can be copied, and the rest is sent.
    writer = run.writer()
    watch = Watch(writer)
    run.save(lora(3), 3, writer)
    assert watch.calls["copy"] == 1
    run.assert_holds(3, lora(3))
