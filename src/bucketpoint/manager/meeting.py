"""A meeting of ranks over the job's own key-value store: it names the ranks that have not come, and shares a failure.

It needs no connections between the ranks, so that it works before there are any, and after they have failed. Any
process of the job's network may write into the store: what lies there is text with limits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from bucketpoint.dcp import meshes, process_groups
from bucketpoint.dcp.error_boundary import decoded
from bucketpoint.errors import BucketpointError, RanksDisagreeError, first_of

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Seconds after which a rank that waits logs who has not come."""

_NAMED = 16
_MOST_LETTERS = 4096


@dataclass(frozen=True)
class Presence:
    """The ranks that are at one place of the program, noted in the store.

    Attributes:
        ranks: global ranks that are expected.
        store: part of the job's store for this place.
        index: place of this rank among them.
    """

    ranks: tuple[int, ...]
    store: Any
    index: int

    def note(self, what: str) -> None:
        """Note that this rank is here."""
        self.store.set(f"here/{self.index}", what)

    def missing(self) -> list[int]:
        """Return the global ranks that have not noted that they are here."""
        return [rank for index, rank in enumerate(self.ranks) if not self.store.check([f"here/{index}"])]

    def calls(self) -> list[str]:
        """Return what each rank has noted. All must be here."""
        said = (self.store.get(f"here/{index}") for index in range(len(self.ranks)))
        return [text[:_MOST_LETTERS].decode("utf-8", "replace") for text in said]


def meet(ranks: tuple[int, ...], what: str, error: BaseException | None, timeout_s: float) -> str:
    """Wait until all ranks make the same call, or until one of them has failed. A collective call.

    Return the name of the meeting, which is the same on all ranks, and unique among the meetings of these ranks.

    Each rank numbers its meetings. A meeting that was given up is skipped, so that a rank that missed it meets the
    others at their next one.

    Args:
        what: the call, as a program spells it.
        error: failure of this rank, which no rank may go on after.

    Raises:
        BucketpointError: a rank has failed; or some have not come in time, or make another call.
    """
    job, index = process_groups.store_of(ranks), ranks.index(dist.get_rank())
    while True:
        number = job.add(f"meetings/{index}", 1)
        name = f"meeting-{number}"
        store = dist.PrefixStore(name, job)
        if not store.check(["given-up"]):
            break
    here = Presence(ranks, store, index)
    here.note(what)
    if error is not None:
        failure = as_failure(error, ranks[index])
        store.set("failed", message_of(ranks[index], _text(error), failure.url))
        store.set("all", "failed")
        raise failure
    if store.add("count", 1) == len(ranks):
        calls = here.calls()
        other = next((number for number, call in enumerate(calls) if call != calls[0]), None)
        store.set("all", "yes" if other is None else "other")
    _await(lambda: bool(store.check(["all"])), here, what, timeout_s)
    verdict = store.get("all")
    if verdict == b"failed":
        rank, message, url = read_message(store.get("failed"))
        raise failed_on(rank, message, url=url)
    if verdict == b"other":
        raise other_calls(ranks, here.calls())
    return name


def _await(until: Callable[[], bool], here: Presence, what: str, timeout_s: float) -> None:
    begun = time.monotonic()
    if meshes.poll(until, begun + min(PATIENCE_S, timeout_s)):
        return
    if timeout_s > PATIENCE_S:
        log_missing(what, here.missing(), time.monotonic() - begun)
        if meshes.poll(until, begun + timeout_s):
            return
    here.store.set("given-up", "yes")
    raise late(what, here.missing(), time.monotonic() - begun)


def message_of(rank: int, message: str, url: str | None = None) -> str:
    """Encode what a rank leaves in the store for the others."""
    return json.dumps([rank, message[:_MOST_LETTERS], url and url[:_MOST_LETTERS]])


def read_message(data: bytes) -> tuple[int | None, str, str | None]:
    """Decode what `message_of` made; of anything else, say that it is that."""
    with contextlib.suppress(ValueError):
        told = decoded(data)
        if isinstance(told, list) and len(told) == 3 and type(told[0]) is int and isinstance(told[1], str):
            return told[0], told[1], told[2] if isinstance(told[2], str) else None
    return None, f"something other than a rank wrote {len(data)} bytes into the TCP store of the job", None


def log_missing(what: str, missing: list[int], waited_s: float) -> None:
    """Log the ranks that this one has waited for."""
    if missing:
        has = "have" if len(missing) > 1 else "has"
        logger.warning("%s has waited for %.0f s: %s %s not come", what, waited_s, _named(missing), has)


def late(what: str, missing: list[int], waited_s: float, *, dead: bool = False) -> BucketpointError:
    """Return the error of a wait that has ended without some ranks.

    Args:
        dead: the connection to a rank was lost.
    """
    who = f"{_named(missing)} never came" if missing else "all ranks came, and one did not come to its end"
    why = "after a connection was lost" if dead else f"after {waited_s:.0f} s"
    return BucketpointError(
        f"{what} was given up {why}: {who}",
        rank=missing[0] if missing else None,
        remedy="Make the call on all ranks, at the same point of the program. If all make it, read the log of the rank "
        "that is missing: it may have died, or hang",
    )


def other_calls(ranks: tuple[int, ...], calls: list[str]) -> RanksDisagreeError:
    """Return the error of ranks that wait for each other in different calls."""
    by_call: dict[str, list[int]] = {}
    for rank, call in zip(ranks, calls, strict=True):
        by_call.setdefault(call, []).append(rank)
    made = "; ".join(f"{_named(at)}: {call}" for call, at in by_call.items())
    return RanksDisagreeError(
        f"The ranks make different calls at the same time: {made}"[:1000],
        remedy="Make each call on all ranks, in the same order",
    )


def as_failure(error: BaseException, rank: int) -> BucketpointError:
    """Return an error of any kind as the one that all ranks raise."""
    if isinstance(error, BucketpointError):
        error.rank = rank if error.rank is None else error.rank
        return error
    failure = failed_on(rank, _text(error))
    failure.__cause__ = error
    return failure


def failed_on(rank: int | None, message: str, *, url: str | None = None) -> BucketpointError:
    who = "A rank" if rank is None else f"Rank {rank}"
    return BucketpointError(f"{who} failed: {message}", rank=rank, url=url)


def _text(error: BaseException) -> str:
    if isinstance(error, BucketpointError):
        text = f"{error.message}. {error.remedy}" if error.remedy else error.message
        return text if type(error) is BucketpointError else f"{type(error).__name__}: {text}"
    return f"{type(error).__name__}: {error}"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {first_of(ranks, _NAMED)}"
