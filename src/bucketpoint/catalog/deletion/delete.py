"""Deletion of checkpoints. A deletion is a commit: one conditional request removes `.metadata` before any data.

If the store can compare and delete in one step, and all data carries the commit's own token, that request is a DELETE.
Otherwise it replaces `.metadata` by a marker, which tells the next pruner what to delete, and which is deleted last. No
object is deleted only because it is in the folder: it must be named by the commit that is deleted. Data objects carry a
token of their rank and attempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple, cast

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S, Stopwatch
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.reconcile import named
from bucketpoint.catalog.snapshot import Snapshot, Tombstone
from bucketpoint.catalog.tombstones import withdraw
from bucketpoint.errors import MetadataError, ObjectNotFoundError, PreconditionFailedError, UnsafeDataError
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.item_info import data_paths
from bucketpoint.format.metadata.deletion_marker import DeletionMarker, parse_marker
from bucketpoint.format.metadata.plain import read_metadata, read_record
from bucketpoint.stores import Capabilities, ExpiringDeletes, ObjectInfo, proven_deletes
from bucketpoint.transfer import retry_transient

SIGNED_S = 300
"""Seconds for which a signed deletion of a marker is valid. More than deleting some thousand objects takes."""


LOOKED_S = 300.0
"""Seconds for which a check of the newest checkpoint holds. A pruner that was suspended for longer deletes nothing."""


class Doomed(NamedTuple):
    """Objects that are deleted with one checkpoint.

    Attributes:
        data: keys of its objects.
        remove: removes the marker that replaced its `.metadata`; None if there is no marker, or if it has to stay.
    """

    data: list[str]
    remove: Callable[[], object] | None = None


def delete_checkpoints(
    catalog: Catalog,
    snapshot: Snapshot,
    going: list[Tombstone],
    done: Pruned,
    looked: Stopwatch,
    by: str = "by the retention policy",
) -> None:
    """Delete checkpoints whose tombstones this pruner has claimed, and report the outcome in `done`.

    The order is: the commit, then the record and the data, then the notes and the tombstone. Each checkpoint costs a
    LIST of its folder and a conditional request for its `.metadata`; all other deletes share requests.

    Args:
        looked: started when the newest checkpoint was looked at.
        by: author of the deletion, which the marker tells those who come to load the checkpoint.
    """
    able = proven_deletes(catalog.store, catalog.key(catalog_keys.CATALOG))
    uncommitted = ((tombstone, _uncommit(catalog, able, snapshot, tombstone, done, looked, by)) for tombstone in going)
    doomed = {one: objects for one, objects in uncommitted if objects is not None}
    # Records of commits that were replaced are deleted too: alone in the listing, they would count as a checkpoint.
    records = [*snapshot.checkpoints, *snapshot.superseded]
    wanted = {
        one: [other.key for other in records if other.key and other.folder == one.folder] + objects.data
        for one, objects in doomed.items()
    }
    _delete_all(catalog, wanted, doomed, done)
    for objects in doomed.values():
        if objects.remove is not None:
            # A save may have committed in the marker's place. Its commit stays.
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
    """Replace `there` by a marker.

    Return a function that removes the marker later; None if the store cannot do so safely.

    The removal deletes only this marker, however late it arrives: it is conditional on the marker's ETag, or it is
    signed before the marker is put, and expires. A save waits for that expiry before it commits in the marker's place.

    Raises:
        ObjectNotFoundError, PreconditionFailedError: the object is not `there` any more.
    """
    store = catalog.store
    signed = None
    if able.expiring_delete and not able.conditional_delete:
        signed = cast("ExpiringDeletes", store).expiring_delete(there.key, SIGNED_S)
    etag = catalog.write(there.key, marker.encode(), if_match=there.etag).etag
    if signed is None and etag is not None and (able.conditional_delete or not able.conditional_put):
        return lambda: store.delete_if(there.key, etag)
    # Sent again if its answer is lost: the service refuses it once it has expired.
    return None if signed is None else lambda: retry_transient(signed)


def _uncommit(
    catalog: Catalog, able: Capabilities, snapshot: Snapshot, one: Tombstone, done: Pruned, looked: Stopwatch, by: str
) -> Doomed | None:
    """Remove the commit. Return None if it stays: another commit has replaced it, or the deletion was refused."""
    listed = catalog.objects_of(one.folder)
    committed = listed.get(keys.METADATA)
    # A trainer without the right to delete leaves the objects that its commit replaced: they are deleted too.
    ended = {one.id, *(other.id for other in snapshot.superseded if other.folder == one.folder)}
    if committed is None:
        # `.metadata` was deleted by hand, or by a pruner that died after this point.
        return Doomed(_data(listed, ended, ()))
    same = one.mark != catalog_keys.UNKNOWN and catalog_keys.mark_of(committed.etag) == one.mark
    tokens: set[str] = {one.id}
    paths: tuple[str, ...] = ()
    # If all data in the folder carries the commit's own token, no other token can belong to it. If several ranks saved,
    # the other ranks have tokens of their own. Only the metadata tells those from the tokens of a save that is under
    # way, whose objects may be as many and as large.
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
        # The token tells the commit, too: the ETag of a run that another tool has copied is no longer the recorded one.
        elif same or _token_in(data, committed) == one.id:
            tokens = keys.tokens_in(data)
            paths = () if tokens else _flat_paths(data)
        else:
            withdraw(catalog, one, done)
            return None
    if _fenced(catalog, listed, tokens):
        # If the checkpoint were deleted now, a second request would commit it without its data: see `pruner._unheard`.
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
            # If this pruner dies, the marker tells the next one which objects to delete.
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
        return named(read_record(data), data, info).token
    except (MetadataError, UnsafeDataError):
        return None


def _flat_paths(data: bytes) -> tuple[str, ...]:
    """Return the objects beside `.metadata` that another writer's metadata names. Deeper ones may be another's."""
    try:
        paths = data_paths(read_metadata(data))
    except (MetadataError, UnsafeDataError):
        return ()
    return tuple(sorted(filter(_is_flat, paths)))


def _is_flat(path: str) -> bool:
    return "/" not in path and keys.may_be_data(path)


def _data(listed: dict[str, ObjectInfo], tokens: set[str], paths: tuple[str, ...]) -> list[str]:
    """Return the keys to delete: the attempt's objects, by the tokens of its ranks or by the names in its metadata."""
    named_by_it = {keys.RECORD, *filter(_is_flat, paths)}
    return [
        info.key
        for path, info in listed.items()
        if keys.token_of(path) in tokens or keys.parse_fence_path(path) in tokens or path in named_by_it
    ]


def _notes(snapshot: Snapshot, one: Tombstone) -> list[str]:
    """Return the keys of the notes on a step, if this is its last checkpoint, and of the checkpoint's tombstones."""
    last = sum(other.step == one.step for other in snapshot.checkpoints) <= 1
    notes = sorted(snapshot.notes.keys_of(one.step)) if last else []
    # The tombstone of a pending thinning is deleted too: taking it back would suggest that the checkpoint still exists.
    tombstones = [other.key for other in snapshot.notes.tombstones if other.name == one.name]
    return [*notes, *dict.fromkeys([*tombstones, one.key])]


def _delete_all(
    catalog: Catalog, wanted: dict[Tombstone, list[str]], doomed: dict[Tombstone, Doomed], done: Pruned
) -> None:
    """Delete in shared batches. A checkpoint with a refused key leaves `doomed`: the next prune tries again."""
    failures = catalog.store.delete([key for one in doomed for key in wanted[one]])
    done.failures += failures
    failed = {failure.key for failure in failures}
    for one in [tombstone for tombstone in doomed if not failed.isdisjoint(wanted[tombstone])]:
        del doomed[one]
