"""The ranks that use one manager together: a separate gloo group, on which they agree before they continue."""

from __future__ import annotations

import contextlib
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from bucketpoint.dcp import meshes, process_groups
from bucketpoint.dcp.error_boundary import as_failure, errors_of_dcp, from_plain, to_plain
from bucketpoint.dcp.meeting import ANSWERS_WITHIN_S, PATIENCE_S, Failure, Meeting, other_calls, poll
from bucketpoint.errors import BucketpointError, RanksDisagreeError

T = TypeVar("T")

_SLOTS = 8
"""Number of values that one agreement compares. All agreements have one size, because different ones can meet: gloo
ends a process on which messages of different sizes meet."""

_CALL_BYTES = 200
_NOTES_AFTER_S = 1.0


class Ranks:
    """All ranks of a group, or this process alone if torch.distributed is not initialised.

    Steps that can fail on one rank run in `together`, after which all ranks continue or all raise. A rank that waits
    for others logs after 10 s which are missing, and raises at the timeout an error that names them.

    The group is a new gloo group, so that no collective of training can mix with the manager's. As the manager's ranks
    communicate while a save is under way, all saves and loads of these ranks share another group. Both are made by
    `connect`; before it, `together` uses the job's key-value store. The call after a failed wait reconnects.

    Args:
        what: name of the user of the ranks, for messages.
        members: torch's group of the ranks; None for all ranks of the job.

    Attributes:
        members: as given; to be passed to `async_save`, too.
        group: group on which the ranks agree; None before `connect`, and without torch.distributed.
        load_s: longest time that a rank waits for the end of a load on the others.

    Raises:
        BucketpointError: there are several ranks and no process group.
    """

    def __init__(self, what: str = "A checkpoint manager", members: Any = None) -> None:
        process_groups.refuse_a_rank_alone(what)
        self.group: Any = None
        self._ranks = process_groups.ranks_of(members)
        self.world = len(self._ranks)
        self.rank = self._ranks.index(process_groups.this_rank()) if self.world > 1 else 0
        # A job of one rank connects, too: it has its group from the job's store.
        waits = process_groups.timeout_of(members) if process_groups.is_initialized() else timedelta()
        self._timeout_s = waits.total_seconds()
        self._come_s = self._timeout_s
        self.load_s = 0.0
        self.members = members
        self._connects = False
        self._calls = 0

    def connect(self, what: str, *, timeout: timedelta | None = None, collectives: timedelta | None = None) -> None:
        """Make the groups. A collective call.

        Args:
            timeout: longest time that a rank waits for the others; by default that of the members' group, which limits
                waits for missing ranks in any case.
            collectives: longest time that a rank waits in a load, in which others may read more than it does.
        """
        if not process_groups.is_initialized():
            return
        self._connects = True
        if timeout is not None:
            self.limit(timeout)
        self.load_s = max(2 * self._timeout_s, collectives.total_seconds() if collectives is not None else 0.0)
        self._reconnect(what)

    def limit(self, timeout: timedelta) -> None:
        """Set the longest time that a rank waits for the others. The same on all ranks."""
        self._timeout_s = timeout.total_seconds()
        self._come_s = min(self._come_s, self._timeout_s)

    @property
    def global_rank(self) -> int:
        return self._ranks[self.rank]

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    @property
    def limit_s(self) -> float:
        """The longest time that a rank waits for the others' work, in seconds."""
        return self._timeout_s

    def together(self, what: str, attempt: Callable[[], T]) -> T:
        """Run a step that can fail on one rank, and continue once all ranks have done it. A collective call.

        Args:
            what: the call, as a program spells it, the same on all ranks.

        Raises:
            BucketpointError: on all ranks, the failure of the first rank that has failed, with its rank. Errors of
                other libraries are raised as their text, with the error as the cause on the rank itself.
            BaseException: on an interrupted rank, the interruption.
        """
        self._refuse_other_group(what)
        if self._connects and self.group is None:
            # The attempt may look at the group.
            self._reconnect(what)
        result, error = _tried(attempt)
        if self.world == 1:
            if error is not None:
                raise error
        elif self.group is None:
            self._meet(what, error)
        else:
            (failed,) = self.most([0 if error is None else self.world - self.rank], what)
            if failed:
                self._raise_from(self.world - failed, error, what)
        return result  # type: ignore[return-value]

    def on_coordinator(self, find: Callable[[], T], what: str) -> T:
        """Run `find` on the coordinator alone. Return its result, or raise its error, on every rank."""
        if self.world == 1:
            return find()
        result, error = _tried(find) if self.is_coordinator else (None, None)
        failed, shared = self.shared(0, (error is not None, result), what)
        if failed:
            self._raise_from(0, error, what)
        return shared  # type: ignore[no-any-return]

    def most(self, numbers: Sequence[int], what: str, *, limit_s: float | None = None) -> list[int]:
        """Return the largest value of each number among all ranks. A collective call.

        Args:
            limit_s: seconds to wait for the others; by default as long as for missing ranks.

        Raises:
            BucketpointError: ranks are missing at the timeout, or were lost.
            RanksDisagreeError: the ranks make different calls at the same time.
        """
        self._refuse_other_group(what)
        if self.world == 1:
            return list(numbers)
        assert len(numbers) <= _SLOTS
        if self.group is None:
            assert self._connects
            self._reconnect(what)
        call = zlib.crc32(what.encode())
        agreed = torch.tensor([call, -call, *numbers, *[0] * (_SLOTS - len(numbers))], dtype=torch.int64, device="cpu")
        self._run(lambda: dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.group, async_op=True), what, limit_s)
        first, second, *most = agreed.tolist()
        if first != -second:
            raise other_calls(self._ranks, self._calls_made(what))
        return [int(number) for number in most[: len(numbers)]]

    def refuse_unless_same(self, name: str, value: object, what: str) -> None:
        """Compare a value, by its text, with those of the other ranks.

        Raises:
            RanksDisagreeError: they are not all the same. Raised on every rank.
        """
        digest = zlib.crc32(repr(value).encode())
        if self.most([digest, -digest], what) != [digest, -digest]:
            raise RanksDisagreeError(
                f"{name} is not the same on all ranks. On rank {self.global_rank} it is {value!r}"[:500],
                remedy="Give every rank the same policy",
            )

    def close(self) -> None:
        """Leave the groups. Not a collective call."""
        if self.group is not None:
            process_groups.leave(self.group)
        self.group = None
        self.world = 1

    @contextlib.contextmanager
    def calling_dcp(
        self, what: str, url: str | None, *, before: tuple[type[BucketpointError], ...] = ()
    ) -> Iterator[None]:
        """Make a call of DCP on all ranks. Its error is raised as ours; an interrupt unchanged.

        An interrupt that DCP does not raise on all ranks leaves the others in a collective. This rank gives up the
        group: `group` is None then, and the others raise an error that names it.

        Args:
            what: the call, for messages.
            before: classes of errors that are preferred to all others.
        """
        with errors_of_dcp(url, what, self._ranks, before=before):
            try:
                yield
            except (Exception, CheckpointException):
                raise
            except BaseException as error:
                self.leave_others(what, error)
                raise

    # -- on a group ---------------------------------------------------------------------------------------------------

    def _refuse_other_group(self, what: str) -> None:
        """Check that torch's group still joins these ranks: without it a rank would save its own part as the whole."""
        if process_groups.is_initialized() or len(self._ranks) > 1:
            now = process_groups.ranks_of(self.members)
            if now != self._ranks:
                there = f"joins {len(now)} now" if process_groups.is_initialized() else "was destroyed"
                raise RanksDisagreeError(
                    f"{what} cannot begin: the process group joined {len(self._ranks)} ranks, and {there}",
                    remedy="Close the manager before destroy_process_group(), and make a new one after "
                    "init_process_group()",
                )

    def _meet(self, what: str, error: BaseException | None = None) -> Meeting:
        meeting = Meeting.begin(self._ranks, what, purpose="manager", error=error)
        meeting.wait(self._come_s)
        return meeting

    def _reconnect(self, what: str) -> None:
        meeting = self._meet(what)
        self._store, self._calls = meeting.store, 0
        store, within = dist.PrefixStore("group", self._store), timedelta(seconds=self.load_s)
        self.group = process_groups.connect(self._ranks, store, meeting.name, within)
        # Made now, while all ranks take part, and not at the first save. It is kept for as long as the members' group
        # exists. One rank may free our own group earlier than another, and would then make the next mesh alone.
        meshes.group_beside(self.members)

    def _raise_from(self, index: int, error: BaseException | None, what: str) -> NoReturn:
        """Raise the failure of a rank, by its place among the ranks, on all of them."""
        failure = self.failure_of(index, error, what)
        if error is not None and not isinstance(error, Exception):
            raise error
        if failure is error or error is None:
            raise failure
        raise failure from error

    def failure_of(self, index: int, error: BaseException | None, what: str) -> BucketpointError:
        """Return one rank's failure on all ranks. A collective call.

        Args:
            index: place of that rank among the ranks of the group.
            error: failure of this rank, if it has one.
        """
        mine = as_failure(error, self.global_rank) if error is not None and index == self.rank else None
        plain = self.shared(index, mine and to_plain(mine), what)
        return mine or from_plain(plain)

    def shared(self, index: int, value: Any, what: str) -> Any:
        """Return one rank's value on all ranks. A collective call.

        Args:
            index: place of that rank among the ranks of the group; its value is plain data.
        """
        if self.world == 1:
            return value
        mine = index == self.rank
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if mine else None
        (length,) = self.most([data.numel() if data is not None else 0], what, limit_s=self._timeout_s)
        held = data if data is not None else torch.empty(length, dtype=torch.uint8, device="cpu")
        self._run(lambda: dist.broadcast(held, group_src=index, group=self.group, async_op=True), what, self._timeout_s)
        return value if mine else pickle.loads(held.numpy().tobytes())

    def _calls_made(self, what: str) -> list[str]:
        mine = torch.zeros(_CALL_BYTES, dtype=torch.uint8, device="cpu")
        text = what.encode()[:_CALL_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        made = [torch.zeros_like(mine) for _ in self._ranks]
        self._run(lambda: dist.all_gather(made, mine, group=self.group, async_op=True), what, None)
        return [each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in made]

    def _run(self, begin: Callable[[], Any], what: str, limit_s: float | None) -> None:
        """Run a collective of the group, and give the group up if it does not succeed."""
        self._calls += 1
        here = Meeting(self._ranks, what, dist.PrefixStore(f"calls/{self._calls}", self._store))
        try:
            try:
                work = begin()
            except RuntimeError as error:
                raise self._broken(here) from error
            self._wait(work, here, self._come_s if limit_s is None else limit_s)
        except BucketpointError:
            # The collective may still wait for the others, and a later one must not be mixed with it.
            self._give_up()
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                failure = BucketpointError(f"{what} cannot go on: the job's key-value store does not answer: {error}")
                self._give_up()
                raise failure from error
            self.leave_others(what, error)
            raise

    def _wait(self, work: Any, here: Meeting, limit_s: float) -> None:
        begun, noted, said = time.monotonic(), False, False
        while True:
            waited = time.monotonic() - begun
            until = _NOTES_AFTER_S if not noted else PATIENCE_S if not said else limit_s
            try:
                work.wait(timedelta(seconds=max(min(until, waited + PATIENCE_S, limit_s) - waited, 0.001)))
                return
            except RuntimeError as error:
                if work.is_completed():
                    # The collective may have ended just after the timeout.
                    try:
                        work.wait()
                        return
                    except RuntimeError:
                        raise self._broken(here) from error
            waited = time.monotonic() - begun
            if not noted:
                # Only now, so that collectives without a wait send no request to the store.
                noted = True
                here.come()
            if waited >= limit_s:
                failure = here.late(waited)
                self._note_end(failure)
                raise failure
            if waited >= PATIENCE_S and not said:
                said = True
                here.log_missing(waited)

    def leave_others(self, what: str, error: BaseException) -> None:
        """Give the group up after an error of this rank alone. Ranks that wait for it raise an error, too."""
        if self.group is not None:
            self._note_end(as_failure(error, self.global_rank, what=what))
            self._give_up()

    def _note_end(self, failure: BucketpointError) -> None:
        """Record why this rank gives the group up, for the others, whose connections to it close."""
        self._store.set("end", Failure(self.global_rank, "lost", failure).encoded())

    def _broken(self, here: Meeting) -> BucketpointError:
        """Return the error of a collective whose connections were closed: another rank has given up, or is dead."""
        here.come()
        poll(lambda: bool(self._store.check(["end"])) or not here.missing(), time.monotonic() + ANSWERS_WITHIN_S)
        if self._store.check(["end"]):
            end = Failure.received(self._store.get("end"), self._ranks)
            return BucketpointError(
                f"{here.what} cannot go on: rank {end.rank} has given up. There: {end.error.message}"[:1000],
                rank=end.rank,
                remedy="Make each call on all ranks, at the same point of the program",
            )
        return here.late(0.0, dead=True)

    def _give_up(self) -> None:
        group, self.group = self.group, None
        if group is None:
            return
        meshes.Mesh(group, "", timedelta()).cut()
        process_groups.leave(group)


def _tried(attempt: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return attempt(), None
    except BaseException as error:  # noqa: BLE001 (raised once the other ranks know)
        return None, error
