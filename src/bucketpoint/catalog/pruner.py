"""The pruner: tombstone, grace, delete. It carries out orders and refuses unsafe ones; others decide what to keep.

Killed at any request, it is finished by whoever prunes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from bucketpoint.catalog import lock as locks
from bucketpoint.catalog.adopt import heal
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.save_log import read_record
from bucketpoint.catalog.snapshot import DELETE, Checkpoint, Snapshot, Tombstone
from bucketpoint.catalog.tombstones import bury, claim, empty, unclaim
from bucketpoint.errors import MetadataError, ObjectNotFoundError, PreconditionFailedError
from bucketpoint.format import catalogue, keys
from bucketpoint.retention.row import FULL, Row
from bucketpoint.stores import DeleteFailure, ObjectInfo
from bucketpoint.transfer.checksum import crc32c

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


@dataclass
class Pruned:
    """What a prune did. Checkpoints are (step, id).

    Attributes:
        buried: got a tombstone.
        deleted, thinned: gone, and reduced to their weights.
        withdrawn: had a tombstone that is now void: somebody holds on to them, or they were saved anew.
        refused: ordered, and not done, with the reason.
        failures: keys that the store did not delete, and why; what has failed is tried again by the next prune.
        stopped: why nothing was done at all: another one prunes, or the newest checkpoint cannot be read.
    """

    buried: list[tuple[int, str]] = field(default_factory=list)
    deleted: list[tuple[int, str]] = field(default_factory=list)
    thinned: list[tuple[int, str]] = field(default_factory=list)
    withdrawn: list[tuple[int, str]] = field(default_factory=list)
    refused: dict[tuple[int, str], str] = field(default_factory=dict)
    failures: list[DeleteFailure] = field(default_factory=list)
    stopped: str | None = None


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
        return Pruned(stopped="another pruner is at work")
    try:
        snapshot = heal(catalog, catalog.snapshot())
        problem = unreadable(catalog, snapshot)
        if problem is not None:
            return Pruned(stopped=problem)
        done = Pruned()
        orders = decide(snapshot.rows())
        _bury(catalog, snapshot, orders, catalog.clock() + grace, done)
        # What a trainer without the right to delete has left; it lies in the listing that every restore asks for. The
        # intent of an overwrite is the sweep's: it says that what was replaced may be there still.
        replaced = {one.folder for one in snapshot.superseded}
        done.failures += catalog.store.delete([one.key for one in snapshot.finished if one.folder not in replaced])
        collect(catalog, done, until=lock.expires)
        return done
    finally:
        locks.give_back(catalog, lock)


def unreadable(catalog: Catalog, snapshot: Snapshot) -> str | None:
    """Why the newest full checkpoint cannot be relied on, or None if its `.metadata` is what its record says."""
    full = [one for one in snapshot.checkpoints if one.kind == FULL]
    if not full:
        return "there is no full checkpoint" if snapshot.checkpoints else None
    newest = full[-1]
    try:
        record = read_record(catalog, newest.key) if newest.key is not None else None
        data, _ = catalog.store.get(catalog.metadata_key(newest.folder))
    except ObjectNotFoundError:
        return f"the newest checkpoint, {newest.folder}, has no metadata"
    except MetadataError as error:
        return f"the record of the newest checkpoint, {newest.folder}, cannot be read: {error.message}"
    if record is None or record.metadata_crc32c != crc32c(memoryview(data)):
        return f"the metadata of the newest checkpoint, {newest.folder}, is not what its record says"
    return None


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


def collect(catalog: Catalog, done: Pruned, *, until: float) -> None:
    """Carry out the tombstones that are due. For each one claim and one LIST; deletes are shared.

    Args:
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
    claimed = [begun for one in waiting if (begun := claim(catalog, one)) is not None]
    if not claimed:
        return
    # Again, now that everybody can see the claims: whoever came between the two listings is in this one.
    snapshot = catalog.snapshot()
    going = [one for one in claimed if _still_goes(catalog, snapshot, one, done)]
    for action, group in groupby(sorted(going, key=lambda one: one.action), key=lambda one: one.action):
        if catalog.clock() >= until:
            break
        if action == DELETE:
            _delete(catalog, snapshot, list(group), done)
        else:
            # Only thinning needs to read metadata, and thereby torch.
            from bucketpoint.catalog.thin import thin

            for one in group:
                thin(catalog, snapshot, one, done)


def _still_goes(catalog: Catalog, snapshot: Snapshot, one: Tombstone, done: Pruned) -> bool:
    current = next((other for other in snapshot.checkpoints if other.folder == one.folder), None)
    void = (current is not None and current.id != one.id) or _held(snapshot, one, one.action) is not None
    if void:
        withdraw(catalog, one, done)
        return False
    try:
        if any(attempt.folder == one.folder and attempt.is_live(snapshot.taken) for attempt in snapshot.attempts):
            unclaim(catalog, one)
            done.refused[one.step, one.id] = "a save to its folder is under way"
            return False
    except PreconditionFailedError:
        # Another pruner has taken over, and decides the same.
        return False
    return True


def withdraw(catalog: Catalog, one: Tombstone, done: Pruned) -> None:
    try:
        empty(catalog, one)
    except PreconditionFailedError:
        # Another pruner has taken over, and decides the same.
        return
    done.withdrawn.append((one.step, one.id))


def _delete(catalog: Catalog, snapshot: Snapshot, going: list[Tombstone], done: Pruned) -> None:
    """Records, then the metadata, then all else: nobody ever finds a commit whose data has begun to go."""
    objects: dict[Tombstone, list[ObjectInfo]] = {}
    for one in going:
        found = own_objects(catalog, one.folder)
        committed = next((info for info in found if info.key == catalog.metadata_key(one.folder)), None)
        if committed is not None and replaced(one, committed):
            withdraw(catalog, one, done)
            continue
        objects[one] = found
    records = {one: _records(snapshot, one) for one in objects}
    _delete_all(catalog, records, objects, done)
    commits = {one: [info.key for info in found if _is_commit(info.key)] for one, found in objects.items()}
    _delete_all(catalog, commits, objects, done)
    data = {one: [info.key for info in found if not _is_commit(info.key)] for one, found in objects.items()}
    _delete_all(catalog, data, objects, done)
    alone = Counter(one.step for one in snapshot.checkpoints)
    notes = {one: _notes(snapshot, one.step, alone[one.step] <= 1) + _tombstones(snapshot, one) for one in objects}
    _delete_all(catalog, notes, objects, done)
    done.deleted += [(one.step, one.id) for one in objects]


def replaced(one: Tombstone, committed: ObjectInfo) -> bool:
    """Whether the folder's `.metadata` is another one than that which the tombstone is for."""
    return one.mark != catalogue.UNKNOWN and catalogue.mark_of(committed.etag) != one.mark


def own_objects(catalog: Catalog, folder: str) -> list[ObjectInfo]:
    """All objects of a checkpoint, without those of runs and checkpoints that lie within its folder."""
    prefix = catalog.key(f"{folder}/")
    found = list(catalog.store.list(prefix))
    inner = set()
    for info in found:
        above, _, name = info.key[len(prefix) :].rpartition("/")
        parts = above.split("/")
        if catalogue.CATALOGUE in parts:
            # The root of a run, unless that is this very folder: then its checkpoints have metadata of their own.
            at = parts.index(catalogue.CATALOGUE)
            inner.add("/".join([*parts[: at or 1], ""]))
        elif above and name == keys.METADATA:
            inner.add(above + "/")
    return [info for info in found if not info.key[len(prefix) :].startswith(tuple(inner))] if inner else found


def _is_commit(key: str) -> bool:
    return key.endswith(keys.METADATA)


def _records(snapshot: Snapshot, one: Tombstone) -> list[str]:
    # Those of commits that this one replaced too: alone in the listing, they would stand for a checkpoint.
    records = [*snapshot.checkpoints, *snapshot.superseded]
    return [other.key for other in records if other.key and other.folder == one.folder]


def _notes(snapshot: Snapshot, step: int, alone: bool) -> list[str]:
    """What was said about a step; it goes with the last checkpoint of that step."""
    if not alone:
        return []
    said = snapshot.notes
    about = [(one.step, one.key) for one in said.reports]
    about += [(one.step, one.key) for one in said.pins]
    about += [(one.step, one.key) for one in said.leases]
    about += [(one.step, one.key) for one in said.resumes]
    return list(dict.fromkeys(key for of, key in about if of == step))


def _tombstones(snapshot: Snapshot, one: Tombstone) -> list[str]:
    # Of a thinning that was to come as well: taking it back would say that there is something left.
    same = [other.key for other in snapshot.notes.tombstones if (other.folder, other.id) == (one.folder, one.id)]
    return [*same, one.key] if one.key not in same else same


def _delete_all(
    catalog: Catalog, wanted: dict[Tombstone, list[str]], objects: dict[Tombstone, list[ObjectInfo]], done: Pruned
) -> None:
    """Delete in shared batches. A checkpoint of which a key was refused goes no further: the next prune tries again."""
    failures = catalog.store.delete([key for one in objects for key in wanted[one]])
    done.failures += failures
    failed = {failure.key for failure in failures}
    for one in [one for one in objects if not failed.isdisjoint(wanted[one])]:
        del objects[one]
