"""State machine of a deletion: the table of all transitions, those of tombstones as functions, and the wholeness check.

Transitions for which processes compete are conditional requests, so exactly one process succeeds. A prune requires that
the newest checkpoint is whole: its metadata matches the record and covers all tensors, and all objects are listed with
the right sizes.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.deletion.fence import SAVE, SWEEP
from bucketpoint.catalog.listing import read_steps
from bucketpoint.catalog.records import read_record
from bucketpoint.catalog.snapshot import BEGUN_BYTES, Checkpoint, Tombstone
from bucketpoint.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    MetadataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnsafeDataError,
)
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.catalog_keys import NoteKey
from bucketpoint.format.index.ref import index_path
from bucketpoint.format.item_info import read_item
from bucketpoint.format.metadata.coverage import uncovered
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.metadata.plain import read_metadata
from bucketpoint.format.record import CommitRecord, is_marker
from bucketpoint.stores import DeleteFailure
from bucketpoint.transfer.checksum import crc32c


class Change(NamedTuple):
    """Transition of an object between two states. In the empty state the object does not exist.

    Attributes:
        by: process that makes the change, and when.
        condition: condition of the request, and checks that the process makes before it.
        guards: guards in `tests/simulation`, by name; without any of them data is lost.
    """

    what: str
    before: str
    after: str
    by: str
    condition: str
    guards: tuple[str, ...] = ()


WAITING, BEGUN, VOID = "waiting", "begun", "void"

# fmt: off
CHANGES = {
    "begin": Change("intent", "", "open", "a save, before it sends data", "each attempt has its own key"),
    "fence": Change("fence", "", SAVE, "a save of half an hour or more, before it commits",
        "create-only, If-Match to renew it; all its data is there", ("save takes its fence",)),
    "condemn": Change("fence", "", SWEEP, "a sweep, before it deletes data",
        "create-only, or If-Match on an old fence; attempt inactive for `debris_after`",
        ("sweep takes the fence", "age floor")),
    "sweep": Change("data, uploads, intent", "there", "", "the sweep", "no metadata names the data",
        ("metadata of ranks",)),
    "commit": Change("`.metadata`", "", "commit", "a save", "create-only, If-Match on what it replaces",
        ("only what was seen",)),
    "record": Change("record", "", "there", "the save; a prune, if the save died",
        "create-only; the commit is there", ("commit that a record names",)),
    "finish": Change("intent, fence", "there", "", "the save; a prune, if the save may not delete",
        "the record is there; for a prune, intent an hour old",
        ("intent of a save that may commit again", "intent after a second request")),
    "lock": Change("`pruner.json`", "", "held", "a pruner, first", "create-only, If-Match if free or 15 minutes old"),
    "schedule": Change("tombstone", "", WAITING, "a prune, `rm`, a rollback, a restore past damage",
        "create-only; for a policy, the newest is whole", ("newest is whole",)),
    "undo": Change("tombstone", WAITING, VOID, "`undo`, a pin, a lease; a policy that keeps the checkpoint",
        "If-Match", ("a policy that keeps takes back",)),
    "claim": Change("tombstone", WAITING, BEGUN, "a pruner, when due; a later one again",
        "If-Match; the newest is whole", ("the store's time",)),
    "unclaim": Change("tombstone", BEGUN, WAITING, "the first pruner, beside a save into the folder", "If-Match"),
    "withdraw": Change("tombstone", BEGUN, VOID, "the first pruner, if the checkpoint is held; any, if it was replaced",
        "If-Match", ("claims are not withdrawn",)),
    "delete": Change("`.metadata`", "commit", "", "the pruner, if one rank saved and the store can",
        "DELETE with If-Match; no young fence", ("deletion is conditional", "fence of a save that may commit again")),
    "mark": Change("`.metadata`", "commit", "marker", "the pruner, otherwise", "If-Match; no young fence"),
    "thin": Change("`.metadata`", "commit", "weights", "the pruner", "If-Match"),
    "clear": Change("record, data", "there", "", "the pruner", "the commit named it", ("deletion by token",)),
    "unmark": Change("`.metadata`", "marker", "", "the pruner; else a sweep",
        "If-Match, or signed before `mark` and expiring"),
    "end": Change("notes, tombstone", BEGUN, "", "the pruner", "all else is gone"),
}
"""All changes by their names. `docs/catalog.md` shows them."""
# fmt: on


_WAITING_BYTES = BEGUN_BYTES // 2
"""Limit on the bytes of a waiting tombstone, whose reason is cut: a tombstone's size shows its state."""


@dataclass
class Pruned:
    """Report of one prune. Checkpoints are (step, id).

    Attributes:
        buried: checkpoints that got a tombstone.
        deleted, thinned: checkpoints that were deleted, and those that were thinned to their weights.
        withdrawn: checkpoints whose tombstone was withdrawn: the policy keeps them, they are held, or they were
            replaced by another save.
        refused: checkpoints that were to be deleted or thinned and stay, with the reason.
        freed: bytes of data of each deleted checkpoint, and the bytes removed from each thinned one.
        metrics: names of all metrics reported in the run.
        failures: keys that the store did not delete, with the reason; the next prune repeats the deletion.
        gone: steps with a record whose checkpoint another tool has removed or replaced. No rule counts them.
        ahead: steps saved by a machine whose clock was ahead, with the difference in seconds.
        now: the store's time at the beginning of the round; None if the store returns no times.
        stopped: reason why the round did nothing, such as another pruner at work or a damaged newest checkpoint.
    """

    buried: list[tuple[int, str]] = field(default_factory=list)
    deleted: list[tuple[int, str]] = field(default_factory=list)
    thinned: list[tuple[int, str]] = field(default_factory=list)
    withdrawn: list[tuple[int, str]] = field(default_factory=list)
    refused: dict[tuple[int, str], str] = field(default_factory=dict)
    freed: dict[tuple[int, str], int] = field(default_factory=dict)
    metrics: frozenset[str] = frozenset()
    failures: list[DeleteFailure] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    ahead: dict[int, float] = field(default_factory=dict)
    now: float | None = None
    stopped: str | None = None


class GoneError(CommitConflictError):
    """Error for a checkpoint whose deletion or thinning has begun and cannot be undone."""

    remedy_default = "It is too late to keep this checkpoint: `bucketpoint ls ROOT` lists those that are left"


def schedule_deletion(
    catalog: Catalog, checkpoint: Checkpoint, action: str, *, due: float, reason: str = "", by_policy: bool = False
) -> str:
    """Write a tombstone: the checkpoint is deleted or thinned at `due` (see `Catalog.due`). Return the tombstone's key.

    Args:
        by_policy: True if a later prune whose policy keeps the checkpoint may withdraw the tombstone.
    """
    author = (catalog_keys.BY_POLICY,) if by_policy else ()
    fields = (checkpoint.id, catalog_keys.milliseconds(due), action, checkpoint.mark, checkpoint.folder, *author)
    note = NoteKey(checkpoint.step, catalog_keys.TOMBSTONE, fields)
    key = catalog.own_key(catalog_keys.STEPS, note.name())
    catalog.create(key, _body(CHANGES["schedule"].after, reason))
    return key


def undo(catalog: Catalog, step: int) -> int:
    """Withdraw all tombstones of a step. Return their number. One LIST, and three requests for each tombstone.

    Raises:
        GoneError: a pruner has begun to delete or thin the checkpoint.
    """
    listed = catalog.listed(catalog_keys.STEPS, NoteKey(step, catalog_keys.TOMBSTONE, ("",)).name())
    notes = read_steps(listed, catalog.template, taken=None).notes
    for tombstone in (*notes.tombstones, *notes.void):
        _take_back(catalog, tombstone)
    return len(notes.tombstones) + len(notes.void)


def spare(catalog: Catalog, tombstone: Tombstone, done: Pruned) -> None:
    """Withdraw a waiting tombstone, and add it to the report `done`, unless a pruner has claimed it. Three requests."""
    with contextlib.suppress(GoneError):
        _take_back(catalog, tombstone)
        done.withdrawn.append((tombstone.step, tombstone.id))


def _take_back(catalog: Catalog, tombstone: Tombstone) -> None:
    try:
        data, info = catalog.store.get(tombstone.key, first=BEGUN_BYTES)
    except ObjectNotFoundError:
        return  # another process withdrew it, or the deletion is complete
    gone = bool(data) and state_of(data) != WAITING
    if not gone and _change(catalog, replace(tombstone, etag=info.etag), "undo") is None:
        with contextlib.suppress(ObjectNotFoundError):
            # An empty tombstone was withdrawn: by another undo, or by this one, if the answer to its write was lost.
            gone = bool(catalog.store.get(tombstone.key, first=BEGUN_BYTES)[0])
    if gone:
        raise GoneError(
            f"Step {tombstone.step} is being {'thinned' if tombstone.action == 'thin' else 'deleted'}",
            url=catalog.url_of_folder(tombstone.folder),
        )


def withdraw(catalog: Catalog, tombstone: Tombstone, done: Pruned) -> None:
    """Withdraw a claimed tombstone, and add it to the report `done`, unless another pruner has claimed it since."""
    if _change(catalog, tombstone, "withdraw") is not None:
        done.withdrawn.append((tombstone.step, tombstone.id))


def claim(catalog: Catalog, tombstone: Tombstone) -> Tombstone | None:
    """Claim a tombstone that is due. None if it was withdrawn or claimed since it was listed."""
    return _change(catalog, tombstone, "claim")


def unclaim(catalog: Catalog, tombstone: Tombstone) -> bool:
    """Return a claimed tombstone to the waiting state; nothing was deleted yet. False if another pruner claimed it."""
    return _change(catalog, tombstone, "unclaim") is not None


def state_of(data: bytes) -> str:
    return str(catalog_keys.content_of(data).get("state", BEGUN))


def _change(catalog: Catalog, tombstone: Tombstone, change: str) -> Tombstone | None:
    """Make a transition of a tombstone. Return None if the tombstone was changed since `tombstone.etag`."""
    state = CHANGES[change].after
    try:
        info = catalog.write(tombstone.key, _body(state), if_match=tombstone.etag)
    except PreconditionFailedError:
        return None
    if state == VOID:
        # The tombstone was emptied first, under a condition. A delete without condition alone could remove a tombstone
        # that a pruner has just claimed. If the delete fails, the next prune removes the empty tombstone.
        catalog.store.delete([tombstone.key])
    return replace(tombstone, etag=info.etag, begun=state == BEGUN)


def _body(state: str, reason: str = "") -> bytes:
    if state == VOID:
        return b""
    # S3 derives an ETag from the bytes alone: with a nonce, a rewritten tombstone has another ETag than before.
    content = {"nonce": os.urandom(8).hex(), "reason": reason[: _WAITING_BYTES // 12], "state": state}
    body = json.dumps(content, sort_keys=True).encode()
    return body.ljust(BEGUN_BYTES) if state == BEGUN else body


@dataclass(frozen=True)
class Inspected:
    """A checkpoint's record and metadata.

    Attributes:
        problem: text about unreadable or contradictory record and metadata; None if they match.
        data: bytes of the metadata.
        gone: True if there is no metadata.
    """

    checkpoint: Checkpoint
    problem: str | None
    record: CommitRecord | None = None
    data: bytes = field(default=b"", repr=False)
    gone: bool = False


def inspect(catalog: Catalog, checkpoint: Checkpoint) -> Inspected:
    """Read the record and the metadata of a checkpoint. Two GETs."""
    folder = checkpoint.folder
    try:
        record = read_record(catalog, checkpoint.key) if checkpoint.key is not None else None
        data, _ = get_metadata(catalog.store, catalog.metadata_key(folder))
    except ObjectNotFoundError:
        return Inspected(checkpoint, f"checkpoint {folder} has no metadata", gone=True)
    except MetadataError as error:
        return Inspected(checkpoint, f"the record of checkpoint {folder} cannot be read: {error.message}")
    if is_marker(data):
        return Inspected(checkpoint, f"checkpoint {folder} is being deleted")
    if checkpoint.key is not None and (record is None or record.metadata_crc32c != crc32c(memoryview(data))):
        return Inspected(checkpoint, f"the metadata of checkpoint {folder} differs from its record")
    return Inspected(checkpoint, None, record, data)


def damage(catalog: Catalog, inspected: Inspected) -> str | None:
    """Describe the damage of a checkpoint's tensors or objects; None if it is whole. One LIST."""
    folder, record = inspected.checkpoint.folder, inspected.record
    if inspected.problem is not None:
        return inspected.problem
    try:
        if not (record and record.covers) and (part := _part(inspected.data)) is not None:
            return f"checkpoint {folder} does not hold all of its state: {part}"
        sizes = {path: info.size for path, info in catalog.objects_of(folder).items()}
        if record is not None:
            index = index_path(record.token or "")
            data = {path: size for path, size in sizes.items() if keys.token_of(path) and path != index}
            whole = (len(data), sum(data.values())) == (record.objects, record.bytes)
            # Counts and sizes alone prove too little: a save under way in the same folder may have equal ones. So the
            # tokens must be in the metadata.
            if data and whole and {keys.token_of(path) for path in data} <= keys.tokens_in(inspected.data):
                return None
        missing = _missing(inspected.data, sizes)
    except (CheckpointNotFoundError, MetadataError, UnsafeDataError) as error:
        return f"the metadata of checkpoint {folder} cannot be read: {error.message}"
    return f"data of checkpoint {folder} is missing: {missing}" if missing is not None else None


def look_for_damage(catalog: Catalog, checkpoint: Checkpoint) -> str | None:
    """Inspect a checkpoint and describe its damage; None if it is whole. Two GETs, one LIST."""
    return damage(catalog, inspect(catalog, checkpoint))


def _part(data: bytes) -> str | None:
    """Return a text about a tensor that the checkpoint does not fully cover; None if it covers all."""
    metadata = read_metadata(data)
    return next((f"{name} {why}" for name, why in uncovered(metadata, extra(metadata))), None)


def _missing(data: bytes, sizes: dict[str, int]) -> str | None:
    """Return the path of an object in the metadata that is missing or too small; None if there is none."""
    metadata = read_metadata(data)
    least = {path: int(fact["size"]) for path, fact in extra(metadata).get("objects", {}).items()}
    for info in (metadata.storage_data or {}).values():
        item = read_item(info)
        least[item.path] = max(least.get(item.path, 0), item.offset + item.length)
    return next((path for path, size in sorted(least.items()) if sizes.get(path, -1) < size), None)
