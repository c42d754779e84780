"""The mesh: the gloo group that all saves and loads of the same ranks share.

Calls use a mesh one after the other: a save or a load first waits for the earlier saves of its process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import utils as dcp_utils

from bucketpoint.dcp import process_groups
from bucketpoint.dcp.error_boundary import as_failure
from bucketpoint.dcp.meeting import ANSWERS_WITHIN_S, Failure, Meeting, named, poll
from bucketpoint.errors import LISTED, BucketpointError, PeerFailedError
from bucketpoint.forks import process_lock, renew_in_child

logger = logging.getLogger(__name__)

_CONNECT_WITHIN = timedelta(minutes=1)
"""Limit on gloo's steps while the ranks of a meeting connect, and on the wait for ranks to replace a failed mesh:
ranks that have not noticed the failure do not join."""

_by_ranks: weakref.WeakValueDictionary[tuple[int, ...], Mesh] = weakref.WeakValueDictionary()
"""The newest mesh of each group of ranks."""

_beside: weakref.WeakKeyDictionary[Any, Mesh] = weakref.WeakKeyDictionary()
"""For each caller's group, the mesh over the same ranks, which is kept for as long as one of these groups exists."""

_making = process_lock()


@dataclass(eq=False)
class Mesh:
    """A gloo group over some ranks, for all saves and loads of these ranks.

    Attributes:
        name: the same on all ranks; never used for another mesh of the job.
        timeout: limit on the waits in collectives.
        process: id of the process that made the mesh. A fork does not inherit the threads that receive.
        lost: the connections are closed, or may be. The next call makes another mesh.
        leave: function that frees the connections and threads.
        ended: the meeting that ranks join when they leave the mesh; the first rank with an error records the reason.
    """

    group: Any
    name: str
    timeout: timedelta
    process: int = field(default_factory=os.getpid)
    lost: bool = False
    leave: Any = None
    ended: Meeting | None = None

    @classmethod
    def make(cls, parent: Any, meeting: Meeting, within: timedelta) -> Mesh:
        """Connect the ranks of `parent`, and keep the mesh for their next calls. A collective call.

        Args:
            meeting: a meeting that all ranks of `parent` have joined.
            within: limit on the time to make the connections, and on the waits in collectives, if it is above the
                timeout of `parent`.
        """
        mesh = cls.connect(meeting, within)
        mesh.wait_for(process_groups.timeout_of(parent))
        _by_ranks[meeting.ranks] = _beside[_or_world(parent)] = mesh
        return mesh

    @classmethod
    def connect(cls, meeting: Meeting, within: timedelta) -> Mesh:
        """Connect the ranks of a meeting for as long as the caller keeps the mesh. A collective call."""
        store = dist.PrefixStore("group", meeting.store)
        connecting = min(within, _CONNECT_WITHIN)
        group = process_groups.connect(meeting.ranks, store, meeting.name, connecting)
        mesh = cls(group, meeting.name, connecting, ended=_ended(meeting))
        mesh.wait_for(within)
        mesh.leave = weakref.finalize(mesh, process_groups.leave, group)
        mesh.leave.atexit = False
        renew_in_child(mesh, lambda inherited: inherited.leave.detach())
        return mesh

    def wait_for(self, timeout: timedelta, *, at_most: bool = False) -> None:
        """Let collectives wait for at least `timeout`; with `at_most`, for exactly `timeout`."""
        if at_most or timeout > self.timeout:
            process_groups.backend_of(self.group)._set_default_timeout(timeout)
            self.timeout = timeout

    def cut(self) -> list[int]:
        """Close the connections. Every thread that waits in a collective raises, here and on other ranks.

        Returns:
            The ranks in the group whose connections to this rank were closed before.
        """
        self.lost = True
        return _disconnected(self.group) if self.group is not None else []

    def end(self, error: BaseException, url: str | None, what: str = "The save") -> BucketpointError:
        """Close the connections after an error on this rank. Return the reason, which is the same on all ranks.

        The first rank with an error determines the lost ranks: other ranks also see connections that it has closed, and
        see this much later if they are working.

        Args:
            error: a `PeerFailedError` if this rank has waited for another rank without success.
            what: name of the call, for messages.
        """
        assert self.ended is not None
        ended, store, here, lost = self.ended, self.ended.store, process_groups.this_rank(), list[int]()
        try:
            ended.come()
            first = store.add("first", 1) == 1
            lost = [ended.ranks[place] for place in self.cut()]
            if first:
                poll(lambda: not ended.missing(), time.monotonic() + ANSWERS_WITHIN_S)
                missing = ended.missing()
                silent = [rank for rank in lost if rank in missing]
                if isinstance(error, PeerFailedError):
                    silent = silent or missing
                ours = _explained(error, silent, url, what)
                store.set("why", Failure(here, "error", ours).encoded())
            elif poll(lambda: bool(store.check(["why"])), time.monotonic() + 2 * ANSWERS_WITHIN_S):
                ours = Failure.received(store.get("why"), ended.ranks).error
                ours.__cause__ = error
            else:
                ours = _explained(error, lost, url, what)
        except RuntimeError:
            # The process that holds the job's TCP store is lost.
            ours = _explained(error, lost or [ended.ranks[place] for place in self.cut()], url, what)
        return ours

    def complete(self) -> None:
        """Free the connections after a call in which this rank has finished, although other ranks may not have.

        This rank first joins `ended`, so that a rank that fails later does not report this rank as lost.
        """
        if self.ended is not None and process_groups.is_known(self.group):
            with contextlib.suppress(RuntimeError):
                self.ended.come()
        self.drop()

    def drop(self) -> None:
        """Free the connections and threads before the mesh is garbage-collected."""
        self.lost = True
        self.leave()
        self.group = None


def not_connected(meeting: Meeting, error: BaseException, what: str) -> BucketpointError:
    """Return the reason for which the ranks could not connect, which is the same on all ranks.

    A rank may fail, and close its connections, while other ranks still connect. Ranks that do not answer may still be
    connecting, so no rank is named as lost.
    """
    return Mesh(None, meeting.name, timedelta(0), ended=_ended(meeting)).end(error, None, what)


def _ended(meeting: Meeting) -> Meeting:
    return replace(meeting, store=dist.PrefixStore("ended", meeting.store))


def _disconnected(group: Any) -> list[int]:
    """Close the connections of a group, as `Mesh.cut`."""
    with contextlib.suppress(RuntimeError):
        backend, here, size = process_groups.backend_of(group), group.rank(), group.size()
        # In a large group, only these ranks are certainly connected, by gloo's barrier.
        near = [(here + (1 << power)) % size for power in range((size - 1).bit_length())]
        others = [peer for peer in range(size) if peer != here]
        return process_groups.disconnect(backend, near if size > process_groups.MOST_CONNECTED else others)
    return []


def _or_world(group: Any) -> Any:
    return group if group is not None else dist.group.WORLD


def mesh_of(parent: Any) -> Mesh | None:
    """Return the mesh of the ranks of a group; None if there is no usable mesh.

    A mesh is not used after torch's default group was destroyed, nor in a fork.

    Raises:
        BucketpointError: this process was forked from the one that made the mesh.
    """
    mesh = _by_ranks.get(process_groups.ranks_of(parent))
    if mesh is None or not process_groups.is_known(mesh.group):
        return None
    if mesh.process != os.getpid():
        raise BucketpointError(
            f"This process was forked from rank {dist.get_rank()} (process {mesh.process}), and cannot "
            "use the process group of that process",
            rank=dist.get_rank(),
            remedy="Save and load in the process that called init_process_group()",
        )
    # `parent` may be another group over the same ranks, which now keeps the mesh too.
    _beside[_or_world(parent)] = mesh
    return None if mesh.lost else mesh


def group_beside(parent: Any) -> Any:
    """Return the gloo group that background saves use instead of `parent`.

    The group is made once and kept. The first call for these ranks is collective, and so is the first call after a save
    on the group has failed.

    Raises:
        BucketpointError: some ranks did not take part in making the group.
    """
    with _making:
        mesh = mesh_of(parent)
        if mesh is None:
            ranks, within = process_groups.ranks_of(parent), process_groups.timeout_of(parent)
            former = _by_ranks.get(ranks)
            if former is not None and process_groups.is_known(former.group):
                within = min(within, _CONNECT_WITHIN)
                former.drop()
            refused = process_groups.too_few_descriptors(ranks)
            meeting = Meeting.begin(ranks, "an asynchronous save", error=refused)
            meeting.wait(within.total_seconds())
            try:
                mesh = Mesh.make(parent, meeting, within)
            except RuntimeError as error:
                raise not_connected(meeting, error, "The save") from error
        return mesh.group


def given_up(group: Any, error: BaseException, url: str | None) -> BaseException:
    """Close the connections of a group from `group_beside` after an error of this rank. Return the reason."""
    mesh = next((mesh for mesh in list(_by_ranks.values()) if mesh.group is group), None)
    if mesh is not None and process_groups.is_known(group):
        return mesh.end(error, url)
    # Other ranks may wait in a collective of the save that this rank has left. torch has destroyed the group, but its
    # connections stay open while the save refers to the group.
    _disconnected(group)
    if isinstance(error, BucketpointError | CheckpointException):
        return error
    gone = process_groups.group_gone("The process group was destroyed during the save", url)
    gone.__cause__ = error
    return gone


def _explained(error: BaseException, lost: list[int], url: str | None, what: str) -> BucketpointError:
    if not lost:
        return as_failure(error, process_groups.this_rank(), url, what)
    ours = PeerFailedError(
        f"{what} failed: {named(lost)} died, stopped, or did not answer",
        url=url,
        rank=lost[0],
        remedy="Read the log of that rank, and start the job again. A save was committed only if all ranks had "
        f"uploaded before: {LISTED}",
    )
    ours.__cause__ = error
    return ours


def leave_default_group() -> None:
    """Make DCP's background save on this thread use the mesh of all ranks for its collectives.

    By default DCP uses the default process group, at the same time as training. It does not pass the group to writers,
    so the group is replaced in DCP's wrapper, a local variable of the functions that call the writer. In a checkpoint
    process, which saves on its main thread, the default group has no other use.
    """
    if threading.current_thread() is threading.main_thread():
        return
    wrapper = _dcp_wrapper()
    if wrapper is not None:
        if wrapper.use_dist and wrapper.group in (None, dist.group.WORLD) and dist.get_world_size() > 1:
            wrapper.group = group_beside(None)
    elif len(dist.distributed_c10d._world.pg_map) == 1:
        logger.warning(
            "an asynchronous save may use the default process group: if its collectives mix with those of training, "
            "the job hangs or is aborted. Call bucketpoint.async_save, which makes a separate process group, or pass "
            'process_group=dist.new_group(backend="gloo"), made once on every rank'
        )


def _dcp_wrapper() -> Any:
    """Return DCP's wrapper of the process group of the save that this thread runs; None if it is not found."""
    kind = getattr(dcp_utils, "_DistWrapper", ())
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, kind):
                return value
        frame = frame.f_back
    return None
