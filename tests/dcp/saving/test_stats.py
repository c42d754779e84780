"""Figures of saves and loads, and what a program is told of a commit: on each rank, and on the coordinator of all."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import bucketpoint
from bucketpoint import BucketpointError, BucketReader, BucketWriter, CommitInfo, SavePlanner, TransferOptions
from bucketpoint.format.record import CommitRecord
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Keep, RetentionPolicy
from dcp.ranks import Ranks
from dcp.saving.async_scenarios import FailingPlanner, GatedFileSystem
from kit import FaultProxy, Refuse, Rule, Script
from kit.servers import S3Server

MIB = 1 << 20


def state(mib: int = 12) -> dict[str, Any]:
    return {"weight": torch.arange(mib * MIB // 4, dtype=torch.float32)}


@pytest.mark.parametrize("background", ["thread", "process"])
def test_counts_each_request_of_a_save_and_of_a_load_that_the_store_receives(minio: S3Server, background: str) -> None:
    options = TransferOptions(part_bytes=5 * MIB, single_put_bytes=5 * MIB, background=background)  # type: ignore[arg-type]
    bucket = minio.make_bucket()
    with FaultProxy(minio.endpoint) as proxy:
        writer = BucketWriter(storage_options=minio.at(proxy.url).options, transfer=options)
        handle = bucketpoint.async_save(state(), f"s3://{bucket}/run/step-1", storage_writer=writer)
        handle.result()
        writer.close()
        received = proxy.counts.requests
        proxy.clear()
        reader = BucketReader(handle.url, storage_options=minio.at(proxy.url).options, transfer=options)
        assert reader.stats is None
        dcp.load(state(), storage_reader=reader, no_dist=True)
        asked = proxy.counts.requests
    stats = handle.stats
    assert stats.requests["create_multipart"] == received["CreateMultipartUpload"] == 1
    assert stats.requests["put_part"] == received["UploadPart"] == 3
    assert stats.requests["complete_multipart"] == received["CompleteMultipartUpload"] == 1
    assert stats.requests["put"] == received["PutObject"]
    assert sum(stats.requests.values()) == received.total()
    assert (stats.retried, stats.throttled) == (0, 0)
    loaded = reader.stats
    assert loaded.read_bytes == 12 * MIB
    assert dict(loaded.requests) == {"get": asked["GetObject"]}
    assert min(loaded.metadata_s, loaded.planning_s, loaded.read_s) > 0
    assert loaded.metadata_s + loaded.planning_s + loaded.read_s == pytest.approx(loaded.total_s)
    assert (loaded.retried, loaded.throttled) == (0, 0)


def test_counts_retries_and_throttled_answers_of_a_save(minio: S3Server) -> None:
    with FaultProxy(minio.endpoint) as proxy:
        writer = BucketWriter(storage_options=minio.at(proxy.url).options)
        url = f"s3://{minio.make_bucket()}/run/step-1"
        slow, broken = Refuse(503, "SlowDown"), Refuse(500, "InternalError")
        proxy.play(
            Script((Rule((slow,), ("PutObject",), times=2), Rule((broken,), ("PutObject",), keys="*/data/*", times=1)))
        )
        handle = bucketpoint.async_save({"weight": torch.ones(10)}, url, storage_writer=writer)
        handle.result()
    stats = handle.stats
    assert (stats.throttled, stats.retried) == (2, 1)
    # The data, `.metadata`, the record and the fence: three of the attempts were answered by the proxy.
    assert stats.requests["put"] == proxy.counts.requests["PutObject"]


def test_adds_up_the_seconds_of_a_save(tmp_path: Path) -> None:
    began = time.monotonic()
    told: list[CommitInfo] = []
    handle = bucketpoint.async_save(state(4), str(tmp_path / "step-1"), on_commit=told.append)
    assert handle.stats is None or handle.done()
    handle.result()
    elapsed = time.monotonic() - began
    stats = handle.stats
    assert [info.stats for info in told] == [stats]
    phases = (stats.staging_s, stats.planning_s, stats.upload_s, stats.waiting_s, stats.commit_s)
    assert min(phases) > 0
    assert sum(phases) + stats.queued_s <= stats.total_s <= elapsed
    assert 0 < stats.blocked_s <= stats.total_s
    assert stats.staged_bytes == 4 * MIB
    assert stats.memory_bytes >= 4 * MIB
    assert 4 * MIB < stats.sent_bytes < 5 * MIB
    assert stats.upload_bytes_per_s == pytest.approx(stats.sent_bytes / stats.upload_s)
    assert {name: spread.slowest for name, spread in stats.ranks.items()} == dict.fromkeys(stats.ranks, 0)
    assert stats.ranks["sent_bytes"].max == stats.sent_bytes
    record = CommitRecord.from_json((tmp_path / "step-1" / ".bucketpoint.json").read_bytes())
    assert record.seconds is not None
    # To the millisecond. The commit itself comes after.
    assert sum(phases) - stats.commit_s - 1e-3 <= record.seconds <= stats.total_s + 1e-3


def test_says_that_a_save_waited_for_the_one_before(tmp_path: Path) -> None:
    gated = GatedFileSystem()
    writer = BucketWriter(fs=gated)
    first = bucketpoint.async_save(state(1), str(tmp_path / "step-1"), storage_writer=writer)
    assert gated.arrived.wait(60)
    second = bucketpoint.async_save(state(1), str(tmp_path / "step-2"), storage_writer=BucketWriter())
    began = time.monotonic()
    while "step-2" not in repr(second._lease):
        time.sleep(0.01)
    time.sleep(0.05)
    queued = time.monotonic() - began
    gated.gate.set()
    first.result()
    second.result()
    assert first.stats.queued_s < queued <= second.stats.total_s
    assert second.stats.queued_s > 0.05


def test_counts_what_a_save_copies_apart_from_what_it_sends(tmp_path: Path) -> None:
    writer = BucketWriter(unchanged="copy")
    for step in (1, 2):
        handle = bucketpoint.async_save(
            {**state(4), "step": torch.tensor(step)}, str(tmp_path / f"step-{step}"), storage_writer=writer
        )
        handle.result()
    # The item, and its frame.
    assert 4 * MIB < handle.stats.copied_bytes < 5 * MIB
    assert handle.stats.sent_bytes < MIB


def test_keeps_figures_of_a_failed_save_as_far_as_it_came_and_tells_nothing(tmp_path: Path) -> None:
    told: list[CommitInfo] = []
    handle = bucketpoint.async_save(
        state(1), str(tmp_path / "step-1"), planner=FailingPlanner("upload"), on_commit=told.append
    )
    assert handle.exception() is not None
    assert (handle.stats.upload_s, handle.stats.commit_s) == (0, 0)
    assert handle.stats.planning_s > 0
    assert told == []


def test_leaves_figures_of_a_save_in_the_foreground_with_the_writer(tmp_path: Path) -> None:
    writer = BucketWriter()
    assert writer.stats is None
    dcp.save(state(1), checkpoint_id=str(tmp_path / "step-1"), storage_writer=writer, no_dist=True)
    stats = writer.stats
    assert stats.sent_bytes > MIB
    assert (stats.blocked_s, stats.staging_s, stats.staged_bytes) == (stats.total_s, 0, 0)
    assert min(stats.planning_s, stats.upload_s, stats.commit_s) > 0


def test_counts_no_request_after_a_save_or_a_load_as_theirs() -> None:
    url = "memory://bucket/run of test_stats/step-1"
    writer, reader = BucketWriter(), BucketReader(url)
    dcp.save(state(1), checkpoint_id=url, storage_writer=writer, no_dist=True)
    saved = dict(writer.stats.requests)
    assert bucketpoint.latest_checkpoint("memory://bucket/run of test_stats") == url
    assert dict(writer.stats.requests) == saved
    dcp.load(state(1), storage_reader=reader, no_dist=True)
    counted = dict(reader._load.counts)
    assert bucketpoint.latest_checkpoint("memory://bucket/run of test_stats") == url
    assert dict(reader._load.counts) == counted


def test_leaves_requests_of_a_save_with_it_during_a_load_within() -> None:
    run = "memory://bucket/loading run of test_stats"

    class Loading(SavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            dcp.load(state(1), checkpoint_id=f"{run}/step-1", storage_reader=BucketReader(), no_dist=True)
            return super().finish_plan(new_plan)

    plain, loading = BucketWriter(), BucketWriter()
    dcp.save(state(1), checkpoint_id=f"{run}/step-1", storage_writer=plain, no_dist=True)
    dcp.save(state(1), checkpoint_id=f"{run}/step-2", storage_writer=loading, planner=Loading(), no_dist=True)
    assert loading.stats.requests["put"] == plain.stats.requests["put"] > 0


def figures_of_ranks(rank: int, world: int, root: str, executor: str) -> Any:
    """Save a MiB on rank 0, two on rank 1 and so on. Return the rank's figures, and what `on_commit` was told there."""
    told: list[CommitInfo] = []
    handle = bucketpoint.async_save(
        {f"weight of {rank}": torch.ones((rank + 1) * MIB // 4)},
        f"{root}/step-1",
        async_checkpointer_type=AsyncCheckpointerType(executor),
        on_commit=told.append,
    )
    handle.result(60)
    return handle.stats, [(info.url, info.nbytes) for info in told]


def assert_told_on_the_coordinator_alone(told: Sequence[list[tuple[str, int]]], root: Path) -> None:
    ((url, nbytes),) = told[0]
    assert url == f"{root}/step-1"
    expected = sum(range(len(told) + 1)) * MIB
    assert expected < nbytes < 1.01 * expected
    assert not any(told[1:])


def test_gives_the_coordinator_the_spread_over_the_ranks_and_the_commit(four_ranks: Ranks, tmp_path: Path) -> None:
    stats, told = zip(*four_ranks.run(figures_of_ranks, str(tmp_path), "thread"), strict=True)
    assert_told_on_the_coordinator_alone(told, tmp_path)
    assert [each.rank for each in stats] == [0, 1, 2, 3]
    sent = [each.sent_bytes for each in stats]
    assert [nbytes // MIB for nbytes in sent] == [1, 2, 3, 4]
    spread = stats[0].ranks["sent_bytes"]
    assert (spread.min, spread.median, spread.max, spread.slowest) == (sent[0], (sent[1] + sent[2]) / 2, sent[3], 3)
    assert stats[0].ranks["upload_s"].max == pytest.approx(max(each.upload_s for each in stats), rel=1e-6)
    assert [each.ranks for each in stats[1:]] == [{}, {}, {}]
    assert [each.commit_s > 0 for each in stats] == [True, False, False, False]


def test_keeps_the_figures_of_a_checkpoint_process_and_tells_of_its_commit(two_ranks: Ranks, tmp_path: Path) -> None:
    stats, told = zip(*two_ranks.run(figures_of_ranks, str(tmp_path), "process"), strict=True)
    assert stats == (None, None)
    assert_told_on_the_coordinator_alone(told, tmp_path)


def figures_of_a_group(rank: int, world: int, root: str, how: str) -> Any:
    """Save and load on ranks 1 and 3: more bytes on rank 3. Return the figures of both, and the lines of progress."""
    group = dist.new_group([1, 3], backend="gloo")
    if rank not in (1, 3):
        return None
    state, url = {f"weight of {rank}": torch.ones(rank * MIB // 4)}, f"{root}/step-1"
    lines = io.StringIO()
    with contextlib.redirect_stderr(lines):
        writer = BucketWriter(url, progress=True)
        if how == "async":
            saved = bucketpoint.async_save(state, storage_writer=writer, process_group=group)
            saved.result(60)
        else:
            saved = writer
            dcp.save(state, storage_writer=writer, process_group=group)
        reader = BucketReader(url, progress=True)
        dcp.load(state, storage_reader=reader, process_group=group)
    return saved.stats, reader.stats, lines.getvalue()


@pytest.mark.parametrize("how", ["async", "blocking"])
def test_names_ranks_by_their_numbers_in_the_job(four_ranks: Ranks, tmp_path: Path, how: str) -> None:
    told = four_ranks.run(figures_of_a_group, str(tmp_path), how)
    for rank in (1, 3):
        saved, loaded, lines = told[rank]
        assert (saved.rank, loaded.rank) == (rank, rank)
        assert lines.count(f" on rank {rank}: ") == 2
    assert told[1][0].ranks["sent_bytes"].slowest == 3


def test_loads_the_checkpoint_in_on_commit_before_the_handle_is_done(tmp_path: Path) -> None:
    told: list[tuple[CommitInfo, float, bool]] = []

    def on_commit(info: CommitInfo) -> None:
        loaded = {"weight": torch.zeros(1000)}
        bucketpoint.load(loaded, info.url)
        told.append((info, float(loaded["weight"].sum()), handles[0].done() if handles else False))

    handles: list[bucketpoint.SaveHandle] = []
    handles.append(bucketpoint.async_save({"weight": torch.ones(1000)}, f"{tmp_path}/step-1", on_commit=on_commit))
    handles[0].result()
    ((info, total, done),) = told
    assert (info.url, info.step, dict(info.metrics)) == (f"{tmp_path}/step-1", None, {})
    # The data, and the headers of its object.
    assert 4000 < info.nbytes < 5000
    assert (total, done) == (1000, False)
    assert 0 < info.blocked_s <= info.commit_s


def test_tells_step_and_metrics_from_a_manager(tmp_path: Path) -> None:
    told: list[CommitInfo] = []
    policy = RetentionPolicy(Keep(latest=2))
    with CheckpointManager(f"{tmp_path}/run", policy=policy, on_commit=told.append) as manager:
        for step in (3, 7):
            manager.save(step, {"weight": torch.full((10,), float(step))}, metrics={"loss": 1 / step})
    assert [(info.url, info.step, dict(info.metrics)) for info in told] == [
        (manager.catalog.url_of(3), 3, {"loss": 1 / 3}),
        (manager.catalog.url_of(7), 7, {"loss": 1 / 7}),
    ]


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit, CheckpointException])
def test_logs_an_error_of_on_commit_without_failing_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def on_commit(info: CommitInfo) -> None:
        raise kind("the tracker is away", {}) if kind is CheckpointException else kind("the tracker is away")

    with caplog.at_level(logging.ERROR, logger="bucketpoint"):
        bucketpoint.async_save({"weight": torch.ones(3)}, f"{tmp_path}/step-1", on_commit=on_commit).result(60)
    assert "is committed, but on_commit raised" in caplog.text
    assert "the tracker is away" in caplog.text


@pytest.mark.parametrize("given", ["a name", FileSystemWriter])
def test_refuses_what_cannot_be_told(tmp_path: Path, given: object) -> None:
    foreign = given is FileSystemWriter
    with pytest.raises(BucketpointError, match="function of one argument"):
        bucketpoint.async_save(
            {"weight": torch.ones(3)},
            f"{tmp_path}/step-1",
            storage_writer=FileSystemWriter(f"{tmp_path}/step-1") if foreign else BucketWriter(),
            on_commit=print if foreign else given,  # type: ignore[arg-type]
        )
