"""Loads beside a node's copy: which bytes come from the bucket, and that damage to the copy fails none."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import bucketpoint
from bucketpoint import BucketReader, BucketWriter, CheckpointManager, LoadPlanner, NodeCopy, TransferOptions
from bucketpoint.integrations.boxes import BoxReader, SavedBox
from bucketpoint.stores import LocalStore, node_copy
from bucketpoint.transfer import Block, BufferPool, Extent, Meter, fetch, plan_requests
from bucketpoint.transfer.checksum import crc32c
from dcp import scenarios
from dcp.cooperative.cooperative_scenarios import counted, expected_tensor
from dcp.ranks import Ranks
from kit import FaultProxy
from services import Service

SHAPE = (3000, 500)  # six megabytes, in blocks of half a megabyte


@pytest.fixture(autouse=True)
def logged_anew() -> None:
    node_copy._logged.clear()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/run/step-1"


@pytest.fixture
def copy(tmp_path: Path) -> NodeCopy:
    return NodeCopy(str(tmp_path / "copy"), 100_000_000)


def transfer(copy: NodeCopy | None, **options: Any) -> TransferOptions:
    return TransferOptions(node_copy=copy, part_bytes=3 << 20, **options)


def state(*, fill: bool) -> dict[str, Any]:
    weight, turned = expected_tensor(SHAPE), expected_tensor((300, 200)).t()
    made = {"model": {"w": weight, "t": turned, "b": torch.arange(7.0)}, "step": 9}
    return (
        made if fill else {"model": {name: torch.zeros_like(value) for name, value in made["model"].items()}, "step": 0}
    )


def save(url: str, copy: NodeCopy | None) -> None:
    dcp.save(state(fill=True), storage_writer=BucketWriter(url, transfer=transfer(copy)), no_dist=True)


def load(url: str, copy: NodeCopy | None) -> tuple[int, int]:
    """Load all of the state, which must be right. Return the bytes from the bucket and those from the copy."""
    loaded, reader = state(fill=False), BucketReader(url, transfer=transfer(copy))
    with counted() as count:
        dcp.load(loaded, storage_reader=reader, no_dist=True, planner=LoadPlanner())
    expected = state(fill=True)
    assert all(torch.equal(loaded["model"][name], value) for name, value in expected["model"].items())
    assert loaded["step"] == 9
    assert reader.stats is not None
    assert reader.stats.read_bytes == count.read
    return count.read, reader.stats.node_bytes


def load_rows(url: str, copy: NodeCopy, low: int, high: int) -> int:
    """Load rows of a tensor, which must be right. Return the bytes from the bucket."""
    target, reader = torch.zeros(high - low, SHAPE[1]), BoxReader(url, transfer=transfer(copy))
    with counted() as count:
        reader.load([SavedBox("model.w", (low, 0), target)], reader.read_metadata(), alone=True)
    assert torch.equal(target, expected_tensor(SHAPE)[low:high])
    return count.read


def files(copy: NodeCopy) -> list[Path]:
    return sorted(path for path in Path(copy.path).glob("*/*") if path.name[0].isdigit())


@pytest.mark.parametrize("background", ["process", "thread"])
def test_loads_what_was_saved_here_without_a_byte_from_the_bucket(url: str, copy: NodeCopy, background: Any) -> None:
    writer = BucketWriter(url, transfer=transfer(copy, background=background))
    bucketpoint.async_save(state(fill=True), checkpoint_id=url, storage_writer=writer, no_dist=True).result(60)
    writer.close()
    assert load(url, copy)[0] == 0
    shutil.rmtree(copy.path)
    read, held = load(url, copy)
    assert (read > 6_000_000, held) == (True, 0)
    assert load(url, copy) == (0, read)


def test_reads_only_the_rows_that_the_node_lacks(url: str, tmp_path: Path) -> None:
    save(url, None)
    node, quarter = NodeCopy(str(tmp_path / "node"), 100_000_000), SHAPE[0] // 4
    first = load_rows(url, node, 0, quarter)
    # Half as many ranks: of its half the first node has one half.
    whole = load_rows(url, NodeCopy(str(tmp_path / "new"), 100_000_000), 0, 2 * quarter)
    assert 0 < load_rows(url, node, 0, 2 * quarter) <= whole - first + 100  # and the table of checksums
    # A range of which the node has the beginning is read from there on.
    part = NodeCopy(str(tmp_path / "part"), 100_000_000)
    assert load_rows(url, part, 0, 100) + load_rows(url, part, 0, 2 * quarter) <= whole + 100
    # Twice as many ranks read nothing that their node has.
    assert [load_rows(url, node, low, low + quarter // 2) for low in range(0, 2 * quarter, quarter // 2)] == [0] * 4


def test_notices_and_heals_every_flipped_bit(url: str, copy: NodeCopy, caplog: pytest.LogCaptureFixture) -> None:
    save(url, None)
    nbytes, _ = load(url, copy)
    whole = {file: file.read_bytes() for file in files(copy)}
    assert len(whole) > 2
    for share in (0.0, 0.5, 0.999999, None):
        for file, data in whole.items():
            position = int(len(data) * (share or 0))
            flipped = bytes([data[position] ^ 16]) + data[position + 1 :]
            file.write_bytes(data[:-1] if share is None else data[:position] + flipped)
        assert load(url, copy) == (nbytes, 0)
        assert {file: file.read_bytes() for file in files(copy)} == whole
        assert load(url, copy) == (0, nbytes)
    assert len([record for record in caplog.records if "damaged" in record.getMessage()]) == 1


@pytest.mark.parametrize("case", ["process", "thread", "ends before the call"])
def test_commits_before_its_copy_and_loses_only_the_copy_if_its_process_is_killed(
    url: str, copy: NodeCopy, case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    background: Any = "process" if case == "process" else "thread"
    writer, infos, begin = BucketWriter(transfer=transfer(copy, background=background)), [], dcp.async_save
    os.mkdir(copy.path, 0o700)

    def begin_and_wait(*args: Any, **kwargs: Any) -> Any:
        begun = begin(*args, **kwargs)
        getattr(begun, "upload_completion", begun).result()
        return begun

    if case == "ends before the call":
        monkeypatch.setattr(dcp, "async_save", begin_and_wait)
    began = time.monotonic()
    with node_copy._locked("used", os.open(copy.path, os.O_RDONLY), 0, 1, 0.0):
        handle = bucketpoint.async_save(
            state(fill=True), checkpoint_id=url, storage_writer=writer, no_dist=True, on_commit=infos.append
        )
        while handle.stats is None:
            time.sleep(0.01)
        assert (Path(url.removeprefix("file://")) / ".metadata").exists()
        assert not handle.done()
        until_copy_s = time.monotonic() - began
        if background == "process":
            os.kill(writer.uploads.process_id or 0, signal.SIGKILL)
            handle.result(60)
    handle.result(60)
    monkeypatch.undo()
    assert [info.commit_s <= until_copy_s for info in infos] == [True]
    copied = background == "thread"
    assert bool(files(copy)) == copied
    assert len([record for record in caplog.records if "SIGKILL" in record.getMessage()]) == (not copied)
    assert (load(url, copy)[0] == 0) == copied
    bucketpoint.async_save(state(fill=True), checkpoint_id=url + "2", storage_writer=writer, no_dist=True).result(60)
    writer.close()
    assert load(url + "2", copy)[0] == 0


def test_restores_a_run_from_the_copy_and_logs_how_much(
    url: str, copy: NodeCopy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for loaded, step in ((state(fill=True), None), (state(fill=False), 9)):
        with CheckpointManager(url, keep=1, every=1, transfer=transfer(copy)) as manager, counted() as count:
            restored = manager.restore(loaded)
            assert (restored and restored.step) == step
            if step is None:
                manager.save(9, loaded)
    assert count.read == 0
    assert torch.equal(loaded["model"]["w"], expected_tensor(SHAPE))
    assert "6.2 MB of them from the node's copy" in caplog.text


@pytest.mark.parametrize("service", ["minio"], indirect=True)
def test_deletes_the_copy_of_a_pruned_checkpoint_at_the_next_look(service: Service, copy: NodeCopy) -> None:
    for step in (1, 2):
        writer = service.writer(service.url(f"step-{step}"), transfer=transfer(copy))
        dcp.save(state(fill=True), storage_writer=writer, no_dist=True)
    assert len(files(copy)) == 4
    for key in service.listed("step-1/"):
        service.delete(key)
    reader = service.reader(service.url("step-1"), transfer=transfer(copy))
    with pytest.raises(dcp.CheckpointException, match="no checkpoint"):
        dcp.load(state(fill=False), storage_reader=reader, no_dist=True)
    dcp.load(
        state(fill=False),
        storage_reader=service.reader(service.url("step-2"), transfer=transfer(copy)),
        no_dist=True,
    )
    assert len(files(copy)) == 2


def test_keeps_no_bytes_without_a_checksum(url: str, copy: NodeCopy, tmp_path: Path) -> None:
    path = url.removeprefix("file://")
    dcp.save(state(fill=True), storage_writer=FileSystemWriter(path), no_dist=True)
    assert load(url, copy) == load(url, copy)
    assert not files(copy)
    # That checkpoint names no ETags either.
    store, content = LocalStore(str(tmp_path / "bucket")), os.urandom(1000)
    etag = store.put("k", [memoryview(content)]).etag
    for blocks, kept in (([], 0), ([Block(1000, crc32c(memoryview(content)))], 1)):
        extents = [Extent("k", 0, 1000, lambda view: None, blocks, etag=etag)]
        options, meter = transfer(copy), Meter("load", url, 0, None)
        fetch(store, plan_requests(extents, options), options, pool=BufferPool(1 << 20), meter=meter)
        assert len(files(copy)) == kept


def load_from_a_server(rank: int, world: int, url: str, options: dict[str, Any], copy: NodeCopy) -> tuple[int, int]:
    """Every rank loads all of the state, as servers of a node do."""
    loaded = state(fill=False)
    reader = BucketReader(url, storage_options=options, transfer=transfer(copy))
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert torch.equal(loaded["model"]["w"], expected_tensor(SHAPE))
    assert reader.stats is not None
    return reader.stats.read_bytes, reader.stats.node_bytes


@pytest.mark.parametrize("service", ["minio"], indirect=True)
def test_reads_each_byte_once_for_all_processes_of_a_node(
    four_ranks: Ranks, service: Service, proxy: FaultProxy, copy: NodeCopy
) -> None:
    url, options = service.url("step"), service.at(proxy.url).options
    dcp.save(state(fill=True), storage_writer=BucketWriter(url, storage_options=options), no_dist=True)
    nbytes = sum(map(len, (service.read(key) for key in service.listed() if key.endswith(".distcp"))))
    for wanted in (1.02 * nbytes, 0):
        figures = four_ranks.run(load_from_a_server, url, options, copy)
        assert sum(read for read, _ in figures) <= wanted
        assert sum(read + held for read, held in figures) >= 0.99 * 4 * nbytes


def load_shards(rank: int, world: int, url: str, copies: list[NodeCopy], mode: Any) -> tuple[int, int, str]:
    loaded, transfers = scenarios.sharded_state(world, fill=False), transfer(copies[rank])
    reader = BucketReader(transfer=transfers, cooperative=mode)
    with counted() as count:
        dcp.load(loaded, checkpoint_id=url, storage_reader=reader, planner=LoadPlanner())
    scenarios.assert_state(loaded)
    assert reader.stats is not None
    return count.read, reader.stats.node_bytes, reader.explain()


def save_shards(rank: int, world: int, url: str, copies: list[NodeCopy]) -> None:
    writer = BucketWriter(transfer=transfer(copies[rank]))
    dcp.save(scenarios.sharded_state(world, fill=True), checkpoint_id=url, storage_writer=writer)


def test_takes_the_place_of_the_exchange_between_ranks(four_ranks: Ranks, url: str, copy: NodeCopy) -> None:
    four_ranks.run(save_shards, url, [copy] * 4)
    for read, _, explained in four_ranks.run(load_shards, url, [copy] * 4, "node"):
        assert (read, explained) == (0, "Plain: the 4 ranks share the node's copy")


def test_reads_for_a_lost_node_only_what_its_rank_needs(four_ranks: Ranks, url: str, tmp_path: Path) -> None:
    nodes, none = ([NodeCopy(f"{tmp_path}/{name}-{rank}", 100_000_000) for rank in range(4)] for name in ("node", "no"))
    four_ranks.run(save_shards, url, nodes)
    needs = [read for read, *_ in four_ranks.run(load_shards, url, none, "off")]
    first = [figures[:2] for figures in four_ranks.run(load_shards, url, nodes, "off")]
    # Each node has what its rank sent. Replicated tensors were sent by one rank, so the others read them once.
    assert [read + held for read, held in first] == needs
    sent = sum(os.path.getsize(path) for path in Path(url.removeprefix("file://")).rglob("*.distcp"))
    assert 0.99 * sent < sum(held for _, held in first) <= sent
    shutil.rmtree(nodes[2].path)
    again = [figures[:2] for figures in four_ranks.run(load_shards, url, nodes, "off")]
    assert again == [(needs[rank], 0) if rank == 2 else (0, needs[rank]) for rank in range(4)]
