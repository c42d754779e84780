"""Removal of checkpoints without a policy: by name, by a rollback, or because of damage.

A checkpoint that a person names is deleted at once, by the steps of a prune. Checkpoints that a job gives up (damaged,
or newer than the step of a rollback) get a tombstone after the commit of another checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.deletion.lock import Lock, require_deletes, under_lock
from bucketpoint.catalog.deletion.prune import carry_out
from bucketpoint.catalog.deletion.state import Pruned, look_for_damage, schedule_deletion
from bucketpoint.catalog.records import metadata_record, reconcile, write_missing
from bucketpoint.catalog.run import names_below, other_files, run_of, size_of
from bucketpoint.catalog.snapshot import BY_STEP, DELETE, Checkpoint, Snapshot, Tombstone
from bucketpoint.errors import CheckpointNotFoundError, ObjectNotFoundError, first_of
from bucketpoint.format import catalog_keys
from bucketpoint.format.record import parse_marker
from bucketpoint.location import Location, Place
from bucketpoint.retention.rows import FULL
from bucketpoint.stopwatch import Stopwatch
from bucketpoint.stores import this_url

logger = logging.getLogger(__name__)

LOOKED_AT_MOST = 20
"""Limit on the checkpoints checked or loaded to find a whole one. More damaged ones in a row have a common cause."""

HOLDS = frozenset({"pinned", "leased"})
"""Reasons that keep a given-up checkpoint. "restored from" is not included, because it ends with the next commit."""


@dataclass(frozen=True)
class Discard:
    """A checkpoint that is given up, with the reason.

    Attributes:
        checkpoint: the checkpoint, with the mark of its present `.metadata`, altered or not. Its id is empty if there
            is no record and no readable metadata.
        damaged: True if it could not be loaded; False if training was rolled back to an earlier step.
    """

    checkpoint: Checkpoint
    reason: str
    damaged: bool = False

    @property
    def name(self) -> tuple[str, str]:
        return self.checkpoint.name


@dataclass
class Discarded:
    """Outcome for the checkpoints that were given up.

    Attributes:
        due: time of the deletion, in seconds since the epoch.
        buried: checkpoints that got a tombstone.
        held: checkpoints that stay, with the reason: pinned, leased, or without readable metadata.
        void: checkpoints that are gone, replaced, or had such a tombstone before.
    """

    due: float
    buried: list[Discard] = field(default_factory=list)
    held: list[tuple[Discard, str]] = field(default_factory=list)
    void: list[Discard] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """Steps of `buried`."""
        return [discard.checkpoint.step for discard in self.buried]


def damaged(catalog: Catalog, checkpoint: Checkpoint, reason: str) -> Discard | None:
    """Return the discard of a checkpoint that could not be loaded; None if another one has replaced it.

    One small GET, and a GET of the whole `.metadata` if it differs from the record.
    """
    present = _as_committed(catalog, checkpoint)
    return None if present is None else Discard(present, reason, damaged=True)


def _as_committed(catalog: Catalog, checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the checkpoint with id and mark of its present `.metadata`; None if that is another commit's."""
    committed = catalog.metadata_info(checkpoint.folder)
    if committed is None:
        return checkpoint if checkpoint.key is not None else None
    mark = catalog_keys.mark_of(committed.etag)
    if checkpoint.key is not None and mark == checkpoint.mark:
        return checkpoint
    if checkpoint.key is None and mark != checkpoint.mark:
        return None
    record = metadata_record(catalog, checkpoint.folder)
    token = checkpoint.id if record is None else record.token or ""
    if checkpoint.id and token != checkpoint.id:
        return None
    return replace(checkpoint, id=token, mark=mark)


def rolled_back(catalog: Catalog, snapshot: Snapshot, step: int) -> list[Discard]:
    """Return discards of the checkpoints of higher steps, of all kinds, except those that were given up already.

    Two GETs for each checkpoint without a record, to identify its commit.
    """
    given_up = snapshot.given_up()
    reason = f"training was rolled back to step {step}"
    newer = (one for one in snapshot.checkpoints if one.step > step and one.name not in given_up)
    present = (one if one.key is not None else _as_committed(catalog, one) for one in newer)
    return [Discard(checkpoint, reason) for checkpoint in present if checkpoint is not None]


def united(discards: Iterable[Discard]) -> tuple[Discard, ...]:
    first: dict[tuple[str, str], Discard] = {}
    for discard in discards:
        first.setdefault(discard.name, discard)
    return tuple(first.values())


def among(discards: Iterable[Discard]) -> Callable[[Checkpoint], bool]:
    """Return a function that returns True for a listed checkpoint that is one of the discards."""
    names, folders = set(), set()
    for discard in discards:
        # A checkpoint without a record has no id in a listing, so its folder identifies it.
        if discard.checkpoint.key is None:
            folders.add(discard.checkpoint.folder)
        names.add(discard.name)
    return lambda one: one.name in names or (one.key is None and one.folder in folders)


def bury_discards(catalog: Catalog, discards: Collection[Discard], *, due: float, dry_run: bool = False) -> Discarded:
    """Write tombstones of given-up checkpoints, except those that are held or were replaced.

    Two LISTs, and a PUT for each tombstone.
    """
    done = Discarded(due)
    snapshot = catalog.snapshot()
    if not dry_run:
        snapshot = _with_records(catalog, snapshot, discards)
    there = {checkpoint.folder: checkpoint for checkpoint in snapshot.checkpoints}
    if dry_run:
        # Without `dry_run`, `_with_records` has added these checkpoints.
        there |= {one.folder: one for one in (discard.checkpoint for discard in discards) if one.key is None}
    # `given_up` does not include tombstones by a policy, which a later prune may withdraw.
    given_up, held = snapshot.given_up(), snapshot.held()
    for discard in discards:
        current = there.get(discard.checkpoint.folder)
        if not discard.checkpoint.id and (current is None or current.key is None):
            done.held.append((discard, "without readable metadata"))
        elif current is None or not _same(current, discard.checkpoint) or discard.name in given_up:
            done.void.append(discard)
        elif reasons := held.get(current.step, set()) & HOLDS:
            done.held.append((discard, " and ".join(sorted(reasons))))
        else:
            if not dry_run:
                schedule_deletion(
                    catalog, replace(current, mark=discard.checkpoint.mark), DELETE, due=due, reason=discard.reason
                )
            done.buried.append(discard)
    return done


def _same(current: Checkpoint, given_up: Checkpoint) -> bool:
    """Return True if the listed checkpoint is the one that was given up, and not a later commit in its folder."""
    if given_up.key is not None:
        return current.key == given_up.key
    return (current.id, current.mark) == (given_up.id, given_up.mark)


def _with_records(catalog: Catalog, snapshot: Snapshot, discards: Collection[Discard]) -> Snapshot:
    """Write the missing records of given-up checkpoints, which their tombstones need. Return the new snapshot."""
    missing = (one for one in (discard.checkpoint for discard in discards) if one.key is None and one.id)
    commits = [(one.step, one.folder, one.id) for one in missing if one.folder not in snapshot.folders]
    return catalog.snapshot() if write_missing(catalog, commits) else snapshot


@dataclass(frozen=True)
class Removal:
    """A checkpoint to remove.

    Attributes:
        checkpoint: the checkpoint, with token and mark even if it has no record.
        bytes: bytes of its data.
        reasons: reasons to keep it, which only `force` overrides.
    """

    catalog: Catalog
    checkpoint: Checkpoint
    bytes: int
    reasons: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return self.catalog.url_of_folder(self.checkpoint.folder)


def plan_removal(place: Place) -> Removal:
    """Return the `Removal` of the checkpoint at `place`, with the reasons against it. Changes nothing.

    Raises:
        InvalidURLError: the URL cannot be that of a checkpoint.
        CheckpointNotFoundError: there is no checkpoint at the URL.
    """
    catalog, folder = run_of(Location.of(place))
    snapshot = catalog.with_unrecorded(catalog.snapshot())
    checkpoint = next((checkpoint for checkpoint in snapshot.checkpoints if checkpoint.folder == folder), None)
    if checkpoint is None:
        raise _not_there(catalog, folder)
    nbytes = sum(checkpoint.groups.values()) if checkpoint.key is not None else size_of(catalog, folder)
    if checkpoint.key is None:
        checkpoint = _identified(catalog, checkpoint)
    elif committed := catalog.metadata_info(folder):
        # The present commit is removed, even if it is damaged or differs from the record.
        checkpoint = replace(checkpoint, mark=catalog_keys.mark_of(committed.etag))
    return Removal(catalog, checkpoint, nbytes, tuple(_reasons(catalog, snapshot, checkpoint)))


def remove(removal: Removal, *, holder: str, force: bool = False, of_run: bool = False) -> Pruned:
    """Delete the checkpoint by the steps of a prune: a tombstone that is due at once, a claim, `.metadata`, the data.

    Args:
        holder: name of this process in the pruners' lock.
        force: delete the checkpoint despite all reasons to keep it.
        of_run: True if the whole run is removed: then only a pin, a lease or a resume is a reason to keep a checkpoint.

    Raises:
        AccessDeniedError: data may not be deleted; nothing was changed.
        StoreError: a request failed, after all retries. The next prune or removal completes the deletion.
    """
    catalog, one = removal.catalog, removal.checkpoint
    require_deletes(catalog, one.folder)

    def work(lock: Lock) -> Pruned:
        catalog, done = lock.catalog, Pruned()

        def held(snapshot: Snapshot, _: Tombstone) -> str | None:
            if force:
                return None
            found = _held(snapshot, one) if of_run else _reasons(catalog, catalog.with_unrecorded(snapshot), one)
            reasons = " and ".join(found)
            if reasons:
                done.refused[one.step, one.id] = reasons
            return reasons or None

        reconcile(catalog, catalog.snapshot())
        key = schedule_deletion(catalog, one, DELETE, due=catalog.due(0.0), reason="a person deleted it by name")
        stones = [stone for stone in catalog.steps().notes.tombstones if stone.key == key]
        carry_out(stones, done, Stopwatch(), lock, held=held, by="by `bucketpoint rm`")
        if done.deleted:
            logger.info("%s is deleted", removal.url)
        elif not (done.refused or done.withdrawn or done.failures):
            done.refused[one.step, one.id] = "another process has its tombstone, and deletes it or has withdrawn it"
        return done

    return under_lock(catalog, holder, work)


def _not_there(catalog: Catalog, folder: str) -> CheckpointNotFoundError:
    message = f"There is no checkpoint at {this_url(catalog.store)}"
    remedy = "Check the URL; `bucketpoint gc --deep` on the run deletes the data of saves that never committed"
    marker = None
    with contextlib.suppress(ObjectNotFoundError):
        marker = parse_marker(get_metadata(catalog.store, catalog.metadata_key(folder))[0])
        if marker is not None:
            message = marker.text
            remedy = "The next prune, or `bucketpoint gc --deep`, deletes the remaining objects"
    url = catalog.url_of_folder(folder)
    files = None if marker is not None else other_files(names_below(catalog.store, catalog.key(folder)), url)
    return files or CheckpointNotFoundError(message, url=url, remedy=remedy)


def _identified(catalog: Catalog, one: Checkpoint) -> Checkpoint:
    """Return `one`, which has no record, with the token from its metadata. One GET."""
    record = metadata_record(catalog, one.folder)
    if record is not None:
        return replace(one, id=record.token or "", mark=catalog_keys.mark_of(record.metadata_etag))
    try:
        data, info = get_metadata(catalog.store, catalog.metadata_key(one.folder))
    except ObjectNotFoundError:
        raise _not_there(catalog, one.folder) from None
    # The metadata is unreadable, so the id is a hash. Its bytes may still contain the tokens of data to delete.
    return replace(one, id=hashlib.sha256(data).hexdigest()[:12], mark=catalog_keys.mark_of(info.etag))


def _reasons(catalog: Catalog, snapshot: Snapshot, one: Checkpoint) -> list[str]:
    """Return the reasons to keep a checkpoint: it is held, or is the newest whole one, or no checkpoint is whole.

    Two GETs and a LIST for each full checkpoint, newest first, until one is whole.
    """
    reasons = _held(snapshot, one)
    if one.kind != FULL:
        return reasons
    going = snapshot.going() - {one.name}
    full = [other for other in snapshot.full if other.name not in going]
    whole = next((other for other in full[: -LOOKED_AT_MOST - 1 : -1] if look_for_damage(catalog, other) is None), None)
    if whole is None:
        reasons.append("its run has no whole checkpoint")
    elif whole.folder == one.folder:
        due = [str(other.step) for other in snapshot.full if other.name in going and BY_STEP(other) > BY_STEP(one)]
        newer = f" that is not due for deletion, as step {first_of(due, 3)} is" if due else ""
        reasons.append(f"it is the newest whole checkpoint of its run{newer}")
    return reasons


def _held(snapshot: Snapshot, one: Checkpoint) -> list[str]:
    return [f"it is {held}" for held in sorted(snapshot.held().get(one.step, ()))]
