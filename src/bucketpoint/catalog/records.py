"""Commit records: reading, writing, and making a missing record from `.metadata`."""

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
from bucketpoint.format.catalog_keys import MAX_NAME_BYTES, OTHER, CommitKey, NoteKey
from bucketpoint.format.metadata.facts import extra, record_of
from bucketpoint.format.metadata.plain import read_metadata
from bucketpoint.format.record import MAX_RECORD_BYTES, CommitRecord, dated
from bucketpoint.stores import ObjectInfo


def reconcile(catalog: Catalog, snapshot: Snapshot) -> Snapshot:
    """Write the missing records of committed attempts, and delete misleading records. Return the new snapshot.

    One GET for each attempt without a record (usually there is none); a PUT and a small GET for each record written.
    Misleading records are deleted because each costs a request in every listing; the next round repeats failed
    deletions.
    """
    catalog.store.delete(snapshot.misleading)
    attempts = ((attempt.step, attempt.folder, attempt.token) for attempt in snapshot.attempts)
    written = write_missing(catalog, attempts, new=True)
    return catalog.snapshot() if written or snapshot.misleading else snapshot


def write_missing(catalog: Catalog, commits: Iterable[tuple[int, str, str]], *, new: bool = False) -> bool:
    """Write the missing records of those attempts (step, folder, token) that have committed.

    Return True if at least one had committed. `new`: as for `metadata_record`.
    """
    written = False
    for step, folder, token in commits:
        record = metadata_record(catalog, folder, new=new)
        # Metadata with another token belongs to an older checkpoint, which this attempt would have replaced. It gets no
        # record here: a checkpoint of a plain writer is not subject to the policy until `gc --adopt`.
        if record is not None and record.token == token:
            _write_record(catalog, folder, step, record)
            written = True
    return written


def absent(
    catalog: Catalog, checkpoints: Iterable[Checkpoint], *, dry_run: bool = False
) -> tuple[list[Checkpoint], bool]:
    """Return the checkpoints whose commit no longer exists, and True if any record was rewritten.

    One HEAD for each checkpoint. If another tool has copied or moved the run, the ETags differ from those in the
    records: if `.metadata` still has the token of the record, the record is rewritten, once, with the new ETag.
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
        # The new record keeps the old time of commit: otherwise the move would change decisions of the rules.
        write_record(catalog, checkpoint.folder, checkpoint.step, replace(record, created=checkpoint.created))
    catalog.store.delete([checkpoint.key for checkpoint, _ in moved if checkpoint.key is not None])
    return gone, bool(moved)


def adopt(catalog: Catalog, steps: Collection[int] | None = None, *, dry_run: bool = False) -> list[str]:
    """Write the missing records of all checkpoints below the root, of any writer. Return their folders.

    A folder is adopted if its whole name fits the template and its `.metadata` is readable. One LIST for each 1,000
    folders; for each folder without a record a GET, a small GET and a PUT, and another PUT if it has metrics.

    Args:
        steps: adopt only checkpoints of these steps.
    """
    snapshot = catalog.snapshot()
    # A new record would bring back a checkpoint that is being deleted, whose record the pruner has already removed.
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
    """Write the metrics and the record made from `.metadata`. Return False if the checkpoint was deleted meanwhile."""
    # Metrics come before the record: without them a prune could delete the best checkpoint. Their time is that of the
    # save, so that reports made after the save take precedence.
    write_metrics(catalog, step, record.metrics, at=record.created or 0.0, token=record.token)
    written = write_record(catalog, folder, step, record)
    if catalog.metadata_info(folder) is not None:
        return True
    # The deletion did not include the new record. If the record stayed, it would count as a checkpoint.
    catalog.store.delete([written])
    return False


def write_metrics(catalog: Catalog, step: int, metrics: Mapping[str, float], *, at: float, token: str | None) -> None:
    """Write notes of metrics measured at time `at`, for the commit with `token`; None: for every commit of the step."""
    head = ["", catalog_keys.METRICS, catalog_keys.milliseconds(at)]
    head += catalog_keys.named_token(token) if token else ()
    batch: list[str] = []
    for name, value in sorted(metrics.items()):
        pair = [name, repr(value)]
        # One key holds as many metrics as fit, to save requests.
        if batch and len(catalog_keys.encode([*head, *batch, *pair])) + 16 > MAX_NAME_BYTES:
            put_note(catalog, NoteKey(step, catalog_keys.METRICS, (*head[2:], *batch)))
            batch = []
        batch += pair
    if batch:
        put_note(catalog, NoteKey(step, catalog_keys.METRICS, (*head[2:], *batch)))


def put_note(catalog: Catalog, note: NoteKey, body: bytes = b"") -> str:
    key = catalog.own_key(catalog_keys.NOTES, note.name())
    catalog.write(key, body)
    return key


def write_record(catalog: Catalog, folder: str, step: int, record: CommitRecord) -> str:
    """Write the record of a commit, and return its key, which encodes the main facts."""
    mark = catalog_keys.mark_of(record.metadata_etag)
    token = record.token or ""
    # Bytes without a known group, as in objects of other writers, are counted as `other`.
    groups = {**record.groups, OTHER: record.groups.get(OTHER, 0) + record.bytes - sum(record.groups.values())}
    name = CommitKey(step, record.created or 0.0, token, record.kind, mark, folder, groups).name()
    key = catalog.own_key(catalog_keys.STEPS, name)
    # Create-only suffices: the key encodes the commit, so an existing object of this key describes the same commit.
    catalog.create(key, replace(record, step=step).to_json())
    return key


def read_record(catalog: Catalog, key: str) -> CommitRecord | None:
    """Read a record; None if it is gone.

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
    """Make the record of a folder's commit from its `.metadata`; None if that is missing or unreadable.

    Args:
        new: True if a save of this run made the commit: the record gets the store's time of the commit if the clock of
            the saving machine was behind.
    """
    try:
        data, info = get_metadata(catalog.store, catalog.metadata_key(folder))
        metadata = read_metadata(data)
        record = named(record_of(metadata, data, metadata_etag=info.etag), data, info)
        # A copy keeps the time of its source.
        return dated(record, info.modified) if new and "copied_from" not in extra(metadata) else record
    except (ObjectNotFoundError, CheckpointDeletedError, MetadataError, UnsafeDataError):
        return None


def named(record: CommitRecord, data: bytes, info: ObjectInfo) -> CommitRecord:
    """Return the record with a token and a time, which metadata of other writers lacks.

    The token is a hash of the metadata's bytes, the time that of the object.
    """
    created = record.created if record.created is not None else info.modified or 0.0
    return replace(record, token=record.token or hashlib.sha256(data).hexdigest()[:12], created=created)


def process_name() -> str:
    """Return the name of this process in records and in the pruner's lock: host and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"
