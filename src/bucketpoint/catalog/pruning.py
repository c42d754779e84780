"""From a policy to the pruner: what is ordered, the circuit breaker, and the worker that prunes beside training."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.pace import Pace, paced
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.pruner import Order, prune
from bucketpoint.catalog.snapshot import DELETE, THIN
from bucketpoint.catalog.sweep import sweep
from bucketpoint.catalog.tombstones import bury
from bucketpoint.errors import BucketpointError
from bucketpoint.format.keys import new_token
from bucketpoint.retention import Plan, RetentionPolicy, Row, Verdict, circuit_breaker, plan
from bucketpoint.transfer.tasks import stand_back

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Round:
    """One prune by a policy.

    Attributes:
        plan: what the policy says; None where nothing was looked at, as `done.stopped` says.
        verdict: the circuit breaker's.
        done: what was carried out.
    """

    plan: Plan | None
    verdict: Verdict | None
    done: Pruned


def prune_by(catalog: Catalog, policy: RetentionPolicy, *, holder: str, force: bool = False) -> Round:
    """Carry out what a policy says, once.

    Args:
        holder: who prunes, for the lock.
        force: also where the circuit breaker refuses.

    Raises:
        StoreError: a request failed for good. What was begun is finished by the next round.
        PolicyError: `match` fails.
    """
    made: list[tuple[Plan, Verdict]] = []

    def decide(rows: Sequence[Row]) -> list[Order]:
        planned, verdict = judged(policy, rows)
        made.append((planned, verdict))
        return orders(planned) if verdict or force else []

    done = prune(catalog, decide, grace=policy.prune.grace.total_seconds(), holder=holder)
    planned, verdict = made[0] if made else (None, None)
    return Round(planned, verdict, done)


def judged(policy: RetentionPolicy, rows: Sequence[Row]) -> tuple[Plan, Verdict]:
    """What a policy says of these rows, and whether it may be carried out unasked."""
    made, limit = plan(policy, rows), policy.prune.max_delete
    return made, circuit_breaker(made, count=limit.count, fraction=limit.fraction)


def orders(planned: Plan) -> list[Order]:
    """What the pruner is to do."""
    gone = [Order(one.row.step, one.row.id, DELETE, str(one.miss or "")) for one in planned.deleted]
    return gone + [Order(one.row.step, one.row.id, THIN, str(one.miss or "")) for one in planned.thinned]


class PruneWorker:
    """Prunes on a thread of its own, one round at a time, with the lowest priority. Never fatal to training.

    Asked while a round is under way it makes one more afterwards, however often it is asked. It rests after every
    request, until somebody waits for it or the program ends.

    Args:
        pace: of the rests.

    Attributes:
        holder: its name for the lock.
        last: the last round of this process; None before the first.
        failure: why the last round failed; None if it did not.
    """

    def __init__(self, catalog: Catalog, policy: RetentionPolicy, *, pace: Pace | None = None) -> None:
        self.catalog = catalog
        self.policy = policy
        self._pace = pace or Pace()
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{new_token()}"
        self.last: Round | None = None
        self.failure: BucketpointError | None = None
        self._swept = False
        self._lock = threading.Lock()
        self._asked = False
        self._thread: threading.Thread | None = None

    def after_commit(self, step: int, discards: Collection[int] = ()) -> None:
        """A checkpoint of this step can be loaded: `discards` get their tombstones, and the policy is carried out soon.

        Never raises: the save has been made.
        """
        try:
            if discards:
                self._discard(step, discards)
        except BucketpointError as error:
            # Rules would count what ought to be gone.
            self._failed(error)
            return
        if self.policy.prune.when == "after_commit":
            self.ask()

    def ask(self) -> None:
        """Prune soon. Returns at once."""
        with self._lock:
            self._asked = True
            if self._thread is not None:
                return
            self._pace.calm()
            # No daemon: an interpreter that exits lets a round end, as it would a save.
            thread = threading.Thread(target=self._work, name="bucketpoint-prune")
            try:
                thread.start()
            except RuntimeError:
                # Python 3.12.0 and 3.12.1 start no threads as a program ends, and its last save must not fail by that.
                self._asked = False
                logger.info(
                    "nothing is pruned after the last save, as the program ends: the next job's first save does"
                )
                return
            self._thread = thread

    def now(self, *, force: bool = False) -> Round:
        """One round on the caller's thread, without rests, once the one under way has ended. Raises as `prune_by`."""
        self.drain()
        return prune_by(self.catalog, self.policy, holder=self.holder, force=force)

    @property
    def busy(self) -> bool:
        """Whether a round is under way, or has been asked for."""
        with self._lock:
            return self._thread is not None

    def drain(self, timeout: float | None = None) -> bool:
        """Wait for what was asked for, which now hurries. Whether it has ended in time, in seconds."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        self._pace.hurry()
        thread.join(timeout)
        return not thread.is_alive()

    def __reduce__(self) -> tuple[Any, ...]:
        return worker_of, (self.catalog, self.policy)

    def _discard(self, step: int, discards: Collection[int]) -> None:
        due = self.catalog.clock() + self.policy.prune.grace.total_seconds()
        for one in self.catalog.steps().checkpoints:
            if one.step in discards:
                bury(self.catalog, one, DELETE, due=due, reason=f"training was rolled back to step {step}")

    def _work(self) -> None:
        stand_back(19)
        while True:
            with self._lock:
                if not self._asked:
                    self._thread = None
                    return
                self._asked = False
            self._round()

    def _round(self) -> None:
        catalog = replace(self.catalog, store=paced(self.catalog.store, self._pace))
        self._pace.begin()
        try:
            self.last, self.failure = prune_by(catalog, self.policy, holder=self.holder), None
            if not self._swept:
                # Once for each job: debris is what earlier ones left.
                self._swept = True
                sweep(catalog, older_than=self.policy.prune.debris_after.total_seconds())
        except BucketpointError as error:
            self._failed(error)
            return
        except Exception as error:  # noqa: BLE001 (no fault of ours may end the thread for all later saves)
            ours = BucketpointError(f"This is a fault of bucketpoint: {type(error).__name__}: {error}")
            ours.__cause__ = error
            self._failed(ours)
            return
        _tell(self.last)

    def _failed(self, error: BucketpointError) -> None:
        self.failure = error
        logger.warning("pruning failed, and is tried again after the next save: %s", error, exc_info=error.__cause__)


_workers: dict[tuple[str, ...], PruneWorker] = {}
_looking = threading.Lock()


def worker_of(catalog: Catalog, policy: RetentionPolicy) -> PruneWorker:
    """The worker of this process for a run and a policy, which lives as long as the process.

    One for all writers, as clients of a store are: a program may make a writer for each save, and a checkpoint process
    is sent one with each. Their rounds would get in each other's way, and each would sweep again.
    """
    url, identity = catalog.store.url, catalog.store.identity
    # A local folder's identity changes when the folder comes to be.
    place = url if identity.startswith(url) else identity
    run = place, catalog.prefix, catalog.template.namespace, str(catalog.run), repr(policy)
    with _looking:
        found = _workers.get(run)
        if found is None:
            found = _workers[run] = PruneWorker(catalog, policy)
        # Whoever came last may have newer credentials.
        found.catalog = catalog
        return found


def _tell(made: Round) -> None:
    done, verdict = made.done, made.verdict
    if done.stopped is not None:
        logger.info("nothing was pruned: %s", done.stopped)
    if verdict is not None and not verdict:
        logger.warning("nothing was pruned: %s. Look at the plan, and prune by hand if it is right", verdict.why)
    if done.failures:
        logger.warning(
            "%d objects were not deleted, %s first (%s); the next prune tries again",
            len(done.failures),
            done.failures[0].key,
            done.failures[0].code,
        )
