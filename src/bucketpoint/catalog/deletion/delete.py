"""Deletion and thinning of checkpoints whose tombstone a pruner has claimed.

One conditional request ends the checkpoint before any data is deleted. If the store supports conditional deletes, and
all data carries the coordinator's token, the request deletes `.metadata`. Otherwise it replaces `.metadata` by a
deletion marker. The marker names the objects to delete, for the next pruner if this one dies, and is deleted last. Only
objects of the deleted commit are deleted, not the whole folder: data objects carry a token of rank and attempt.

Thinning writes new metadata without the optimizer, and deletes the optimizer's objects. It reads no tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import NamedTuple, cast

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S
from bucketpoint.catalog.deletion.state import Pruned, withdraw
from bucketpoint.catalog.records import named, read_record, write_record
from bucketpoint.catalog.snapshot import Checkpoint, Snapshot, Tombstone
from bucketpoint.errors import (
    CheckpointDeletedError,
    MetadataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnsafeDataError,
)
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.item_info import data_paths
from bucketpoint.format.metadata import plain
from bucketpoint.format.metadata.thinning import WEIGHTS, Outline
from bucketpoint.format.record import CommitRecord, DeletionMarker, parse_marker
from bucketpoint.retention.rows import FULL
from bucketpoint.stopwatch import Stopwatch
from bucketpoint.stores import Capabilities, ExpiringDeletes, ObjectInfo, proven_deletes
from bucketpoint.stores.retry import retry_transient

SIGNED_S = 300
"""Seconds for which a signed deletion of a marker is valid: longer than deleting some thousand objects takes."""

LOOKED_S = 300.0
"""Seconds for which a check of the newest checkpoint is valid. A pruner that was suspended longer deletes nothing."""


class Doomed(NamedTuple):
    """Objects to delete with one checkpoint.

    Attributes:
        data: keys of its objects.
        remove: function that removes the deletion marker; None if there is no marker, or if it has to stay.
    """

    data: list[str]
    remove: Callable[[], object] | None = None


def delete_checkpoints(
    catalog: Catalog,
    snapshot: Snapshot,
    going: list[Tombstone],
    done: Pruned,
    looked: Stopwatch,
    by: str,
) -> None:
    """Delete the checkpoints of claimed tombstones, and report the outcome in `done`.

    The order is: `.metadata`, then record and data, then notes and tombstone. Each checkpoint costs a LIST of its
    folder and a conditional request for its `.metadata`; all other deletes share requests.

    Args:
        looked: stopwatch that was started when the newest checkpoint was checked.
        by: author of the deletion, for the errors of readers that find the marker.
    """
    able = proven_deletes(catalog.store, catalog.key(catalog_keys.CATALOG))
    uncommitted = ((tombstone, _uncommit(catalog, able, snapshot, tombstone, done, looked, by)) for tombstone in going)
    doomed = {one: objects for one, objects in uncommitted if objects is not None}
    # Records of replaced commits in the folder are deleted too: without the newer record they would count.
    records = [*snapshot.checkpoints, *snapshot.superseded]
    wanted = {
        one: [other.key for other in records if other.key and other.folder == one.folder] + objects.data
        for one, objects in doomed.items()
    }
    _delete_all(catalog, wanted, doomed, done)
    for objects in doomed.values():
        if objects.remove is not None:
            # The removal fails if a save has replaced the marker by its commit.
            with contextlib.suppress(PreconditionFailedError):
                objects.remove()
    _delete_all(catalog, {tombstone: _notes(snapshot, tombstone) for tombstone in doomed}, doomed, done)
    sizes = {checkpoint.name: sum(checkpoint.groups.values()) for checkpoint in snapshot.checkpoints}
    for tombstone in doomed:
        done.deleted.append((tombstone.step, tombstone.id))
        done.freed[tombstone.step, tombstone.id] = sizes.get(tombstone.name, 0)


def put_marker(
    catalog: Catalog, able: Capabilities, there: ObjectInfo, marker: DeletionMarker
) -> Callable[[], object] | None:
    """Replace the object `there` by a marker. Return a function that removes it; None if the store has no safe removal.

    The function deletes only this marker, even if its request arrives late: the request depends on the marker's ETag,
    or it is signed before the marker is written, and expires. A save waits for the expiry before it replaces a marker.

    Raises:
        ObjectNotFoundError, PreconditionFailedError: the object was removed or replaced.
    """
    store = catalog.store
    signed = None
    if able.expiring_delete and not able.conditional_delete:
        signed = cast("ExpiringDeletes", store).expiring_delete(there.key, SIGNED_S)
    etag = catalog.write(there.key, marker.encode(), if_match=there.etag).etag
    if signed is None and etag is not None and (able.conditional_delete or not able.conditional_put):
        return lambda: store.delete_if(there.key, etag)
    # A signed deletion may be sent again after a lost answer, because the service refuses it once it has expired.
    return None if signed is None else lambda: retry_transient(signed)


def _uncommit(
    catalog: Catalog, able: Capabilities, snapshot: Snapshot, one: Tombstone, done: Pruned, looked: Stopwatch, by: str
) -> Doomed | None:
    """Remove the commit, and return the objects to delete. None if it was replaced, or must not be deleted now."""
    listed = catalog.objects_of(one.folder)
    committed = listed.get(keys.METADATA)
    # Objects of replaced commits are deleted too: a trainer without permission to delete has left them.
    ended = {one.id, *(other.id for other in snapshot.superseded if other.folder == one.folder)}
    if committed is None:
        # `.metadata` was deleted by hand, or by a pruner that died before it deleted the data.
        return Doomed(_data(listed, ended, ()))
    same = one.mark != catalog_keys.UNKNOWN and catalog_keys.mark_of(committed.etag) == one.mark
    tokens: set[str] = {one.id}
    paths: tuple[str, ...] = ()
    # If all data in the folder has the coordinator's token, no other rank saved data. Otherwise only the metadata
    # distinguishes tokens of other ranks from those of a save under way, so it is read.
    if not same or {token for path in listed if (token := keys.token_of(path)) is not None} != tokens:
        try:
            data = get_metadata(catalog.store, committed.key)[0]
        except ObjectNotFoundError:
            data = b""
        marker = parse_marker(data)
        if marker is not None and marker.token != one.id:
            return Doomed(_data(listed, ended, ()))
        if marker is not None:
            tokens, paths = set(marker.tokens), marker.paths
        # If another tool has copied the run, the ETag differs from the record's, and the token identifies the commit.
        elif same or _token_in(data, committed) == one.id:
            tokens = keys.tokens_in(data)
            paths = () if tokens else _flat_paths(data)
        else:
            withdraw(catalog, one, done)
            return None
    if _fenced(catalog, listed, tokens):
        # A repeated commit would make a checkpoint without data: see `prune._unheard`.
        done.refused[one.step, one.id] = "its save still has a fence, and may send its commit again"
        return None
    if looked.seconds() > LOOKED_S:
        done.refused[one.step, one.id] = (
            f"the newest checkpoint was checked more than {LOOKED_S / 60:g} minutes ago; the next prune checks it again"
        )
        return None
    remove = None
    try:
        if tokens == {one.id} and committed.etag is not None and able.conditional_delete:
            catalog.store.delete_if(committed.key, committed.etag)
        else:
            # The marker names the objects to delete, for the next pruner if this one dies.
            at = catalog.now if catalog.now is not None else catalog.clock()
            marker = DeletionMarker(one.id, at, by, tuple(sorted(tokens)), paths)
            remove = put_marker(catalog, able, committed, marker)
    except ObjectNotFoundError:
        pass
    except PreconditionFailedError:
        withdraw(catalog, one, done)
        return None
    return Doomed(_data(listed, tokens | ended, paths), remove)


def _fenced(catalog: Catalog, listed: dict[str, ObjectInfo], tokens: set[str]) -> bool:
    fences = [info for path, info in listed.items() if keys.parse_fence_path(path) in tokens]
    oldest = catalog.now - MIN_SWEEP_AGE_S if catalog.now is not None else float("-inf")
    return any(info.modified is None or info.modified >= oldest for info in fences)


def _token_in(data: bytes, info: ObjectInfo) -> str | None:
    try:
        return named(plain.read_record(data), data, info).token
    except (MetadataError, UnsafeDataError):
        return None


def _flat_paths(data: bytes) -> tuple[str, ...]:
    """Return the paths in another writer's metadata, except in subfolders, which may belong to another run."""
    try:
        paths = data_paths(plain.read_metadata(data))
    except (MetadataError, UnsafeDataError):
        return ()
    return tuple(sorted(filter(_is_flat, paths)))


def _is_flat(path: str) -> bool:
    return "/" not in path and keys.may_be_data(path)


def _data(listed: dict[str, ObjectInfo], tokens: set[str], paths: tuple[str, ...]) -> list[str]:
    """Return the keys to delete: data and fences with these tokens, objects at `paths`, and the record."""
    named_by_it = {keys.RECORD, *filter(_is_flat, paths)}
    return [
        info.key
        for path, info in listed.items()
        if keys.token_of(path) in tokens or keys.parse_fence_path(path) in tokens or path in named_by_it
    ]


def _notes(snapshot: Snapshot, one: Tombstone) -> list[str]:
    """Return the keys of the checkpoint's tombstones, and, if it is the step's last checkpoint, of the step's notes."""
    last = sum(other.step == one.step for other in snapshot.checkpoints) <= 1
    notes = sorted(snapshot.notes.keys_of(one.step)) if last else []
    # A tombstone for thinning is deleted too: `undo` of it would suggest that the checkpoint still exists.
    tombstones = [other.key for other in snapshot.notes.tombstones if other.name == one.name]
    return [*notes, *dict.fromkeys([*tombstones, one.key])]


def _delete_all(
    catalog: Catalog, wanted: dict[Tombstone, list[str]], doomed: dict[Tombstone, Doomed], done: Pruned
) -> None:
    """Delete in shared batches. A checkpoint with a failed key leaves `doomed`, so its tombstone stays for a retry."""
    failures = catalog.store.delete([key for one in doomed for key in wanted[one]])
    done.failures += failures
    failed = {failure.key for failure in failures}
    for one in [tombstone for tombstone in doomed if not failed.isdisjoint(wanted[tombstone])]:
        del doomed[one]


def thin(catalog: Catalog, snapshot: Snapshot, one: Tombstone, done: Pruned) -> None:
    """Thin a checkpoint: replace metadata and record, and delete the optimizer's objects and then the tombstone."""
    name = (one.step, one.id)
    key = catalog.metadata_key(one.folder)
    try:
        data, info = get_metadata(catalog.store, key)
        outline = Outline(data)
        if outline.facts.get("token") not in (None, one.id):
            withdraw(catalog, one, done)
            return
        if outline.facts.get("kind") != WEIGHTS:
            data = outline.thinned(info.etag)
            outline = Outline(data)
            # The condition fails if another process has replaced the metadata.
            info = catalog.write(key, data, if_match=info.etag)
    except (ObjectNotFoundError, CheckpointDeletedError):
        withdraw(catalog, one, done)
        return
    except PreconditionFailedError:
        done.refused[name] = "its metadata was replaced meanwhile"
        return
    except (MetadataError, UnsafeDataError) as error:
        withdraw(catalog, one, done)
        done.refused[name] = f"it cannot be thinned: {error.message}"
        return
    record = outline.record(metadata_etag=info.etag)
    records = [*snapshot.checkpoints, *snapshot.superseded]
    old = [other for other in records if other.name == one.name]
    for other in old:
        # Metadata of other writers has no time and no token, so those of the old record are used.
        former = _record_of(catalog, other)
        created = record.created if record.created is not None else other.created
        metrics = {**(former.metrics if former else {}), **record.metrics}
        # If the checkpoint covered all its tensors, the thinned one does, too.
        covers = (former and former.covers) or None
        record = dataclasses.replace(record, token=other.id, created=created, metrics=metrics, covers=covers)
    if record.token is None:
        record = dataclasses.replace(record, token=one.id)
    written = write_record(catalog, one.folder, one.step, record)
    failures = catalog.store.delete([other.key for other in old if other.key and other.key != written])
    objects = {path: info.key for path, info in catalog.objects_of(one.folder).items()}
    if keys.METADATA not in objects:
        # Another pruner has deleted the checkpoint meanwhile, so the new record has no commit.
        done.failures += failures + catalog.store.delete([written])
        withdraw(catalog, one, done)
        return
    # Only the paths that the old metadata named: a save under way may have optimizer objects in the same folder.
    goes = set(outline.facts.get("thinned_paths", ())) - outline.paths
    failures += catalog.store.delete([objects[path] for path in sorted(goes & objects.keys()) if keys.token_of(path)])
    done.failures += failures
    if not failures:
        done.failures += catalog.store.delete([one.key])
        done.thinned.append(name)
        before = next((sum(other.groups.values()) for other in old if other.kind == FULL), record.bytes)
        done.freed[name] = before - record.bytes


def _record_of(catalog: Catalog, one: Checkpoint) -> CommitRecord | None:
    try:
        return read_record(catalog, one.key) if one.key else None
    except MetadataError:
        return None
