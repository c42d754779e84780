"""Deleting checkpoints. A deletion is a commit: `.metadata` goes by one conditional request before any data does.

Where the store can compare and delete in one step, and all data carries the commit's own token, that is a DELETE.
Otherwise `.metadata` is replaced by a marker, which tells the next pruner what goes, and which goes last. Nothing is
deleted for the folder that it lies in: only what the commit that goes has named. Data objects carry a token of their
rank and attempt.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from bucketpoint.catalog.adopt import named
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.fence import Stopwatch
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.snapshot import Snapshot, Tombstone
from bucketpoint.catalog.tombstones import withdraw
from bucketpoint.errors import MetadataError, ObjectNotFoundError, PreconditionFailedError, UnsafeDataError
from bucketpoint.format import catalogue, keys
from bucketpoint.format.deletion_marker import DeletionMarker, parse_marker
from bucketpoint.format.item_info import data_paths
from bucketpoint.format.plain_metadata import read_metadata, read_record
from bucketpoint.stores import Capabilities, ExpiringDeletes, ObjectInfo, proven_deletes

SIGNED_S = 300
"""Seconds for which a signed deletion of a marker is in force. More than deleting some thousand objects takes."""


@dataclass
class Doomed:
    """Objects that go with one checkpoint.

    Attributes:
        data: keys of its objects.
        remove: removes the marker in place of its `.metadata`; None if nothing is there, or the marker has to stay.
    """

    data: list[str] = field(default_factory=list)
    remove: Callable[[], object] | None = None


LOOKED_S = 300.0
"""How long the look at the newest checkpoint holds. A pruner that was suspended since then looks again."""


def delete_checkpoints(
    catalog: Catalog,
    snapshot: Snapshot,
    going: list[Tombstone],
    done: Pruned,
    looked: Stopwatch,
    by: str = "by the retention policy",
) -> None:
    """Delete checkpoints whose tombstones this pruner has claimed, and say in `done` what came of it.

    The commit, then the record and the data, then the notes and the tombstone. Each checkpoint costs a LIST of its
    folder and a conditional request for its `.metadata`; the deletes of all else are shared.

    Args:
        looked: since the newest checkpoint was looked at.
        by: who deletes, for those who come to load it.
    """
    able = proven_deletes(catalog.store, catalog.key(catalogue.CATALOGUE)) if going else catalog.store.capabilities
    doomed = {
        one: found for one in going if (found := _uncommit(catalog, able, snapshot, one, done, looked, by)) is not None
    }
    wanted = {one: _records(snapshot, one) + what.data for one, what in doomed.items()}
    _delete_all(catalog, wanted, doomed, done)
    for what in doomed.values():
        if what.remove is not None:
            # A save may have committed in its place: then it stays.
            with contextlib.suppress(PreconditionFailedError):
                what.remove()
    alone = Counter(one.step for one in snapshot.checkpoints)
    notes = {one: _notes(snapshot, one.step, alone[one.step] <= 1) + _tombstones(snapshot, one) for one in doomed}
    _delete_all(catalog, notes, doomed, done)
    sizes = {(one.folder, one.id): sum(one.groups.values()) for one in snapshot.checkpoints}
    for one in doomed:
        done.deleted.append((one.step, one.id))
        done.freed[one.step, one.id] = sizes.get((one.folder, one.id), 0)


def put_marker(
    catalog: Catalog, able: Capabilities, there: ObjectInfo, marker: DeletionMarker
) -> Callable[[], object] | None:
    """Replace `there` by a marker. Returns what removes the marker later; None where the store cannot do so safely.

    The removal deletes nothing but this marker, however late it comes: by its ETag, or because it is signed before the
    marker is put, and expires. A save waits until it has expired before it commits in the marker's place.

    Raises:
        ObjectNotFoundError, PreconditionFailedError: what is there is not `there` any more.
    """
    store = catalog.store
    signed = None
    if able.expiring_delete and not able.conditional_delete:
        signed = cast("ExpiringDeletes", store).expiring_delete(there.key, SIGNED_S)
    written = catalog.write(there.key, marker.encode(), if_match=there.etag)
    etag = written.etag
    if signed is None and etag is not None and (able.conditional_delete or not able.conditional_put):
        return lambda: store.delete_if(there.key, etag)
    return signed


def _uncommit(
    catalog: Catalog, able: Capabilities, snapshot: Snapshot, one: Tombstone, done: Pruned, looked: Stopwatch, by: str
) -> Doomed | None:
    """Take the commit away. None if there is another commit by now, which stays whole."""
    listed = catalog.objects_of(one.folder)
    committed = listed.get(keys.METADATA)
    # A trainer without the right to delete leaves what its commit has replaced.
    ended = {one.id, *(other.id for other in snapshot.superseded if other.folder == one.folder)}
    if committed is None:
        # Deleted by hand, or by a pruner that got so far.
        return Doomed(_data(listed, ended, ()))
    same = one.mark != catalogue.UNKNOWN and catalogue.mark_of(committed.etag) == one.mark
    paths: tuple[str, ...] = ()
    tokens = {one.id} if same and _only_its_own(one, listed) else None
    if tokens is None:
        data = _get(catalog, committed)
        marker = parse_marker(data)
        if marker is not None and marker.token != one.id:
            return Doomed(_data(listed, ended, ()))
        if marker is not None:
            tokens, paths = set(marker.tokens), marker.paths
        elif same or (one.mark == catalogue.UNKNOWN and _token_in(data, committed) == one.id):
            tokens = keys.tokens_in(data)
            paths = () if tokens else _flat_paths(data)
        else:
            withdraw(catalog, one, done)
            return None
    if looked.seconds() > LOOKED_S:
        done.refused[one.step, one.id] = "the newest checkpoint must be looked at again: the next prune does"
        return None
    remove = None
    try:
        if tokens == {one.id} and committed.etag is not None and able.conditional_delete:
            catalog.store.delete_if(committed.key, committed.etag)
        else:
            # If this pruner dies, the next one must know what else goes.
            said = DeletionMarker(one.id, catalog.clock(), by, tuple(sorted(tokens)), paths)
            remove = put_marker(catalog, able, committed, said)
    except ObjectNotFoundError:
        pass
    except PreconditionFailedError:
        withdraw(catalog, one, done)
        return None
    return Doomed(_data(listed, tokens | ended, paths), remove)


def _only_its_own(one: Tombstone, listed: dict[str, ObjectInfo]) -> bool:
    """Whether all data in the folder carries the token that the commit goes by: then nothing else can be of it.

    Where several ranks saved, the others have tokens of their own, and only the metadata tells those from the tokens of
    a save that is under way, whose objects may be as many and as large.
    """
    return {token for path in listed if (token := keys.token_of(path)) is not None} == {one.id}


def _get(catalog: Catalog, committed: ObjectInfo) -> bytes:
    try:
        return catalog.store.get(committed.key)[0]
    except ObjectNotFoundError:
        return b""


def _token_in(data: bytes, info: ObjectInfo) -> str | None:
    try:
        return named(read_record(data), data, info).token
    except (MetadataError, UnsafeDataError):
        return None


def _flat_paths(data: bytes) -> tuple[str, ...]:
    """The objects that metadata of another writer names beside itself. Whatever lies deeper may be another's."""
    try:
        paths = data_paths(read_metadata(data))
    except (MetadataError, UnsafeDataError):
        return ()
    return tuple(sorted(path for path in paths if "/" not in path and keys.may_be_data(path)))


def _data(listed: dict[str, ObjectInfo], tokens: set[str], paths: tuple[str, ...]) -> list[str]:
    """Keys of what goes: the objects of the attempt, by the tokens of its ranks or by the names in its metadata."""
    named_by_it = {keys.RECORD, *(path for path in paths if "/" not in path and keys.may_be_data(path))}
    return [
        info.key
        for path, info in listed.items()
        if keys.token_of(path) in tokens or keys.parse_fence_path(path) in tokens or path in named_by_it
    ]


def _records(snapshot: Snapshot, one: Tombstone) -> list[str]:
    # Those of commits that this one replaced too: alone in the listing, they would stand for a checkpoint.
    records = [*snapshot.checkpoints, *snapshot.superseded]
    return [other.key for other in records if other.key and other.folder == one.folder]


def _notes(snapshot: Snapshot, step: int, alone: bool) -> list[str]:
    """Keys of the notes on a step; they go with the last checkpoint of that step."""
    if not alone:
        return []
    said = snapshot.notes
    about = [(one.step, one.key) for one in said.reports]
    about += [(one.step, one.key) for one in said.pins]
    about += [(one.step, one.key) for one in said.leases]
    about += [(one.step, one.key) for one in said.resumes]
    return list(dict.fromkeys(key for of, key in about if of == step))


def _tombstones(snapshot: Snapshot, one: Tombstone) -> list[str]:
    # Of a thinning that was to come as well: taking it back would say that there is something left.
    same = [other.key for other in snapshot.notes.tombstones if (other.folder, other.id) == (one.folder, one.id)]
    return [*same, one.key] if one.key not in same else same


def _delete_all(
    catalog: Catalog, wanted: dict[Tombstone, list[str]], doomed: dict[Tombstone, Doomed], done: Pruned
) -> None:
    """Delete in shared batches. A checkpoint of which a key was refused goes no further: the next prune tries again."""
    failures = catalog.store.delete([key for one in doomed for key in wanted[one]])
    done.failures += failures
    failed = {failure.key for failure in failures}
    for one in [one for one in doomed if not failed.isdisjoint(wanted[one])]:
        del doomed[one]
