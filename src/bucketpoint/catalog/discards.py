"""Checkpoints that a run has given up: damaged ones, and those behind which training was rolled back.

They get a tombstone once another checkpoint is committed, never before: until then they may be all that there is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from bucketpoint.catalog.adopt import metadata_record
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.save_log import write_record
from bucketpoint.catalog.snapshot import DELETE, Checkpoint, Snapshot
from bucketpoint.catalog.tombstones import bury
from bucketpoint.catalog.wholeness import inspect
from bucketpoint.format import catalogue

HOLDS = frozenset({"pinned", "leased"})
"""What keeps a checkpoint that a run has given up. That it was restored from does not: it ends with the next commit."""


@dataclass(frozen=True)
class Discard:
    """A checkpoint that is given up.

    Attributes:
        checkpoint: as it was found. Its mark is that of the `.metadata` that is there, altered or not; it has no id
            where there is no record, and no metadata that can be read.
        damaged: it could not be loaded. Otherwise training was rolled back behind it.
    """

    checkpoint: Checkpoint
    reason: str
    damaged: bool = False

    @property
    def name(self) -> tuple[str, str]:
        """Folder and id."""
        return self.checkpoint.folder, self.checkpoint.id


@dataclass
class Discarded:
    """What became of checkpoints that were given up.

    Attributes:
        buried: they have a tombstone now.
        held: they stay: somebody holds on to them, or nobody can say which commit they are.
        void: they are gone, have a tombstone already, or were saved anew.
    """

    buried: list[Discard] = field(default_factory=list)
    held: list[tuple[Discard, str]] = field(default_factory=list)
    void: list[Discard] = field(default_factory=list)


def damaged(catalog: Catalog, checkpoint: Checkpoint, reason: str) -> Discard | None:
    """Give up a checkpoint that could not be loaded. None if another one has been committed in its place.

    One small GET, and one of the whole `.metadata` where that is not what the record says.
    """
    found = _as_committed(catalog, checkpoint)
    return None if found is None else Discard(found, reason, damaged=True)


def _as_committed(catalog: Catalog, checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint with the id and the mark that its `.metadata` has now. None if another one is there by now."""
    committed = catalog.metadata_info(checkpoint.folder)
    if committed is None:
        return checkpoint if checkpoint.key is not None else None
    mark = catalogue.mark_of(committed.etag)
    if checkpoint.key is not None and mark == checkpoint.mark:
        return checkpoint
    if checkpoint.key is None and mark != checkpoint.mark:
        return None
    record = metadata_record(catalog, checkpoint.folder)
    token = checkpoint.id if record is None else record.token or ""
    if checkpoint.id and token != checkpoint.id:
        return None
    return replace(checkpoint, id=token, mark=mark)


def is_as_written(catalog: Catalog, checkpoint: Checkpoint) -> bool:
    """Whether the metadata is what its record says. Two GETs. False where there is no record that could say so."""
    return checkpoint.key is not None and inspect(catalog, checkpoint).problem is None


def rolled_back(catalog: Catalog, snapshot: Snapshot, step: int) -> list[Discard]:
    """Give up the checkpoints of higher steps, of all kinds, but for those that a tombstone will delete anyway.

    Two GETs for each that has no record, which alone would say which commit it is.
    """
    going = snapshot.going()
    reason = f"training was rolled back to step {step}"
    newer = [one for one in snapshot.checkpoints if one.step > step and (one.folder, one.id) not in going]
    known = (one if one.key is not None else _as_committed(catalog, one) for one in newer)
    return [Discard(one, reason) for one in known if one is not None]


def united(*groups: Iterable[Discard]) -> tuple[Discard, ...]:
    """Each checkpoint once, for the first reason that is given."""
    found: dict[tuple[str, str], Discard] = {}
    for group in groups:
        for one in group:
            found.setdefault(one.name, one)
    return tuple(found.values())


def bury_discards(catalog: Catalog, discards: Collection[Discard], *, due: float, dry_run: bool = False) -> Discarded:
    """Give tombstones to checkpoints that were given up, unless somebody holds on to them or has saved them anew.

    Two LISTs, and a PUT for each.
    """
    done = Discarded()
    snapshot = catalog.snapshot()
    if not dry_run:
        snapshot = _with_records(catalog, snapshot, discards)
    there = {one.folder: one for one in snapshot.checkpoints}
    if dry_run:
        # They would have a record by now.
        there |= {one.checkpoint.folder: one.checkpoint for one in discards if one.checkpoint.key is None}
    going, held = snapshot.going(), snapshot.held()
    for one in discards:
        current = there.get(one.checkpoint.folder)
        if not one.checkpoint.id and (current is None or current.key is None):
            done.held.append((one, "without metadata that can be read"))
        elif current is None or not _same(current, one.checkpoint) or one.name in going:
            done.void.append(one)
        elif reasons := held.get(current.step, set()) & HOLDS:
            done.held.append((one, " and ".join(sorted(reasons))))
        else:
            if not dry_run:
                bury(catalog, replace(current, mark=one.checkpoint.mark), DELETE, due=due, reason=one.reason)
            done.buried.append(one)
    return done


def _same(current: Checkpoint, given_up: Checkpoint) -> bool:
    """Whether what the catalog lists now is the very checkpoint that was given up, and no later one of its step."""
    if given_up.key is not None:
        return current.key == given_up.key
    return (current.id, current.mark) == (given_up.id, given_up.mark)


def _with_records(catalog: Catalog, snapshot: Snapshot, discards: Collection[Discard]) -> Snapshot:
    """Give those a record that have none: a tombstone is on a record's checkpoint."""
    known = {one.folder for one in snapshot.checkpoints}
    written = False
    for one in (one.checkpoint for one in discards):
        if one.key is not None or not one.id or one.folder in known:
            continue
        record = metadata_record(catalog, one.folder)
        if record is not None and record.token == one.id:
            write_record(catalog, one.folder, one.step, record)
            written = True
    return catalog.snapshot() if written else snapshot
