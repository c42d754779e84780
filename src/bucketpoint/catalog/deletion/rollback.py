"""Rollback of a run by hand: all newer checkpoints get a tombstone, and a restart goes on from the chosen one."""

from __future__ import annotations

from dataclasses import dataclass

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.discards import Discarded, bury_discards, rolled_back
from bucketpoint.catalog.deletion.wholeness import look_for_damage
from bucketpoint.catalog.reconcile import adopt, reconcile
from bucketpoint.catalog.tombstones import undo
from bucketpoint.errors import CheckpointNotFoundError, CorruptDataError


@dataclass(frozen=True)
class RolledBack:
    """Report of a rollback, or of its dry run.

    Attributes:
        steps: steps whose checkpoints have a tombstone now, and are deleted at `due`, in seconds since the epoch.
        held: steps that stay because they are held, with the reason. A restart restores them until that ends.
    """

    steps: tuple[int, ...]
    held: tuple[tuple[int, str], ...]
    due: float


def roll_back(catalog: Catalog, step: int, *, grace: float, dry_run: bool = False) -> RolledBack:
    """Give all checkpoints of higher steps a tombstone, and take back that of `step`, if it has one.

    Checkpoints from `step` on that have no record get one.

    Args:
        grace: seconds until the deletion.
        dry_run: report what would be done, and change nothing.

    Raises:
        CheckpointNotFoundError: there is no full checkpoint of this step.
        CorruptDataError: the checkpoint of this step is not whole, so nothing is given up for it.
        GoneError: the deletion of the checkpoint of this step has begun.
    """
    snapshot = catalog.with_unrecorded(catalog.snapshot() if dry_run else reconcile(catalog, catalog.snapshot()))
    unrecorded = [checkpoint.step for checkpoint in snapshot.unrecorded if checkpoint.step >= step]
    if unrecorded and not dry_run:
        adopt(catalog, unrecorded)
        snapshot = catalog.with_unrecorded(catalog.snapshot())
    target = next((checkpoint for checkpoint in snapshot.full if checkpoint.step == step), None)
    if target is None:
        there = ", ".join(str(checkpoint.step) for checkpoint in snapshot.full)
        raise CheckpointNotFoundError(
            f"There is no full checkpoint of step {step} in this run",
            url=catalog.url,
            remedy=f"These steps have full checkpoints: {there}"
            if there
            else "The run has no full checkpoint; see `bucketpoint ls`",
        )
    problem = look_for_damage(catalog, target)
    if problem is not None:
        raise CorruptDataError(
            f"Step {step} is not whole, so nothing was rolled back: {problem}",
            url=catalog.url_of_folder(target.folder),
            remedy="Roll back to another step; `bucketpoint verify` lists the damage of this one",
        )
    due = (catalog if dry_run else catalog.at_store_time()).due(grace)
    discards = rolled_back(catalog, snapshot, step)
    if not dry_run and any(tombstone.step == step for tombstone in snapshot.notes.tombstones):
        undo(catalog, step)
    done = bury_discards(catalog, discards, due=due, dry_run=dry_run) if discards else Discarded()
    held = tuple((one.checkpoint.step, why) for one, why in done.held)
    return RolledBack(tuple(discard.checkpoint.step for discard in done.buried), held, due)
