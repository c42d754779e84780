"""The sweep: removal of dead attempts' data, uploads and fences, of old deletion markers, and of expired notes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.deletion.delete import put_marker
from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S, condemn
from bucketpoint.catalog.records import absent, reconcile
from bucketpoint.catalog.snapshot import SAFETY_AGE_S, Snapshot
from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CheckpointDeletedError,
    CorruptDataError,
    MetadataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnsafeDataError,
)
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.catalog_keys import UPLOADS, UploadKey, content_of
from bucketpoint.format.record import DeletionMarker, parse_marker
from bucketpoint.stopwatch import Stopwatch
from bucketpoint.stores import DeleteFailure, ObjectInfo, OpenUpload, proven_deletes

MAX_NOTE_BYTES = 64 << 20
"""Limit on the bytes of the note that lists one rank's uploads, far above any that a rank writes."""

_LOOKED_S = 60.0
"""Limit on the seconds between listing and removing a marker, on a store without conditional or expiring deletes."""


@dataclass
class Swept:
    """Report of a sweep: objects that were removed, or in a dry run would be.

    Attributes:
        oldest: objects written since this time, by the store's clock, are not removed.
        bytes: bytes of `objects`; sizes of uploads are unknown.
    """

    oldest: float = float("-inf")
    objects: list[str] = field(default_factory=list)
    bytes: int = 0
    uploads: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[DeleteFailure] = field(default_factory=list)


def sweep(catalog: Catalog, *, older_than: float = SAFETY_AGE_S, deep: bool = False, dry_run: bool = False) -> Swept:
    """Remove the remains of dead attempts: those without a sign of life for `older_than` seconds.

    Missing records of committed attempts are written. Removed objects have names of a bucketpoint writer and are not in
    the folder's metadata; if that is unreadable, nothing in the folder is removed. An attempt whose data is removed can
    no longer commit: see `fence`.

    Args:
        older_than: at least an hour, so that a running save is not taken for dead.
        deep: sweep every folder of the run, not only those with an intent or open uploads, and remove records whose
            commit is gone. One LIST for each 1,000 objects, and one GET and one HEAD for each checkpoint.
        dry_run: remove nothing, and report what would be removed.

    Raises:
        BucketpointError: `older_than` is less than an hour.
    """
    if older_than < MIN_SWEEP_AGE_S:
        raise BucketpointError(
            f"A sweep of data older than {older_than:g} seconds could delete the data of running saves",
            url=catalog.url,
            remedy=f"Sweep what is {MIN_SWEEP_AGE_S / 3600:g} hour old or older (--older-than 1h, debris_after: 1h)",
        )
    if catalog.now is None:
        # Without permission to write, a dry run uses the newest time in its listing.
        with contextlib.suppress(AccessDeniedError) if dry_run else contextlib.nullcontext():
            catalog = catalog.at_store_time()
    snapshot = catalog.snapshot() if dry_run else reconcile(catalog, catalog.snapshot())
    # By the store's clock: if this machine's clock were ahead, a save under way would be taken for dead.
    oldest = snapshot.taken - older_than if snapshot.taken is not None else float("-inf")
    parsed = ((UploadKey.parse(name), info) for name, info in catalog.listed(UPLOADS))
    # A folder whose name does not fit the template is not one of this run.
    announced = [(key, info) for key, info in parsed if key and catalog.template.step_of(key.folder) == key.step]
    live = {attempt.folder for attempt in snapshot.attempts if not _is_old(attempt.started, oldest)}
    # Folders with the intent of a committed save are swept too: they may hold objects of the replaced checkpoint.
    begun = [*snapshot.attempts, *snapshot.finished]
    folders = (
        {attempt.folder for attempt in begun} | {key.folder for key, _ in announced} | _folders_of_uploads(catalog)
    )
    if deep:
        folders |= {*catalog.folders(), *snapshot.folders}
    elif not catalog.store.capabilities.conditional_delete:
        # Markers that the pruner cannot remove stay in folders without a record.
        folders |= set(catalog.folders()) - snapshot.folders
    swept = Swept(oldest=oldest)
    clean, uncommitted = set(), set()
    for folder in sorted(folders - live):
        noted = [note.key for upload, note in announced if upload.folder == folder]
        uploads = [one for note in noted for one in _listed_by_key(catalog, folder, note)]
        state = _sweep_folder(catalog, folder, uploads, swept, oldest=oldest, dry_run=dry_run)
        if state.uncommitted:
            uncommitted.add(folder)
        if state.clean:
            clean.add(folder)
    # Intents of dead saves, and those of committed saves whose trainer could not delete them.
    notes = [attempt.key for attempt in begun if attempt.folder in clean and _is_old(attempt.started, oldest)]
    # Only old notes: a young note may belong to a save that began after the intents were listed.
    notes += [note.key for upload, note in announced if upload.folder in clean and _is_old(note.modified, oldest)]
    # Records whose `.metadata` was deleted by hand, or by a second pruner at the same time.
    records = [record for record in snapshot.recorded if record.folder in uncommitted]
    if deep:
        records += absent(
            catalog, [one for one in snapshot.recorded if one.folder in clean - uncommitted], dry_run=True
        )[0]
    notes += [record.key for record in records if record.key]
    notes += _stale(catalog, snapshot, oldest)
    swept.notes += dict.fromkeys(notes)
    if not dry_run:
        swept.failures += catalog.store.delete(swept.notes)
    return swept


def _folders_of_uploads(catalog: Catalog) -> set[str]:
    """Return the run's folders with open multipart uploads, if the store lists uploads by prefix."""
    above = catalog.key("")
    parts = catalog.template.parent.count("/") + 1
    folders = {"/".join(one.key[len(above) :].split("/")[:parts]) for one in catalog.store.list_multipart(above)}
    return {folder for folder in folders if catalog.template.step_of(folder) is not None}


def _listed_by_key(catalog: Catalog, folder: str, note: str) -> list[OpenUpload]:
    """Return the open uploads of the paths in a rank's note. One request for each path."""
    try:
        data, _ = catalog.store.get(note, max_bytes=MAX_NOTE_BYTES)
    except (CorruptDataError, ObjectNotFoundError):
        return []
    paths = content_of(data).get("paths")
    uploads = []
    for path in paths if isinstance(paths, list) else []:
        if isinstance(path, str) and keys.parse_data_path(path) is not None:
            key = catalog.key(f"{folder}/{path}")
            uploads += [one for one in catalog.store.list_multipart(key) if one.key == key]
    return uploads


def _stale(catalog: Catalog, snapshot: Snapshot, oldest: float) -> list[str]:
    """Return the keys of notes without further effect, and of records that a later commit has replaced."""
    notes, resumed = snapshot.notes, snapshot.resumed
    there = {checkpoint.step for checkpoint in snapshot.checkpoints} | {attempt.step for attempt in snapshot.attempts}
    stale = [checkpoint.key for checkpoint in snapshot.superseded if checkpoint.key]
    stale += [lease.key for lease in notes.leases if not lease.valid(oldest)]
    stale += [pin.key for pin in notes.pins if pin.expires is not None and pin.expires < oldest]
    stale += [resume.key for resume in notes.resumes if resume.time < oldest and resume not in resumed]
    reports = [report for report in notes.reports if report.step not in there and _is_old(report.written, oldest)]
    if reports:
        # Metrics of checkpoints without a record, such as torch's, stay for a later adoption.
        there = {catalog.template.step_of(folder) or 0 for folder in catalog.folders()}
    return stale + [report.key for report in reports if report.step not in there]


class _FolderState(NamedTuple):
    """State of a folder after its sweep.

    Attributes:
        clean: True if no remains of an uncommitted attempt are left, so that its intent may be removed.
        uncommitted: True if the folder has no commit.
    """

    clean: bool
    uncommitted: bool


def _sweep_folder(
    catalog: Catalog, folder: str, announced: list[OpenUpload], swept: Swept, *, oldest: float, dry_run: bool
) -> _FolderState:
    """Remove from one folder the objects of attempts without a sign of life since `oldest`.

    Objects of an attempt are removed together or not at all, after the sweep has written the fence.

    Args:
        announced: uploads that the store does not list by prefix.
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
            # All these tokens may belong to one attempt. If one of its ranks is alive, the attempt is.
            dead = set()
        if dead and not dry_run:
            fences = {token: listed.get(keys.fence_path(token)) for token in dead}
            dead = {token for token in dead if condemn(catalog.store, above[:-1], token, fences[token])}
            # Listed again: between the listing and `condemn` a save may have committed and removed its fence.
            listed = catalog.objects_of(folder)
            named, deleted = _read_commits(catalog, above, listed)
    except (MetadataError, UnsafeDataError):
        # Unreadable metadata could name any object, so nothing is removed.
        return _FolderState(clean=False, uncommitted=False)
    committed = _tokens(named or ())
    orphans, young = [], False
    for path, info in listed.items():
        token = keys.token_of(path)
        if token is None or path in (named or ()):
            continue
        if token in dead or (token in committed and _is_old(info.modified, oldest)):
            orphans.append(info)
        else:
            young = True
    record = listed.get(keys.RECORD)
    if named is None and not young and record is not None and _is_old(record.modified, oldest):
        orphans.append(record)
    stale = [upload for upload in uploads if _token_of_key(upload.key) not in alive]
    young = young or len(stale) < len(uploads)
    failures: list[DeleteFailure] = []
    if not dry_run:
        for upload in stale:
            catalog.store.abort_multipart(upload.key, upload.upload_id)
        failures = catalog.store.delete([info.key for info in orphans])
        if not failures:
            # Fences are removed last: as long as data of an attempt exists, its save must find the fence.
            failures += catalog.store.delete(_stale_fences(listed, dead | committed, oldest))
        marker = listed.get(keys.METADATA)
        if deleted and marker is not None and not young and not failures and _is_old(marker.modified, oldest):
            _remove_marker(catalog, marker, watch)
    swept.uploads += [upload.key for upload in stale]
    swept.objects += [info.key for info in orphans]
    swept.bytes += sum(info.size for info in orphans)
    swept.failures += failures
    return _FolderState(clean=not young and not failures, uncommitted=named is None)


def _is_old(moment: float | None, oldest: float) -> bool:
    return moment is not None and moment < oldest


def _read_commits(catalog: Catalog, above: str, listed: Mapping[str, ObjectInfo]) -> tuple[set[str] | None, bool]:
    """Return the paths in the folder's metadata (None without a commit), and True if there is a deletion marker.

    Raises:
        MetadataError, UnsafeDataError: a metadata object cannot be read.
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
    """Return the tokens with a sign of life since `oldest`: a new object, a new upload, or a fence."""
    seen = {_token_of_key(upload.key) for upload in uploads if not _is_old(upload.started, oldest)}
    for path, info in listed.items():
        if not _is_old(info.modified, oldest):
            seen |= {keys.token_of(path), keys.parse_fence_path(path)}
    return {token for token in seen if token is not None}


def _stale_fences(listed: Mapping[str, ObjectInfo], ended: set[str], oldest: float) -> list[str]:
    """Return the keys of fences of ended attempts, and of old fences without data."""
    with_data = _tokens(listed)
    fences = {token: info for path, info in listed.items() if (token := keys.parse_fence_path(path)) is not None}
    return [
        info.key
        for token, info in fences.items()
        if token in ended or (token not in with_data and _is_old(info.modified, oldest))
    ]


def _remove_marker(catalog: Catalog, marker: ObjectInfo, watch: Stopwatch) -> None:
    """Remove a deletion marker, unless it was replaced."""
    store = catalog.store
    able = proven_deletes(store, catalog.key(catalog_keys.CATALOG))
    with contextlib.suppress(ObjectNotFoundError, PreconditionFailedError):
        if able.conditional_delete and marker.etag is not None:
            store.delete_if(marker.key, marker.etag)
        elif able.expiring_delete:
            # The marker is rewritten with the present time: a save that finds it then waits until the signed deletion
            # has expired.
            old = parse_marker(get_metadata(store, marker.key)[0]) or DeletionMarker("", 0.0)
            remove = put_marker(catalog, able, marker, replace(old, seen=catalog.clock()))
            if remove is not None:
                remove()
        elif store.head(marker.key).etag == marker.etag and watch.seconds() < _LOOKED_S:
            store.delete([marker.key])


def _tokens(paths: Iterable[str]) -> set[str]:
    return {token for path in paths if (token := keys.token_of(path)) is not None}


def _token_of_key(key: str) -> str | None:
    return keys.token_of("/".join(key.rsplit("/", 3)[-3:]))
