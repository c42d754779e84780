"""Tombstones: orders to delete or thin a checkpoint at a given time.

A tombstone is made, taken back, or claimed by a pruner. Of an undo and a claim at the same time exactly one wins.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.listing import read_steps
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.snapshot import BEGUN_BYTES, Checkpoint, Tombstone
from bucketpoint.errors import CommitConflictError, ObjectNotFoundError, PreconditionFailedError
from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import NoteKey

WAITING = "waiting"
BEGUN = "begun"

_WAITING_BYTES = BEGUN_BYTES // 2
"""Most bytes of a waiting tombstone, so that the size of a tombstone tells its state: the reason is cut."""


class GoneError(CommitConflictError):
    """The error for a checkpoint that is being deleted or thinned, and cannot be recovered: a deletion is a commit."""

    remedy_default = "It is too late to keep this checkpoint: `bucketpoint ls ROOT` lists those that are left"


def schedule_deletion(
    catalog: Catalog, checkpoint: Checkpoint, action: str, *, due: float, reason: str = "", by_policy: bool = False
) -> str:
    """Write the tombstone of a checkpoint, which is deleted or thinned at `due` (see `Catalog.due`); its key.

    Args:
        by_policy: a later prune whose policy keeps the checkpoint takes the tombstone back.
    """
    author = (catalog_keys.BY_POLICY,) if by_policy else ()
    fields = (checkpoint.id, catalog_keys.milliseconds(due), action, checkpoint.mark, checkpoint.folder, *author)
    note = NoteKey(checkpoint.step, catalog_keys.TOMBSTONE, fields)
    key = catalog.own_key(catalog_keys.STEPS, note.name())
    catalog.create(key, _body(WAITING, reason))
    return key


def undo(catalog: Catalog, step: int) -> int:
    """Take back all tombstones of a step. Return their number. One LIST, and three requests for each.

    Raises:
        GoneError: a pruner has begun to delete or thin the checkpoint.
    """
    listed = catalog.listed(catalog_keys.STEPS, NoteKey(step, catalog_keys.TOMBSTONE, ("",)).name())
    tombstones = read_steps(listed, catalog.template, taken=None).notes.tombstones
    for tombstone in tombstones:
        _take_back(catalog, tombstone)
    return len(tombstones)


def spare(catalog: Catalog, tombstone: Tombstone, done: Pruned) -> None:
    """Make void a tombstone that waits, and report it. Do nothing if a pruner has claimed it. Three requests."""
    with contextlib.suppress(GoneError):
        _take_back(catalog, tombstone)
        done.withdrawn.append((tombstone.step, tombstone.id))


def _take_back(catalog: Catalog, tombstone: Tombstone) -> None:
    try:
        data, info = catalog.store.get(tombstone.key, first=BEGUN_BYTES)
    except ObjectNotFoundError:
        return  # another process withdrew it, or its pruner is done, which the next load will show
    if data and state_of(data) != WAITING:
        raise GoneError(
            f"Step {tombstone.step} is being {'thinned' if tombstone.action == 'thin' else 'deleted'}",
            url=catalog.url_of_folder(tombstone.folder),
        )
    try:
        _empty(catalog, replace(tombstone, etag=info.etag))
    except PreconditionFailedError:
        with contextlib.suppress(ObjectNotFoundError):
            # An empty tombstone was taken back, by another undo or by this one if its answer was lost.
            if catalog.store.get(tombstone.key, first=BEGUN_BYTES)[0]:
                raise GoneError(
                    f"The deletion of step {tombstone.step} has just begun", url=catalog.url_of_folder(tombstone.folder)
                ) from None


def _empty(catalog: Catalog, tombstone: Tombstone) -> None:
    """Make a tombstone void, and remove it. Raises `PreconditionFailedError` if it has been changed meanwhile."""
    # Emptied first, by a conditional write: a delete has no condition, and could remove a tombstone that a pruner has
    # just claimed.
    catalog.write(tombstone.key, if_match=tombstone.etag)
    # If the delete fails, an empty tombstone remains, and the next prune removes it.
    catalog.store.delete([tombstone.key])


def withdraw(catalog: Catalog, tombstone: Tombstone, done: Pruned) -> None:
    """Make void a tombstone that this pruner has claimed, and report it. Do nothing if another pruner has it now."""
    try:
        _empty(catalog, tombstone)
    except PreconditionFailedError:
        return
    done.withdrawn.append((tombstone.step, tombstone.id))


def claim(catalog: Catalog, tombstone: Tombstone) -> Tombstone | None:
    """Claim a tombstone that is due. None if it was taken back, or if another pruner has claimed it."""
    try:
        info = catalog.write(tombstone.key, _body(BEGUN), if_match=tombstone.etag)
    except PreconditionFailedError:
        return None
    return replace(tombstone, etag=info.etag, begun=True)


def unclaim(catalog: Catalog, tombstone: Tombstone) -> None:
    """Leave a claimed tombstone to a later prune: nothing has been deleted yet."""
    catalog.write(tombstone.key, _body(WAITING), if_match=tombstone.etag)


def state_of(data: bytes) -> str:
    return str(catalog_keys.content_of(data).get("state", BEGUN))


def _body(state: str, reason: str = "") -> bytes:
    # S3 makes an ETag of the bytes alone: the nonce gives a rewritten tombstone another ETag than before.
    content = {"nonce": os.urandom(8).hex(), "reason": reason[: _WAITING_BYTES // 12], "state": state}
    body = json.dumps(content, sort_keys=True).encode()
    return body.ljust(BEGUN_BYTES) if state == BEGUN else body
