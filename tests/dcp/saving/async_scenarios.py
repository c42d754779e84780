"""What a test of asynchronous saves does on its ranks, with the slow stores and the failing planners for it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bucketpoint
from bucketpoint import (
    BucketpointError,
    BucketReader,
    BucketWriter,
    SaveHandle,
    Stager,
    StagingOptions,
    TransferOptions,
)
from bucketpoint.errors import CheckpointProcessError
from transfer.helper.orders import wait_until

WAIT_S = 240
"""Against hangs only: nothing here is expected to take long."""

BESIDE = StagingOptions(use_async_staging=True)
PROCESS = AsyncCheckpointerType.PROCESS


# -- states -----------------------------------------------------------------------------------------------------------


class Training:
    """A state that each step changes in place, and the marks by which a checkpoint of it is known."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        own = f"only_{rank}"
        self.state: dict[str, Any] = {"model": {"w": torch.zeros(50_000), own: torch.zeros(1000)}, "step": 0}
        self.run(0)

    def run(self, step: int) -> dict[str, Any]:
        self.state["model"]["w"].fill_(step)
        self.state["model"][f"only_{self.rank}"].fill_(10 * step + self.rank)
        self.state["step"] = step
        return self.state

    def spoil(self) -> None:
        self.run(-1)


def assert_holds(url: str, step: int, world: int = 1) -> None:
    """A checkpoint of `Training` has all of one step, of every rank, and nothing of another one."""
    target: dict[str, Any] = {
        "model": {"w": torch.zeros(50_000), **{f"only_{rank}": torch.zeros(1000) for rank in range(world)}},
        "step": None,
    }
    dcp.load(target, checkpoint_id=url, storage_reader=BucketReader(), no_dist=True)
    assert target["step"] == step
    assert target["model"]["w"].unique().tolist() == [step]
    for rank in range(world):
        assert target["model"][f"only_{rank}"].unique().tolist() == [10 * step + rank]


def upload_of(begun: Any) -> Future[Any]:
    """The future of the upload in what `async_save` of either library returned."""
    return begun.upload_completion if isinstance(begun, AsyncSaveResponse) else begun


def wait(begun: Any) -> Any:
    return upload_of(begun).result(WAIT_S)


def error_of(begun: Any) -> BaseException | None:
    return upload_of(begun).exception(WAIT_S)


# -- stores -----------------------------------------------------------------------------------------------------------


class SlowFileSystem(LocalFileSystem):
    """Takes `delay_s` for every object. Leaves the niceness of the thread that writes first, which writes data."""

    def __init__(self, delay_s: float = 0.0, mark: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.delay_s, self.mark = delay_s, mark

    def pipe_file(self, path: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if self.mark is not None and not Path(self.mark).exists():
            Path(self.mark).write_text(str(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        time.sleep(self.delay_s)
        return super().pipe_file(path, value, *args, **kwargs)


class GatedFileSystem(LocalFileSystem):
    """Writes nothing until its gate is open. Only for threads of one process."""

    cachable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gate = threading.Event()
        self.arrived = threading.Event()

    def pipe_file(self, path: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        self.arrived.set()
        if not self.gate.wait(WAIT_S):
            raise TimeoutError("nobody opened the gate")
        return super().pipe_file(path, value, *args, **kwargs)


# -- planners ---------------------------------------------------------------------------------------------------------


class FailingPlanner(DefaultSavePlanner):
    """Raises on one rank: `"plan"` before `write_data` is called, `"upload"` during it, `"never"` not at all."""

    def __init__(self, where: str, rank: int = 0) -> None:
        super().__init__()
        self.where, self.rank = where, rank

    def create_local_plan(self) -> Any:
        self._fail("plan")
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        self._fail("upload")
        return super().resolve_data(write_item)

    def _fail(self, where: str) -> None:
        if self.where == where and (not dist.is_initialized() or dist.get_rank() == self.rank):
            raise OSError("this disk is on fire")


class LatePlanner(DefaultSavePlanner):
    """Comes late to the first collective on one rank: without an order of saves, that rank runs another one first."""

    def __init__(self, rank: int, delay_s: float = 0.3) -> None:
        super().__init__()
        self.rank, self.delay_s = rank, delay_s

    def create_local_plan(self) -> Any:
        if dist.get_rank() == self.rank:
            time.sleep(self.delay_s)
        return super().create_local_plan()


# -- ways to save -----------------------------------------------------------------------------------------------------

WAYS = (
    "our writer",
    "our writer, staging beside training",
    "foreign writer",
    "our stager",
    "our stager, staging beside training",
    "our stager and foreign writer",
    "no writer",
)


def begin(state: Any, url: str, writer: Any = None, *, by: Callable[..., Any] = dcp.async_save, **given: Any) -> Any:
    """Begin a save by our writer, if no other one is given."""
    return by(state, checkpoint_id=url, storage_writer=writer or BucketWriter(), **given)


def begin_alone(*args: Any, **given: Any) -> Any:
    """The same without other ranks."""
    return begin(*args, **given, no_dist=True)


def way_to_save(way: str, url: str) -> dict[str, Any]:
    """The arguments of `async_save`."""
    given: dict[str, Any] = {"checkpoint_id": url}
    if "foreign writer" in way:
        given["storage_writer"] = FileSystemWriter(url)
    elif way != "no writer":
        given["storage_writer"] = BucketWriter(staging=BESIDE if way.startswith("our writer, ") else None)
    if "our stager" in way:
        given["async_stager"] = Stager(BESIDE if "beside" in way else None)
    return given


def assert_one_shape(way: str, url: str, executor: AsyncCheckpointerType, **arguments: Any) -> None:
    """A save that goes well, by any way: the handle answers to all that it promises."""
    training = Training()
    handle = bucketpoint.async_save(
        training.run(1), **way_to_save(way, url), async_checkpointer_type=executor, **arguments
    )
    assert type(handle) is SaveHandle
    assert handle.staged.result(WAIT_S) is None
    training.spoil()
    assert not handle.cancel()
    assert not handle.staged.cancel()
    assert handle.committed is handle
    assert handle.wait(WAIT_S)
    assert handle.done()
    assert handle.url == url
    assert isinstance(handle.result(), Metadata)
    assert handle.exception() is None
    if executor is PROCESS or "foreign" in way:
        assert handle.progress is None
    else:
        assert handle.progress.finished
        assert handle.progress.done_bytes == handle.progress.total_bytes > 200_000
    assert_holds(url, 1)


def assert_errors_of_ours(way: str, url: str, executor: AsyncCheckpointerType, where: str, **arguments: Any) -> None:
    """A save that fails, by any way: the error is one of ours, and what was raised within DCP is its cause."""
    arguments = {**way_to_save(way, url), **arguments}
    handle = bucketpoint.async_save(
        Training().run(1), **arguments, async_checkpointer_type=executor, planner=FailingPlanner(where)
    )
    error = handle.exception(WAIT_S)
    assert isinstance(error, BucketpointError), repr(error)
    assert not isinstance(error.__cause__, dcp.CheckpointException)
    assert "this disk is on fire" in str(error)
    assert error.url == url
    assert handle.staged.result(WAIT_S) is None
    assert not Path(url, ".metadata").exists()


# -- one rank with a checkpoint process -------------------------------------------------------------------------------


def handles_of_a_checkpoint_process(rank: int, world: int, root: str) -> None:
    for number, way in enumerate(("our writer", "our stager, staging beside training", "foreign writer", "no writer")):
        assert_one_shape(way, f"{root}/way-{number}", PROCESS)
    for where in ("plan", "upload"):
        assert_errors_of_ours("our writer", f"{root}/{where}", PROCESS, where)


def dtensors_cross_too(rank: int, world: int, root: str) -> None:
    """Of several in one arena all but the first begin within it, where torch's pickler takes a wrapper for a tensor."""
    mesh = init_device_mesh("cpu", (world,))
    whole = {name: torch.arange(rows * 4.0).reshape(rows, 4) for name, rows in (("a", 8), ("b", 7), ("c", 1))}

    def state(fill: bool) -> dict[str, Any]:
        made = {name: value.clone() if fill else torch.zeros_like(value) for name, value in whole.items()}
        return {"layers": [{name: distribute_tensor(value, mesh, [Shard(0)])} for name, value in made.items()]}

    with contextlib.closing(BucketWriter()) as writer:
        for step in range(2):
            url = f"{root}/dtensors-{step}"
            wait(begin(state(True), url, writer, async_checkpointer_type=PROCESS))
            loaded = state(False)
            dcp.load(loaded, checkpoint_id=url, storage_reader=BucketReader())
            for layer in loaded["layers"]:
                for name, value in layer.items():
                    assert torch.equal(value.full_tensor(), whole[name])


def uploads_by_a_checkpoint_process(rank: int, world: int, root: str) -> tuple[list[int | None], int]:
    """The trainer's helper after each of two saves, and the niceness of the threads that upload."""
    mark, found = Path(root, "niceness"), []
    transfer = TransferOptions(background="process")
    # Without a filesystem object, with which a trainer starts no helper.
    with contextlib.closing(BucketWriter(transfer=transfer)) as writer:
        for step in range(2):
            wait(begin(Training().run(step), f"{root}/alone-{step}", writer, async_checkpointer_type=PROCESS))
            found.append(writer.uploads.process_id)
            assert_holds(f"{root}/alone-{step}", step)
    nice = BucketWriter(fs=SlowFileSystem(mark=str(mark)), transfer=transfer)
    wait(begin(Training().run(2), f"{root}/nice", nice, async_checkpointer_type=PROCESS))
    return found, int(mark.read_text())


def what_cannot_be_pickled_is_named(rank: int, world: int, root: str) -> None:
    writer = BucketWriter()
    training = Training()
    state = {**training.run(1), "app": {"hooks": [1, lambda: None]}}
    plain = begin(state, f"{root}/no", writer, async_checkpointer_type=PROCESS)
    handle = begin(state, f"{root}/no", writer, async_checkpointer_type=PROCESS, by=bucketpoint.async_save)
    for error in (error_of(plain), error_of(handle)):
        assert isinstance(error, CheckpointProcessError), repr(error)
        assert error.key == "app.hooks.1"
        assert "function" in str(error)
    url = f"{root}/yes"
    wait(begin(training.state, url, writer, async_checkpointer_type=PROCESS))
    assert_holds(url, 1)
    writer.close()


def a_killed_checkpoint_process_is_named(rank: int, world: int, root: str) -> None:
    from torch.distributed.checkpoint import _async_process_executor as executor

    training = Training()
    wait(begin(training.run(1), f"{root}/before", async_checkpointer_type=PROCESS))
    assert_holds(f"{root}/before", 1)
    process = executor._CHECKPOINT_PROCESS._save_process
    mark = Path(root, "stuck")
    handle = begin(
        training.run(2),
        f"{root}/killed",
        BucketWriter(fs=SlowFileSystem(10 * WAIT_S, str(mark))),
        async_checkpointer_type=PROCESS,
        by=bucketpoint.async_save,
    )
    wait_until(mark.exists, WAIT_S)
    assert not handle.done()
    os.kill(process.pid, signal.SIGKILL)
    _assert_names(handle.exception(WAIT_S), process.pid, f"{root}/killed")
    writer = BucketWriter()
    later = [
        begin(training.run(3), f"{root}/after", writer, async_checkpointer_type=PROCESS, by=save)
        for save in (dcp.async_save, bucketpoint.async_save, dcp.async_save)
    ]
    for begun in later:
        _assert_names(error_of(begun), process.pid, None if begun is not later[1] else f"{root}/after")
    assert not Path(root, "after", ".metadata").exists()
    wait(begin(training.run(4), f"{root}/thread", writer))
    assert_holds(f"{root}/thread", 4)


def _assert_names(error: BaseException | None, pid: int, url: str | None) -> None:
    assert isinstance(error, CheckpointProcessError), repr(error)
    assert f"pid {pid}" in str(error)
    assert "exit code -9" in str(error)
    assert url is None or error.url == url


# -- several ranks ----------------------------------------------------------------------------------------------------


def three_saves_before_and_after_failures(rank: int, world: int, root: str, executor: str, where: str) -> None:
    """Failures on rank 1 fail both ranks, commit nothing, and leave everything usable."""
    writer = BucketWriter()
    training = Training(rank, world)
    for step in range(8):
        fails = step in (3, 4)
        url = f"{root}/{executor}-{where}-{step}"
        begun = (bucketpoint if step == 4 else dcp).async_save(
            training.run(step),
            checkpoint_id=url,
            storage_writer=writer,
            planner=FailingPlanner(where if fails else "never", rank=1),
            async_checkpointer_type=AsyncCheckpointerType[executor],
        )
        training.spoil()
        if not fails:
            wait(begun)
            assert_holds(url, step, world)
            continue
        error = error_of(begun)
        if step == 4:
            assert isinstance(error, BucketpointError), repr(error)
            assert error.rank == 1
        else:
            assert isinstance(error, dcp.CheckpointException), repr(error)
            assert list(error.failures) == [1]
        assert "this disk is on fire" in str(error)
        assert not Path(url, ".metadata").exists()
    writer.close()


SLOW_S = 0.1


def _slow(**kwargs: Any) -> BucketWriter:
    return BucketWriter(fs=SlowFileSystem(SLOW_S), **kwargs)


def saves_overlap(rank: int, world: int, root: str, staging: StagingOptions | None, *, states: int = 1) -> None:
    """Saves of each state in turn, by a writer of its own, without waits for their futures; each rank late for another.

    Two states may be a model and an optimizer.
    """
    writers = [_slow(staging=staging, cache_staged_state_dict=True) for _ in range(states)]
    trainings = [Training(rank, world) for _ in range(states)]
    begun: list[Any] = []
    overlapped = 0
    for step in range(3 if states == 1 else 4):
        state, writer = trainings[step % states].run(step), writers[step % states]
        begun.append(begin(state, f"{root}/{step}", writer, planner=LatePlanner(rank=(step + 1) % world)))
        if isinstance(begun[-1], AsyncSaveResponse):
            begun[-1].staging_completion.result(WAIT_S)
        trainings[step % states].spoil()
        overlapped += step > 0 and not upload_of(begun[step - 1]).done()
    for step, one in enumerate(begun):
        wait(one)
        assert_holds(f"{root}/{step}", step, world)
    if states == 2 or (staging is not None and staging.when_busy == "double_buffer"):
        assert overlapped >= 2
    for writer in writers:
        writer.close()


def a_writer_for_each_step(rank: int, world: int, root: str) -> None:
    """The recipe that keeps nothing: neither writers nor futures."""
    training = Training(rank, world)
    for step in range(3):
        begin(training.run(step), f"{root}/{step}", _slow(), planner=LatePlanner(rank=(step + 1) % world))
        training.spoil()
    assert not Path(root, "2", ".metadata").exists()
    # What comes last is known to end last.
    wait(begin(training.run(3), f"{root}/3", _slow()))
    for step in range(4):
        assert_holds(f"{root}/{step}", step, world)


def a_save_and_a_load_wait_for_the_asynchronous_save(rank: int, world: int, root: str) -> None:
    training = Training(rank, world)
    writer = _slow()
    begun = begin(training.run(1), f"{root}/1", writer, planner=LatePlanner(rank=1))
    assert not begun.done()
    dcp.save(training.run(2), checkpoint_id=f"{root}/2", storage_writer=writer, planner=LatePlanner(rank=0))
    dcp.save(training.run(3), checkpoint_id=f"{root}/3", storage_writer=BucketWriter())
    wait(begun)
    begun = begin(training.run(4), f"{root}/4", writer, planner=LatePlanner(rank=1))
    assert not begun.done()
    dcp.load(training.state, checkpoint_id=f"{root}/3", storage_reader=BucketReader())
    assert training.state["step"] == 3
    wait(begun)
    for step in range(1, 5):
        assert_holds(f"{root}/{step}", step, world)


def a_foreign_writer_is_put_in_order(rank: int, world: int, root: str, staging: StagingOptions | None) -> None:
    training = Training(rank, world)
    begun = []
    with Stager(staging) as stager:
        for step in range(3):
            begun.append(
                begin(
                    training.run(step),
                    f"{root}/{step}",
                    FileSystemWriter(f"{root}/{step}"),
                    async_stager=stager,
                    planner=LatePlanner(rank=(step + 1) % world),
                    by=bucketpoint.async_save,
                )
            )
            training.spoil()
        for step, one in enumerate(begun):
            wait(one)
            assert_holds(f"{root}/{step}", step, world)
