"""Rollback of a run to an earlier step."""

from __future__ import annotations

import contextlib
import os

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.remove import Discarded, bury_discards, rolled_back
from bucketpoint.catalog.deletion.wholeness import look_for_damage
from bucketpoint.catalog.notes import lease, release
from bucketpoint.catalog.records import adopt, reconcile
from bucketpoint.catalog.snapshot import Checkpoint
from bucketpoint.errors import CheckpointNotFoundError, CorruptDataError, StoreError


def roll_back(catalog: Catalog, step: int, *, grace: float, dry_run: bool = False) -> Discarded:
    """Write tombstones for all checkpoints of higher steps, and withdraw those of `step`.

    Checkpoints of `step` and above that have no record get one. `grace`: seconds until the deletion.

    Raises:
        CheckpointNotFoundError: there is no full checkpoint of this step.
        CorruptDataError: the checkpoint of this step is not whole; the others get no tombstone.
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
    _refuse_damaged(catalog, target)
    discards = rolled_back(catalog, snapshot, step)
    if dry_run:
        return bury_discards(catalog, discards, due=catalog.due(grace), dry_run=True)
    # Without a lease, a prune that began before the rollback could delete the checkpoint after it was found whole.
    holder = f"rollback-{os.urandom(4).hex()}"
    lease(catalog, step, holder)
    try:
        _refuse_damaged(catalog, target)
        return bury_discards(catalog, discards, due=catalog.at_store_time().due(grace))
    finally:
        # Without permission to delete, the lease expires after ten minutes.
        with contextlib.suppress(StoreError):
            release(catalog, step, holder)


def _refuse_damaged(catalog: Catalog, target: Checkpoint) -> None:
    problem = look_for_damage(catalog, target)
    if problem is not None:
        raise CorruptDataError(
            f"Step {target.step} is not whole, so nothing was rolled back: {problem}",
            url=catalog.url_of_folder(target.folder),
            remedy="Roll back to another step; `bucketpoint verify` lists the damage of this one",
        )
