"""What dead attempts leave: data without a commit, open uploads, intents; and notes that say nothing any more."""

from __future__ import annotations

from dataclasses import dataclass, field

from bucketpoint.catalog.adopt import heal
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.pruner import own_objects
from bucketpoint.catalog.snapshot import SAFETY_AGE_S, Snapshot
from bucketpoint.errors import CorruptDataError, MetadataError, ObjectNotFoundError, UnsafeDataError
from bucketpoint.format import keys
from bucketpoint.format.catalogue import UploadKey, content_of
from bucketpoint.stores import DeleteFailure, OpenUpload

MAX_NOTE_BYTES = 64 << 20
"""Of the list of one rank's uploads: far above what any rank writes."""


@dataclass
class Swept:
    """What was removed, or would be in a dry run. `bytes` are of objects; what parts of uploads hold is not known."""

    objects: list[str] = field(default_factory=list)
    bytes: int = 0
    uploads: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[DeleteFailure] = field(default_factory=list)


def sweep(catalog: Catalog, *, older_than: float = SAFETY_AGE_S, deep: bool = False, dry_run: bool = False) -> Swept:
    """Remove what attempts left that began more than `older_than` seconds ago and will never commit.

    A `.metadata` without a record counts as committed, and gets its record. Only objects that a bucketpoint writer
    named are removed, and none that the folder's metadata names or could name if it could be read.

    Args:
        deep: look into every folder of the run, and not only where an intent says that an attempt began. One LIST for
            each 1,000 objects, and one GET for each checkpoint. Records whose `.metadata` is gone go as well.
    """
    snapshot = catalog.snapshot() if dry_run else heal(catalog, catalog.snapshot())
    oldest = snapshot.taken - older_than
    announced = _announced(catalog)
    live = {one.folder for one in snapshot.attempts if not _is_old(one.started, oldest)}
    # An intent that outlived its commit says that what this replaced may be there still.
    begun = [*snapshot.attempts, *snapshot.finished]
    folders = {one.folder for one in begun} | {key.folder for key, _ in announced}
    if deep:
        folders |= {*catalog.folders(), *(one.folder for one in snapshot.checkpoints)}
    swept = Swept()
    clean, uncommitted = set(), set()
    for folder in sorted(folders - live):
        try:
            named = _named_by_metadata(catalog, folder)
        except (MetadataError, UnsafeDataError):
            # It could name anything.
            continue
        if named is None:
            uncommitted.add(folder)
        if _sweep_folder(catalog, folder, named or set(), oldest, announced, swept, dry_run=dry_run):
            clean.add(folder)
    notes = [one.key for one in snapshot.attempts if one.folder in clean and _is_old(one.started, oldest)]
    notes += [key for upload, key in announced if upload.folder in clean]
    # Intents of attempts that have their record stay where the trainer may not delete, or was killed before it did.
    notes += [one.key for one in snapshot.finished if one.folder in clean]
    # Records whose `.metadata` is gone, by hand or beside a pruner whose lock had expired: a pin would keep them.
    notes += [one.key for one in snapshot.checkpoints if one.folder in uncommitted and one.key is not None]
    notes += _stale(snapshot, oldest)
    swept.notes += dict.fromkeys(notes)
    if not dry_run:
        swept.failures += catalog.store.delete(swept.notes)
    return swept


def _sweep_folder(
    catalog: Catalog,
    folder: str,
    named: set[str],
    oldest: float,
    announced: list[tuple[UploadKey, str]],
    swept: Swept,
    *,
    dry_run: bool,
) -> bool:
    """True if nothing of a dead attempt is left there, so that its intent may go. `named` are the commit's paths."""
    uploads = list(catalog.store.list_multipart(catalog.key(f"{folder}/")))
    if not catalog.store.capabilities.lists_uploads:
        for upload, key in announced:
            if upload.folder == folder:
                uploads += _listed_by_key(catalog, folder, key)
    young = [one for one in uploads if not _is_old(one.started, oldest)]
    prefix = len(catalog.key(f"{folder}/"))
    orphans = []
    for info in own_objects(catalog, folder):
        path = info.key[prefix:]
        if path in named or keys.parse_data_path(path) is None:
            continue
        if _is_old(info.modified, oldest):
            orphans.append(info)
        else:
            young.append(OpenUpload(info.key, ""))
    failures: list[DeleteFailure] = []
    if not dry_run:
        for one in uploads:
            if one not in young:
                catalog.store.abort_multipart(one.key, one.upload_id)
        failures = catalog.store.delete([info.key for info in orphans])
    swept.uploads += [one.key for one in uploads if one not in young]
    swept.objects += [info.key for info in orphans]
    swept.bytes += sum(info.size for info in orphans)
    swept.failures += failures
    return not young and not failures


def _named_by_metadata(catalog: Catalog, folder: str) -> set[str] | None:
    """Paths that the folder's commit names; None without a commit.

    Raises:
        MetadataError, UnsafeDataError: it cannot be read.
    """
    from bucketpoint.format.index_ref import ref_of
    from bucketpoint.format.metadata import decode_metadata
    from bucketpoint.format.storage_info import read_storage_info

    try:
        data, _ = catalog.store.get(catalog.metadata_key(folder))
        metadata = decode_metadata(data)
        index = ref_of(metadata)
        named = {read_storage_info(info).path for info in (metadata.storage_data or {}).values()}
        return named | ({index.path} if index is not None else set())
    except ObjectNotFoundError:
        return None


def _listed_by_key(catalog: Catalog, folder: str, note: str) -> list[OpenUpload]:
    """Uploads of one rank, each asked for by its whole key."""
    try:
        data, _ = catalog.store.get(note, max_bytes=MAX_NOTE_BYTES)
    except (CorruptDataError, ObjectNotFoundError):
        return []
    paths = content_of(data).get("paths")
    found = []
    for path in paths if isinstance(paths, list) else []:
        if isinstance(path, str) and keys.parse_data_path(path) is not None:
            key = catalog.key(f"{folder}/{path}")
            found += [one for one in catalog.store.list_multipart(key) if one.key == key]
    return found


def _announced(catalog: Catalog) -> list[tuple[UploadKey, str]]:
    found = []
    for name, info in catalog.uploads():
        key = UploadKey.parse(name)
        # An address that the template does not make is nobody's checkpoint.
        if key is not None and catalog.template.step_of(key.folder) == key.step:
            found.append((key, info.key))
    return found


def _stale(snapshot: Snapshot, oldest: float) -> list[str]:
    """Notes that no plan will ever look at again, and records that a later commit has replaced."""
    said = snapshot.notes
    there = {one.step for one in snapshot.checkpoints} | {one.step for one in snapshot.attempts}
    newest = max((one.created for one in snapshot.checkpoints if one.kind == "full"), default=float("-inf"))
    found = [one.key for one in snapshot.superseded if one.key]
    found += [one.key for one in said.leases if not one.valid(oldest)]
    found += [one.key for one in said.pins if one.expires is not None and one.expires < oldest]
    found += [one.key for one in said.resumes if one.time < newest and one.time < oldest]
    fresh = {one.key for one in said.reports if one.step in there or one.time >= oldest}
    return found + [one.key for one in said.reports if one.key not in fresh]


def _is_old(moment: float | None, oldest: float) -> bool:
    # What the store does not date is not known to be old.
    return moment is not None and moment < oldest
