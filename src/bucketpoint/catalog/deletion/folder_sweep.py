"""The sweep of one checkpoint folder: data and uploads of dead attempts, their fences, and markers of deletions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.deletion.delete import put_marker
from bucketpoint.catalog.deletion.fence import Stopwatch, condemn
from bucketpoint.errors import (
    CheckpointDeletedError,
    MetadataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnsafeDataError,
)
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.metadata.deletion_marker import DeletionMarker, parse_marker
from bucketpoint.stores import DeleteFailure, ObjectInfo, OpenUpload, proven_deletes

_LOOKED_S = 60.0
"""Most seconds from the listing to a marker's removal, on a store without conditional or expiring deletes."""


@dataclass
class Swept:
    """Report of a sweep: objects removed, or to be removed in a dry run.

    `bytes` does not count the parts of uploads. What was written after `oldest`, by the store's clock, is left alone.
    """

    oldest: float = float("-inf")
    objects: list[str] = field(default_factory=list)
    bytes: int = 0
    uploads: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[DeleteFailure] = field(default_factory=list)


class FolderState(NamedTuple):
    """State of a folder after its sweep.

    Attributes:
        clean: True if nothing of an attempt is left there that did not commit, so that its intent may go.
        uncommitted: True if nothing is committed there.
    """

    clean: bool
    uncommitted: bool


def sweep_folder(
    catalog: Catalog, folder: str, announced: list[OpenUpload], swept: Swept, *, oldest: float, dry_run: bool
) -> FolderState:
    """Remove from one folder the objects of attempts that have given no sign of life since `oldest`.

    Objects of one attempt are removed together or not at all, and only once its fence says that it cannot commit any
    more.

    Args:
        announced: uploads that the store does not list by the folder.
        swept: report to which the removals are added.
    """
    watch = Stopwatch()
    above = catalog.key(f"{folder}/")
    listed = catalog.objects_of(folder)
    uploads = [*catalog.store.list_multipart(above), *announced]
    # Uploads deeper in the folder may belong to another run, whose own sweep removes them.
    uploads = [upload for upload in uploads if keys.parse_data_path(upload.key[len(above) :]) is not None]
    try:
        named, deleted = _read_commits(catalog, above, listed)
        alive = _alive_tokens(listed, uploads, oldest)
        committed = _tokens(named or ())
        dead = _tokens(listed) - committed
        if alive - committed:
            # Each rank has a token of its own, so all these tokens may be of one attempt of which one rank is alive.
            dead = set()
        if dead and not dry_run:
            fences = {token: listed.get(keys.fence_path(token)) for token in dead}
            dead = {token for token in dead if condemn(catalog.store, above[:-1], token, fences[token])}
            # Listed again: a save may have committed and removed its fence between the listing and the condemnation.
            listed = catalog.objects_of(folder)
            named, deleted = _read_commits(catalog, above, listed)
    except (MetadataError, UnsafeDataError):
        # Metadata that cannot be read could name any object, so nothing is removed.
        return FolderState(clean=False, uncommitted=False)
    committed = _tokens(named or ())
    orphans, young = [], False
    for path, info in listed.items():
        token = keys.token_of(path)
        if token is None or path in (named or ()):
            continue
        if token in dead or (token in committed and is_old(info.modified, oldest)):
            orphans.append(info)
        else:
            young = True
    record = listed.get(keys.RECORD)
    if named is None and not young and record is not None and is_old(record.modified, oldest):
        orphans.append(record)
    stale = [upload for upload in uploads if _token_of_key(upload.key) not in alive]
    young = young or len(stale) < len(uploads)
    failures: list[DeleteFailure] = []
    if not dry_run:
        for upload in stale:
            catalog.store.abort_multipart(upload.key, upload.upload_id)
        failures = catalog.store.delete([info.key for info in orphans])
        if not failures:
            # Fences go last: as long as data of an attempt is left, its save must find that it has been condemned.
            failures += catalog.store.delete(_stale_fences(listed, dead | committed, oldest))
        marker = listed.get(keys.METADATA)
        if deleted and marker is not None and not young and not failures and is_old(marker.modified, oldest):
            _remove_marker(catalog, marker, watch)
    swept.uploads += [upload.key for upload in stale]
    swept.objects += [info.key for info in orphans]
    swept.bytes += sum(info.size for info in orphans)
    swept.failures += failures
    return FolderState(clean=not young and not failures, uncommitted=named is None)


def is_old(moment: float | None, oldest: float) -> bool:
    """Return True if a time from the store is before `oldest`. False if the store tells no time."""
    return moment is not None and moment < oldest


def _read_commits(catalog: Catalog, above: str, listed: Mapping[str, ObjectInfo]) -> tuple[set[str] | None, bool]:
    """Collect the objects that `.metadata` names, and the metadata of each rank if a save ran without collectives.

    Return None for the objects if nothing is committed, and True if a deletion marker stands in place of a commit.

    Raises:
        MetadataError, UnsafeDataError: one of them cannot be read.
    """
    named: set[str] | None = None
    deleted = False
    for name in [keys.METADATA, *filter(keys.is_rank_metadata, listed)]:
        try:
            named = (named or set()) | _named_by(get_metadata(catalog.store, above + name)[0])
        except ObjectNotFoundError:
            continue
        except CheckpointDeletedError:
            deleted = True
    return named, deleted


def _named_by(data: bytes) -> set[str]:
    from bucketpoint.format.index.ref import ref_of
    from bucketpoint.format.item_info import data_paths
    from bucketpoint.format.metadata.codec import decode_metadata

    metadata = decode_metadata(data)
    index = ref_of(metadata)
    return data_paths(metadata) | ({index.path} if index is not None else set())


def _alive_tokens(listed: Mapping[str, ObjectInfo], uploads: list[OpenUpload], oldest: float) -> set[str]:
    """Return the tokens of attempts with a sign of life since `oldest`: an object, an upload that began, or a fence."""
    seen = {_token_of_key(upload.key) for upload in uploads if not is_old(upload.started, oldest)}
    for path, info in listed.items():
        if not is_old(info.modified, oldest):
            seen |= {keys.token_of(path), keys.parse_fence_path(path)}
    return {token for token in seen if token is not None}


def _stale_fences(listed: Mapping[str, ObjectInfo], ended: set[str], oldest: float) -> list[str]:
    """Return the fences of attempts that have ended, and old ones that have no data beside them."""
    with_data = _tokens(listed)
    fences = {token: info for path, info in listed.items() if (token := keys.parse_fence_path(path)) is not None}
    return [
        info.key
        for token, info in fences.items()
        if token in ended or (token not in with_data and is_old(info.modified, oldest))
    ]


def _remove_marker(catalog: Catalog, marker: ObjectInfo, watch: Stopwatch) -> None:
    """Remove the marker of a deletion, unless somebody has replaced it."""
    store = catalog.store
    able = proven_deletes(store, catalog.key(catalog_keys.CATALOG))
    with contextlib.suppress(ObjectNotFoundError, PreconditionFailedError):
        if able.conditional_delete and marker.etag is not None:
            store.delete_if(marker.key, marker.etag)
        elif able.expiring_delete:
            # The marker is put anew with the present time, so that a save that finds it waits until the signed deletion
            # has expired.
            old = parse_marker(get_metadata(store, marker.key)[0]) or DeletionMarker("", 0.0)
            remove = put_marker(catalog, able, marker, old.again(catalog.clock()))
            if remove is not None:
                remove()
        elif store.head(marker.key).etag == marker.etag and watch.seconds() < _LOOKED_S:
            store.delete([marker.key])


def _tokens(paths: Iterable[str]) -> set[str]:
    return {token for path in paths if (token := keys.token_of(path)) is not None}


def _token_of_key(key: str) -> str | None:
    return keys.token_of("/".join(key.rsplit("/", 3)[-3:]))
