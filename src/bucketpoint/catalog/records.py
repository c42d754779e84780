"""Records of commits: those that saves write, and those made from `.metadata` where a record is missing."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.snapshot import Checkpoint, Snapshot
from bucketpoint.errors import (
    CheckpointDeletedError,
    CorruptDataError,
    MetadataError,
    ObjectNotFoundError,
    UnsafeDataError,
)
from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import MAX_NAME_BYTES, CommitKey, NoteKey
from bucketpoint.format.groups import OTHER
from bucketpoint.format.metadata.facts import extra, record_of
from bucketpoint.format.metadata.plain import read_metadata
from bucketpoint.format.record import MAX_RECORD_BYTES, CommitRecord, dated
from bucketpoint.stores import ObjectInfo


def reconcile(catalog: Catalog, snapshot: Snapshot) -> Snapshot:
    """Make records agree with `.metadata`, where a listing shows that they may differ. Return the new snapshot.

    A committed attempt without a record gets one. It costs a GET for each attempt (usually there is none), and a PUT
    and a small GET for each record. Misleading records are deleted: each listing costs a request for
    them, and the next round tries again what fails.
    """
    catalog.store.delete(snapshot.misleading)
    attempts = ((attempt.step, attempt.folder, attempt.token) for attempt in snapshot.attempts)
    written = write_missing(catalog, attempts, new=True)
    return catalog.snapshot() if written or snapshot.misleading else snapshot


def write_missing(catalog: Catalog, commits: Iterable[tuple[int, str, str]], *, new: bool = False) -> bool:
    """Write the missing records of attempts (step, folder, token) that have committed. Return True if there was one.

    Args:
        new: as for `metadata_record`.
    """
    written = False
    for step, folder, token in commits:
        record = metadata_record(catalog, folder, new=new)
        # Metadata with another token is that of an older checkpoint, which this attempt would replace. That may be one
        # of a plain writer, on which no policy decides until somebody adopts it.
        if record is not None and record.token == token:
            _write_record(catalog, folder, step, record)
            written = True
    return written


def absent(
    catalog: Catalog, checkpoints: Iterable[Checkpoint], *, dry_run: bool = False
) -> tuple[list[Checkpoint], bool]:
    """Return the checkpoints whose commit no longer exists, and True if a record was written again.

    One HEAD for each. A run that another tool has copied or moved has other ETags than its records say: if `.metadata`
    is still that of the recorded attempt, the record is written again, once.
    """
    gone: list[Checkpoint] = []
    moved: list[tuple[Checkpoint, CommitRecord]] = []
    for checkpoint in checkpoints:
        try:
            mark = catalog_keys.mark_of(catalog.store.head(catalog.metadata_key(checkpoint.folder)).etag)
        except ObjectNotFoundError:
            gone.append(checkpoint)
            continue
        if mark == checkpoint.mark != catalog_keys.UNKNOWN:
            continue
        record = metadata_record(catalog, checkpoint.folder)
        if record is None or record.token != checkpoint.id:
            gone.append(checkpoint)
        elif mark != checkpoint.mark:
            moved.append((checkpoint, record))
    if dry_run:
        return gone, False
    for checkpoint, record in moved:
        # With the time of the old record, so that the move changes no rule's decision.
        write_record(catalog, checkpoint.folder, checkpoint.step, replace(record, created=checkpoint.created))
    catalog.store.delete([checkpoint.key for checkpoint, _ in moved if checkpoint.key is not None])
    return gone, bool(moved)


def adopt(catalog: Catalog, steps: Collection[int] | None = None, *, dry_run: bool = False) -> list[str]:
    """Write the missing records of all checkpoints below the root, whoever saved them. Return their folders.

    A folder is adopted if its whole name fits the template and its `.metadata` is readable. One LIST for each 1,000
    folders; two GETs, of which one is small, and one PUT, with metrics two, for each folder without a record.

    Args:
        steps: adopt only checkpoints of these steps.
        dry_run: write nothing.
    """
    snapshot = catalog.snapshot()
    # A checkpoint that is being deleted must not come back: its pruner has already removed the record.
    skipped = snapshot.folders | {folder for folder, _ in snapshot.going()}
    adopted = []
    for folder in catalog.folders():
        step = catalog.template.step_of(folder)
        if step is None or folder in skipped or (steps is not None and step not in steps):
            continue
        record = metadata_record(catalog, folder)
        if record is not None and (dry_run or _write_record(catalog, folder, step, record)):
            adopted.append(folder)
    return adopted


def _write_record(catalog: Catalog, folder: str, step: int, record: CommitRecord) -> bool:
    """Write a record and metrics made from `.metadata`. Return False if the checkpoint is deleted since it was read."""
    # Before the record: a prune that saw it without them would delete the best checkpoint. With the time of the save,
    # so that later reports count.
    write_metrics(catalog, step, record.metrics, at=record.created or 0.0, token=record.token)
    written = write_record(catalog, folder, step, record)
    if catalog.metadata_info(folder) is not None:
        return True
    # Whoever deleted it did not see the record, which would count as a checkpoint.
    catalog.store.delete([written])
    return False


def write_metrics(catalog: Catalog, step: int, metrics: Mapping[str, float], *, at: float, token: str | None) -> None:
    """Write the notes of metrics that were measured at a time, of the commit with this token."""
    head = ["", catalog_keys.METRICS, catalog_keys.milliseconds(at)]
    head += catalog_keys.named_token(token) if token else ()
    batch: list[str] = []
    for name, value in sorted(metrics.items()):
        pair = [name, repr(value)]
        # One key holds as many metrics as fit: one request for each metric would cost more than the metrics are worth.
        if batch and len(catalog_keys.encode([*head, *batch, *pair])) + 16 > MAX_NAME_BYTES:
            put_note(catalog, NoteKey(step, catalog_keys.METRICS, (*head[2:], *batch)))
            batch = []
        batch += pair
    if batch:
        put_note(catalog, NoteKey(step, catalog_keys.METRICS, (*head[2:], *batch)))


def put_note(catalog: Catalog, note: NoteKey, body: bytes = b"") -> str:
    """Write a note, and return its key."""
    key = catalog.own_key(catalog_keys.NOTES, note.name())
    catalog.write(key, body)
    return key


def write_record(catalog: Catalog, folder: str, step: int, record: CommitRecord) -> str:
    """Write the record of a commit under the key that encodes the same facts, and return the key."""
    mark = catalog_keys.mark_of(record.metadata_etag)
    token = record.token or ""
    # Bytes without a known group, as in objects of other writers, are counted as well.
    groups = {**record.groups, OTHER: record.groups.get(OTHER, 0) + record.bytes - sum(record.groups.values())}
    name = CommitKey(step, record.created or 0.0, token, record.kind, mark, folder, groups).name()
    key = catalog.own_key(catalog_keys.STEPS, name)
    # The key encodes the whole commit: an object that exists under it already says the same.
    catalog.create(key, replace(record, step=step).to_json())
    return key


def read_record(catalog: Catalog, key: str) -> CommitRecord | None:
    """Read a record, which holds more than its key. None if it is gone.

    Raises:
        MetadataError: the object is not a commit record.
    """
    url = f"{catalog.store.url}/{key}"
    try:
        data, _ = catalog.store.get(key, max_bytes=MAX_RECORD_BYTES)
    except ObjectNotFoundError:
        return None
    except CorruptDataError as error:
        raise MetadataError(f"The commit record is malformed: {error.message}", url=url) from None
    return CommitRecord.from_json(data, url=url)


def metadata_record(catalog: Catalog, folder: str, *, new: bool = False) -> CommitRecord | None:
    """Make the record of a folder's commit from its `.metadata`; None if there is none that can be read.

    Args:
        new: True if the save under way has made the commit. Its record then has the time that the save's record has.
    """
    try:
        data, info = get_metadata(catalog.store, catalog.metadata_key(folder))
        metadata = read_metadata(data)
        record = named(record_of(metadata, data, metadata_etag=info.etag), data, info)
        # A copy has the time of its source.
        return dated(record, info.modified) if new and "copied_from" not in extra(metadata) else record
    except (ObjectNotFoundError, CheckpointDeletedError, MetadataError, UnsafeDataError):
        return None


def named(record: CommitRecord, data: bytes, info: ObjectInfo) -> CommitRecord:
    """Add the token and the time that the metadata of other writers lacks: made from its bytes and its object."""
    created = record.created if record.created is not None else info.modified or 0.0
    return replace(record, token=record.token or hashlib.sha256(data).hexdigest()[:12], created=created)


def process_name() -> str:
    """Name this process for the pruner's lock and for records: its host and its process id."""
    return f"{socket.gethostname()}-{os.getpid()}"
