"""Messages between the ranks of a call over the job's own key-value store: presence, failures and answers.

Each rank has one thread for a call. The thread waits for the other ranks, makes the group, sends this rank's failure
and receives those of others. `collective_call.py` decides what follows.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from bucketpoint.dcp import process_groups
from bucketpoint.errors import BucketpointError

if TYPE_CHECKING:
    from bucketpoint.dcp.deadline.collective_call import CollectiveCall

ANSWER_S = 5.0
"""Seconds kept before the deadline to find out which ranks are missing. A live rank answers in a fraction of this."""

WAITS = ""
"""Stage of a rank that only waits for others, and delays nobody."""

_LOOK_S = 0.25
_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.25

Kind = Literal["error", "lost", "late"]


@dataclass(frozen=True)
class Failure:
    """Reason why a call ends. An `"error"` is raised by all ranks; otherwise they find out which ranks are missing."""

    rank: int
    kind: Kind
    error: BucketpointError


class CallRefused(Exception):
    """Raised if a call ends before it begins; the `CollectiveCall` knows the reason."""


class StoreChannel:
    """The thread that talks to the job's store for one call. Other threads never wait for that store."""

    def __init__(self, call: CollectiveCall) -> None:
        self._call = call
        self._ranks = call._ranks
        self._index = self._ranks.index(dist.get_rank())
        self._store: Any = None
        self._number = 0
        self._told = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bucketpoint-call", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def end(self, ends: float) -> None:
        """Wait a limited time for the thread to end. If the store stalls, the thread ends later."""
        self._wake.set()
        self._thread.join(min(max(ends - time.monotonic(), 0.5), 2 * ANSWER_S))

    def _run(self) -> None:
        call, group = self._call, None
        try:
            try:
                self._meet()
                left = max(call.stops - time.monotonic(), 0.001)
                store = dist.PrefixStore("group", self._store)
                group = process_groups.connect(self._ranks, store, str(self._number), timedelta(seconds=left))
                call._note(group=group)
            except Exception as error:  # noqa: BLE001 (told, and raised by the call)
                self._own_up(error)
            self._serve()
        except Exception:  # noqa: BLE001 (the store is gone, and with it whom to tell)
            call._note(_storeless=True)
            call._stop("lost")
        finally:
            call._note(group=None)
            if group is not None:
                with contextlib.suppress(Exception):
                    dist.destroy_process_group(group)

    def _own_up(self, error: Exception) -> None:
        """End the call because it could not begin, and note this rank's failure for the others."""
        call, rank = self._call, dist.get_rank()
        if call._stopped is not None:
            return
        if isinstance(error, BucketpointError):
            call._own = Failure(rank, "error", error)
            call._stop("error")
        elif isinstance(error, CallRefused) or time.monotonic() > call.stops - _LOOK_S:
            call._stop("late")
        else:
            call._own = Failure(rank, "lost", BucketpointError(f"{type(error).__name__}: {error}"))
            call._stop("lost")

    def _meet(self) -> None:
        """Wait until all ranks make this call.

        Each rank numbers its calls. Numbers of calls that have failed are skipped, so that a rank that missed such a
        call meets the others again at its next one.
        """
        call, world = self._call, len(self._ranks)
        job = process_groups.store_of(self._ranks)
        number = job.add(f"calls/{self._index}", 1)
        while job.check([f"{number}/failed/1"]):
            number = job.add(f"calls/{self._index}", 1)
        self._number = number
        self._store = store = dist.PrefixStore(str(number), job)
        # Within a sentence, as the error has it.
        store.set(f"here/{self._index}", call._what[:1].lower() + call._what[1:])
        if store.add("here", 1) == world:
            calls = [store.get(f"here/{index}").decode() for index in range(world)]
            other = next((index for index, what in enumerate(calls) if what != calls[0]), None)
            store.set(
                "all", "yes" if other is None else f"{calls[0]}, but rank {self._ranks[other]} began {calls[other]}"
            )
        self._poll(lambda: store.check(["all"]) or self._hears() or call._stopped is not None, call.stops)
        if call._stopped is not None or not store.check(["all"]):
            raise CallRefused
        verdict = store.get("all").decode()
        if verdict != "yes":
            raise BucketpointError(
                f"The ranks made different calls: rank {self._ranks[0]} began {verdict}",
                url=call._url,
                remedy="Make the same call on all ranks of the process group",
            )

    def _serve(self) -> None:
        call = self._call
        while True:
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            if call._own is not None and not self._told:
                self._tell(call._own)
            elif call._stopped == "late" and call._heard is None and not self._told:
                self._tell(Failure(dist.get_rank(), "late", call._late({})))
            else:
                self._hears()
            if call._stopped is not None:
                # Cut again: connections that were still being opened escaped the first cut.
                call.cut.make()
                if call._heard is not None and call._heard.kind != "error" and call._answers is None:
                    self._call_roll()
            if call._leaving:
                self._part()
                return

    def _tell(self, failure: Failure) -> None:
        self._told = True
        number = self._store.add("failures", 1)
        self._store.set(f"failed/{number}", pickle.dumps(failure))
        self._hear()

    def _hears(self) -> bool:
        """Return True if a rank has failed."""
        if self._call._heard is None and self._store.check(["failed/1"]):
            self._hear()
        return self._call._heard is not None

    def _hear(self) -> None:
        """Read the failures and stop the call with one that is the same on all ranks.

        It is the first `"error"`, as lost connections follow from errors; without an error it is the first failure.
        """
        failures: list[Failure] = []
        for number in range(1, int(self._store.add("failures", 0)) + 1):
            key = [f"failed/{number}"]
            # A rank counts its failure before it writes it, so the text may still be on its way.
            if self._poll(partial(self._store.check, key), time.monotonic() + 1):
                failures.append(pickle.loads(self._store.get(*key)))
        if failures:
            first = next((failure for failure in failures if failure.kind == "error"), failures[0])
            self._call._note(_heard=first)
            self._call._stop(first.kind)

    def _call_roll(self) -> None:
        """Publish the stage of this rank, and collect the stages of the others. A rank without an answer is missing."""
        call, store = self._call, self._store
        self._answer(call._stage_then or "-")
        ends = min(time.monotonic() + ANSWER_S, call.ends - min(1.0, call._deadline_s / 10))
        self._poll(lambda: store.check(["answered"]), ends)
        # Look again: an error told since then explains all the rest.
        self._hear()
        stages: dict[int, str | None] = {}
        for index, rank in enumerate(self._ranks):
            key = f"answer/{index}"
            stage = store.get(key).decode() if store.check([key]) else None
            stages[rank] = WAITS if stage == "-" else stage
        call._note(_answers=stages)

    def _answer(self, stage: str) -> None:
        self._store.set(f"answer/{self._index}", stage)
        if self._store.add("answers", 1) == len(self._ranks):
            self._store.set("answered", "yes")

    def _part(self) -> None:
        """Wait after a success until all ranks have finished.

        Otherwise this rank would close connections from which another rank still reads.
        """
        call, store = self._call, self._store
        if call._stopped is not None or store is None:
            return
        if store.add("done", 1) == len(self._ranks):
            store.set("parted", "yes")
        self._poll(lambda: store.check(["parted"]) or store.check(["failed/1"]), time.monotonic() + ANSWER_S)
        if not store.check(["parted"]):
            # Answer for a roll call that other ranks may make later, so that they do not take this rank for missing.
            self._answer("-")

    def _poll(self, until: Callable[[], bool], ends: float) -> bool:
        """Return True once `until` does, False at the end."""
        pause = _FIRST_POLL_S
        while not (done := until()) and time.monotonic() < ends:
            time.sleep(max(min(pause, ends - time.monotonic()), 0))
            pause = min(2 * pause, _LONGEST_POLL_S)
        return done
