"""Messages between the ranks of a call over the job's own key-value store: presence, failures and answers.

Each rank has one thread for a call. The thread waits for the other ranks, makes the group, sends this rank's failure
and receives those of others. `collective_call.py` decides what follows.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch.distributed as dist

from bucketpoint.dcp import meshes
from bucketpoint.dcp.error_boundary import decoded, from_plain
from bucketpoint.errors import BucketpointError

if TYPE_CHECKING:
    from bucketpoint.dcp.deadline.collective_call import CollectiveCall

ANSWER_S = 5.0
"""Seconds kept before the deadline to find out which ranks are missing. A live rank answers in a fraction of this."""

WAITS = ""
"""Stage of a rank that only waits for others, and delays nobody."""

_LOOK_S = 0.25
_LOOKS_A_SECOND = 4000
"""Most requests a second that all ranks together send to the job's store while nothing happens."""

_MOST_STAGE = 200
_MOST_BUSY = 64

Kind = Literal["error", "lost", "late"]


@dataclass(frozen=True)
class Failure:
    """Reason why a call ends. An `"error"` is raised by all ranks; otherwise they find out which ranks are missing."""

    rank: int
    kind: Kind
    error: BucketpointError

    @classmethod
    def received(cls, data: bytes, ranks: tuple[int, ...]) -> Failure:
        """Decode what `note_failure` wrote. Any process on the job's network may have written something else there."""
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
                f"The call ended: something other than its ranks wrote {len(data)} bytes into the TCP store of the job",
                remedy="Keep other hosts and users away from the job's network: see SECURITY.md",
            ),
        )


class CallRefused(Exception):
    """Raised if a call ends before it begins; the `CollectiveCall` knows the reason."""


class StoreChannel:
    """The thread that talks to the job's store for one call. Other threads never wait for that store."""

    def __init__(self, call: CollectiveCall) -> None:
        self._call = call
        self._ranks = call._ranks
        self._index = self._ranks.index(dist.get_rank())
        self._store: Any = None
        self._told = self._parted = False
        self._look_s = max(_LOOK_S, len(self._ranks) / _LOOKS_A_SECOND)
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
        call = self._call
        mesh: meshes.Mesh | None = None
        try:
            try:
                mesh = self._meet()
                call._note(mesh=mesh, group=mesh.group)
            except Exception as error:  # noqa: BLE001 (told, and raised by the call)
                self._own_up(error)
            self._serve()
        except Exception:  # noqa: BLE001 (the store is gone, and with it whom to tell)
            call._note(_storeless=True)
            call._stop("lost")
        finally:
            call._note(mesh=None, group=None)
            if mesh is not None and not self._parted:
                # Bytes of this call may still be on their way: no later call may read them.
                mesh.cut()
                mesh.drop()

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

    def _meet(self) -> meshes.Mesh:
        """Wait until all ranks make this call. Return their mesh, or a new one if some of them have none."""
        call, ranks = self._call, self._ranks
        former = meshes.mesh_of(call._parent)
        number, self._store = meshes.enter_call(ranks, call._what, former.name if former is not None else "")
        store = self._store
        meshes.poll(
            lambda: store.check(["all"]) or self._hears() or call._stopped is not None, call.stops, self._look_s
        )
        if call._stopped is not None or not store.check(["all"]):
            raise CallRefused
        same = meshes.verdict_of(store, ranks, call._url)
        left = timedelta(seconds=max(call.stops - time.monotonic(), 0.001))
        # The deadline ends the waiting, and no timeout of the group before it.
        if former is not None and same == former.name:
            former.wait_for(left)
            return former
        if former is not None:
            former.drop()
        return meshes.Mesh.make(call._parent, store, number, left, left)

    def _serve(self) -> None:
        call = self._call
        while True:
            self._wake.wait(self._look_s)
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
        meshes.note_failure(self._store, failure.rank, failure.kind, failure.error)
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
        # Each rank notes one at most: a larger count is not theirs.
        for number in range(1, min(self._store.add("failures", 0), len(self._ranks)) + 1):
            key = [f"failed/{number}"]
            # A rank counts its failure before it writes it, so the text may still be on its way.
            if meshes.poll(partial(self._store.check, key), time.monotonic() + 1):
                failures.append(Failure.received(self._store.get(*key), self._ranks))
        if failures:
            first = next((failure for failure in failures if failure.kind == "error"), failures[0])
            self._call._note(_heard=first)
            self._call._stop(first.kind)

    def _call_roll(self) -> None:
        """Publish the stage of this rank, and learn those of the others. A rank without an answer is missing.

        One rank collects the answers for all: if each did, the store would get ranks x ranks requests.
        """
        call, store = self._call, self._store
        self._answer(call._stage_then or "-")
        latest = call.ends - min(1.0, call._deadline_s / 10)
        ends = min(time.monotonic() + ANSWER_S, latest)
        collects = store.add("collects", 1) == 1
        meshes.poll(lambda: store.check(["answered" if collects else "roll"]), ends, self._look_s)
        # Look again: an error told since then explains all the rest.
        self._hear()
        if collects:
            keys = [f"answer/{index}" for index in range(len(self._ranks))]
            stages = [store.get(key).decode("utf-8", "replace") if store.check([key]) else None for key in keys]
            gone = [rank for rank, stage in zip(self._ranks, stages, strict=True) if stage is None]
            busy = [[rank, stage] for rank, stage in zip(self._ranks, stages, strict=True) if stage not in (None, "-")]
            store.set("roll", json.dumps([gone, busy[:_MOST_BUSY]]))
        # The rank that collects may have begun later than this one.
        elif not meshes.poll(lambda: store.check(["roll"]), min(ends + ANSWER_S, latest), self._look_s):
            return
        call._note(_answers=self._roll())

    def _roll(self) -> dict[int, str | None]:
        """Return the stage of each rank that others wait for; None for a missing rank."""
        try:
            gone, busy = decoded(self._store.get("roll"))
            named = {**dict.fromkeys(gone), **{rank: str(stage)[:_MOST_STAGE] for rank, stage in busy}}
            return {rank: stage for rank, stage in named.items() if rank in self._ranks}
        except (ValueError, TypeError):
            return {}

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
        meshes.poll(
            lambda: store.check(["parted"]) or store.check(["failed/1"]), time.monotonic() + ANSWER_S, self._look_s
        )
        self._parted = store.check(["parted"])
        if not self._parted:
            # Answer for a roll call that other ranks may make later, so that they do not take this rank for missing.
            self._answer("-")
