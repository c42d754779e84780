"""Records for checkpoints that have none: of dead coordinators, of other writers, of a lost catalogue."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.save_log import write_record
from bucketpoint.catalog.snapshot import Checkpoint, Snapshot
from bucketpoint.errors import CheckpointDeletedError, MetadataError, ObjectNotFoundError, UnsafeDataError
from bucketpoint.format import catalogue
from bucketpoint.format.plain_metadata import read_record
from bucketpoint.format.record import CommitRecord
from bucketpoint.stores import ObjectInfo


def heal(catalog: Catalog, snapshot: Snapshot) -> Snapshot:
    """Make records say what `.metadata` says, where a listing shows that they may not. Returns the one to go on with.

    Attempts that have committed without a record get theirs: one GET for each attempt, which there are none of as a
    rule, and a PUT and a HEAD for each that has committed. Of a folder with several records the youngest counts, and
    where clocks disagree about that, those go that its `.metadata` has replaced: one HEAD for each such folder.
    """
    known = {one.folder: one for one in snapshot.checkpoints}
    healed = _drop_replaced(catalog, snapshot)
    for attempt in snapshot.attempts:
        record = metadata_record(catalog, attempt.folder)
        # Metadata of another attempt is an older checkpoint, which this one would replace.
        if record is None or (record.token is not None and record.token != attempt.token and attempt.folder in known):
            continue
        if attempt.folder in known and known[attempt.folder].id == record.token:
            continue
        written = write_record(catalog, attempt.folder, attempt.step, record)
        if catalog.metadata_info(attempt.folder) is None:
            # Deleted since it was read, by a pruner who did not see the record.
            catalog.store.delete([written])
        healed = True
    return catalog.snapshot() if healed else snapshot


def _drop_replaced(catalog: Catalog, snapshot: Snapshot) -> bool:
    """Whether there were any.

    A job that saves a step again may have a clock that is behind. Its record would be taken for the older one: the
    sweep would delete it, and the pruner find that nothing fits any more.
    """
    dead: list[str] = []
    for youngest in snapshot.checkpoints:
        others = [one for one in snapshot.superseded if one.folder == youngest.folder]
        if not any(_may_be_younger(one, youngest) for one in others):
            continue
        committed = catalog.metadata_info(youngest.folder)
        mark = catalogue.mark_of(committed.etag if committed is not None else None)
        records = [youngest, *others]
        # Where none fits, `.metadata` is just being replaced.
        if mark != catalogue.UNKNOWN and any(one.mark == mark for one in records):
            dead += [one.key for one in records if one.mark != mark and one.key is not None]
    # What cannot be deleted is tried again by the next round.
    catalog.store.delete(dead)
    return bool(dead)


def _may_be_younger(one: Checkpoint, youngest: Checkpoint) -> bool:
    """Whether the store's clock, by which records were written, says other than those of the jobs; or these nothing."""
    if one.created == youngest.created:
        return True
    return one.written is not None and youngest.written is not None and one.written > youngest.written


def adopt(catalog: Catalog, steps: Collection[int] | None = None) -> list[str]:
    """Write the missing records of all checkpoints below the root, whoever saved them. Returns their folders.

    A folder is taken whose whole name fits the template and which has a readable `.metadata`. One LIST for each 1,000
    folders; one GET and one PUT for each without a record.

    Args:
        steps: only those of these steps.
    """
    snapshot = catalog.snapshot()
    recorded = {one.folder for one in snapshot.checkpoints}
    # What is about to go must not come back: its pruner has removed the record already.
    going = {folder for folder, _ in snapshot.going()}
    adopted = []
    for folder in catalog.folders():
        step = catalog.template.step_of(folder)
        if step is None or folder in recorded or folder in going or (steps is not None and step not in steps):
            continue
        record = metadata_record(catalog, folder)
        if record is not None:
            write_record(catalog, folder, step, record)
            adopted.append(folder)
    return adopted


def metadata_record(catalog: Catalog, folder: str) -> CommitRecord | None:
    """The record of what is committed in a folder, made of its `.metadata`; None if there is none that can be read."""
    try:
        data, info = catalog.store.get(catalog.metadata_key(folder))
        record = read_record(data, metadata_etag=info.etag)
    except (ObjectNotFoundError, CheckpointDeletedError, MetadataError, UnsafeDataError):
        return None
    return named(record, data, info)


def named(record: CommitRecord, data: bytes, info: ObjectInfo) -> CommitRecord:
    """With a token and a time, which the metadata of other writers does not tell: `data`, as `info` describes it."""
    token = record.token or hashlib.sha256(data).hexdigest()[:12]
    created = record.created
    if created is None:
        created = info.modified or 0.0
    return replace(record, token=token, created=created)
