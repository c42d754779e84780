"""The pruner: tombstone, grace, deletion. It carries out orders and refuses unsafe ones; others decide what to keep.

A pruner that is killed at any request is finished by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from bucketpoint.catalog import lock as locks
from bucketpoint.catalog.adopt import heal
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion import delete_checkpoints
from bucketpoint.catalog.fence import Stopwatch
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.snapshot import DELETE, Checkpoint, Snapshot, Tombstone
from bucketpoint.catalog.tombstones import bury, claim, unclaim, withdraw
from bucketpoint.catalog.wholeness import Inspected, damage, inspect
from bucketpoint.errors import PreconditionFailedError
from bucketpoint.retention.row import FULL, Row

LOCK_SECONDS = 900.0
"""Longer than deleting a batch takes; a pruner that died is waited for as long."""


@dataclass(frozen=True)
class Order:
    """What to do with one checkpoint: `delete` or `thin`, and why."""

    step: int
    id: str
    action: str = DELETE
    reason: str = ""


Decide = Callable[[Sequence[Row]], Sequence[Order]]
"""A policy: pure. Called under the lock with all rows; it orders what is to go."""


def prune(catalog: Catalog, decide: Decide, *, grace: float, holder: str, lock_seconds: float = LOCK_SECONDS) -> Pruned:
    """One round: what `decide` orders gets a tombstone, and what is due goes.

    Args:
        grace: seconds from the tombstone to the deletion; 0 deletes in this round.
        holder: who prunes, for the lock. The same name takes up its own lock again.

    Raises:
        StoreError: a request failed for good. What was begun is finished by the next round.
    """
    lock = locks.acquire(catalog, holder, seconds=lock_seconds)
    if lock is None:
        return Pruned(stopped=locks.held_by(catalog))
    try:
        snapshot = heal(catalog, catalog.snapshot())
        full = [one for one in snapshot.checkpoints if one.kind == FULL]
        if not full and snapshot.checkpoints:
            return Pruned(stopped="there is no full checkpoint")
        going = snapshot.going()
        # A damaged one that was set aside must not keep itself and all others from going.
        staying = [one for one in full if (one.folder, one.id) not in going] or full
        newest = inspect(catalog, staying[-1]) if staying else None
        if newest is not None and newest.problem is not None:
            return Pruned(stopped=newest.problem)
        done = Pruned()
        orders = decide(snapshot.rows())
        looked = Stopwatch()
        problem = _damage_of_newest(catalog, snapshot, orders, newest)
        if problem is not None:
            return Pruned(stopped=problem)
        _bury(catalog, snapshot, orders, catalog.clock() + grace, done)
        # What a trainer without the right to delete has left; it lies in the listing that every restore asks for. The
        # intent of an overwrite is the sweep's: it says that what was replaced may be there still.
        replaced = {one.folder for one in snapshot.superseded}
        done.failures += catalog.store.delete([one.key for one in snapshot.finished if one.folder not in replaced])
        collect(catalog, done, looked, until=lock.expires)
        return done
    finally:
        locks.give_back(catalog, lock)


def _damage_of_newest(
    catalog: Catalog, snapshot: Snapshot, orders: Sequence[Order], newest: Inspected | None
) -> str | None:
    """Tell why the newest full checkpoint that would remain is not whole. None if it is, or if nothing goes."""
    stones = [one for one in snapshot.notes.tombstones if not one.undone]
    if newest is None or (not orders and all(one.due > snapshot.taken + LOCK_SECONDS for one in stones)):
        return None
    going = {(one.step, one.id) for one in stones} | {(one.step, one.id) for one in orders}
    full = [one for one in snapshot.checkpoints if one.kind == FULL]
    staying = [one for one in full if (one.step, one.id) not in going]
    if staying and staying[-1] != newest.checkpoint:
        newest = inspect(catalog, staying[-1])
    return damage(catalog, newest)


def _bury(catalog: Catalog, snapshot: Snapshot, orders: Sequence[Order], due: float, done: Pruned) -> None:
    there = {(one.step, one.id): one for one in snapshot.checkpoints}
    buried = {(one.folder, one.id, one.action) for one in snapshot.notes.tombstones if not one.undone}
    for order in orders:
        name = (order.step, order.id)
        one = there.get(name)
        if one is None:
            # Committed after the snapshot, or gone: not what the plan was made for.
            done.refused[name] = "it is not in the snapshot"
        elif reason := _held(snapshot, one, order.action):
            done.refused[name] = reason
        elif (one.folder, one.id, order.action) not in buried:
            bury(catalog, one, order.action, due=due, reason=order.reason)
            done.buried.append(name)


def _held(snapshot: Snapshot, one: Checkpoint | Tombstone, action: str) -> str | None:
    """Why this checkpoint must not go. No order overrides it."""
    if (one.folder, one.id) in snapshot.newest():
        return "it is the newest"
    reasons = snapshot.held().get(one.step)
    return f"it is {' and '.join(sorted(reasons))}" if reasons else None


def collect(catalog: Catalog, done: Pruned, looked: Stopwatch, *, until: float) -> None:
    """Carry out the tombstones that are due. For each one claim and one LIST; deletes are shared.

    Args:
        looked: since the newest checkpoint was looked at.
        until: begin nothing after this moment: the lock has expired by then.
    """
    now = catalog.clock()
    first = catalog.snapshot()
    waiting = []
    for one in first.notes.tombstones:
        if one.undone:
            done.failures += catalog.store.delete([one.key])
        elif one.due <= now:
            waiting.append(one)
    claimed = [(one, begun) for one in waiting if (begun := claim(catalog, one)) is not None]
    if not claimed:
        return
    # Again, now that everybody can see the claims: whoever came between the two listings is in this one.
    snapshot = catalog.snapshot()
    going = []
    for one, begun in claimed:
        held = _held(snapshot, one, one.action)
        if still_goes(catalog, snapshot, begun, done, held=held, taken_over=one.begun):
            going.append(begun)
    for action, group in groupby(sorted(going, key=lambda one: one.action), key=lambda one: one.action):
        if catalog.clock() >= until:
            break
        if action == DELETE:
            delete_checkpoints(catalog, snapshot, list(group), done, looked)
        else:
            # Only thinning needs to read metadata, and thereby torch.
            from bucketpoint.catalog.thin import thin

            for one in group:
                thin(catalog, snapshot, one, done)


def still_goes(
    catalog: Catalog, snapshot: Snapshot, one: Tombstone, done: Pruned, *, held: str | None, taken_over: bool
) -> bool:
    """Decide whether a claimed deletion is carried out; if not, withdraw the claim or put it back.

    Args:
        held: why it must not go; None if nothing is against it.
        taken_over: another pruner had claimed it before. It may be suspended, and deletes the checkpoint once it wakes:
            so the claim cannot be withdrawn, and a checkpoint that somebody holds on to is left as it is.
    """
    current = next((other for other in snapshot.checkpoints if other.folder == one.folder), None)
    replaced = current is not None and current.id != one.id
    if taken_over and held is not None and not replaced:
        done.refused[one.step, one.id] = f"{held}, and another pruner had begun with it"
        return False
    if replaced or held is not None:
        withdraw(catalog, one, done)
        return False
    try:
        if any(attempt.folder == one.folder and attempt.is_live(snapshot.taken) for attempt in snapshot.attempts):
            if not taken_over:
                unclaim(catalog, one)
            done.refused[one.step, one.id] = "a save to its folder is under way"
            return False
    except PreconditionFailedError:
        # Another pruner has taken over, and decides the same.
        return False
    return True
