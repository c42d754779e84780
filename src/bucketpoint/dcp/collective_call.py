"""A collective call, which ends on all ranks of a group by a deadline.

The ranks meet over the job's TCP store, and then use their mesh (see `meshes`), or make a new mesh if some
ranks have none. A failure, a lost rank or the deadline ends the call early: it closes the connections of the mesh and
cancels pending requests, so that every waiting thread wakes up.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from bucketpoint.dcp import meshes, process_groups
from bucketpoint.dcp.error_boundary import as_failure, as_ours, decoded, expect_one_process, interrupt_in
from bucketpoint.dcp.meeting import CallRefused, Failure, Kind, Meeting, named, poll
from bucketpoint.dcp.session import checked_seconds
from bucketpoint.errors import BucketpointError
from bucketpoint.forks import Event, Monitor
from bucketpoint.staging import take_turn
from bucketpoint.stores import retry
from bucketpoint.stores.cutoff import RequestCanceller

ANSWER_S = 5.0
"""Seconds reserved before the deadline to find the missing ranks. A live rank answers in a fraction of this time."""

WAITS = ""
"""Stage of a rank that only waits for other ranks."""

_LOOK_S = 0.25
_LOOKS_A_SECOND = 4000
"""Limit on requests per second to the job's TCP store, from all idle ranks together."""

_MOST_STAGE = 600
_MOST_BUSY = 64

DEADLINE_S = 1800.0
"""Default deadline: as long as a gloo group waits by default (torch's `default_pg_timeout`)."""


@contextlib.contextmanager
def collective_call(
    what: str, parent: Any, deadline_s: float, *, url: str, alone: bool = False
) -> Iterator[CollectiveCall]:
    """Run a block on all ranks of a group, which begin together. If a rank fails, all ranks raise.

    Args:
        what: name of the call for messages; the same on all ranks.
        parent: torch's process group, of any backend; None for all ranks of the job, or for this process alone if
            torch.distributed is not initialised.
        deadline_s: seconds from the call until the last rank has raised.
        alone: this process makes the call alone, even if it is part of a job.

    Raises:
        BucketpointError: the error of another rank that failed, or an error that names the missing ranks.
    """
    deadline_s = checked_seconds("deadline_s", deadline_s)
    ranks: tuple[int, ...] = ()
    if not alone:
        process_groups.refuse_a_rank_alone(what, url)
        ranks = process_groups.ranks_of(parent)
    call = CollectiveCall(what, parent, ranks, deadline_s, url)
    try:
        # Requests may take until `ends`, so that the canceller, and not their own timeout, ends them at `stops`.
        with retry.deadline(call.ends - time.monotonic()), call.cut.over_here(), warnings.catch_warnings():
            call.join()
            if call.group is None:
                expect_one_process()
            yield call
    except BaseException as error:
        reason = call.failed(error)
        if reason is error:
            raise
        _clear_frames(error)
        _clear_frames(reason)
        try:
            raise reason.with_traceback(None) from reason.__cause__
        finally:
            # Break the reference cycle of the error, its traceback and this frame.
            del reason
    finally:
        call.leave()


class CollectiveCall:
    """This rank's part in a call. Made by `collective_call`.

    On each rank, only one thread uses the job's TCP store, so that no other waits for the store. It meets the other
    ranks, makes the mesh, sends this rank's failure, receives failures of other ranks, and wakes the working thread.

    Attributes:
        mesh: the connections of the ranks, once all have begun the call; None for a process alone.
        group: process group for the collectives of this call; None before and after them, and for a process alone.
        cut: canceller of the requests of this call.
        stops: monotonic time at which this rank gives up.
        ends: monotonic time by which this rank must have raised.
    """

    def __init__(self, what: str, parent: Any, ranks: tuple[int, ...], deadline_s: float, url: str) -> None:
        self._what, self._url, self._deadline_s = what, url, deadline_s
        self.ends = time.monotonic() + deadline_s
        self.stops = self.ends - min(ANSWER_S, deadline_s / 4)
        self.cut = RequestCanceller(self.ends)
        self.mesh: meshes.Mesh | None = None
        self.group: Any = None
        # `ranks` is empty for a call that a process makes alone.
        self._parent, self._ranks = parent, ranks
        self._rank = process_groups.this_rank() if ranks else 0
        self._stage = "had not begun"
        self._stopped: Kind | None = None
        self._stage_then = WAITS
        self._own: Failure | None = None
        self._interrupt: BaseException | None = None
        self._leaving = False
        self._timer = threading.Timer(self.stops - time.monotonic(), self._stop, ("late",))
        self._timer.daemon = True
        # Received over the job's TCP store: the failure that ends the call, the stages of the ranks for which others
        # wait (None for a missing rank), and True if that store is lost.
        self._received: Failure | None = None
        self._stages: dict[int, str | None] | None = None
        self._storeless = False
        self._changed = Monitor()
        # Used only by the thread that uses the job's TCP store.
        self._thread: threading.Thread | None = None
        self._meeting: Meeting | None = None
        self._told = False
        self._wake = Event()
        self._look_s = max(_LOOK_S, len(ranks) / _LOOKS_A_SECOND)

    # -- called by the work -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def doing(self, stage: str) -> Iterator[None]:
        """Mark a block for which other ranks may have to wait. An error in the block is reported to them at once."""
        self._stage = stage
        try:
            yield
        except BaseException as error:
            if time.monotonic() >= self.stops:
                self._stop("late")
            elif self._stopped is None:
                self._tell("error", error)
            raise
        finally:
            self._stage = WAITS

    # -- beginning and end --------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Wait for this process's background saves, and then for the other ranks to make the same call.

        Background saves use the same mesh, so the call must not use or close the mesh before they have ended.
        """
        self._timer.start()
        if self._ranks:
            with self.doing("was waiting for a save in the background"):
                take_turn(self._what, lambda: self._stopped is not None)
        if len(self._ranks) <= 1:
            self._stage = "was still working"
            return
        self._stage = WAITS
        self._thread = threading.Thread(target=self._talk, name="bucketpoint-call", daemon=True)
        self._thread.start()
        self._wait(lambda: self.group is not None or self._stopped is not None, self.ends)
        if self._stopped is not None or self.group is None:
            raise CallRefused
        self._stage = "was planning"

    def failed(self, error: BaseException) -> BaseException:
        """Return the error that this rank must raise, and report it to ranks that would not raise otherwise."""
        if self._own is not None and self._own.kind == "error":
            # Later errors, from DCP or from closed connections, are consequences of the first error.
            return self._own.error if self._interrupt is None else self._interrupt
        if not isinstance(error, Exception | CheckpointException):
            if self._stopped is None:
                self._tell("error", error)
            return error
        if self._stopped is None:
            if isinstance(error, CheckpointException):
                # DCP raises a CheckpointException on all ranks, so no report is needed.
                return interrupt_in(error, self._ranks) or as_ours(error, self._url, self._what, self._ranks)
            if self._thread is None or not isinstance(error, RuntimeError):
                self._tell("error", error)
                return error
            # A RuntimeError may come from a broken connection, or from the user's code, and then no rank is missing.
            self._tell("lost", error)
            self._stop("lost")
        return self._reason(error)

    def leave(self) -> None:
        """Free the timer, thread and group of the call; after a success, wait until all ranks have finished."""
        self._leaving = True
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()
        self._wake.set()
        if self._thread is not None:
            # If the store stalls, the thread ends later.
            self._thread.join(min(max(self.ends - time.monotonic(), 0.5), 2 * ANSWER_S))
        # Break the reference cycle of the error and the frames with this call, which would keep the group's threads.
        self._own = self._received = self._interrupt = None

    def _tell(self, kind: Kind, error: BaseException) -> None:
        if not isinstance(error, Exception | CheckpointException):
            self._interrupt = error
        if isinstance(error, CheckpointException):
            error = as_ours(error, self._url, self._what, self._ranks)
        self._own = self._failure(kind, error)
        if self._thread is not None:
            self._wake.set()
            # Wait until the other ranks can have received the reason. Otherwise they would see only closed connections.
            ends = min(self.ends, time.monotonic() + ANSWER_S)
            self._wait(lambda: self._received is not None or self._storeless, ends)

    def _reason(self, error: BaseException) -> BaseException:
        """Return an error with the reason for which the call stopped, as far as it is found before the deadline."""
        if self._thread is None:
            return self._late({self._rank: self._stage_then})
        self._wait(
            lambda: self._stages is not None or self._storeless or getattr(self._received, "kind", None) == "error",
            self.ends,
        )
        received, stages = self._received, self._stages
        if received is not None and received.kind == "error":
            return received.error
        if stages is None:
            return self._error(
                f"{self._what} failed, and the missing rank is unknown: the job's TCP store does not answer",
                "Read the log of rank 0, or of the agent that started it: that process holds the job's TCP store",
            )
        if received is not None and received.kind == "lost" and None not in stages.values():
            # All ranks answer, so no connection broke, and the error came from the work.
            mine = self._own is not None and received.rank == self._own.rank and not isinstance(error, CallRefused)
            return error if mine else received.error
        return self._late(stages)

    def _late(self, stages: Mapping[int, str | None]) -> BucketpointError:
        gone = [rank for rank, stage in stages.items() if stage is None]
        busy = [rank for rank, stage in stages.items() if stage]
        parts = {rank: str(stages[rank]).partition("\n") for rank in busy}
        reasons = [f"rank {rank} {parts[rank][0]}" for rank in busy[:16]]
        remedies = [remedy for _, _, remedy in parts.values() if remedy]
        if gone:
            # Without a group the call has not begun on all ranks.
            never = "lost its connection, or never made this call, which all ranks must make"
            missing = (
                f"{named(gone)} {'do' if len(gone) > 1 else 'does'} not answer "
                f"(died, stopped, {never if self.group is None else 'or lost its connection'})"
            )
            if self._received is not None and self._received.kind == "lost":
                return self._error(f"{self._what} failed: {missing}", "Read the error or the log of that rank", *gone)
            reasons.insert(0, missing)
        why = "; ".join(reasons) or "all ranks waited for each other"
        return self._error(
            f"{self._what} was not complete after {self._deadline_s:.0f} s: {why}",
            remedies[0] if remedies else "Read the log of that rank, or allow more time with deadline_s=",
            *(gone or busy),
        )

    def _error(self, message: str, remedy: str, *ranks: int) -> BucketpointError:
        return BucketpointError(message, url=self._url, rank=ranks[0] if ranks else None, remedy=remedy)

    # -- on any thread ------------------------------------------------------------------------------------------------

    def _stop(self, kind: Kind) -> None:
        """End all waits for other ranks and for the object store: close connections and cancel requests."""
        with self._changed:
            if self._stopped is not None or self._leaving:
                return
            self._stopped, self._stage_then = kind, self._stage
            if self._stage and self.cut.called:
                self._stage_then += f" ({self.cut.called} was still running)"
            why, remedy = retry.ongoing_outage()
            if self._stage and why:
                # Other ranks receive the remedy with the stage, on a second line.
                self._stage_then += f" ({why})\n{remedy or ''}"
            self._changed.notify_all()
        self.cut.make()
        mesh = self.mesh
        if mesh is not None:
            mesh.cut()
        self._wake.set()

    def _wait(self, until: Callable[[], bool], ends: float) -> None:
        with self._changed:
            self._changed.wait_for(until, max(ends - time.monotonic(), 0))

    @contextlib.contextmanager
    def _news(self) -> Iterator[None]:
        """Change attributes in the block, and then wake the threads that `_wait` for them."""
        with self._changed:
            yield
            self._changed.notify_all()

    # -- on the thread that uses the job's TCP store ------------------------------------------------------------------

    def _talk(self) -> None:
        mesh, parted = None, False
        try:
            try:
                mesh = self._meet()
                with self._news():
                    self.mesh, self.group = mesh, mesh.group
            except Exception as error:  # noqa: BLE001 (reported to the other ranks, and raised by the call)
                self._refuse(error)
            if self._meeting is None:
                # `Meeting.begin` has sent the reason to the other ranks, unless the job's TCP store is lost.
                with self._news():
                    self._storeless = True
                return
            while True:
                self._wake.wait(self._look_s)
                self._wake.clear()
                self._serve(self._meeting)
                if self._leaving:
                    parted = self._part(self._meeting)
                    return
        except Exception:  # noqa: BLE001 (without the store, the error cannot be reported)
            with self._news():
                self._storeless = True
            self._stop("lost")
        finally:
            with self._news():
                self.mesh = self.group = None
            if mesh is not None and not parted:
                # Bytes of this call may still be in transit, and must not be read by a later call.
                mesh.cut()
                mesh.drop()

    def _meet(self) -> meshes.Mesh:
        """Wait until all ranks make this call. Return their mesh, or a new one if some of them have none."""
        former = meshes.mesh_of(self._parent)
        if former is None:
            meeting = Meeting.begin(self._ranks, self._what, error=process_groups.too_few_descriptors(self._ranks))
        else:
            meeting = Meeting.begin(self._ranks, self._what, note=former.name)
        self._meeting = meeting
        poll(
            lambda: meeting.store.check(["all"]) or self._hears(meeting) or self._stopped is not None,
            self.stops,
            self._look_s,
        )
        if self._stopped is not None or not meeting.store.check(["all"]):
            raise CallRefused
        same = meeting.verdict()
        left = timedelta(seconds=max(self.stops - time.monotonic(), 0.001))
        # The deadline ends the waits, and not the timeout of the group, which may be earlier.
        if former is not None and same == former.name:
            former.wait_for(left)
            return former
        if former is not None:
            former.drop()
            if (refused := process_groups.too_few_descriptors(self._ranks)) is not None:
                raise refused
        return meshes.Mesh.make(self._parent, meeting, left)

    def _refuse(self, error: Exception) -> None:
        """End a call that could not begin, and record this rank's failure for the other ranks."""
        if self._stopped is not None:
            return
        known = isinstance(error, BucketpointError)
        if not known and (isinstance(error, CallRefused) or time.monotonic() > self.stops - _LOOK_S):
            self._stop("late")
            return
        kind: Kind = "error" if known else "lost"
        self._own = self._failure(kind, error)
        self._stop(kind)

    def _failure(self, kind: Kind, error: BaseException) -> Failure:
        return Failure(self._rank, kind, as_failure(error, self._rank, self._url, self._what))

    def _serve(self, meeting: Meeting) -> None:
        failure = self._own
        if failure is None and self._stopped == "late" and self._received is None:
            failure = Failure(self._rank, "late", self._late({}))
        if failure is not None and not self._told:
            self._told = True
            meeting.fail(failure)
            self._hear(meeting)
        else:
            self._hears(meeting)
        if self._stopped is not None:
            # Cut again: connections that were still being opened escaped the first cut.
            self.cut.make()
            if self._received is not None and self._received.kind != "error" and self._stages is None:
                self._call_roll(meeting)

    def _hears(self, meeting: Meeting) -> bool:
        """Return True if a rank has failed."""
        if self._received is None and meeting.store.check(["failed/1"]):
            self._hear(meeting)
        return self._received is not None

    def _hear(self, meeting: Meeting) -> None:
        """Receive the failures, and stop the call with the same failure on all ranks.

        This is the first `"error"`, because lost connections are consequences of errors; or else the first failure.
        """
        failures = meeting.failures()
        if failures:
            first = next((failure for failure in failures if failure.kind == "error"), failures[0])
            with self._news():
                self._received = first
            self._stop(first.kind)

    def _call_roll(self, meeting: Meeting) -> None:
        """Publish the stage of this rank, and receive the stages of the others. A rank without an answer is missing.

        One rank collects the answers for all ranks: otherwise the job's TCP store would get ranks x ranks requests.
        """
        store, ranks = meeting.store, self._ranks
        self._answer(meeting, self._stage_then or "-")
        latest = self.ends - min(1.0, self._deadline_s / 10)
        ends = min(time.monotonic() + ANSWER_S, latest)
        collects = store.add("collects", 1) == 1
        poll(lambda: store.check(["answered" if collects else "roll"]), ends, self._look_s)
        # Look again: an error reported since then explains all others.
        self._hear(meeting)
        if collects:
            keys = [f"answer/{index}" for index in range(len(ranks))]
            stages = [store.get(key).decode("utf-8", "replace") if store.check([key]) else None for key in keys]
            gone = [rank for rank, stage in zip(ranks, stages, strict=True) if stage is None]
            busy = [[rank, stage] for rank, stage in zip(ranks, stages, strict=True) if stage not in (None, "-")]
            store.set("roll", json.dumps([gone, busy[:_MOST_BUSY]]))
        # The rank that collects may have begun later than this one.
        elif not poll(lambda: store.check(["roll"]), min(ends + ANSWER_S, latest), self._look_s):
            return
        named: dict[int, str | None] = {}
        with contextlib.suppress(ValueError, TypeError):
            gone, busy = decoded(store.get("roll"))
            named = {**dict.fromkeys(gone), **{rank: str(stage)[:_MOST_STAGE] for rank, stage in busy}}
        with self._news():
            self._stages = {rank: stage for rank, stage in named.items() if rank in ranks}

    def _answer(self, meeting: Meeting, stage: str) -> None:
        meeting.store.set(f"answer/{self._ranks.index(self._rank)}", stage)
        if meeting.store.add("answers", 1) == len(self._ranks):
            meeting.store.set("answered", "yes")

    def _part(self, meeting: Meeting) -> bool:
        """Wait after a success until all ranks have finished; return False if some have not, or the call has failed.

        Without the wait, this rank might close connections from which another rank still reads.
        """
        store = meeting.store
        if self._stopped is not None:
            return False
        if store.add("done", 1) == len(self._ranks):
            store.set("parted", "yes")
        poll(lambda: store.check(["parted"]) or store.check(["failed/1"]), time.monotonic() + ANSWER_S, self._look_s)
        if store.check(["parted"]):
            return True
        # Answer a roll call that other ranks may make later, so that they do not report this rank as missing.
        self._answer(meeting, "-")
        return False


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and of its causes, which hold the group with its threads, and the state."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            traceback.clear_frames(cause.__traceback__)
            waiting += [cause.__cause__, cause.__context__]
