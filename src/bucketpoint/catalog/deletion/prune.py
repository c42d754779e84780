"""One round of pruning: writes tombstones for a policy's orders, and carries out those whose grace is over.

If a pruner is killed at any request, the next pruner completes its work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.delete import delete_checkpoints, thin
from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S
from bucketpoint.catalog.deletion.lock import Lock, require_deletes, under_lock
from bucketpoint.catalog.deletion.state import (
    Inspected,
    Pruned,
    claim,
    damage,
    inspect,
    schedule_deletion,
    spare,
    unclaim,
    withdraw,
)
from bucketpoint.catalog.records import absent, reconcile
from bucketpoint.catalog.snapshot import DELETE, KEEP, THIN, Attempt, Checkpoint, Snapshot, Tombstone
from bucketpoint.errors import first_of
from bucketpoint.retention import Entry, Plan, RetentionPolicy, Row, Verdict, circuit_breaker, plan
from bucketpoint.retention.plans import unreported
from bucketpoint.stopwatch import Stopwatch

Decide = Callable[[Sequence[Row]], Sequence[Entry]]
"""Pure function from all rows to the entries of a plan that are carried out, called under the lock.

`keep` withdraws the tombstone of an earlier prune; `thin` withdraws one for deletion. Other checkpoints are left
unchanged.
"""


@dataclass(frozen=True)
class Round:
    """Report of one prune by a policy.

    Attributes:
        plan: the policy's plan; None if no plan was made, for the reason in `done.stopped`.
        verdict: the circuit breaker's verdict on the plan.
        done: the pruner's report.
    """

    plan: Plan | None
    verdict: Verdict | None
    done: Pruned

    def __repr__(self) -> str:
        done, kept = self.done, len(self.plan.left()) if self.plan is not None else 0
        counts = f"{kept} kept, {len(done.buried)} scheduled, {len(done.deleted)} deleted, {len(done.thinned)} thinned"
        return f"Round({done.stopped or counts})"


def prune_by(
    catalog: Catalog, policy: RetentionPolicy, *, holder: str, force: bool = False, committed: int = 0
) -> Round:
    """Prune once by a policy. Raises the errors of `prune`, and `PolicyError` if `policy.keep.match` fails.

    Args:
        force: carry out the whole plan, even if `max_delete` refuses it.
        committed: number of checkpoints that the job has committed since its last round.
    """
    planned: Plan | None = None
    verdict: Verdict | None = None

    def decide(rows: Sequence[Row]) -> list[Entry]:
        nonlocal planned, verdict
        planned, verdict = judged(policy, rows, committed=committed)
        entries = [entry for entry in (*planned.deleted, *planned.thinned) if not entry.is_ordered]
        # Of a refused plan, the oldest few are carried out; later rounds continue.
        allowed = entries if verdict or force else entries[: verdict.unasked]
        # Orders that keep more of a checkpoint than its tombstone delete nothing, so `max_delete` does not count them.
        spared = [
            entry
            for entry in planned.entries
            if entry.row.tombstone and entry.action not in ("delete", entry.row.tombstone)
        ]
        return [*allowed, *spared]

    done = prune(catalog, decide, grace=policy.prune.grace.total_seconds(), holder=holder)
    return Round(planned, verdict, done)


def judged(policy: RetentionPolicy, rows: Sequence[Row], *, committed: int = 0) -> tuple[Plan, Verdict]:
    planned, limit = plan(policy, rows), policy.prune.max_delete
    return planned, circuit_breaker(planned, count=limit.count, fraction=limit.fraction, committed=committed)


def missing_metrics(policy: RetentionPolicy, rows: Sequence[Row], reported: Collection[str]) -> dict[str, str]:
    """Return, by metric, a warning for each `best` rule whose metric was never reported: the name may be misspelt."""
    names = first_of(sorted(reported))
    return {
        metric: f"no checkpoint has a value of {metric} (rule best); the metrics reported are {names}"
        for metric in unreported(policy, rows, reported)
    }


def gone_lines(arguments: str, gone: Collection[int]) -> Iterator[str]:
    """Yield a line about records whose checkpoints another tool has removed or replaced."""
    if gone:
        yield (
            f"another tool removed or replaced checkpoints that have a record, so no rule counts them: step "
            f"{first_of(sorted(gone))}; `bucketpoint gc --deep {arguments}` removes the records"
        )


def future_lines(ahead: Mapping[int, float]) -> Iterator[str]:
    """Yield a line for each step whose record contains a commit time later than the record's write."""
    for step, seconds in sorted(ahead.items()):
        yield (
            f"step {step} was saved by a machine whose clock was {seconds / 3600:.1f} h ahead: its "
            "record has a time in the future, so its age counts from its write by the store's clock"
        )


def prune(catalog: Catalog, decide: Decide, *, grace: float, holder: str) -> Pruned:
    """Run one round: write the tombstones that `decide` orders, and carry out all that are due.

    First, tombstones of earlier rounds are withdrawn if `decide` orders to keep their checkpoints.

    Args:
        grace: seconds from the tombstone to the deletion; 0 deletes in this round.
        holder: name of the pruner in the lock. A pruner of the same name takes the lock over.

    Raises:
        StoreError: a request failed, after all retries. The next round completes unfinished deletions.
    """
    return under_lock(catalog, holder, lambda lock: _round(lock, decide, grace))


def _round(lock: Lock, decide: Decide, grace: float) -> Pruned:
    # `lock.catalog` has the store's time. The clock of the pruner's machine may be wrong by days.
    catalog = lock.catalog
    snapshot, newest = _newest(catalog, reconcile(catalog, catalog.snapshot()))
    done = Pruned(metrics=snapshot.metric_names(), now=catalog.now)
    decided: Sequence[Entry] = ()
    if not snapshot.full and (snapshot.checkpoints or snapshot.gone):
        done.stopped = "the run has no full checkpoint"
    elif newest is not None and newest.problem is not None:
        done.stopped = newest.problem
    else:
        snapshot, decided = existing(catalog, snapshot, decide, looked_at=newest.checkpoint if newest else None)
    done.gone += sorted(checkpoint.step for checkpoint in snapshot.gone)
    done.ahead |= snapshot.ahead
    if done.stopped is not None:
        return done
    spared = snapshot.spared({order.row.name: order.action for order in decided})
    snapshot, orders = snapshot.without(spared), [order for order in decided if order.action != KEEP]
    looked = Stopwatch()
    problem = _damage_of_newest(catalog, snapshot, orders, newest)
    if problem is not None:
        return Pruned(stopped=problem)
    for tombstone in spared:
        spare(catalog, tombstone, done)
    _bury(catalog, snapshot, orders, catalog.due(grace), done)
    # Intents of a trainer without permission to delete make the listings of all restores longer, so they are deleted.
    # The intent of an overwrite stays: it directs the sweep to a folder that may hold objects of the old checkpoint.
    replaced, unheard = {checkpoint.folder for checkpoint in snapshot.superseded}, _unheard(snapshot)
    ended = [attempt for attempt in snapshot.finished if attempt not in unheard and attempt.folder not in replaced]
    notes = catalog.snapshot().notes
    done.failures += catalog.store.delete([*(attempt.key for attempt in ended), *(stone.key for stone in notes.void)])
    carry_out([stone for stone in notes.tombstones if stone.is_due(catalog.now)], done, looked, lock)
    return done


def _newest(catalog: Catalog, snapshot: Snapshot) -> tuple[Snapshot, Inspected | None]:
    """Return the newest full checkpoint that exists, and the snapshot with those that do not exist moved to `gone`."""
    while True:
        given_up = snapshot.given_up()
        # A given-up checkpoint does not count as the newest: a damaged one would block all deletions, its own included.
        staying = [checkpoint for checkpoint in snapshot.full if checkpoint.name not in given_up] or snapshot.full
        newest = inspect(catalog, staying[-1]) if staying else None
        if newest is None or not newest.gone:
            return snapshot, newest
        snapshot = snapshot.without_gone([newest.checkpoint])


def existing(
    catalog: Catalog, snapshot: Snapshot, decide: Decide, *, looked_at: Checkpoint | None = None, dry_run: bool = False
) -> tuple[Snapshot, Sequence[Entry]]:
    """Return the orders for the checkpoints that exist, and the snapshot with the others moved to `gone`.

    If another tool has removed a checkpoint, its record remains. A rule that counted the record would keep one existing
    checkpoint fewer. So before any deletion, one HEAD for each checkpoint that stays checks that it exists.

    Args:
        looked_at: a checkpoint that is known to exist.
        dry_run: write no records.
    """
    known = {looked_at.name} if looked_at is not None else set()
    while True:
        decided = decide(snapshot.rows())
        fates = {order.row.name: order.action for order in decided}
        stones = snapshot.without(snapshot.spared(fates)).notes.tombstones
        if {*fates.values()} <= {KEEP} and not any(stone.is_due(snapshot.taken) for stone in stones):
            return snapshot, decided
        going = {stone.name for stone in stones if stone.action == DELETE}
        staying = [
            checkpoint
            for checkpoint in snapshot.recorded
            if checkpoint.name not in known | going and fates.get((checkpoint.step, checkpoint.id)) != DELETE
        ]
        gone, written = absent(catalog, staying, dry_run=dry_run)
        known |= {checkpoint.name for checkpoint in staying}
        if not gone and not written:
            return snapshot, decided
        if written:
            snapshot = catalog.snapshot().without_gone(snapshot.gone)
        snapshot = snapshot.without_gone(gone)


def _damage_of_newest(
    catalog: Catalog, snapshot: Snapshot, orders: Sequence[Entry], newest: Inspected | None
) -> str | None:
    """Describe the damage of the newest full checkpoint that stays; None if it is whole, or no deletion is planned."""
    stones = snapshot.notes.tombstones
    if newest is None or (not orders and not any(stone.is_due(snapshot.taken) for stone in stones)):
        return None
    going = {(stone.step, stone.id) for stone in stones} | {order.row.name for order in orders}
    staying = [checkpoint for checkpoint in snapshot.full if (checkpoint.step, checkpoint.id) not in going]
    if staying and staying[-1] != newest.checkpoint:
        newest = inspect(catalog, staying[-1])
    return damage(catalog, newest)


def _bury(catalog: Catalog, snapshot: Snapshot, orders: Sequence[Entry], due: float, done: Pruned) -> None:
    there = {(checkpoint.step, checkpoint.id): checkpoint for checkpoint in snapshot.checkpoints}
    buried = {(*stone.name, stone.action) for stone in snapshot.notes.tombstones}
    for order in orders:
        name = order.row.name
        one = there.get(name)
        if one is None:
            # Committed or deleted since the snapshot was taken.
            done.refused[name] = "it was committed or deleted after the plan was made"
        elif reason := _held(snapshot, one):
            done.refused[name] = reason
        elif (*one.name, order.action) not in buried:
            reason = str(order.miss or "")
            schedule_deletion(catalog, one, order.action, due=due, reason=reason, by_policy=True)
            done.buried.append(name)


def _held(snapshot: Snapshot, one: Checkpoint | Tombstone) -> str | None:
    """Return the reason why no order may delete or thin a checkpoint, or None."""
    if one.name in snapshot.newest():
        return "it is the newest checkpoint"
    reasons = snapshot.held().get(one.step)
    return f"it is {' and '.join(sorted(reasons))}" if reasons else None


def carry_out(
    due: Sequence[Tombstone],
    done: Pruned,
    looked: Stopwatch,
    lock: Lock,
    *,
    held: Callable[[Snapshot, Tombstone], str | None] = _held,
    by: str = "by the retention policy",
) -> None:
    """Carry out the tombstones in `due`. One claim and one LIST for each; deletes share requests.

    Args:
        looked: stopwatch that was started when the newest checkpoint was checked.
        lock: no deletion begins after it has expired.
        held: returns the reason to keep a checkpoint, or None.
        by: author of the deletion, for the deletion marker.
    """
    catalog = lock.catalog
    if due:
        # Checked before the claims: a claimed tombstone cannot be undone.
        require_deletes(catalog, due[0].folder, written=len(done.buried))
    claimed = [(tombstone, begun) for tombstone in due if (begun := claim(catalog, tombstone)) is not None]
    if not claimed:
        return
    # Listed again after the claims, to find pins, leases and saves made since the first listing. Pins and leases made
    # later find the claim, and fail.
    snapshot = catalog.snapshot()
    going = []
    for one, begun in claimed:
        if still_goes(catalog, snapshot, begun, done, held=held(snapshot, one), taken_over=one.begun):
            going.append(begun)
    # A checkpoint may have two tombstones. That of a restore takes precedence over the policy's: its mark is that of
    # the present `.metadata`, which may differ from the record.
    by_policy_first = sorted(going, key=lambda tombstone: not tombstone.by_policy)
    deleted = {tombstone.name: tombstone for tombstone in by_policy_first if tombstone.action == DELETE}
    if lock.holds and deleted:
        delete_checkpoints(catalog, snapshot, [*deleted.values()], done, looked, by)
    if lock.holds:
        for tombstone in going:
            if tombstone.action == THIN:
                thin(catalog, snapshot, tombstone, done)


def still_goes(
    catalog: Catalog, snapshot: Snapshot, one: Tombstone, done: Pruned, *, held: str | None, taken_over: bool
) -> bool:
    """Return True if a claimed tombstone may be carried out. Otherwise withdraw it, unclaim it, or leave it claimed.

    Args:
        held: the reason to keep the checkpoint, or None.
        taken_over: True if another pruner had claimed the tombstone before. That pruner may be suspended and delete
            the checkpoint when it wakes, so the tombstone of a held checkpoint stays claimed.
    """
    current = next((other for other in snapshot.checkpoints if other.folder == one.folder), None)
    replaced = current is not None and current.id != one.id
    if taken_over and held is not None and not replaced:
        done.refused[one.step, one.id] = f"{held}, but another pruner has begun to delete or thin it"
        return False
    if replaced or held is not None:
        withdraw(catalog, one, done)
        return False
    if any(attempt.folder == one.folder for attempt in _running(snapshot)):
        # If `unclaim` fails, another pruner has claimed the tombstone, and decides likewise.
        if taken_over or unclaim(catalog, one):
            done.refused[one.step, one.id] = "a save into its folder is under way"
        return False
    return True


def _running(snapshot: Snapshot) -> list[Attempt]:
    """Return the attempts that may still send their commit, for the first time or again."""
    return [*(attempt for attempt in snapshot.attempts if attempt.is_live(snapshot.taken)), *_unheard(snapshot)]


def _unheard(snapshot: Snapshot) -> list[Attempt]:
    """Return the committed attempts whose save may send its commit again, because it received no answer.

    The second request follows within minutes. If the checkpoint were deleted before, the request would commit it
    without data. Such a save still has its intent; if older than `FENCE_AGE_S`, it also has a fence.
    """
    return [attempt for attempt in snapshot.finished if attempt.is_live(snapshot.taken, MIN_SWEEP_AGE_S)]
