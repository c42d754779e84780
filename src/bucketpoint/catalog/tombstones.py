"""Tombstones: what goes, and when. Made, taken back, claimed by a pruner: either the undo wins or the claim does."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.snapshot import BEGUN_BYTES, Checkpoint, Tombstone, read_steps
from bucketpoint.errors import BucketpointError, ObjectNotFoundError, PreconditionFailedError
from bucketpoint.format import catalogue
from bucketpoint.format.catalogue import NoteKey

WAITING = "waiting"
BEGUN = "begun"

_WAITING_BYTES = BEGUN_BYTES // 2
"""At most, so that the size of a tombstone tells its state: the reason is cut."""


class GoneError(BucketpointError):
    """The checkpoint is being deleted, or thinned, and cannot be had back."""


def bury(catalog: Catalog, checkpoint: Checkpoint, action: str, *, due: float, reason: str = "") -> Tombstone:
    """Say that a checkpoint goes at `due`, seconds since the epoch."""
    moment = catalogue.milliseconds(due)
    fields = (checkpoint.id, moment, action, checkpoint.mark, checkpoint.folder)
    note = NoteKey(checkpoint.step, catalogue.TOMBSTONE, fields)
    key = catalog.own_key(catalogue.STEPS, note.name())
    catalog.create(key, _body(WAITING, reason))
    return Tombstone(
        checkpoint.step, checkpoint.id, int(moment) / 1000, action, checkpoint.mark, checkpoint.folder, key
    )


def undo(catalog: Catalog, step: int) -> int:
    """Take back all tombstones of a step. Returns how many there were. One LIST, and three requests for each.

    Raises:
        GoneError: a pruner has begun to delete it.
    """
    prefix = catalog.own_key(catalogue.STEPS, "")
    first = prefix + NoteKey(step, catalogue.TOMBSTONE, ("",)).name()
    listed = ((info.key[len(prefix) :], info) for info in catalog.store.list(first))
    found = read_steps(listed, taken=catalog.clock()).notes.tombstones
    for one in found:
        _take_back(catalog, one)
    return len(found)


def _take_back(catalog: Catalog, tombstone: Tombstone) -> None:
    try:
        data, info = catalog.store.get(tombstone.key, max_bytes=1 << 20)
    except ObjectNotFoundError:
        return  # withdrawn by another, or its pruner is done, which the next load will tell
    if data and state_of(data) != WAITING:
        raise GoneError(
            f"Step {tombstone.step} is being {'thinned' if tombstone.action == 'thin' else 'deleted'}",
            url=catalog.url_of_folder(tombstone.folder),
        )
    try:
        empty(catalog, replace(tombstone, etag=info.etag))
        return
    except PreconditionFailedError:
        pass
    try:
        undone = not catalog.store.get(tombstone.key, max_bytes=1 << 20)[0]
    except ObjectNotFoundError:
        undone = True
    # Empty, by another undo or by this one whose answer was lost.
    if not undone:
        raise GoneError(f"Step {tombstone.step} has just begun to go", url=catalog.url_of_folder(tombstone.folder))


def empty(catalog: Catalog, tombstone: Tombstone) -> None:
    """Make a tombstone mean nothing, and remove it.

    Raises:
        PreconditionFailedError: somebody has changed it meanwhile.
    """
    # Emptied first, on a condition: a delete has none, and could remove what a pruner has just claimed.
    catalog.write(tombstone.key, if_match=tombstone.etag)
    # What remains of a failed delete is empty, and the next prune removes it.
    catalog.store.delete([tombstone.key])


def withdraw(catalog: Catalog, tombstone: Tombstone, done: Pruned) -> None:
    """Make void a tombstone that this pruner has claimed, and report it. Does nothing if another pruner has it now."""
    try:
        empty(catalog, tombstone)
    except PreconditionFailedError:
        return
    done.withdrawn.append((tombstone.step, tombstone.id))


def claim(catalog: Catalog, tombstone: Tombstone) -> Tombstone | None:
    """Begin with what is due. None if somebody has taken it back, or another pruner is at it."""
    try:
        info = catalog.write(tombstone.key, _body(BEGUN), if_match=tombstone.etag)
    except PreconditionFailedError:
        return None
    return replace(tombstone, etag=info.etag, begun=True)


def unclaim(catalog: Catalog, tombstone: Tombstone) -> None:
    """Leave it for a later prune: nothing has been done yet."""
    catalog.write(tombstone.key, _body(WAITING), if_match=tombstone.etag)


def state_of(data: bytes) -> str:
    return str(catalogue.content_of(data).get("state", BEGUN))


def _body(state: str, reason: str = "") -> bytes:
    # S3 makes an ETag of the bytes alone: what is written again must not pass for what was there before.
    said = {"nonce": os.urandom(8).hex(), "reason": reason[: _WAITING_BYTES // 12], "state": state}
    body = json.dumps(said, sort_keys=True).encode()
    return body.ljust(BEGUN_BYTES) if state == BEGUN else body
