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
from bucketpoint.catalog.deletion.wholeness import Inspected, damage, inspect
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.reconcile import reconcile
from bucketpoint.catalog.snapshot import DELETE, KEEP, THIN, Attempt, Checkpoint, Snapshot, Tombstone
from bucketpoint.catalog.tombstones import claim, schedule_deletion, spare, unclaim, withdraw
from bucketpoint.errors import PreconditionFailedError
from bucketpoint.retention.row import Row

LOCK_SECONDS = 900.0
"""Seconds for which a pruner's lock holds. Longer than deleting a batch takes; a dead pruner blocks others as long."""


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
    lock = locks.acquire(catalog, holder, seconds=LOCK_SECONDS)
    if lock is None:
        return Pruned(stopped=locks.held_by(catalog))
    try:
        snapshot = reconcile(catalog, catalog.snapshot())
        if not snapshot.full and snapshot.checkpoints:
            return Pruned(stopped="the run has no full checkpoint")
        given_up = snapshot.given_up()
        # A damaged checkpoint that was set aside does not count as the newest: it would block its own deletion and all
        # others.
        staying = [checkpoint for checkpoint in snapshot.full if checkpoint.name not in given_up] or snapshot.full
        newest = inspect(catalog, staying[-1]) if staying else None
        if newest is not None and newest.problem is not None:
            return Pruned(stopped=newest.problem)
        done = Pruned(metrics=snapshot.metric_names())
        decided = decide(snapshot.rows())
        spared = snapshot.spared({(order.step, order.id): order.action for order in decided})
        snapshot, orders = snapshot.without(spared), [order for order in decided if order.action != KEEP]
        looked = Stopwatch()
        problem = _damage_of_newest(catalog, snapshot, orders, newest)
        if problem is not None:
            return Pruned(stopped=problem)
        for tombstone in spared:
            spare(catalog, tombstone, done)
        _bury(catalog, snapshot, orders, catalog.clock() + grace, done)
        # Intents that a trainer without the right to delete has left: they lengthen the listing that every restore asks
        # for. The intent of an overwrite stays for the sweep: it shows that objects of the replaced checkpoint may be
        # left.
        replaced, unheard = {checkpoint.folder for checkpoint in snapshot.superseded}, _unheard(snapshot)
        ended = [attempt for attempt in snapshot.finished if attempt not in unheard and attempt.folder not in replaced]
        done.failures += catalog.store.delete([attempt.key for attempt in ended])
        collect(catalog, done, looked, until=lock.expires)
        return done
    finally:
        locks.give_back(catalog, lock)


def _damage_of_newest(
    catalog: Catalog, snapshot: Snapshot, orders: Sequence[Order], newest: Inspected | None
) -> str | None:
    """Describe the damage of the newest full checkpoint that would remain. None if it is whole, or if nothing goes."""
    stones = [tombstone for tombstone in snapshot.notes.tombstones if not tombstone.undone]
    if newest is None or (not orders and all(tombstone.due > snapshot.taken + LOCK_SECONDS for tombstone in stones)):
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


def collect(catalog: Catalog, done: Pruned, looked: Stopwatch, *, until: float) -> None:
    """Carry out the tombstones that are due. One claim and one LIST for each; deletes share requests.

    Args:
        looked: started when the newest checkpoint was looked at.
        until: moment at which the lock expires. Nothing is begun after it.
    """
    now = catalog.clock()
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
        and tombstone.due <= now
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
    if catalog.clock() < until and deleted:
        delete_checkpoints(catalog, snapshot, [*deleted.values()], done, looked)
    if catalog.clock() < until and (thinned := [tombstone for tombstone in going if tombstone.action == THIN]):
        # Imported here, because only thinning decodes metadata, which needs torch.
        from bucketpoint.catalog.deletion.thin import thin

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
