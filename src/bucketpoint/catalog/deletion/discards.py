"""Checkpoints that a run has given up: damaged ones, and those newer than the step of a rollback.

They get a tombstone once another checkpoint is committed, never before: until then they may be all that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.reconcile import metadata_record, write_record
from bucketpoint.catalog.snapshot import DELETE, Checkpoint, Snapshot
from bucketpoint.catalog.tombstones import schedule_deletion
from bucketpoint.format import catalog_keys

HOLDS = frozenset({"pinned", "leased"})
"""Notes that keep a given-up checkpoint. "restored from" is not among them: it ends with the next commit."""


@dataclass(frozen=True)
class Discard:
    """A checkpoint that is given up.

    Attributes:
        checkpoint: the checkpoint as it was found. Its mark is that of the `.metadata` that is there, altered or not.
            Its id is empty if there is no record, and no metadata that can be read.
        damaged: True if it could not be loaded. Otherwise training was rolled back to an earlier step.
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
        buried: have a tombstone now.
        held: stay, because somebody holds them, or because nothing tells which commit they are.
        void: are gone, were given up already, or were saved anew.
    """

    buried: list[Discard] = field(default_factory=list)
    held: list[tuple[Discard, str]] = field(default_factory=list)
    void: list[Discard] = field(default_factory=list)


def damaged(catalog: Catalog, checkpoint: Checkpoint, reason: str) -> Discard | None:
    """Give up a checkpoint that could not be loaded. None if another one has been committed in its place.

    One small GET, and a GET of the whole `.metadata` if it differs from the record.
    """
    present = _as_committed(catalog, checkpoint)
    return None if present is None else Discard(present, reason, damaged=True)


def _as_committed(catalog: Catalog, checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the checkpoint with the id and the mark of its present `.metadata`. None if another one replaced it."""
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
    """Give up the checkpoints of higher steps, of all kinds, except those that were given up already.

    Two GETs for each checkpoint without a record, to find out which commit it is.
    """
    given_up = snapshot.given_up()
    reason = f"training was rolled back to step {step}"
    newer = (one for one in snapshot.checkpoints if one.step > step and one.name not in given_up)
    present = (one if one.key is not None else _as_committed(catalog, one) for one in newer)
    return [Discard(checkpoint, reason) for checkpoint in present if checkpoint is not None]


def united(discards: Iterable[Discard]) -> tuple[Discard, ...]:
    """Return each checkpoint once, with the first reason that is given."""
    first: dict[tuple[str, str], Discard] = {}
    for discard in discards:
        first.setdefault(discard.name, discard)
    return tuple(first.values())


def among(discards: Iterable[Discard]) -> Callable[[Checkpoint], bool]:
    """Return a test whether a listed checkpoint is one of these."""
    names, folders = set(), set()
    for discard in discards:
        # A checkpoint without a record has no id in a listing, so its folder identifies it.
        if discard.checkpoint.key is None:
            folders.add(discard.checkpoint.folder)
        names.add(discard.name)
    return lambda one: one.name in names or (one.key is None and one.folder in folders)


def bury_discards(catalog: Catalog, discards: Collection[Discard], *, due: float, dry_run: bool = False) -> Discarded:
    """Give tombstones to given-up checkpoints, except those that somebody holds or has saved anew.

    Two LISTs, and a PUT for each.
    """
    done = Discarded()
    snapshot = catalog.snapshot()
    if not dry_run:
        snapshot = _with_records(catalog, snapshot, discards)
    there = {checkpoint.folder: checkpoint for checkpoint in snapshot.checkpoints}
    if dry_run:
        # Without `dry_run` they would have a record by now.
        there |= {one.folder: one for one in (discard.checkpoint for discard in discards) if one.key is None}
    # A tombstone by a policy is not enough: a later prune may take it back.
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
    """Return True if the listed checkpoint is the one that was given up, and no later one of its step."""
    if given_up.key is not None:
        return current.key == given_up.key
    return (current.id, current.mark) == (given_up.id, given_up.mark)


def _with_records(catalog: Catalog, snapshot: Snapshot, discards: Collection[Discard]) -> Snapshot:
    """Write the missing records of given-up checkpoints, since a tombstone needs one. Return the snapshot with them."""
    known, written = snapshot.folders, False
    for one in (discard.checkpoint for discard in discards):
        if one.key is not None or not one.id or one.folder in known:
            continue
        record = metadata_record(catalog, one.folder)
        if record is not None and record.token == one.id:
            write_record(catalog, one.folder, one.step, record)
            written = True
    return catalog.snapshot() if written else snapshot
