"""Meetings of ranks over the job's TCP store, which record the ranks that have joined, their calls and failures.

A meeting needs no connections between the ranks, so it works before ranks are connected, and after connections have
failed. Any process on the job's network may write into that store, so messages are JSON of limited size.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch.distributed as dist

from bucketpoint.dcp import process_groups
from bucketpoint.dcp.error_boundary import as_failure, decoded, from_plain, to_plain
from bucketpoint.errors import BucketpointError, RanksDisagreeError, first_of

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Seconds after which a waiting rank logs which ranks are missing."""

ANSWERS_WITHIN_S = 3.0
"""Seconds within which a rank answers after its connections were closed; a rank without an answer is lost."""

_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.25
_MOST_SKIPPED = 1000
_NAMED = 16
_MOST_LETTERS = 1000

Kind = Literal["error", "lost", "late"]


@dataclass(frozen=True)
class Failure:
    """Reason for the end of a call. All ranks raise an `"error"`; for other kinds they determine the missing ranks."""

    rank: int
    kind: Kind
    error: BucketpointError

    def encoded(self) -> str:
        return json.dumps([self.rank, self.kind, to_plain(self.error)])

    @classmethod
    def received(cls, data: bytes, ranks: tuple[int, ...]) -> Failure:
        """Decode the result of `encoded`; for data of another writer, return an error about this data."""
        try:
            rank, kind, error = decoded(data)
            if kind in get_args(Kind) and type(rank) is int and rank in ranks:
                return cls(rank, kind, from_plain(error))
        except (ValueError, TypeError):
            pass
        return cls(
            ranks[0],
            "error",
            BucketpointError(
                f"The call ended: something other than its ranks wrote {len(data)} bytes into the job's TCP store",
                remedy="Keep other hosts and users away from the job's network: see SECURITY.md",
            ),
        )


class CallRefused(Exception):
    """Raised if a call cannot begin, for a reason that is received over the job's TCP store."""


@dataclass(frozen=True)
class Meeting:
    """One collective call of some ranks, recorded in the job's TCP store.

    Attributes:
        ranks: global ranks that must join.
        what: name of the call, the same on all ranks.
        store: part of the job's TCP store for this meeting.
        name: the same on all ranks, and unique among the meetings of these ranks for the same purpose.
    """

    ranks: tuple[int, ...]
    what: str
    store: Any
    name: str = ""

    @classmethod
    def begin(
        cls,
        ranks: tuple[int, ...],
        what: str,
        *,
        note: str = "",
        purpose: str = "calls",
        error: BaseException | None = None,
    ) -> Meeting:
        """Record in the job's TCP store that this rank begins a call. Does not wait for other ranks.

        Each rank numbers its calls. Numbers of failed calls are skipped, so that a rank that missed a failed call meets
        the others at its next call. The last rank to join compares the records of all ranks.

        Args:
            note: text for the other ranks, such as the name of this rank's mesh.
            purpose: kind of calls that are numbered together: all ranks make them in the same order.
            error: failure of this rank, which is raised on all ranks, even if they join later.
        """
        job, index = dist.PrefixStore(purpose, process_groups.store_of(ranks)), ranks.index(dist.get_rank())
        for _ in range(_MOST_SKIPPED):
            number = job.add(f"of/{index}", 1)
            if not job.check([f"{number}/failed/1"]):
                break
        meeting = cls(ranks, what, dist.PrefixStore(str(number), job), f"{purpose}-{number}")
        meeting.come(note)
        if error is not None:
            failure = as_failure(error, dist.get_rank())
            meeting.end(Failure(dist.get_rank(), "error", failure))
            raise failure if isinstance(error, Exception) else error
        if meeting.store.add("here", 1) == len(ranks):
            noted = meeting._noted()
            calls, notes = [call for call, _ in noted], {note for _, note in noted}
            if len(set(calls)) > 1:
                meeting.end(Failure(ranks[0], "error", other_calls(ranks, calls)))
            else:
                # compare_set, because a rank may have been interrupted while it waited, and have set a failure.
                meeting.store.compare_set("all", "", json.dumps(notes.pop() if len(notes) == 1 else ""))
        return meeting

    def come(self, note: str = "") -> None:
        """Record that this rank has joined."""
        self.store.set(f"here/{self.ranks.index(dist.get_rank())}", json.dumps([self.what, note]))

    def notes(self) -> list[str]:
        """Return the note of each rank. All ranks must have joined."""
        return [note for _, note in self._noted()]

    def _noted(self) -> list[tuple[str, str]]:
        return [_noted(data) for data in self.store.multi_get([f"here/{at}" for at in range(len(self.ranks))])]

    def missing(self) -> list[int]:
        """Return the global ranks that have not joined."""
        return [rank for index, rank in enumerate(self.ranks) if not self.store.check([f"here/{index}"])]

    def wait(self, within_s: float) -> None:
        """Wait until all ranks make the same call, or until a rank has failed.

        Raises:
            BucketpointError: a rank has failed, ranks are missing at the deadline, or ranks make different calls.
        """
        begun = time.monotonic()

        def is_over() -> bool:
            return bool(self.store.check(["all"]) or self.store.check(["failed/1"]))

        try:
            if not poll(is_over, begun + min(PATIENCE_S, within_s)) and within_s > PATIENCE_S:
                self.log_missing(time.monotonic() - begun)
                poll(is_over, begun + within_s)
        except BaseException as error:
            if not isinstance(error, Exception):
                self.end(Failure(dist.get_rank(), "error", as_failure(error, dist.get_rank())))
            raise
        if not self.store.check(["all"]):
            failure = self.late(time.monotonic() - begun)
            self.fail(Failure(dist.get_rank(), "late", failure))
            raise failure
        self.verdict()

    def verdict(self) -> str:
        """Return the common note of all ranks; empty if their notes differ. All ranks must have joined.

        Raises:
            RanksDisagreeError: the ranks make different calls.
            BucketpointError: a rank has failed.
        """
        data = self.store.get("all")
        with contextlib.suppress(ValueError):
            note = decoded(data)
            if isinstance(note, str):
                return note
        raise Failure.received(data, self.ranks).error

    def end(self, failure: Failure) -> None:
        """Raise an error on all ranks that have joined, and on those that join later."""
        self.store.set("all", failure.encoded())

    def fail(self, failure: Failure) -> None:
        """Record a failure for the ranks that have joined. Ranks that begin later skip this meeting."""
        number = self.store.add("failures", 1)
        self.store.set(f"failed/{number}", failure.encoded())

    def failures(self) -> list[Failure]:
        """Return the failures that ranks have recorded, in order."""
        found = []
        # Each rank records at most one failure. A larger count was written by another process.
        for number in range(1, min(self.store.add("failures", 0), len(self.ranks)) + 1):
            key = [f"failed/{number}"]
            # A rank counts its failure before it writes the text, which may still be missing.
            if poll(partial(self.store.check, key), time.monotonic() + 1):
                found.append(Failure.received(self.store.get(*key), self.ranks))
        return found

    def log_missing(self, waited_s: float) -> None:
        missing = self.missing()
        if missing:
            logger.warning("%s has waited %.0f s for %s", self.what, waited_s, named(missing))

    def late(self, waited_s: float) -> BucketpointError:
        """Return the error of a wait that has ended without some ranks."""
        missing = self.missing()
        who = f"{named(missing)} did not begin it" if missing else "all ranks began it, but one did not complete it"
        return BucketpointError(
            f"{self.what} was given up after {waited_s:.0f} s: {who}",
            rank=missing[0] if missing else None,
            remedy="Make the call on all ranks, at the same point of the program. If all make it, read the log of the "
            "rank that is missing: it may have died, or be blocked",
        )


def poll(until: Callable[[], bool], ends: float, longest_s: float = _LONGEST_POLL_S) -> bool:
    """Return True once `until` returns True; False at monotonic time `ends`."""
    pause = _FIRST_POLL_S
    while not (done := until()) and time.monotonic() < ends:
        time.sleep(max(min(pause, ends - time.monotonic()), 0))
        pause = min(2 * pause, longest_s)
    return done


def other_calls(ranks: Sequence[int], calls: Sequence[str]) -> RanksDisagreeError:
    """Return the error of ranks that wait for each other in different calls."""
    by_call: dict[str, list[int]] = {}
    for rank, call in zip(ranks, calls, strict=True):
        by_call.setdefault(call, []).append(rank)
    made = "; ".join(f"{named(at)}: {call}" for call, at in by_call.items())
    return RanksDisagreeError(
        f"The ranks make different calls at the same time: {made}"[:_MOST_LETTERS],
        remedy="Make each call on all ranks, in the same order",
    )


def _noted(data: bytes) -> tuple[str, str]:
    """Decode a call and a note; return an error text as the call if another process has written other data."""
    with contextlib.suppress(ValueError):
        found = decoded(data)
        if isinstance(found, list) and len(found) == 2 and all(isinstance(text, str) for text in found):
            return found[0], found[1]
    return f"something else (an unreadable message of {len(data)} bytes)", ""


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {first_of(ranks, _NAMED)}"
