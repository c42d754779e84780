"""Records for checkpoints that have none: of dead coordinators, of other writers, of a lost catalogue."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.save_log import write_record
from bucketpoint.catalog.snapshot import Snapshot
from bucketpoint.errors import MetadataError, ObjectNotFoundError, UnsafeDataError
from bucketpoint.format.record import CommitRecord
from bucketpoint.stores import ObjectInfo


def heal(catalog: Catalog, snapshot: Snapshot) -> Snapshot:
    """Give their records to attempts that have committed without. Returns the snapshot to go on with.

    One GET for each attempt, which there are none of as a rule, and a PUT for each that has committed.
    """
    known = {one.folder: one for one in snapshot.checkpoints}
    healed = False
    for attempt in snapshot.attempts:
        record = metadata_record(catalog, attempt.folder)
        # Metadata of another attempt is an older checkpoint, which this one would replace.
        if record is None or (record.token is not None and record.token != attempt.token and attempt.folder in known):
            continue
        if attempt.folder in known and known[attempt.folder].id == record.token:
            continue
        write_record(catalog, attempt.folder, attempt.step, record)
        healed = True
    return catalog.snapshot() if healed else snapshot


def adopt(catalog: Catalog) -> list[str]:
    """Write the missing records of all checkpoints below the root, whoever saved them. Returns their folders.

    A folder is taken whose whole name fits the template and which has a readable `.metadata`. One LIST for each 1,000
    folders; one GET and one PUT for each without a record.
    """
    snapshot = catalog.snapshot()
    recorded = {one.folder for one in snapshot.checkpoints}
    # What is about to go must not come back: its pruner has removed the record already.
    going = {folder for folder, _ in snapshot.going()}
    adopted = []
    for folder in catalog.folders():
        step = catalog.template.step_of(folder)
        if step is None or folder in recorded or folder in going:
            continue
        record = metadata_record(catalog, folder)
        if record is not None:
            write_record(catalog, folder, step, record)
            adopted.append(folder)
    return adopted


def metadata_record(catalog: Catalog, folder: str) -> CommitRecord | None:
    """The record of what is committed in a folder, made of its `.metadata`; None if there is none that can be read."""
    # Whoever only lists and prunes need not wait for torch.
    from bucketpoint.format.metadata import record_from_metadata

    try:
        data, info = catalog.store.get(catalog.metadata_key(folder))
        record = record_from_metadata(data, metadata_etag=info.etag)
    except (ObjectNotFoundError, MetadataError, UnsafeDataError):
        return None
    return named(record, data, info)


def named(record: CommitRecord, data: bytes, info: ObjectInfo) -> CommitRecord:
    """With a token and a time, which the metadata of other writers does not tell: `data`, as `info` describes it."""
    token = record.token or hashlib.sha256(data).hexdigest()[:12]
    created = record.created
    if created is None:
        created = info.modified or 0.0
    return replace(record, token=token, created=created)
