"""The last checkpoint is untrusted: whatever it says, the next one holds what was saved, or its save raises."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint.errors import BucketpointError
from bucketpoint.format.metadata.codec import decode_metadata, encode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.transfer.digest import DIGEST_BYTES
from dcp.saving.copied_saves import Run, lora

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
        from bucketpoint.stores import open_store

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


def no_digests(data: bytearray) -> None:
    count = int.from_bytes(data[-24:-16], "little")
    at = len(data) - 24 - count * (DIGEST_BYTES + 8)
    data[at : at + count * DIGEST_BYTES] = os.urandom(count * DIGEST_BYTES)


def exchanged_digests(data: bytearray) -> None:
    count = int.from_bytes(data[-24:-16], "little")
    at = len(data) - 24 - count * (DIGEST_BYTES + 8)
    data[at : at + count * DIGEST_BYTES] = b"".join(
        bytes(data[at + number * DIGEST_BYTES : at + (number + 1) * DIGEST_BYTES]) for number in reversed(range(count))
    )


def wrong_offsets(data: bytearray) -> None:
    count = int.from_bytes(data[-24:-16], "little")
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


@pytest.mark.parametrize("data", [b"", b"junk", b"\x80\x02.", bytes(100)], ids=["empty", "text", "pickle", "zeros"])
def test_compares_with_no_checkpoint_without_readable_metadata(tmp_path: Path, data: bytes) -> None:
    run = Run(str(tmp_path / "run"))
    run.save(lora(1), 1, run.writer())
    Path(run.url(1), ".metadata").write_bytes(data)
    run.save(lora(2), 2, run.writer())
    assert loads_or_raises(run, 2)


def test_copies_nothing_of_a_checkpoint_of_another_writer(tmp_path: Path) -> None:
    run = Run(str(tmp_path / "run"))
    dcp.save(lora(1), storage_writer=dcp.FileSystemWriter(run.url(1)), no_dist=True)
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
