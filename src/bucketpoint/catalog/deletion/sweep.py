"""The sweep of a run: removes what dead attempts left in its folders, and notes that mean nothing any more."""

from __future__ import annotations

import contextlib

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S
from bucketpoint.catalog.deletion.folder_sweep import Swept, is_old, sweep_folder
from bucketpoint.catalog.reconcile import absent, reconcile
from bucketpoint.catalog.snapshot import SAFETY_AGE_S, Snapshot
from bucketpoint.errors import AccessDeniedError, BucketpointError, CorruptDataError, ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import UPLOADS, UploadKey, content_of
from bucketpoint.stores import ObjectInfo, OpenUpload

MAX_NOTE_BYTES = 64 << 20
"""Most bytes of the note that lists one rank's uploads: far above what any rank writes."""


def sweep(catalog: Catalog, *, older_than: float = SAFETY_AGE_S, deep: bool = False, dry_run: bool = False) -> Swept:
    """Remove the remains of attempts that began more than `older_than` seconds ago and will never commit.

    A `.metadata` without a record counts as committed, and gets its record. Only objects that a bucketpoint writer
    named are removed, and none that the folder's metadata names, or could name if it could be read. An attempt whose
    data is removed cannot commit any more: see `fence`.

    Args:
        older_than: at least an hour, so that a save that is still running is not taken for dead.
        deep: look into every folder of the run, and not only where an intent says that an attempt began. One LIST for
            each 1,000 objects, and one GET and one HEAD for each checkpoint. Records whose commit is gone are removed.

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
        # Without the right to write, a dry run goes by the newest time that it lists.
        with contextlib.suppress(AccessDeniedError) if dry_run else contextlib.nullcontext():
            catalog = catalog.at_store_time()
    snapshot = catalog.snapshot() if dry_run else reconcile(catalog, catalog.snapshot())
    # By the store's clock: a machine whose clock is ahead would take a save under way for dead.
    oldest = snapshot.taken - older_than if snapshot.taken is not None else float("-inf")
    announced = _announced(catalog)
    live = {attempt.folder for attempt in snapshot.attempts if not is_old(attempt.started, oldest)}
    # An intent that outlived its commit shows that objects of the checkpoint it replaced may still be there.
    begun = [*snapshot.attempts, *snapshot.finished]
    folders = (
        {attempt.folder for attempt in begun} | {key.folder for key, _ in announced} | _folders_of_uploads(catalog)
    )
    if deep:
        folders |= {*catalog.folders(), *snapshot.folders}
    elif not catalog.store.capabilities.conditional_delete:
        # If the pruner cannot remove its markers, they stay in folders that have no record any more.
        folders |= set(catalog.folders()) - snapshot.folders
    swept = Swept(oldest=oldest)
    clean, uncommitted = set(), set()
    for folder in sorted(folders - live):
        noted = [note.key for upload, note in announced if upload.folder == folder]
        uploads = [one for note in noted for one in _listed_by_key(catalog, folder, note)]
        state = sweep_folder(catalog, folder, uploads, swept, oldest=oldest, dry_run=dry_run)
        if state.uncommitted:
            uncommitted.add(folder)
        if state.clean:
            clean.add(folder)
    # An intent outlives its record if the trainer may not delete, or was killed before it did.
    notes = [attempt.key for attempt in begun if attempt.folder in clean and is_old(attempt.started, oldest)]
    # A young note is of a save that began after the intents were listed, and that may begin its uploads now.
    notes += [note.key for upload, note in announced if upload.folder in clean and is_old(note.modified, oldest)]
    # Records whose `.metadata` was deleted by hand, or beside a pruner whose lock had expired: a pin would keep them.
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
    """Return the run's folders with open multipart uploads below them: a dead save may have left nothing else.

    Stores that are not known to list uploads by prefix are asked too: one that cannot answers with none.
    """
    above = catalog.key("")
    parts = catalog.template.parent.count("/") + 1
    folders = {"/".join(one.key[len(above) :].split("/")[:parts]) for one in catalog.store.list_multipart(above)}
    return {folder for folder in folders if catalog.template.step_of(folder) is not None}


def _listed_by_key(catalog: Catalog, folder: str, note: str) -> list[OpenUpload]:
    """Return the open uploads of one rank, each asked for by its whole key."""
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


def _announced(catalog: Catalog) -> list[tuple[UploadKey, ObjectInfo]]:
    parsed = ((UploadKey.parse(name), info) for name, info in catalog.listed(UPLOADS))
    # A folder name that the template does not make is no checkpoint of this run.
    return [(key, info) for key, info in parsed if key and catalog.template.step_of(key.folder) == key.step]


def _stale(catalog: Catalog, snapshot: Snapshot, oldest: float) -> list[str]:
    """Return the keys of notes that no plan will look at again, and of records that a later commit has replaced."""
    notes, resumed = snapshot.notes, snapshot.resumed
    there = {checkpoint.step for checkpoint in snapshot.checkpoints} | {attempt.step for attempt in snapshot.attempts}
    stale = [checkpoint.key for checkpoint in snapshot.superseded if checkpoint.key]
    stale += [lease.key for lease in notes.leases if not lease.valid(oldest)]
    stale += [pin.key for pin in notes.pins if pin.expires is not None and pin.expires < oldest]
    stale += [resume.key for resume in notes.resumes if resume.time < oldest and resume not in resumed]
    reports = [report for report in notes.reports if report.step not in there and is_old(report.written, oldest)]
    if reports:
        # Checkpoints of plain writers and of torch have no record until they are adopted, and their metrics stay.
        there = {catalog.template.step_of(folder) or 0 for folder in catalog.folders()}
    return stale + [report.key for report in reports if report.step not in there]
