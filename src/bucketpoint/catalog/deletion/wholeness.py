"""Checks of the newest checkpoint, on which the pruner relies.

Its metadata is compared with its record and covers its tensors, and its objects are compared with a listing.
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
        problem: the reason why they are not reliable; None if the metadata matches the record.
        gone: True if there is no metadata.
    """

    checkpoint: Checkpoint
    problem: str | None
    record: CommitRecord | None = None
    data: bytes = field(default=b"", repr=False)
    gone: bool = False


def inspect(catalog: Catalog, checkpoint: Checkpoint) -> Inspected:
    """Read the record, if there is one, and the metadata of a checkpoint. Two GETs."""
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
    """Describe the damage of a checkpoint: of its tensors, or its objects. None if it is whole. One LIST.

    Without a record, the metadata itself lists the checkpoint's objects.
    """
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
        # The tokens are compared too: a save under way may have as many objects of the same sizes as the missing ones.
        if data and whole and {keys.token_of(path) for path in data} <= keys.tokens_in(inspected.data):
            return None
    missing = _missing(inspected.data, sizes)
    return f"data of checkpoint {folder} is missing: {missing}" if missing is not None else None


def look_for_damage(catalog: Catalog, checkpoint: Checkpoint) -> str | None:
    """Describe the damage of a checkpoint; None if it is whole. Two GETs, one LIST."""
    return damage(catalog, inspect(catalog, checkpoint))


def _part(data: bytes) -> str | None:
    """Return a tensor that the checkpoint holds only in part, with the reason. None if it holds all of them."""
    try:
        metadata = read_metadata(data)
        return next((f"{name} {why}" for name, why in uncovered(metadata, extra(metadata))), None)
    except (CheckpointNotFoundError, MetadataError, UnsafeDataError) as error:
        return f"its metadata cannot be read: {error.message}"


def _missing(data: bytes, sizes: dict[str, int]) -> str | None:
    """Return an object that the metadata names and that is missing or has too few bytes. None if all are there."""
    try:
        metadata = read_metadata(data)
        least = {path: int(fact["size"]) for path, fact in extra(metadata).get("objects", {}).items()}
        for info in (metadata.storage_data or {}).values():
            item = read_item(info)
            least[item.path] = max(least.get(item.path, 0), item.offset + item.length)
    except (CheckpointNotFoundError, MetadataError, UnsafeDataError) as error:
        return f"its metadata cannot be read: {error.message}"
    return next((path for path, size in sorted(least.items()) if sizes.get(path, -1) < size), None)
