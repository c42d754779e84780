"""What a filesystem of fsspec is found to guarantee, and what a commit makes of it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from awscrt import checksums
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from bucketpoint.doctor.examine import examine
from bucketpoint.errors import CorruptDataError, EndpointError, ObjectNotFoundError, PreconditionFailedError, StoreError
from bucketpoint.stores import proven
from bucketpoint.stores.base import SCRATCH
from bucketpoint.stores.fsspec import FsspecStore, drivers
from bucketpoint.transfer import BufferPool, Extent, Meter, TransferOptions, fetch, plan_requests
from bucketpoint.transfer.copy import copy_whole
from fsspec_backends import IN_PROCESS, SERVED, Backend, backend

MIB = 1 << 20


@pytest.fixture(params=[*IN_PROCESS, *SERVED])
def found(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with backend(request.param, request, tmp_path) as one:
        yield one


class RecordingFileSystem(AsyncFileSystem):
    """A dict with an event loop: remembers what was asked for, and how many at once."""

    protocol = "recording"
    cachable = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.content: dict[str, bytes] = {}
        self.calls: list[tuple[int, int]] = []
        self.at_once = self.most_at_once = 0
        self.broken: set[str] = set()
        self.breaks_once: set[int] = set()

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **settings: Any) -> bytes:
        self.calls.append((start, end))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        if path in self.broken:
            self.broken.discard(path)
            raise TimeoutError("the connection was lost")
        if start in self.breaks_once:
            self.breaks_once.discard(start)
            raise BlockingIOError(errno.EAGAIN, "the connection was lost")
        return self.content[self._strip_protocol(path)][start:end]

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **settings: Any) -> None:
        self.content[self._strip_protocol(path)] = bytes(value)

    async def _info(self, path: str, **settings: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path not in self.content:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.content[path]), "type": "file", "etag": str(hash(self.content[path]))}

    async def _rm_file(self, path: str, **settings: Any) -> None:
        self.content.pop(self._strip_protocol(path), None)


ROWS = {
    "s3fs": "s3fs, on MinIO",
    "gcsfs": "gcsfs, on fake-gcs-server",
    "adlfs": "adlfs, on Azurite",
    "memory": "memory",
    "file": "file and `dir`, through fsspec",
    "dir": "file and `dir`, through fsspec",
    "async": "any other",
}


def promised(name: str) -> list[str]:
    """The row of the table of guarantees."""
    text = (Path(__file__).parents[3] / "docs" / "stores.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if line[:1] == "|"]
    head = next(row for row in rows if row[1:2] == ["a commit creates only"])
    (found,) = [row for row in rows if row[0] == ROWS[name] and len(row) == len(head)]
    return found[1:]


@pytest.mark.contract
def test_finds_by_the_fsspec_probe_what_the_page_promises_and_doctor_shows(found: Backend) -> None:
    store = FsspecStore(found.fs, found.root)
    able = proven(store, "")
    held = able.conditional_put and able.conditional_replace
    assert (able.conditional_put, held) == (found.creates, found.replaces)
    assert (able.checksums, able.multipart) == (found.checks, found.parts)
    assert able == store.capabilities

    creates, replaces, checks, parts = promised(found.name)
    assert creates.startswith("yes" if able.conditional_put else "checks, writes, checks again")
    assert replaces.startswith("yes" if held else "checks, writes, checks again")
    assert checks.startswith("yes" if able.checksums else "no")
    assert parts.startswith("yes" if able.multipart else "no")
    if able.multipart and able.min_part_bytes >= MIB:
        assert f"from {able.min_part_bytes // MIB} MiB on" in parts

    seen = examine(store, "", probe_bytes=0)
    status = {one.check: one.status for one in seen.findings}
    assert seen.ok, [one for one in seen.findings if one.status == "fail"]
    assert status["filesystem"] == "ok"
    assert status["conditional commit"] == ("ok" if found.creates else "warn")
    if found.creates:
        assert status["conditional replace"] == ("ok" if found.replaces else "warn")
        assert status["create-only put"] == "ok"
    assert status["upload checksum"] == ("ok" if found.checks else "skip")
    assert status["parallel parts"] == ("ok" if found.parts else "skip")
    assert found.left_behind() == []


class ForgetfulFileSystem(MemoryFileSystem):
    """Looks like s3fs and passes every condition on, to a service that ignores them."""

    protocol = "forgetful"
    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec's own shape)
    pseudo_dirs = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **settings: Any) -> None:
        super().pipe_file(path, value)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> FsspecStore:
    class Trusting(drivers.S3FS):
        limits: ClassVar[dict[str, int]] = {}

    fs = ForgetfulFileSystem()
    monkeypatch.setattr("bucketpoint.stores.fsspec.store.driver_of", lambda _: Trusting())
    return FsspecStore(fs, f"/forgetful-{os.urandom(4).hex()}")


def test_distrusts_conditions_that_a_service_ignores_and_says_so_once(
    forgetful: FsspecStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert forgetful.capabilities.conditional_put
    with caplog.at_level(logging.WARNING, logger="bucketpoint"):
        able = proven(forgetful, "run")
        assert able == proven(forgetful, "run")
    assert not able.conditional_put
    assert not able.checksums
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "reads .metadata before and after the write" in said[0]
    assert "ignores the condition" in said[0]
    assert not any(SCRATCH in name for name in forgetful.fs.store)
    forgetful.put("k", [memoryview(b"first")], if_none_match=True)
    with pytest.raises(PreconditionFailedError):
        forgetful.put("k", [memoryview(b"second")], if_none_match=True)


def test_learns_nothing_from_a_probe_that_failed(forgetful: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError("nobody listens")

    with monkeypatch.context() as patch:
        patch.setattr(ForgetfulFileSystem, "pipe_file", unreachable)
        with pytest.raises(EndpointError, match="storage_options"):
            proven(forgetful, "")
    assert forgetful.capabilities.conditional_put
    assert not proven(forgetful, "").conditional_put


def test_removes_a_body_whose_checksum_differs_at_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = RecordingFileSystem()
    store = FsspecStore(fs, "bucket/run")
    monkeypatch.setattr("bucketpoint.stores.fsspec.store.driver_of", lambda _: drivers.GCSFS())
    good = checksums.crc32c(b"body")

    async def info(path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": 4, "type": "file", "etag": "1", "crc32c": "AAAAAA=="}

    monkeypatch.setattr(fs, "_info", info)
    monkeypatch.setattr(fs, "info", lambda path, **_: asyncio.run(info(path)))
    with pytest.raises(CorruptDataError):
        store.put("k", [memoryview(b"body")], crc32c=good)
    assert fs.content == {}


def test_shows_a_file_or_a_copy_of_one_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(fsspec.filesystem("file"), str(tmp_path))
    source = store.put("folder/k", [memoryview(b"old")])

    def half(fs: Any, path: str, data: bytes | str, **settings: Any) -> None:
        """Writes, or copies to the path `data`."""
        target = Path(data if isinstance(data, str) else path)
        assert target.name not in ("k", "t")
        target.write_bytes(b"ha")
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(type(store.fs), "pipe_file", half)
        patch.setattr(type(store.fs), "cp_file", half)
        for write in (lambda: store.put("folder/k", [memoryview(b"new one")]), lambda: store.copy(source, "folder/t")):
            with pytest.raises(StoreError, match="disk is full"):
                write()
    assert store.get("folder/k")[0] == b"old"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["k"]


def read_through(store: FsspecStore, cuts: list[tuple[int, int]], **settings: Any) -> bytearray:
    into, extents, at = bytearray(sum(stop - start for start, stop in cuts)), [], 0
    for start, stop in cuts:
        view = memoryview(into)[at : at + stop - start]
        at += stop - start
        extents.append(Extent("k", start, stop, lambda _: None, direct=view, direct_start=start))
    options = TransferOptions(**settings)
    pool = BufferPool(options.max_inflight_bytes)
    fetch(store, plan_requests(extents, options), options, pool=pool, meter=Meter("load", "x", 0, None))
    return into


def recording(nbytes: int) -> tuple[RecordingFileSystem, FsspecStore, bytes]:
    """A filesystem, the store on it, and the content of its object "k"."""
    fs, content = RecordingFileSystem(), os.urandom(nbytes)
    fs.content["bucket/k"] = content
    return fs, FsspecStore(fs, "bucket"), content


@pytest.mark.parametrize("left", [None, b"the other writer's"])
def test_refuses_a_write_that_another_writer_undoes(monkeypatch: pytest.MonkeyPatch, left: bytes | None) -> None:
    store = FsspecStore(MemoryFileSystem(), f"/deleted-{os.urandom(4).hex()}")
    etag, write = store.put("k", [memoryview(b"first")]).etag, MemoryFileSystem.pipe_file
    other = lambda fs, path, data: fs.rm_file(path) if left is None else write(fs, path, left)  # noqa: E731
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", other)
    with pytest.raises(PreconditionFailedError):
        store.put("k", [memoryview(b"second")], if_match=etag)


def test_lists_memory_again_beside_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [RuntimeError("dictionary changed size during iteration")] * 3
    find = MemoryFileSystem.find

    def beside_writers(fs: MemoryFileSystem, *given: Any, **settings: Any) -> Any:
        if failures:
            raise failures.pop()
        return find(fs, *given, **settings)

    store = FsspecStore(MemoryFileSystem(), "/listed-beside-writers")
    store.put("a", [memoryview(b"1")])
    monkeypatch.setattr(MemoryFileSystem, "find", beside_writers)
    assert [info.key for info in store.list("")] == ["a"]
    assert failures == []


def test_reads_ranges_at_once_and_no_byte_more_than_asked_for() -> None:
    fs, store, content = recording(4 * MIB)
    # Too far apart to be joined: each is a range of its own.
    cuts = [(at, at + 1000) for at in range(0, len(content), 100_000)]
    assert read_through(store, cuts, connections=8) == b"".join(content[a:b] for a, b in cuts)
    assert sorted(fs.calls) == cuts
    assert 1 < fs.most_at_once <= 8


def test_cuts_a_large_range_and_holds_no_more_than_the_budget() -> None:
    fs, store, content = recording(12 * MIB)
    cuts = [(at, min(at + 3 * MIB, len(content))) for at in range(0, len(content), 3 * MIB)]
    settings = {"connections": 8, "max_inflight_bytes": 2 * MIB, "part_bytes": 3 * MIB}
    assert read_through(store, cuts, **settings) == content
    assert max(end - start for start, end in fs.calls) * fs.most_at_once <= 2 * MIB
    asked = sorted(fs.calls)
    assert [start for start, _ in asked] == [0, *(end for _, end in asked[:-1])]


def test_asks_again_for_a_range_that_fails_for_now_and_raises_for_a_short_one() -> None:
    fs, store, content = recording(MIB)
    fs.broken.add("bucket/k")
    assert read_through(store, [(0, 1000), (500_000, 600_000)]) == content[:1000] + content[500_000:600_000]
    with pytest.raises(CorruptDataError):
        read_through(store, [(MIB - 10, MIB + 10)])


def test_asks_again_only_for_the_pieces_of_a_large_range_that_fail() -> None:
    fs, store, content = recording(12 * MIB)
    starts = range(0, 12 * MIB, MIB)
    fs.breaks_once.update(starts)
    settings = {"connections": 8, "max_inflight_bytes": 4 * MIB, "part_bytes": 12 * MIB, "read_attempts": 2}
    assert read_through(store, [(0, 12 * MIB)], **settings) == content
    assert sorted(fs.calls) == sorted(2 * [(start, start + MIB) for start in starts])


@pytest.mark.contract
def test_returns_exactly_the_ranges_that_were_asked_for_of_every_filesystem(found: Backend) -> None:
    store, content = FsspecStore(found.fs, found.root), os.urandom(MIB)
    store.put("k", [memoryview(content)])
    cuts = [(0, 1), (70_000, 170_000), (500_000, 500_001), (MIB - 1, MIB)]
    assert read_through(store, cuts, free_gap_bytes=0) == b"".join(content[a:b] for a, b in cuts)


def test_refuses_copies_on_a_filesystem_without_them_with_an_error_of_ours() -> None:
    _, store, _ = recording(1)
    with pytest.raises(StoreError, match="NotImplementedError"):
        store.copy(store.head("k"), "t")


@pytest.mark.parametrize("change", ["replaced", "deleted", "cut"])
def test_refuses_and_deletes_a_copy_whose_source_changes_meanwhile(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("file")
    store = FsspecStore(fs, str(tmp_path))
    source = store.put("k", [memoryview(b"content")])
    original = type(fs).cp_file

    def copy(self: Any, path: str, target: str, **options: Any) -> None:
        original(self, path, target, **options)
        if change == "cut":
            Path(target).write_bytes(b"con")
        else:
            store.delete(["k"])
        if change == "replaced":
            store.put("k", [memoryview(b"another")])

    monkeypatch.setattr(type(fs), "cp_file", copy)
    errors = {"replaced": PreconditionFailedError, "deleted": ObjectNotFoundError, "cut": CorruptDataError}
    with pytest.raises(errors[change]):
        copy_whole(store, source, "t")
    assert not (tmp_path / "t").exists()
    assert [path.name for path in tmp_path.iterdir()] == ([] if change == "deleted" else ["k"])
