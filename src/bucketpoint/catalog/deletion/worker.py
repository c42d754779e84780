"""The thread that prunes beside training, and its throttle: a pause after every request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.prune import Round, future_lines, gone_lines, missing_metrics, prune_by
from bucketpoint.catalog.deletion.remove import Discard, bury_discards, united
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.catalog.records import process_name
from bucketpoint.errors import BucketpointError
from bucketpoint.forks import Event, process_lock, renew_in_child
from bucketpoint.format.keys import new_token
from bucketpoint.retention import RetentionPolicy
from bucketpoint.retention.setting_types import written
from bucketpoint.stores import DeleteFailure, ExpiringDeletes, Store
from bucketpoint.stores.redact import without_credentials
from bucketpoint.telemetry import begin_span, current_context, end_span, record
from bucketpoint.transfer.tasks import stand_back

logger = logging.getLogger(__name__)

RESTS = 19
"""Length of a pause as a multiple of the work before it: the worker works for one twentieth of the time.

Work and pause are wall time: if training keeps the interpreter's lock or the cores busy, a request takes longer, and
so does the pause after it.
"""

LONGEST_REST_S = 1.0
"""Longest pause in seconds. The end of the program does not interrupt a pause, so a longer one would delay the exit."""

REST_AT_MOST_S = 300.0
"""Limit on the pauses of one round, in seconds: a third of `LOCK_SECONDS`, so that a round ends before its lock."""

PAGE = 1000
"""Number of keys that one request lists or deletes."""


class Throttle:
    """Pauses of one thread: allowed after `begin`, and stopped by `hurry`.

    Args:
        clock: returns seconds, as `time.monotonic`.
        wait: pauses for the given seconds; the default also returns at `hurry`.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, wait: Callable[[float], object] | None = None
    ) -> None:
        self._hurried = Event()
        self._clock = clock
        self._wait = wait or self._hurried.wait
        self._left = 0.0
        self._since = clock()

    def begin(self) -> None:
        """Begin a round, with a new allowance of pauses."""
        self._left, self._since = REST_AT_MOST_S, self._clock()

    def hurry(self) -> None:
        """End the present pause, and stop pausing until `calm`, because a caller waits. Thread-safe."""
        self._hurried.set()

    def calm(self) -> None:
        self._hurried.clear()

    def rest(self) -> None:
        """Pause for the work done since the last pause."""
        # No pause after the main thread has ended, because the program then waits for this thread.
        if not self._hurried.is_set() and threading.main_thread().is_alive():
            rest = min(RESTS * (self._clock() - self._since), LONGEST_REST_S, self._left)
            if rest > 0:
                self._left -= rest
                self._wait(rest)
        self._since = self._clock()


def counted(store: Store, after: Callable[[int, int], object]) -> Store:
    """Wrap a store so that it calls `after(listed, deleted)`, with numbers of objects, after each request.

    Deletes are sent in pages.
    """
    return cast("Store", _CountedStore(store, after))


class _CountedStore:
    def __init__(self, store: Store, after: Callable[[int, int], object]) -> None:
        self._store = store
        self._after = after

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        if not callable(attribute):
            return attribute

        def call(*given: Any, **named: Any) -> Any:
            answer = attribute(*given, **named)
            if isinstance(answer, Iterator):
                return self._page_by_page(answer, int(name == "list"))
            self._after(0, int(name == "delete_if"))
            return answer

        return call

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        failures: list[DeleteFailure] = []
        for start in range(0, len(keys), PAGE):
            page = keys[start : start + PAGE]
            refused = self._store.delete(page)
            failures += refused
            self._after(0, len(page) - len(refused))
        return failures

    def expiring_delete(self, key: str, seconds: int) -> Callable[[], bool]:
        send = cast("ExpiringDeletes", self._store).expiring_delete(key, seconds)

        def counted_send() -> bool:
            gone = send()
            self._after(0, 1)
            return gone

        # No call of `after` here: a pause between signing and sending could outlast the request's validity.
        return counted_send

    def _page_by_page(self, found: Iterator[Any], each: int) -> Iterator[Any]:
        number = 0
        for number, one in enumerate(found, 1):
            yield one
            if number % PAGE == 0:
                self._after(each * PAGE, 0)
        self._after(each * (number % PAGE), 0)


class PruneWorker:
    """Worker that prunes on a background thread of the lowest priority, one round at a time.

    A failed round is logged and never ends training. Any number of calls of `ask` during a round cause one more round.
    The worker pauses after every request, until a caller waits for it or the program ends.

    Attributes:
        last: report of the last round of this process; None before the first.
        failure: error of the last round; None if it succeeded.
        ended: end of the last round that carried out the policy, in `time.monotonic` seconds; None before.
        given_up: checkpoints that get a tombstone after the next commit of another checkpoint. They are not stored: a
            restarted job finds them again.
    """

    def __init__(self, catalog: Catalog, policy: RetentionPolicy, *, pace: Throttle | None = None) -> None:
        self.catalog = catalog
        self.policy = policy
        self._pace = pace or Throttle()
        self._begin()
        renew_in_child(self, PruneWorker._begin)

    def _begin(self) -> None:
        # A forked process needs another holder: the pruners' lock does not exclude processes of the same holder.
        self.holder = f"{process_name()}-{new_token()}"
        self.last: Round | None = None
        self.failure: BucketpointError | None = None
        self.ended: float | None = None
        self.given_up: tuple[Discard, ...] = ()
        self._named: set[tuple[str, str]] = set()
        self._missed: set[str] = set()
        self._committed = 0
        self._swept = False
        self._lock = threading.Lock()
        self._asked = False
        self._thread: threading.Thread | None = None

    def give_up(self, discards: Iterable[Discard]) -> None:
        """Add checkpoints that get a tombstone after the next commit."""
        with self._lock:
            self.given_up = united([*self.given_up, *discards])

    def give_up_only(self, discards: Iterable[Discard]) -> None:
        """Replace the given-up checkpoints by `discards`, after the job has resumed from another checkpoint."""
        with self._lock:
            self.given_up = tuple(discards)

    def forget(self, discards: Iterable[Discard]) -> None:
        """Remove `discards` from the given-up checkpoints, after the save that was to discard them has failed."""
        names = {discard.name for discard in discards}
        with self._lock:
            self.given_up = tuple(discard for discard in self.given_up if discard.name not in names)

    def after_commit(self, step: int) -> None:
        """Write the tombstones of given-up checkpoints, and ask for a prune, after the commit of `step`.

        Raises no BucketpointError, because the save has succeeded.
        """
        with self._lock:
            self._committed += 1
        try:
            if self.given_up:
                self._discard()
        except BucketpointError as error:
            # No prune now: the rules would still count the given-up checkpoints.
            self._failed(error)
            return
        if self.policy.prune.when == "after_commit":
            self.ask()

    def ask(self) -> None:
        """Start a round on the background thread, or ask for another one after the round under way. Never blocks."""
        with self._lock:
            self._asked = True
            if self._thread is not None:
                return
            self._pace.calm()
            # Not a daemon thread, so that the interpreter waits at exit until the round ends.
            thread = threading.Thread(target=self._work, name="bucketpoint-prune")
            try:
                thread.start()
            except RuntimeError:
                # Python 3.12.0 and 3.12.1 start no threads while a program ends. The last save must not fail for this.
                self._asked = False
                logger.info(
                    "the program ends before the prune after its last save; the next job prunes after its first save"
                )
                return
            self._thread = thread

    def now(self, *, force: bool = False) -> Round:
        """Wait for the round under way, then run one on the caller's thread without pauses. Raises as `prune_by`."""
        self.drain()
        report = self._carried_out(self.catalog, force=force)
        self._log(report, forced=force)
        return report

    def drain(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for all rounds, without their pauses. Return True if they have ended."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        self._pace.hurry()
        thread.join(timeout)
        return not thread.is_alive()

    def __reduce__(self) -> tuple[Any, ...]:
        return worker_of, (self.catalog, self.policy)

    def _discard(self) -> None:
        grace, catalog = self.policy.prune.grace, self.catalog.at_store_time()
        done = bury_discards(catalog, self.given_up, due=catalog.due(grace.total_seconds()))
        for discard in done.buried:
            logger.log(
                logging.WARNING if discard.damaged else logging.INFO,
                "step %d is set aside and will be deleted %s: %s. %s",
                discard.checkpoint.step,
                _after(self.policy),
                discard.reason,
                f"`bucketpoint undo {self.catalog.arguments} {discard.checkpoint.step}` withdraws its tombstone"
                if grace
                else "",
            )
        held = [(discard, why) for discard, why in done.held if discard.name not in self._named]
        for discard, why in held:
            self._named.add(discard.name)
            logger.warning(
                "step %d was given up (%s), but stays because it is %s; until the hold ends, `latest` may load it",
                discard.checkpoint.step,
                discard.reason,
                why,
            )
        settled = {discard.name for discard in [*done.buried, *done.void]}
        with self._lock:
            self.given_up = tuple(discard for discard in self.given_up if discard.name not in settled)

    def _carried_out(self, catalog: Catalog, *, force: bool = False) -> Round:
        with self._lock:
            committed = self._committed
        began, run = time.monotonic(), {"bucketpoint.run": without_credentials(catalog.url)}
        span = begin_span("bucketpoint.prune", began, parent=current_context(), attributes=run)
        try:
            report = prune_by(catalog, self.policy, holder=self.holder, force=force, committed=committed)
        except BaseException as error:
            end_span(span, time.monotonic(), error)
            record("bucketpoint.prune.failures", 1, {**run, "error.type": type(error).__qualname__})
            raise
        end_span(span, time.monotonic(), attributes={"bucketpoint.prune.deleted": len(report.done.deleted)})
        record("bucketpoint.prune.duration", time.monotonic() - began, run)
        record("bucketpoint.prune.deleted", len(report.done.deleted), run)
        if report.plan is not None:
            kept = report.plan.left()
            record("bucketpoint.kept.size", sum(row.bytes for row in kept), run)
            record("bucketpoint.kept.checkpoints", len(kept), run)
        if report.done.stopped is None:
            with self._lock:
                self._committed -= committed
                self.ended = time.monotonic()
        return report

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
        catalog = replace(self.catalog, store=counted(self.catalog.store, lambda *_: self._pace.rest()))
        self._pace.begin()
        try:
            self.last, self.failure = self._carried_out(catalog), None
            if not self._swept:
                # Once for each job is enough, because earlier jobs left the remains.
                self._swept = True
                at = replace(catalog, now=self.last.done.now)
                sweep(at, older_than=self.policy.prune.debris_after.total_seconds())
            self._log(self.last)
        except BucketpointError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 (no fault of ours may end the thread for all later saves)
            ours = BucketpointError(f"This is a bug in bucketpoint: {type(error).__name__}: {error}")
            ours.__cause__ = error
            self._failed(ours)

    def _log(self, report: Round, *, forced: bool = False) -> None:
        done, verdict = report.done, report.verdict
        entries = report.plan.entries if report.plan is not None else ()
        why = {entry.row.name: entry for entry in entries}
        carried_out = {*done.deleted, *done.thinned}
        for step, token in done.buried:
            if (step, token) in carried_out:
                continue
            entry = why[step, token]
            fate = "deleted" if entry.action == "delete" else "thinned to its weights"
            logger.info("step %d will be %s %s: %s", step, fate, _after(self.policy), entry.miss)
        for name in done.withdrawn:
            if name in why and why[name].action != "delete":
                reasons = "; ".join(map(str, why[name].reasons))
                logger.info("step %d is kept again, and its tombstone is withdrawn: %s", name[0], reasons)
        for words, gone in (("deleted", done.deleted), ("thinned to its weights", done.thinned)):
            for name in gone:
                miss = why[name].miss if name in why else None
                reason = f": {miss}" if miss else ""
                logger.info(
                    "step %d is %s, which frees %.1f MB%s", name[0], words, done.freed.get(name, 0) / 1e6, reason
                )
        if done.stopped is not None:
            logger.info("nothing was pruned: %s", done.stopped)
        if verdict is not None and not verdict and not forced:
            logger.warning(
                "%s; this prune is limited to %d of them. The manager's `prune(force=True)`, or with the policy's file "
                "`bucketpoint prune FILE --root %s --yes`, carries out the whole plan",
                verdict.why,
                len(done.buried),
                self.catalog.url,
            )
        if done.failures:
            logger.warning(
                "%d objects were not deleted, the first is %s (%s); the next prune tries them again",
                len(done.failures),
                done.failures[0].key,
                done.failures[0].code,
            )
        missed = missing_metrics(self.policy, [entry.row for entry in entries], done.metrics).values()
        for line in (*missed, *gone_lines(self.catalog.arguments, done.gone), *future_lines(done.ahead)):
            if line not in self._missed:
                self._missed.add(line)
                logger.warning("%s", line)

    def _failed(self, error: BucketpointError) -> None:
        self.failure = error
        logger.warning(
            "pruning failed and will be tried again after the next save: %s", error, exc_info=error.__cause__
        )


_workers: dict[tuple[str, ...], PruneWorker] = {}
_looking = process_lock(_workers.clear)


def worker_of(catalog: Catalog, policy: RetentionPolicy) -> PruneWorker:
    """Return this process's worker for a run and a policy. The worker lives as long as the process.

    All writers share it, because a program may make a writer for each save, and a checkpoint process receives one with
    each save. Several workers would compete for the lock, and each would sweep again.
    """
    url, identity = catalog.store.url, catalog.store.identity
    # The identity of a local folder changes when the folder is created.
    place = url if url.startswith("file:") else identity
    run = place, catalog.prefix, catalog.template.namespace, str(catalog.run), repr(policy)
    with _looking:
        worker = _workers.get(run)
        if worker is None:
            worker = _workers[run] = PruneWorker(catalog, policy)
        # The catalog of the latest caller may have newer credentials.
        worker.catalog = catalog
        return worker


def _after(policy: RetentionPolicy) -> str:
    grace = policy.prune.grace
    return f"when its grace period of {written(grace)} is over" if grace else "now"
