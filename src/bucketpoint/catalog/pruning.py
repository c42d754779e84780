"""From a policy to the pruner: what is ordered, the circuit breaker, and the worker that prunes beside training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.pruner import Order, Pruned, prune
from bucketpoint.catalog.snapshot import DELETE, THIN
from bucketpoint.catalog.sweep import sweep
from bucketpoint.errors import BucketpointError
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

    Asked while a round is under way it makes one more afterwards, however often it is asked.

    Attributes:
        last: the last round; None before the first.
        failure: why the last round failed; None if it did not.
    """

    def __init__(self, catalog: Catalog, policy: RetentionPolicy, *, holder: str) -> None:
        self.last: Round | None = None
        self.failure: BucketpointError | None = None
        self._run: Callable[[], Round] = lambda: prune_by(catalog, policy, holder=holder)
        self._sweep: Callable[[], object] = lambda: sweep(catalog, older_than=policy.prune.debris_after.total_seconds())
        self._swept = False
        self._lock = threading.Lock()
        self._asked = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Prune soon. Returns at once."""
        with self._lock:
            self._asked = True
            if self._thread is None:
                # No daemon: an interpreter that exits lets a round end, as it would a save.
                self._thread = threading.Thread(target=self._work, name="bucketpoint-prune")
                self._thread.start()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait for what was asked for. Whether it has ended in time, in seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
            return not thread.is_alive()
        return True

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
        try:
            self.last, self.failure = self._run(), None
            if not self._swept:
                # Once for each job: debris is what earlier ones left.
                self._swept = True
                self._sweep()
        except BucketpointError as error:
            self.failure = error
            logger.warning("pruning failed, and is tried again after the next save: %s", error)
            return
        done, verdict = self.last.done, self.last.verdict
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
