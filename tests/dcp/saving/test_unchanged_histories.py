"""Any history of a run with `unchanged="copy"`: each checkpoint holds what a plain save of the same state would."""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader

from bucketpoint import BucketReader
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.dcp.saving.earlier_saves import Announcement, EarlierSaves, Written
from dcp.planning.test_compact import Job, StoppedError
from dcp.saving.copied_saves import Run, Watch, copy_any_size
from dcp.states import assert_loads

NAMES = ["a", "b", "optim.c", "d"]
DTYPES = [torch.float32, torch.int32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]

State = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def copies_of_any_size() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        copy_any_size(patch)
        # So that samples of small tensors are taken, too.
        patch.setattr("bucketpoint.dcp.saving.unchanged._SAMPLED_FROM", 64)
        patch.setattr("bucketpoint.dcp.saving.unchanged._SAMPLE_BYTES", 16)
        yield


def tensor(shape: tuple[int, ...], dtype: torch.dtype, fill: int) -> torch.Tensor:
    count = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    data = torch.full((count,), fill % 3, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


tensors = st.builds(
    tensor,
    st.sampled_from([(), (0,), (4,), (2, 2), (40, 8), (8, 40), (320,), (160, 4), (640, 2)]),
    st.sampled_from(DTYPES),
    st.integers(0, 2),
)
values = st.one_of(tensors, tensors, st.sampled_from([None, 1, "text", "x" * 500]))
states = st.dictionaries(st.sampled_from(NAMES), values, max_size=4)


@st.composite
def changed(draw: st.DrawFn, state: State) -> State:
    """The state after some steps: most of it is the same."""
    state = dict(state)
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True)):
        value = state.get(name)
        kind = draw(st.sampled_from(["new", "one byte", "reshape", "dtype", "rename", "remove"]))
        if kind == "remove":
            state.pop(name, None)
        elif kind == "rename":
            other = draw(st.sampled_from(NAMES))
            state[name], state[other] = state.get(other), value
        elif kind == "new" or not isinstance(value, torch.Tensor) or not value.numel() or not value.dim():
            state[name] = draw(values)
        elif kind == "one byte":
            value = value.clone()
            raw = value.reshape(-1).view(torch.uint8)
            raw[draw(st.integers(0, raw.numel() - 1))] ^= 1
            state[name] = value
        elif kind == "reshape":
            state[name] = value.reshape(-1) if value.dim() > 1 else value.reshape(2, -1)
        elif value.shape[-1] * value.dtype.itemsize % 4 == 0:
            state[name] = value.view(draw(st.sampled_from(DTYPES)))
    return state


def assert_holds(url: str, state: State) -> None:
    for reader in (BucketReader(url, progress=False), FileSystemReader(url)):
        assert_loads(state, reader)
    assert set(open_checkpoint(url).metadata.state_dict_metadata) == set(state)
    found = verify(open_checkpoint(url))
    assert found.ok, found.damage


@settings(max_examples=25)
@given(st.data())
def test_keeps_any_history_of_one_process(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(f"{folder}/run")
        writer = run.writer(target_object_bytes=data.draw(st.sampled_from([None, 3000])))
        state = data.draw(states)
        held: dict[int, State] = {}
        for _ in range(data.draw(st.integers(2, 7))):
            event = data.draw(
                st.sampled_from(["save", "save", "save", "restart", "fail", "delete", "again", "overlap"])
            )
            state = data.draw(changed(state))
            step = max(held, default=0) + 1
            if event == "restart":
                writer = run.writer()
            elif event == "delete" and held:
                gone = data.draw(st.sampled_from(sorted(held)))
                run.delete(gone)
                del held[gone]
                continue
            elif event == "fail":
                with pytest.MonkeyPatch.context() as patch, pytest.raises(dcp.CheckpointException):
                    patch.setattr("bucketpoint.dcp.writer.commit", mock.Mock(side_effect=StoppedError))
                    run.save(state, step, writer)
                continue
            elif event == "again" and held:
                step = data.draw(st.sampled_from(sorted(held)))
            elif event == "overlap":
                # Both begin before the first is committed.
                other = data.draw(changed(state))
                saving = dcp.async_save(
                    copy.deepcopy(other), checkpoint_id=run.url(step + 1), storage_writer=writer, no_dist=True
                )
                run.save(state, step, writer)
                saving.result()  # type: ignore[union-attr]
                held[step + 1] = other
            run.save(state, step, writer)
            held[step] = state
            assert_holds(run.url(step), state)
        for step, content in held.items():
            assert_loads(content, BucketReader(run.url(step), progress=False))


# -- several ranks ----------------------------------------------------------------------------------------------------


class CopyingJob(Job):
    """Ranks in one process, of writers that copy."""

    def __init__(self, world: int, make: Any = SavePlanner) -> None:
        super().__init__(world, make)
        self.run = Run("")
        self.writers = [self.run.writer() for _ in range(world)]
        self.watches = [Watch(writer) for writer in self.writers]  # type: ignore[arg-type]

    def restart(self, rank: int) -> None:
        self.writers[rank] = self.run.writer()
        self.watches[rank] = Watch(self.writers[rank])  # type: ignore[arg-type]

    @property
    def copies(self) -> list[int]:
        return [watch.calls["copy"] for watch in self.watches]


def of_ranks(world: int, state: State) -> list[State]:
    """Everything replicated, and a tensor and a note of each rank alone."""
    return [
        {**state, f"only{rank}": torch.full((500,), float(rank)), f"note{rank}": "x" * (300 + rank)}
        for rank in range(world)
    ]


def whole(parts: list[State]) -> State:
    return {name: value for part in parts for name, value in part.items()}


@settings(max_examples=25)
@given(st.data())
def test_keeps_any_history_of_several_ranks(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make = data.draw(st.sampled_from([SavePlanner, DefaultSavePlanner]))
        job = CopyingJob(data.draw(st.integers(2, 3)), make)
        state = data.draw(states)
        held: dict[int, State] = {}
        for step in range(1, data.draw(st.integers(3, 6))):
            event = data.draw(
                st.sampled_from(["save", "save", "rank", "coordinator", "world", "write", "finish", "gone"])
            )
            state = data.draw(changed(state))
            if event in ("rank", "coordinator"):
                job.restart(0 if event == "coordinator" else len(job.writers) - 1)
            elif event == "world":
                job = CopyingJob(data.draw(st.integers(1, 4)), make)
            elif event == "gone" and held:
                shutil.rmtree(f"{folder}/run/step-{max(held)}")
                del held[max(held)]
            parts = of_ranks(len(job.writers), state)
            url = f"{folder}/run/step-{step}"
            if event in ("write", "finish"):
                with contextlib.suppress(Exception):
                    job.save(parts, url, stop=event)
                # `stop` has broken the coordinator's writer.
                if event == "finish":
                    job.restart(0)
                continue
            job.save(parts, url)
            held[step] = whole(parts)
            assert_holds(url, held[step])
        for step, content in held.items():
            assert_loads(content, BucketReader(f"{folder}/run/step-{step}", progress=False))


def frozen(count: int = 8) -> State:
    return {f"w{number}": torch.full((300, 100), float(number)) for number in range(count)}


@pytest.mark.parametrize("restarted", [(), (1,), (0,), (0, 1, 2)], ids=["none", "a rank", "coordinator", "all"])
def test_copies_the_share_of_each_rank_whoever_was_made_anew(tmp_path: Path, restarted: tuple[int, ...]) -> None:
    job = CopyingJob(3)
    for step in (1, 2, 3):
        for rank in restarted:
            job.restart(rank)
        before = job.copies
        job.save(of_ranks(3, {**frozen(), "step": step}), f"{tmp_path}/run/step-{step}")
        if step > 1:
            assert all(now > then for now, then in zip(job.copies, before, strict=True)) or restarted
            assert sum(job.copies) > sum(before) * (not restarted)
            assert all(job.copies)
        assert_holds(f"{tmp_path}/run/step-{step}", whole(of_ranks(3, {**frozen(), "step": step})))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4), (4, 3)])
def test_copies_what_lies_as_another_world_needs_it_and_sends_the_rest(tmp_path: Path, before: int, after: int) -> None:
    CopyingJob(before).save(of_ranks(before, frozen()), f"{tmp_path}/run/step-1")
    job = CopyingJob(after)
    for step in (2, 3):
        job.save(of_ranks(after, frozen()), f"{tmp_path}/run/step-{step}")
        assert_holds(f"{tmp_path}/run/step-{step}", whole(of_ranks(after, frozen())))
    # What was sent in the first save of the new world is copied in the next.
    assert all(job.copies)


def test_holds_what_was_saved_by_one_writer_on_several_threads_and_in_two_runs(tmp_path: Path) -> None:
    runs = [Run(str(tmp_path / name)) for name in ("one", "two")]
    writer = runs[0].writer()

    def save(thread: int) -> None:
        draw = random.Random(thread)
        for number in range(6):
            weights = {f"layer{layer}": torch.full((300_000,), float(draw.randrange(3))) for layer in range(3)}
            state = {"model": weights, "step": number}
            run, step = runs[number % 2 if thread else 0], 100 * thread + number
            run.save(state, step, writer)
            run.assert_holds(step, state)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(save, range(3)))


def test_holds_what_was_saved_with_a_plan_that_dcp_has_kept(tmp_path: Path) -> None:
    # DCP's planner sends no plan if it is the same again, and uses the kept one, with the announcement of that save.
    run, caching = Run(str(tmp_path / "run")), DefaultSavePlanner(enable_plan_caching=True)
    writer = run.writer()
    for step, (planner, value) in enumerate([(None, 0.0), (caching, 1.0), (caching, 0.0), (None, 0.0)]):
        state = {"model": {"w": torch.full((1 << 19,), value)}, "step": step}
        dcp.save(state, checkpoint_id=run.url(step), storage_writer=writer, planner=planner, no_dist=True)
        run.assert_holds(step, state)


def test_keeps_the_id_of_a_save_when_a_later_one_comes_with_the_same() -> None:
    saves, said = EarlierSaves(), Announcement("a")
    for step in range(1, 5):
        saves.keep(said, f"s3://bucket/run/step-{step}", Written())
    found = saves.compared_with("s3://bucket/run/step-5", Announcement("b", "a"), lambda _: None)
    assert found.url == "s3://bucket/run/step-1"
