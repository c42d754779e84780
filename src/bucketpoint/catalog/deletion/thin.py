"""Thinning: reduces a checkpoint to its weights by new metadata and deletes. No tensor is read or written."""

from __future__ import annotations

import dataclasses

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.reconcile import read_record, write_record
from bucketpoint.catalog.snapshot import Checkpoint, Snapshot, Tombstone
from bucketpoint.catalog.tombstones import withdraw
from bucketpoint.errors import (
    CheckpointDeletedError,
    MetadataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnsafeDataError,
)
from bucketpoint.format import keys
from bucketpoint.format.metadata.thinning import WEIGHTS, Outline
from bucketpoint.format.record import CommitRecord
from bucketpoint.retention.row import FULL


def thin(catalog: Catalog, snapshot: Snapshot, one: Tombstone, done: Pruned) -> None:
    """Thin a checkpoint: replace the metadata, then the record; delete the optimizer's objects, then the tombstone."""
    name = (one.step, one.id)
    key = catalog.metadata_key(one.folder)
    try:
        data, info = get_metadata(catalog.store, key)
        outline = Outline(data)
        if outline.facts.get("token") not in (None, one.id):
            withdraw(catalog, one, done)
            return
        if outline.facts.get("kind") != WEIGHTS:
            data = outline.thinned(info.etag)
            outline = Outline(data)
            # If another process has replaced the metadata meanwhile, the condition fails, and that metadata stays.
            info = catalog.write(key, data, if_match=info.etag)
    except (ObjectNotFoundError, CheckpointDeletedError):
        withdraw(catalog, one, done)
        return
    except PreconditionFailedError:
        done.refused[name] = "its metadata was replaced meanwhile"
        return
    except (MetadataError, UnsafeDataError) as error:
        withdraw(catalog, one, done)
        done.refused[name] = f"it cannot be thinned: {error.message}"
        return
    record = outline.record(metadata_etag=info.etag)
    records = [*snapshot.checkpoints, *snapshot.superseded]
    old = [other for other in records if other.name == one.name]
    for other in old:
        # Another writer's metadata has no time and no token: the old record supplies them.
        former = _record_of(catalog, other)
        created = record.created if record.created is not None else other.created
        metrics = {**(former.metrics if former else {}), **record.metrics}
        # The tensors that stay are as whole as they were.
        covers = (former and former.covers) or None
        record = dataclasses.replace(record, token=other.id, created=created, metrics=metrics, covers=covers)
    if record.token is None:
        record = dataclasses.replace(record, token=one.id)
    written = write_record(catalog, one.folder, one.step, record)
    failures = catalog.store.delete([other.key for other in old if other.key and other.key != written])
    objects = {path: info.key for path, info in catalog.objects_of(one.folder).items()}
    if keys.METADATA not in objects:
        # Another pruner has deleted the checkpoint meanwhile: the new record describes nothing, and must go.
        done.failures += failures + catalog.store.delete([written])
        withdraw(catalog, one, done)
        return
    # Only objects of this attempt: a save that is under way has objects of the same groups in the same folder.
    goes = set(outline.facts.get("thinned_paths", ())) - outline.paths
    failures += catalog.store.delete([objects[path] for path in sorted(goes & objects.keys()) if keys.token_of(path)])
    done.failures += failures
    if not failures:
        done.failures += catalog.store.delete([one.key])
        done.thinned.append(name)
        before = next((sum(other.groups.values()) for other in old if other.kind == FULL), record.bytes)
        done.freed[name] = before - record.bytes


def _record_of(catalog: Catalog, one: Checkpoint) -> CommitRecord | None:
    """Return the checkpoint's record; None also if it is damaged: the metrics are then those reported as notes."""
    try:
        return read_record(catalog, one.key) if one.key else None
    except MetadataError:
        return None
