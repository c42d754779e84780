"""`async_save`: wrapper of `dcp.async_save` that always returns a `SaveHandle`.

The wrapper corrects three behaviours of DCP. DCP returns a future or a pair of futures, depending on the stager. It
treats a staging that fails early as successful. It keeps a failed save's memory while the program keeps the error.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ParamSpec

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException, Metadata, StorageWriter
from torch.distributed.checkpoint import SavePlanner as TorchSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bucketpoint.dcp import error_boundary, process_groups
from bucketpoint.dcp.error_boundary import as_ours
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.dcp.saving.watched_stager import WatchedStager
from bucketpoint.dcp.session import check_types
from bucketpoint.dcp.stats import CommitInfo, OnCommit, SaveStats, SaveTimes, end_save, note_failure, tell
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError
from bucketpoint.forks import Monitor, renew_in_child
from bucketpoint.staging import Lease, SavingRanks, StagedState, Stager
from bucketpoint.transfer import Progress

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class SaveHandle(Future[Metadata]):
    """Handle of one asynchronous save: a future of the committed checkpoint's metadata.

    Attributes:
        url: URL of the checkpoint from the call or the writer; None if neither has a URL.
        staged: future that is done when the program may change the state again; fails if the state could not be copied.
        begun_s: time of the call, `time.monotonic` seconds.
    """

    def __init__(self, url: str | None) -> None:
        super().__init__()
        self.url = url
        self.staged: Future[None] = Future()
        self._condition, self.staged._condition = Monitor(), Monitor()
        self._lease: Lease | None = None
        self._at_end: error_boundary.LastSave | None = None
        self._returned = False
        # True once the program has received the outcome: a failure then does not change the exit status.
        self._told = False
        # The error that the stager or the state raised at the call.
        self._refused: BaseException | None = None
        # Our group over the same ranks is destroyed when the caller's group is garbage-collected, so keep the caller's
        # group alive until the save has ended.
        self._parent_group: ProcessGroup | None = None
        # The group that a save on a thread of this process uses.
        self._group: Any = None
        self._ranks: tuple[int, ...] = ()
        self._on_commit: OnCommit | None = None
        self.begun_s = time.monotonic()
        self._blocked_s = 0.0
        self._stager: Any = None
        self._stats: SaveStats | None = None
        # A running save cannot be cancelled: cancel() returns False.
        self.set_running_or_notify_cancel()
        self.staged.set_running_or_notify_cancel()
        renew_in_child(self, SaveHandle._leave_to_parent)

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self.failure() else "committed"
        return f"SaveHandle({self.url}, {state})"

    def _unstaged(self) -> BaseException | None:
        """Return the error if the state could not be copied; None otherwise, and until the copy ends. Never blocks."""
        return self.staged.exception() if self.staged.done() else None

    @property
    def committed(self) -> Future[Metadata]:
        """Future that is done when the checkpoint can be loaded: this handle, as the counterpart of `staged`."""
        return self

    @property
    def progress(self) -> Progress | None:
        """Progress of this rank's upload; None before the upload begins, and always with a checkpoint process."""
        progress = self._lease.progress if self._lease is not None else None
        return progress if isinstance(progress, Progress) else None

    @property
    def stats(self) -> SaveStats | None:
        """Figures of the save on this rank, and on the coordinator those of all ranks; None while the save runs.

        Always None with a checkpoint process, and with a writer or a stager of another package. Also None if the save
        failed before DCP had set up the writer, for example because the state could not be copied.
        """
        return self._stats

    def result(self, timeout: float | None = None) -> Metadata:
        """Wait for the commit and return the checkpoint's metadata. Raises the error of a save that failed."""
        try:
            metadata = super().result(timeout)
        except BaseException as error:
            # A timeout, or Ctrl-C in the wait, is not the error of the save.
            if error is self.failure():
                self._note_told()
            raise
        self._note_told()
        return metadata

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the save and return the error if it failed; None if the checkpoint is committed."""
        error = super().exception(timeout)
        self._note_told()
        return error

    def failure(self) -> BaseException | None:
        """Return the error if the save has failed; None while it runs and once it is committed.

        Unlike `exception`, this call does not stop the exit status of the program from reporting the failure.
        """
        return super().exception() if self.done() else None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the end of the save. Return True if the save has committed or failed."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
            super().exception(timeout)
        return self.done()

    def _leave_to_parent(self) -> None:
        # In a fork no thread ends this save, so a wait would never end.
        futures: tuple[Future[Any], ...] = (self, self.staged)
        for future in futures:
            vars(future).update(_condition=Monitor(), _waiters=[], _done_callbacks=[])
            if not future.done():
                future.set_exception(
                    BucketpointError(
                        "This save is made by the process that this one was forked from",
                        url=self.url,
                        remedy="Wait for the save in the process that began it",
                    )
                )

    def _note_told(self) -> None:
        """Record that the program has received the outcome, so that a failure does not change the exit status."""
        self._told = True
        if self._at_end is not None:
            self._at_end.failure = None

    def _copied(self, staged: Any) -> None:
        # Keep only the lease: a reference to the staged state would keep the staging memory.
        if isinstance(staged, StagedState):
            self._lease = staged.lease
            staged.lease.after_commit = []
            if self.url:
                # With a checkpoint process, no writer in this process sets the label.
                staged.lease.label = f"the save of {self.url}"
        self.staged.set_result(None)

    def _ended(self, upload: Future[Any]) -> None:
        if not self._returned and self._lease is not None and self._lease.after_commit:
            # The save has ended before `async_save`, whose caller must not wait for the copy on this node.
            self._returned = True
            # If no thread can be started, the caller waits.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._ended, args=(upload,), name="bucketpoint-end").start()
                return
        error, commit_s = upload.exception(), time.monotonic() - self.begun_s
        if error is not None:
            # DCP raises a CheckpointException on all ranks, unless the group was gone and DCP saved alone.
            together = isinstance(error, CheckpointException) and process_groups.is_known(self._group)
            if self._group is not None and not together:
                from bucketpoint.dcp import meshes

                # Wake the ranks that wait for this one. Their connections are not used again.
                error = meshes.given_up(self._group, error, self.url)
            error = as_ours(error, self.url, ranks=self._ranks)
        self._note_figures(error)
        if self._lease is not None:
            self._lease.finish()
        self._parent_group = self._group = None
        if self._at_end is not None:
            # Set before the callbacks run: one of them may pass the outcome to the program, which clears `failure`.
            self._at_end.failure = None if error is None or self._told else str(error)
        if error is None:
            try:
                # Call `on_commit` before the result is set: the program may end right after `result()`.
                committed = getattr(upload.result(), "committed", None)
                # Only the committing rank has `on_commit`.
                if self._on_commit is not None and committed is not None:
                    nbytes, step, metrics, _ = committed
                    info = CommitInfo(str(self.url), step, nbytes, self._blocked_s, commit_s, metrics, self._stats)
                    tell(self._on_commit, info)
            finally:
                # Without a result, waits for the handle would never end.
                self.set_result(upload.result())
        else:
            self.set_exception(error)

    def _note_figures(self, error: BaseException | None) -> None:
        """Set `stats`, and send the figures to OpenTelemetry."""
        lease, held, ended = self._lease, self._stager, time.monotonic()
        # A kept handle must not keep the stager and its memory.
        self._stager = None
        try:
            if lease is not None and isinstance(times := lease.times, SaveTimes):
                self._stats = replace(
                    times.stats(ended),
                    total_s=ended - self.begun_s,
                    blocked_s=self._blocked_s,
                    staged_bytes=lease.nbytes,
                    memory_bytes=held.staged_bytes if isinstance(held, Stager) else 0,
                )
                end_save(times, self._stats, str(self.url), error)
            elif error is not None:
                note_failure(str(self.url), error)
        except Exception:
            # If this error were raised, waits for the handle would never end.
            logger.exception("the figures of the save of %s could not be computed", self.url)


def _raising(begin: Callable[P, SaveHandle]) -> Callable[P, SaveHandle]:
    """Make a call that begins a save raise the error if the state cannot be copied. The handle raises it too."""

    @functools.wraps(begin)
    def call(*args: P.args, **kwargs: P.kwargs) -> SaveHandle:
        handle = begin(*args, **kwargs)
        # A copy that fails while training continues is reported only by the handle, even if it fails at once.
        error = handle._refused
        if error is not None:
            handle._note_told()
            raise error
        return handle

    return call


@_raising
def async_save(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_writer: StorageWriter | None = None,
    planner: TorchSavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    on_commit: OnCommit | None = None,
) -> SaveHandle:
    """Begin a save in the background. Takes the arguments of `dcp.async_save`.

    Args:
        state_dict: the state, as for `dcp.async_save`.
        async_checkpointer_type: a thread of this process (the default), or torch's checkpoint process.
        async_stager: a `Stager`; by default the writer stages.
        no_dist: save in this process alone, without a process group.
        use_collectives: let the ranks plan together; if False, each rank saves its data as a separate checkpoint.
        process_group: the ranks that save, as a group of any backend; None for all ranks of the job. The save runs on a
            separate gloo group over the same ranks, so that its collectives never mix with those of training. The first
            call for these ranks makes that group, so all of them must make the call; the group is kept for as long as
            `process_group` exists.
        storage_writer: any writer; by default a new `BucketWriter`. Use one writer, or one `Stager`, for all saves to
            reuse the staging memory.
        planner: a `SavePlanner` that you keep from save to save; by default a new planner, which reuses the plans of
            the writer's earlier saves.
        on_commit: function that is called with a `CommitInfo` once the checkpoint is committed, usually on a background
            thread. It is called on the coordinator, or, in a save without collectives, on each rank for its own data.
            It must not wait for the handle, which is done only afterwards. Its errors are logged. The writer must be a
            `BucketWriter`.

    Returns:
        A handle. Its `result()` is the checkpoint's `Metadata` on the coordinator, and an object with the URL on other
        ranks. It raises only `BucketpointError`s, which `except Exception` catches.

    Raises:
        StagingError: the state cannot be copied. On other ranks the handle raises the error, so that no rank waits.
        InvalidURLError: neither `checkpoint_id` nor the writer has a URL.
        BucketpointError: there are several ranks and no process group; or an argument has a wrong type.
    """
    begun_s = time.monotonic()
    check_types(state=state_dict)
    if not no_dist:
        where = str(checkpoint_id) if checkpoint_id is not None else None
        process_groups.refuse_a_rank_alone("An asynchronous save", where)
    writer = storage_writer if storage_writer is not None else BucketWriter(checkpoint_id)
    if on_commit is not None and (not isinstance(writer, BucketWriter) or not callable(on_commit)):
        raise BucketpointError(
            "on_commit is not a function, or the writer is not a BucketWriter",
            remedy="Give on_commit a function of one argument, and save with a BucketWriter, S3Writer or GCSWriter",
        )
    stager = async_stager if async_stager is not None else writer
    if not hasattr(stager, "stage"):
        stager = Stager()
    # `writer.url` may be the URL of the save that this thread ran last, so it is not used.
    own = writer._url if isinstance(writer, BucketWriter) else getattr(writer, "checkpoint_id", None)
    if isinstance(writer, BucketWriter) and checkpoint_id is None:
        # Without a URL the save would fail in the background, where the error may go unnoticed.
        writer._open(own)
    handle = SaveHandle(str(checkpoint_id) if checkpoint_id is not None else own)
    handle._parent_group, handle.begun_s = process_group, begun_s
    handle._stager = stager._own_stager() if isinstance(stager, BucketWriter) else stager
    if planner is None:
        planner = SavePlanner.with_plans(writer.plans) if isinstance(writer, BucketWriter) else SavePlanner()
    group = None
    if not no_dist and process_groups.is_initialized():
        from bucketpoint.dcp import meshes

        group = meshes.group_beside(process_group)
        handle._ranks = process_groups.ranks_of(process_group)
    if async_checkpointer_type is AsyncCheckpointerType.THREAD:
        handle._group = group
    together = dist.get_world_size(group) if group is not None else 1
    alone = together == 1 or not use_collectives
    ranks = (
        SavingRanks(None, 1, alone=True, rank=process_groups.this_rank())
        if no_dist
        else replace(SavingRanks.of_job(), together=together)
    )
    if group is None:
        # Not only for this call: DCP warns on the thread of the upload.
        error_boundary.expect_one_process()
    if alone or dist.get_rank(group) == 0:
        handle._on_commit = on_commit
    watched = WatchedStager(stager, handle, alone, ranks)
    try:
        begun = dcp.async_save(
            watched.state_of(state_dict),
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=planner,
            process_group=group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=watched,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    except BaseException as error:
        if handle._lease is not None:
            # Nobody would call these functions.
            handle._lease.after_commit = None
        if not alone:
            # The other ranks would wait for this rank, and then mix this save with its next save.
            meshes.given_up(group, error, handle.url)
        raise
    handle._refused = watched.refused
    handle._at_end = error_boundary.begin(handle.url)
    upload = begun if isinstance(begun, Future) else begun.upload_completion
    # Set before the callback is added, because it may run at once.
    handle._blocked_s = time.monotonic() - begun_s
    upload.add_done_callback(handle._ended)
    handle._returned = True
    return handle


begin_save: Callable[..., SaveHandle] = inspect.unwrap(async_save)
"""`async_save`, but it returns a handle even if the state cannot be copied; then `_unstaged` returns the error.

Such a save fails on all ranks in their first collective. A process that saves alone raises the error instead."""
