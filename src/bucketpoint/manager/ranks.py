"""The ranks of one manager: a separate gloo group, and collective calls in which all ranks continue or all raise."""

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
from bucketpoint.dcp.meeting import PATIENCE_S, Meeting, other_calls
from bucketpoint.errors import BucketpointError, RanksDisagreeError

T = TypeVar("T")

_SLOTS = 8
"""Number of values in each all-reduce. All have the same size, because ranks may be in different calls: gloo aborts a
process that receives a message of another size."""

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Least timeout of the collectives of saves and loads, in which ranks wait for each other's uploads and reads. It is
torch's default."""

_CALL_BYTES = 200
_NOTES_AFTER_S = 1.0


class Ranks:
    """All ranks of a group, or only this process if torch.distributed is not initialised.

    Code that can fail on one rank runs in `together`, after which all ranks continue or all raise. A rank that waits
    for others logs after 10 s which are missing, and at the timeout raises an error that names them.

    There are two gloo groups, one for the manager's own collectives, and one for all saves and loads of these ranks: so
    the collectives of training, of the manager and of a save under way never mix. The call after a failed wait
    reconnects.

    Args:
        what: the call as in the program's text, the same on all ranks: making this object is a collective call.
        members: torch's group of the ranks; None for all ranks of the job.

    Attributes:
        members: the argument `members`, which `async_save` needs as its process group.
        limit_s: longest time in seconds that a rank waits for the others' work; by default the timeout of the members'
            group, which also limits waits for missing ranks.
        load_s: longest time in seconds that a rank waits for the end of a load on the others.

    Raises:
        BucketpointError: there are several ranks and no process group.
    """

    def __init__(self, what: str, members: Any = None) -> None:
        process_groups.refuse_a_rank_alone(what)
        self._mesh: meshes.Mesh | None = None
        self._ranks = process_groups.ranks_of(members)
        self.world = len(self._ranks)
        self.rank = self._ranks.index(process_groups.this_rank()) if self.world > 1 else 0
        self.members = members
        self._calls = 0
        waits = process_groups.timeout_of(members) if process_groups.is_initialized() else timedelta()
        self._come_s = waits.total_seconds()
        self.limit(waits)
        if process_groups.is_initialized():
            self._reconnect(what)

    def limit(self, timeout: timedelta) -> None:
        """Set the longest time that a rank waits for the others. It must be the same on all ranks."""
        self.limit_s = timeout.total_seconds()
        self._come_s = min(self._come_s, self.limit_s)
        self.load_s = max(2 * self.limit_s, COLLECTIVE_TIMEOUT.total_seconds())
        if self._mesh is not None:
            # Ranks wait in DCP's collectives for each other's reads.
            self._mesh.wait_for(timedelta(seconds=self.load_s), at_most=True)

    @property
    def group(self) -> Any:
        """Group of the manager's collectives; None without torch.distributed, and after a failed wait."""
        return self._mesh.group if self._mesh is not None else None

    @property
    def global_rank(self) -> int:
        return self._ranks[self.rank]

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def together(self, what: str, attempt: Callable[[], T], *, limit_s: float | None = None) -> T:
        """Run `attempt`, which can fail on one rank, and return once all ranks have run it. A collective call.

        Args:
            what: the call as in the program's text, the same on all ranks.
            limit_s: as for `most`.

        Raises:
            BucketpointError: on all ranks, the failure of the lowest rank that failed, with its rank. An error of
                another library becomes its text; on the rank where it was raised it is the cause.
            BaseException: on an interrupted rank, the interrupt.
        """
        self._refuse_other_group(what)
        if self.world > 1 and self.group is None:
            # Before the attempt, which may use the group.
            self._reconnect(what)
        result, error = _tried(attempt)
        if self.world == 1:
            if error is not None:
                raise error
        else:
            (failed,) = self.most([0 if error is None else self.world - self.rank], what, limit_s=limit_s)
            if failed:
                self._raise_from(self.world - failed, error, what)
        return result  # type: ignore[return-value]

    def on_coordinator(self, find: Callable[[], T], what: str) -> T:
        """Run `find` on the coordinator only. Return its result, or raise its error, on every rank."""
        if self.world == 1:
            return find()
        result, error = _tried(find) if self.is_coordinator else (None, None)
        failed, shared = self.shared(0, (error is not None, result), what)
        if failed:
            self._raise_from(0, error, what)
        return shared  # type: ignore[no-any-return]

    def most(self, numbers: Sequence[int], what: str, *, limit_s: float | None = None) -> list[int]:
        """Return the maximum of each number over all ranks. A collective call.

        Args:
            limit_s: seconds to wait for the others; by default the limit for missing ranks.

        Raises:
            BucketpointError: ranks are missing at the timeout, or were lost.
            RanksDisagreeError: the ranks are in different calls.
        """
        self._refuse_other_group(what)
        if self.world == 1:
            return list(numbers)
        assert len(numbers) <= _SLOTS
        if self.group is None:
            self._reconnect(what)
        call = zlib.crc32(what.encode())
        agreed = torch.tensor([call, -call, *numbers, *[0] * (_SLOTS - len(numbers))], dtype=torch.int64, device="cpu")
        self._run(lambda: dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.group, async_op=True), what, limit_s)
        first, second, *most = agreed.tolist()
        if first != -second:
            raise other_calls(self._ranks, self._calls_made(what))
        return [int(number) for number in most[: len(numbers)]]

    def refuse_unless_same(self, name: str, value: object, what: str) -> None:
        """Compare the `repr` of a value with those of the other ranks. A collective call.

        Raises:
            RanksDisagreeError: on every rank, if the texts differ.
        """
        digest = zlib.crc32(repr(value).encode())
        if self.most([digest, -digest], what) != [digest, -digest]:
            raise RanksDisagreeError(
                f"{name} is not the same on all ranks. On rank {self.global_rank} it is {value!r}"[:500],
                remedy="Give every rank the same policy",
            )

    def close(self) -> None:
        """Leave the manager's group. Not a collective call."""
        if self._mesh is not None:
            self._mesh.drop()
        self.world = 1

    @contextlib.contextmanager
    def calling_dcp(
        self, what: str, url: str | None, *, before: tuple[type[BucketpointError], ...] = ()
    ) -> Iterator[None]:
        """Run a call of DCP on all ranks. Its errors are raised as BucketpointErrors, an interrupt unchanged.

        DCP raises an error of its steps on all ranks. Any other error on one rank, such as an interrupt, would leave
        the others in a collective of DCP. So this rank leaves the group, and the others raise an error that names it.

        Args:
            what: the call, for messages.
            before: classes of errors that take precedence over all others.
        """
        with errors_of_dcp(url, what, self._ranks, before=before), self._leaving(what):
            yield

    # -- on a group ---------------------------------------------------------------------------------------------------

    def _refuse_other_group(self, what: str) -> None:
        """Raise if torch's group no longer has these ranks: a rank could then save its part as a whole checkpoint."""
        if process_groups.is_initialized() or len(self._ranks) > 1:
            now = process_groups.ranks_of(self.members)
            if now != self._ranks:
                there = f"has {len(now)} now" if process_groups.is_initialized() else "was destroyed"
                raise RanksDisagreeError(
                    f"{what} cannot begin: the process group had {len(self._ranks)} ranks, and {there}",
                    remedy="Close the manager before destroy_process_group(), and make a new one after "
                    "init_process_group()",
                )

    def _reconnect(self, what: str) -> None:
        meeting = Meeting.begin(self._ranks, what, purpose="manager")
        meeting.wait(self._come_s)
        self._store, self._calls = meeting.store, 0
        self._mesh = meshes.Mesh.connect(meeting, timedelta(seconds=self.load_s))
        # The group of saves and loads is made now, in a collective call, and not at the first save. It lives as long as
        # the members' group: ranks may free `self.group` at different times, and one would then make a new group alone.
        meshes.group_beside(self.members)

    def _raise_from(self, index: int, error: BaseException | None, what: str) -> NoReturn:
        """Raise the failure of the rank at `index` on all ranks. A collective call."""
        mine = as_failure(error, self.global_rank) if error is not None and index == self.rank else None
        plain = self.shared(index, mine and to_plain(mine), what)
        failure = mine or from_plain(plain)
        if error is not None and not isinstance(error, Exception):
            raise error
        if failure is error or error is None:
            raise failure
        raise failure from error

    def shared(self, index: int, value: Any, what: str) -> Any:
        """Return the value, plain data, of the rank at `index` of the group, on all ranks. A collective call."""
        if self.world == 1:
            return value
        mine = index == self.rank
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if mine else None
        (length,) = self.most([data.numel() if data is not None else 0], what, limit_s=self.limit_s)
        held = data if data is not None else torch.empty(length, dtype=torch.uint8, device="cpu")
        self._run(lambda: dist.broadcast(held, group_src=index, group=self.group, async_op=True), what, self.limit_s)
        return value if mine else pickle.loads(held.numpy().tobytes())

    def _calls_made(self, what: str) -> list[str]:
        mine = torch.zeros(_CALL_BYTES, dtype=torch.uint8, device="cpu")
        text = what.encode()[:_CALL_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        made = [torch.zeros_like(mine) for _ in self._ranks]
        self._run(lambda: dist.all_gather(made, mine, group=self.group, async_op=True), what, None)
        return [each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in made]

    def _run(self, begin: Callable[[], Any], what: str, limit_s: float | None) -> None:
        """Run a collective of the group, and leave the group if the collective fails."""
        self._calls += 1
        here = Meeting(self._ranks, what, dist.PrefixStore(f"calls/{self._calls}", self._store))
        with self._leaving(what):
            self._wait(begin(), here, self._come_s if limit_s is None else limit_s)

    def _wait(self, work: Any, here: Meeting, limit_s: float) -> None:
        begun, noted, said = time.monotonic(), False, False
        while True:
            waited = time.monotonic() - begun
            until = _NOTES_AFTER_S if not noted else PATIENCE_S if not said else limit_s
            try:
                work.wait(timedelta(seconds=max(min(until, waited + PATIENCE_S, limit_s) - waited, 0.001)))
                return
            except RuntimeError:
                if work.is_completed():
                    # The collective may have ended just after the timeout.
                    work.wait()
                    return
            waited = time.monotonic() - begun
            if not noted:
                # Not before `_NOTES_AFTER_S`, so that fast collectives send no request to the job's TCP store.
                noted = True
                here.come()
            if waited >= limit_s:
                raise here.late(waited)
            if waited >= PATIENCE_S and not said:
                said = True
                here.log_missing(waited)

    @contextlib.contextmanager
    def _leaving(self, what: str) -> Iterator[None]:
        """Leave the group after an error in the block: a failed collective must not mix with a later one."""
        try:
            yield
        except CheckpointException:
            raise
        except BaseException as error:
            reason = self.leave_others(what, error)
            if isinstance(error, Exception):
                raise reason from reason.__cause__
            raise

    def leave_others(self, what: str, error: BaseException) -> BaseException:
        """Leave the group after an error on this rank. Return the reason, which other ranks raise at their next call.

        If this rank leaves because another rank has left, or is dead, this is the reason of that rank.
        """
        if self._mesh is None or self._mesh.lost:
            return error
        try:
            return self._mesh.end(error, None, what)
        finally:
            self._mesh.drop()


def _tried(attempt: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return attempt(), None
    except BaseException as error:  # noqa: BLE001 (raised once the other ranks know)
        return None, error
