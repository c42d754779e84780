"""Check that a checkpoint is whole, which a prune requires of the newest one.

The metadata must match the record and cover all tensors, and all objects must be listed with the right sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.records import read_record
from bucketpoint.catalog.snapshot import Checkpoint
from bucketpoint.errors import CheckpointNotFoundError, MetadataError, ObjectNotFoundError, UnsafeDataError
from bucketpoint.format import keys
from bucketpoint.format.index.ref import index_path
from bucketpoint.format.item_info import read_item
from bucketpoint.format.metadata.coverage import uncovered
from bucketpoint.format.metadata.deletion_marker import is_marker
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.metadata.plain import read_metadata
from bucketpoint.format.record import CommitRecord
from bucketpoint.transfer.checksum import crc32c


@dataclass(frozen=True)
class Inspected:
    """A checkpoint's record and metadata.

    Attributes:
        problem: text about unreadable or contradictory record and metadata; None if they match.
        data: bytes of the metadata.
        gone: True if there is no metadata.
    """

    checkpoint: Checkpoint
    problem: str | None
    record: CommitRecord | None = None
    data: bytes = field(default=b"", repr=False)
    gone: bool = False


def inspect(catalog: Catalog, checkpoint: Checkpoint) -> Inspected:
    """Read the record and the metadata of a checkpoint. Two GETs."""
    folder = checkpoint.folder
    try:
        record = read_record(catalog, checkpoint.key) if checkpoint.key is not None else None
        data, _ = get_metadata(catalog.store, catalog.metadata_key(folder))
    except ObjectNotFoundError:
        return Inspected(checkpoint, f"checkpoint {folder} has no metadata", gone=True)
    except MetadataError as error:
        return Inspected(checkpoint, f"the record of checkpoint {folder} cannot be read: {error.message}")
    if is_marker(data):
        return Inspected(checkpoint, f"checkpoint {folder} is being deleted")
    if checkpoint.key is not None and (record is None or record.metadata_crc32c != crc32c(memoryview(data))):
        return Inspected(checkpoint, f"the metadata of checkpoint {folder} differs from its record")
    return Inspected(checkpoint, None, record, data)


def damage(catalog: Catalog, inspected: Inspected) -> str | None:
    """Describe the damage of a checkpoint's tensors or objects; None if it is whole. One LIST."""
    folder, record = inspected.checkpoint.folder, inspected.record
    if inspected.problem is not None:
        return inspected.problem
    if not (record and record.covers) and (part := _part(inspected.data)) is not None:
        return f"checkpoint {folder} does not hold all of its state: {part}"
    sizes = {path: info.size for path, info in catalog.objects_of(folder).items()}
    if record is not None:
        index = index_path(record.token or "")
        data = {path: size for path, size in sizes.items() if keys.token_of(path) and path != index}
        whole = (len(data), sum(data.values())) == (record.objects, record.bytes)
        # Counts and sizes alone prove too little: a save under way in the same folder may have equal ones. So the
        # tokens must be in the metadata.
        if data and whole and {keys.token_of(path) for path in data} <= keys.tokens_in(inspected.data):
            return None
    missing = _missing(inspected.data, sizes)
    return f"data of checkpoint {folder} is missing: {missing}" if missing is not None else None


def look_for_damage(catalog: Catalog, checkpoint: Checkpoint) -> str | None:
    """Inspect a checkpoint and describe its damage; None if it is whole. Two GETs, one LIST."""
    return damage(catalog, inspect(catalog, checkpoint))


def _part(data: bytes) -> str | None:
    """Return a text about a tensor that the checkpoint does not fully cover; None if it covers all."""
    try:
        metadata = read_metadata(data)
        return next((f"{name} {why}" for name, why in uncovered(metadata, extra(metadata))), None)
    except (CheckpointNotFoundError, MetadataError, UnsafeDataError) as error:
        return f"its metadata cannot be read: {error.message}"


def _missing(data: bytes, sizes: dict[str, int]) -> str | None:
    """Return the path of an object in the metadata that is missing or too small; None if there is none."""
    try:
        metadata = read_metadata(data)
        least = {path: int(fact["size"]) for path, fact in extra(metadata).get("objects", {}).items()}
        for info in (metadata.storage_data or {}).values():
            item = read_item(info)
            least[item.path] = max(least.get(item.path, 0), item.offset + item.length)
    except (CheckpointNotFoundError, MetadataError, UnsafeDataError) as error:
        return f"its metadata cannot be read: {error.message}"
    return next((path for path, size in sorted(least.items()) if sizes.get(path, -1) < size), None)
