"""`async_save` with one return type: a handle on a save under way. Adds nothing to what DCP does but what it lacks.

DCP answers with a future or with a pair of futures, by how the stager works; takes a staging that fails early for one
that succeeded; and keeps a failed save's memory for as long as someone keeps its error.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException, Metadata, SavePlanner, StorageWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bucketpoint.dcp import process_groups, program_end
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError, PeerFailedError
from bucketpoint.staging import Lease, StagedState, Stager, dead_checkpoint_process
from bucketpoint.transfer import Progress

_DYING_S = 1.0
"""A checkpoint process that dies closes its pipe, which ends the save, a moment before it counts as dead."""


class SaveHandle(Future[Metadata]):
    """One asynchronous save: a future of the committed checkpoint's metadata.

    Attributes:
        staged: done when the state may change again; fails if it could not be copied.
    """

    def __init__(self, url: str | None) -> None:
        super().__init__()
        self.url = url
        self.staged: Future[None] = Future()
        self._lease: Lease | None = None
        self._at_end: program_end.LastSave | None = None
        # Our own group over its ranks goes with it, and not before the save has ended.
        self._parent_group: ProcessGroup | None = None
        # What has begun cannot be taken back: cancel() says so.
        self.set_running_or_notify_cancel()
        self.staged.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self.failure() else "committed"
        return f"SaveHandle({self.url}, {state})"

    @property
    def committed(self) -> Future[Metadata]:
        """Done when the checkpoint can be loaded: the handle itself, under the name that goes with `staged`."""
        return self

    @property
    def progress(self) -> Progress | None:
        """How far this rank's upload is; None before it begins, and always with a checkpoint process."""
        progress = self._lease.progress if self._lease is not None else None
        return progress if isinstance(progress, Progress) else None

    def result(self, timeout: float | None = None) -> Metadata:
        """The metadata, once the checkpoint is committed. Raises the error of a save that failed."""
        try:
            return super().result(timeout)
        finally:
            self._told()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of a save that failed, once it has ended; None if the checkpoint is committed."""
        try:
            return super().exception(timeout)
        finally:
            self._told()

    def failure(self) -> BaseException | None:
        """The error of a save that failed; None while it runs. Unlike `exception`, leaves the exit status as it is."""
        return super().exception() if self.done() else None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the save, at most `timeout` seconds. Whether it has ended, well or not."""
        return bool(concurrent.futures.wait([self], timeout).done)

    def _told(self) -> None:
        """The program knows how the save has ended, and its exit status is its own affair."""
        if self.done() and self._at_end is not None:
            self._at_end.failure = None


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> SaveHandle:
    """`dcp.async_save` with its arguments, and one return type whatever the stager and the executor.

    Args:
        process_group: the ranks, by a group of any backend; None for all of the job. The save runs on a gloo group of
            its own over the same ranks, so that it never meets collectives of training. That group is made by the first
            call for these ranks, which all of them make, and kept as long as `process_group` is.
        storage_writer: any writer; without one, a `BucketWriter` for this save alone. One writer, or one `Stager`, kept
            over all saves keeps its staging memory too.

    Returns:
        A handle whose `result()` is the checkpoint's `Metadata`. Its errors are `BucketpointError`s, which
        `except Exception` catches; DCP's `CheckpointException` is their cause.

    Raises:
        StagingError: the state cannot be copied; nothing was begun.
        BucketpointError: there are several ranks and no process group.
    """
    if not no_dist:
        where = str(checkpoint_id) if checkpoint_id is not None else None
        process_groups.refuse_a_rank_alone("An asynchronous save", where)
    writer = storage_writer if storage_writer is not None else BucketWriter(checkpoint_id)
    stager = async_stager if async_stager is not None else writer
    if not hasattr(stager, "stage"):
        stager = Stager()
    # What the writer saved last on this thread is not what it saves next.
    own = writer._url if isinstance(writer, BucketWriter) else getattr(writer, "checkpoint_id", None)
    handle = SaveHandle(str(checkpoint_id) if checkpoint_id is not None else own)
    watched = _Watched(stager, handle)
    handle._parent_group = process_group
    begun = dcp.async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        planner=planner,
        process_group=None if no_dist else process_groups.group_beside(process_group),
        async_checkpointer_type=async_checkpointer_type,
        async_stager=watched,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )
    handle._at_end = program_end.begin(handle.url)
    upload = begun if isinstance(begun, Future) else begun.upload_completion
    upload.add_done_callback(_ending(handle))
    return handle


class _Watched:
    """The stager of one save, which tells the handle what becomes of the copy."""

    def __init__(self, stager: Any, handle: SaveHandle) -> None:
        self._stager = stager
        self._handle = handle
        self._synchronize_after_execute = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        return bool(self._stager.should_synchronize_after_execute)

    def stage(self, state_dict: dict[str, Any]) -> Any:
        staged = self._stager.stage(state_dict)
        if isinstance(staged, Future):
            staged.add_done_callback(self._staged)
        else:
            self._note(staged)
        return staged

    def synchronize_staging(self) -> None:
        self._stager.synchronize_staging()

    def close(self) -> None:
        """The stager is its owner's to close."""

    def _staged(self, staging: Future[Any]) -> None:
        error = staging.exception()
        if error is not None:
            self._handle.staged.set_exception(error)
        else:
            self._note(staging.result())

    def _note(self, staged: Any) -> None:
        # The lease and not the state, which would keep the memory.
        if isinstance(staged, StagedState):
            self._handle._lease = staged.lease
            if self._handle.url:
                # In a checkpoint process no writer of ours could say so.
                staged.lease.label = f"the save of {self._handle.url}"
        self._handle.staged.set_result(None)


def _ending(handle: SaveHandle) -> Callable[[Future[Any]], None]:
    def end(upload: Future[Any]) -> None:
        error = upload.exception()
        if handle._lease is not None:
            handle._lease.end()
        handle._parent_group = None
        if error is not None:
            error = as_ours(error, handle.url)
        if handle._at_end is not None:
            # Before callbacks, which may tell the program.
            handle._at_end.failure = None if error is None else str(error)
        if error is None:
            handle.set_result(upload.result())
        else:
            handle.set_exception(error)

    return end


def as_ours(error: BaseException, url: str | None, what: str = "The save") -> BaseException:
    """The first error of ours among the ranks', or one that says what DCP said. One that tells of a peer comes last."""
    if isinstance(error, BucketpointError):
        error.url = error.url or url
        return error
    if isinstance(error, CheckpointException):
        by_rank = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
        known = [failure for failure in by_rank.values() if isinstance(failure, BucketpointError)]
        ours = next(
            (failure for failure in known if not isinstance(failure, PeerFailedError)), known[0] if known else None
        )
        if ours is None:
            said = "; ".join(f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in by_rank.items())
            ours = BucketpointError(f"{what} failed: {said}", url=url)
        ours.__cause__ = error
        return ours
    dead = dead_checkpoint_process(_DYING_S)
    if dead is not None:
        dead.url = url
        dead.__cause__ = error
        return dead
    return error
