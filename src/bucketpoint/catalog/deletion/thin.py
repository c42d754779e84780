"""Thinning: reduces a checkpoint to its weights by new metadata and deletes. No tensor is read or written."""

from __future__ import annotations

import dataclasses

from torch.distributed.checkpoint import Metadata

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.save_log import read_record, write_record
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
from bucketpoint.format.groups import OPTIM
from bucketpoint.format.index.ref import index_path
from bucketpoint.format.item_info import data_paths, read_item
from bucketpoint.format.metadata.codec import decode_metadata, encode_metadata, record_from_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.record import CommitRecord
from bucketpoint.retention.row import FULL

WEIGHTS = "weights"


def thin(catalog: Catalog, snapshot: Snapshot, one: Tombstone, done: Pruned) -> None:
    """Thin a checkpoint: replace the metadata, then the record; delete the optimizer's objects, then the tombstone."""
    name = (one.step, one.id)
    key = catalog.metadata_key(one.folder)
    try:
        data, info = get_metadata(catalog.store, key)
        metadata = decode_metadata(data, url=catalog.url_of_folder(one.folder))
        facts = extra(metadata)
        if facts.get("token") not in (None, one.id):
            withdraw(catalog, one, done)
            return
        if facts.get("kind") != WEIGHTS:
            data = thinned_metadata(metadata, info.etag)
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
    record = record_from_metadata(data, metadata_etag=info.etag)
    records = [*snapshot.checkpoints, *snapshot.superseded]
    old = [other for other in records if other.name == one.name]
    for other in old:
        # Another writer's metadata has no time and no token: the old record supplies them.
        former = _record_of(catalog, other)
        created = record.created if record.created is not None else other.created
        metrics = {**(former.metrics if former else {}), **record.metrics}
        record = dataclasses.replace(record, token=other.id, created=created, metrics=metrics)
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
    thinned = decode_metadata(data)
    goes = set(extra(thinned).get("thinned_paths", ())) - data_paths(thinned)
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


def thinned_metadata(metadata: Metadata, etag: str | None = None) -> bytes:
    """Return the bytes of metadata that names everything but the optimizer.

    Args:
        etag: ETag of the metadata that it is to replace. A save that overwrites this checkpoint has seen that one.

    Raises:
        MetadataError: weights and optimizer share objects, as other writers store them; or there are no weights; or no
            object holds the optimizer alone.
    """
    facts = extra(metadata)
    places = metadata.storage_data or {}
    named = {path: keys.parse_data_path(path) for path in data_paths(metadata)}
    goes = {path for path, parts in named.items() if parts is not None and parts[2] == OPTIM}
    if not goes:
        raise MetadataError("The checkpoint has no object that holds only optimizer state")
    storage = {index: info for index, info in places.items() if read_item(info).path not in goes}
    names = {index.fqn for index in storage}
    mixed = names & {index.fqn for index, info in places.items() if read_item(info).path in goes}
    if not names or mixed:
        raise MetadataError("Weights and optimizer state share objects, or there are no weights")
    planner = metadata.planner_data
    kept = dataclasses.replace(
        metadata,
        state_dict_metadata={name: entry for name, entry in metadata.state_dict_metadata.items() if name in names},
        planner_data={name: value for name, value in planner.items() if name in names}
        if isinstance(planner, dict)
        else planner,
        storage_data=storage,
    )
    objects = {path: fact for path, fact in facts.get("objects", {}).items() if path not in goes}
    token = facts.get("token")
    # The index repeats the metadata before thinning. It is no longer named, so it is deleted too.
    index = {index_path(token)} if isinstance(token, str) and keys.is_token(token) else set()
    # The paths are stored because another pruner may have to finish the thinning.
    facts = {**facts, "kind": WEIGHTS, "objects": objects, "thinned_from": etag, "thinned_paths": sorted(goes | index)}
    return encode_metadata(kept, bucketpoint=facts)
