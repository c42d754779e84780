"""The pruner: tombstone, grace, deletion. It carries out orders and refuses unsafe ones; its caller makes the orders.

If a pruner is killed at any request, the next one finishes its work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion import lock as locks
from bucketpoint.catalog.deletion.delete import delete_checkpoints
from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S, Stopwatch
from bucketpoint.catalog.deletion.rights import require_deletes
from bucketpoint.catalog.deletion.thin import thin
from bucketpoint.catalog.deletion.wholeness import Inspected, damage, inspect
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.reconcile import absent, reconcile
from bucketpoint.catalog.snapshot import DELETE, KEEP, THIN, Attempt, Checkpoint, Snapshot, Tombstone
from bucketpoint.catalog.tombstones import claim, schedule_deletion, spare, unclaim, withdraw
from bucketpoint.errors import PreconditionFailedError
from bucketpoint.retention.row import Row


@dataclass(frozen=True)
class Order:
    """An order for one checkpoint: `delete`, `thin` or `keep`, with the reason.

    An order to keep takes back the tombstone of an earlier prune, and one to thin takes back a tombstone for deletion.
    A checkpoint without an order is left as it is.
    """

    step: int
    id: str
    action: str = DELETE
    reason: str = ""


Decide = Callable[[Sequence[Row]], Sequence[Order]]
"""A policy, as a pure function. Called under the lock with all rows; returns the orders."""


def prune(catalog: Catalog, decide: Decide, *, grace: float, holder: str) -> Pruned:
    """Run one round: checkpoints that `decide` orders to go get a tombstone, and due tombstones are carried out.

    Tombstones of earlier rounds are taken back first, if `decide` orders to keep their checkpoints.

    Args:
        grace: seconds from the tombstone to the deletion; 0 deletes in this round.
        holder: name of the pruner, for the lock. The same name takes over its own lock.

    Raises:
        StoreError: a request failed for good. The next round finishes what was begun.
    """
    lock = locks.acquire(catalog, holder)
    if lock is None:
        return Pruned(stopped=locks.held_by(catalog))
    # The time of the round is the store's. A pruner's own clock may be wrong by days.
    catalog = lock.catalog
    try:
        snapshot, newest = _newest(catalog, reconcile(catalog, catalog.snapshot()))
        done = Pruned(metrics=snapshot.metric_names(), now=catalog.now)
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
        spared = snapshot.spared({(order.step, order.id): order.action for order in decided})
        snapshot, orders = snapshot.without(spared), [order for order in decided if order.action != KEEP]
        looked = Stopwatch()
        problem = _damage_of_newest(catalog, snapshot, orders, newest)
        if problem is not None:
            return Pruned(stopped=problem)
        for tombstone in spared:
            spare(catalog, tombstone, done)
        _bury(catalog, snapshot, orders, catalog.due(grace), done)
        # Intents that a trainer without the right to delete has left: they lengthen the listing that every restore asks
        # for. The intent of an overwrite stays for the sweep: it shows that objects of the replaced checkpoint may be
        # left.
        replaced, unheard = {checkpoint.folder for checkpoint in snapshot.superseded}, _unheard(snapshot)
        ended = [attempt for attempt in snapshot.finished if attempt not in unheard and attempt.folder not in replaced]
        done.failures += catalog.store.delete([attempt.key for attempt in ended])
        collect(catalog, done, looked, lock)
        return done
    finally:
        locks.give_back(lock)


def _newest(catalog: Catalog, snapshot: Snapshot) -> tuple[Snapshot, Inspected | None]:
    """Return the newest full checkpoint that is there, and the snapshot without newer ones that are gone."""
    while True:
        given_up = snapshot.given_up()
        # A damaged checkpoint that was set aside does not count as the newest: it would block its own deletion and all
        # others.
        staying = [checkpoint for checkpoint in snapshot.full if checkpoint.name not in given_up] or snapshot.full
        newest = inspect(catalog, staying[-1]) if staying else None
        if newest is None or not newest.gone:
            return snapshot, newest
        snapshot = snapshot.without_gone([newest.checkpoint])


def existing(
    catalog: Catalog, snapshot: Snapshot, decide: Decide, *, looked_at: Checkpoint | None = None, dry_run: bool = False
) -> tuple[Snapshot, Sequence[Order]]:
    """Decide on the checkpoints that are there. Return the snapshot without those that are gone, and the orders.

    A checkpoint that something else removed leaves its record: if a rule counted it, another one would be deleted in
    its place. So before anything is deleted, each checkpoint that stays is looked for: one HEAD for each.

    Args:
        looked_at: a checkpoint that is known to be there.
        dry_run: write no records.
    """
    known = {looked_at.name} if looked_at is not None else set()
    while True:
        decided = decide(snapshot.rows())
        fates = {(order.step, order.id): order.action for order in decided}
        stones = [stone for stone in snapshot.without(snapshot.spared(fates)).notes.tombstones if not stone.undone]
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
    catalog: Catalog, snapshot: Snapshot, orders: Sequence[Order], newest: Inspected | None
) -> str | None:
    """Describe the damage of the newest full checkpoint that would remain. None if it is whole, or if nothing goes."""
    stones = [tombstone for tombstone in snapshot.notes.tombstones if not tombstone.undone]
    if newest is None or (not orders and not any(tombstone.is_due(snapshot.taken) for tombstone in stones)):
        return None
    going = {(tombstone.step, tombstone.id) for tombstone in stones} | {(order.step, order.id) for order in orders}
    staying = [checkpoint for checkpoint in snapshot.full if (checkpoint.step, checkpoint.id) not in going]
    if staying and staying[-1] != newest.checkpoint:
        newest = inspect(catalog, staying[-1])
    return damage(catalog, newest)


def _bury(catalog: Catalog, snapshot: Snapshot, orders: Sequence[Order], due: float, done: Pruned) -> None:
    there = {(checkpoint.step, checkpoint.id): checkpoint for checkpoint in snapshot.checkpoints}
    buried = {(*tombstone.name, tombstone.action) for tombstone in snapshot.notes.tombstones if not tombstone.undone}
    for order in orders:
        name = (order.step, order.id)
        one = there.get(name)
        if one is None:
            # Committed after the snapshot, or gone: the plan was not made for it.
            done.refused[name] = "it was committed or deleted after the plan was made"
        elif reason := _held(snapshot, one):
            done.refused[name] = reason
        elif (*one.name, order.action) not in buried:
            schedule_deletion(catalog, one, order.action, due=due, reason=order.reason, by_policy=True)
            done.buried.append(name)


def _held(snapshot: Snapshot, one: Checkpoint | Tombstone) -> str | None:
    """Return the reason why a checkpoint must not be deleted or thinned, or None. No order overrides it."""
    if one.name in snapshot.newest():
        return "it is the newest checkpoint"
    reasons = snapshot.held().get(one.step)
    return f"it is {' and '.join(sorted(reasons))}" if reasons else None


def collect(catalog: Catalog, done: Pruned, looked: Stopwatch, lock: locks.Lock) -> None:
    """Carry out the tombstones that are due. One claim and one LIST for each; deletes share requests.

    Args:
        looked: started when the newest checkpoint was looked at.
        lock: nothing is begun after it has expired.
    """
    tombstones = catalog.snapshot().notes.tombstones
    for tombstone in tombstones:
        if tombstone.undone:
            done.failures += catalog.store.delete([tombstone.key])
    # Anybody may have named a folder in a key. One that the template does not make is no checkpoint of this run, and
    # nothing here knows who holds it.
    due = [
        tombstone
        for tombstone in tombstones
        if not tombstone.undone
        and tombstone.is_due(catalog.now)
        and catalog.template.step_of(tombstone.folder) == tombstone.step
    ]
    if due:
        # Before the claims: no undo takes back a claimed tombstone.
        require_deletes(catalog, due[0].folder)
    claimed = [(tombstone, begun) for tombstone in due if (begun := claim(catalog, tombstone)) is not None]
    if not claimed:
        return
    # Listed again, now that the claims are visible: a pin, lease or save that came between the two listings is in this
    # one.
    snapshot = catalog.snapshot()
    going = []
    for one, begun in claimed:
        if still_goes(catalog, snapshot, begun, done, held=_held(snapshot, one), taken_over=one.begun):
            going.append(begun)
    # A checkpoint may have two: what gave it up knows its present `.metadata`, which may differ from its record.
    by_policy_first = sorted(going, key=lambda tombstone: not tombstone.by_policy)
    deleted = {tombstone.name: tombstone for tombstone in by_policy_first if tombstone.action == DELETE}
    if lock.holds and deleted:
        delete_checkpoints(catalog, snapshot, [*deleted.values()], done, looked)
    if lock.holds and (thinned := [tombstone for tombstone in going if tombstone.action == THIN]):
        for tombstone in thinned:
            thin(catalog, snapshot, tombstone, done)


def still_goes(
    catalog: Catalog, snapshot: Snapshot, one: Tombstone, done: Pruned, *, held: str | None, taken_over: bool
) -> bool:
    """Return True if a claimed deletion may be carried out.

    If not, withdraw the claim, put it back, or leave it as it is.

    Args:
        held: the reason to keep the checkpoint; None if there is none.
        taken_over: True if another pruner had claimed it before. That pruner may be suspended, and deletes the
            checkpoint once it wakes: so the claim cannot be withdrawn, and a checkpoint that is held is left as it is.
    """
    current = next((other for other in snapshot.checkpoints if other.folder == one.folder), None)
    replaced = current is not None and current.id != one.id
    if taken_over and held is not None and not replaced:
        done.refused[one.step, one.id] = f"{held}, but another pruner has begun to delete or thin it"
        return False
    if replaced or held is not None:
        withdraw(catalog, one, done)
        return False
    try:
        if any(attempt.folder == one.folder for attempt in _running(snapshot)):
            if not taken_over:
                unclaim(catalog, one)
            done.refused[one.step, one.id] = "a save into its folder is under way"
            return False
    except PreconditionFailedError:
        # Another pruner has taken over, and makes the same decision.
        return False
    return True


def _running(snapshot: Snapshot) -> list[Attempt]:
    """Return the saves that may still send their commit, or send it again."""
    return [*(attempt for attempt in snapshot.attempts if attempt.is_live(snapshot.taken)), *_unheard(snapshot)]


def _unheard(snapshot: Snapshot) -> list[Attempt]:
    """Return the committed attempts whose saves may not know it, so that they may send their commit again.

    A save that loses the answer to its commit sends the same request again, within minutes. If its checkpoint were
    deleted in between, the second request would commit it without its data. Such a save has not removed its intent yet;
    if it is older than `FENCE_AGE_S`, it has a fence (see `delete_checkpoints`).
    """
    return [attempt for attempt in snapshot.finished if attempt.is_live(snapshot.taken, MIN_SWEEP_AGE_S)]
