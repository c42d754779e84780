"""Checks of a conversion's target for other checkpoints, and for objects of an earlier run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from bucketpoint.catalog.catalog import get_metadata
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME
from bucketpoint.convert.journal import Journal
from bucketpoint.convert.source import BUCKETPOINT, SAFETENSORS, TORCH, Source
from bucketpoint.convert.target import TargetPlace
from bucketpoint.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    CommitConflictError,
    CorruptDataError,
    InvalidURLError,
    MetadataError,
    ObjectNotFoundError,
)
from bucketpoint.format import keys
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.safetensors_header import decode_json
from bucketpoint.stores import ObjectInfo, delete_all
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import ObjectSource, TransferOptions
from bucketpoint.transfer.pieces import MAX_READ_BYTES, for_each

_WEIGHTS = re.compile(r"model((-[0-9a-f]{12})?-\d{5,}-of-\d{5,})?\.safetensors", re.ASCII)

DIGEST = "bucketpoint"
"""Field for the digest of the conversion, in the index and the headers of the files that it writes."""


def will_replace(place: TargetPlace, wanted: str, name: str, overwrite: bool, *, removes: bool = False) -> bool:
    """Return True if the conversion replaces a checkpoint or file at the target.

    Args:
        name: name of the file to write; empty for a folder.
        removes: True if the caller deletes former weights first.

    Raises:
        CheckpointExistsError: the target has content that must not be replaced, or cannot be replaced safely.
    """
    safely = removes or wanted in (BUCKETPOINT, TORCH)
    allowed = overwrite and safely
    remedy = "Name another target, or delete the weights at this one first"
    if safely:
        remedy = "Name another target, or pass --overwrite"
    in_folder = (INDEX_NAME, SINGLE_NAME) if wanted == SAFETENSORS else (keys.METADATA,)
    for path in (name,) if name else in_folder:
        try:
            info = place.head(path)
        except AccessDeniedError:
            if wanted != BUCKETPOINT and not allowed:
                raise
            # S3 answers 403 instead of 404 to callers that may not list. The commit will detect an existing key.
            continue
        if info is not None:
            if allowed:
                return True
            message = f"Checkpoint already exists at this URL: it has a {path}"
            raise CheckpointExistsError(message, url=place.url, remedy=remedy)
    return False


def remove_weights(place: TargetPlace) -> None:
    """Delete the weights in a folder of Hugging Face's layout: the index first, as it must name no missing file."""
    delete_all(place.store, [place.key(INDEX_NAME)])
    above = place.key("x")[:-1]
    found = [info.key for info in place.store.list(f"{above}model")]
    delete_all(place.store, [key for key in found if _WEIGHTS.fullmatch(key, len(above))])


def refuse_own_source(source: Source, place: TargetPlace) -> None:
    """Raise InvalidURLError if `remove_weights` would delete the source before it is read."""
    above = place.key("x")[:-1]
    read = source.bytes.keys() if source.bytes.store.identity == place.store.identity else []
    if any(key.startswith(above) and _WEIGHTS.fullmatch(key, len(above)) for key in read):
        raise InvalidURLError(
            "The weights at the target are the source, and would be deleted before they are read",
            url=place.url,
            remedy="Name another target",
        )


def watch_files(place: TargetPlace, names: Sequence[str], digest: str = "") -> Callable[[], None]:
    """Return a function that checks that files at the target have not changed since this call.

    The function raises CommitConflictError if a file was replaced or has appeared, unless a worker of the conversion
    with this digest has committed.
    """

    def look(name: str) -> ObjectInfo | None:
        try:
            return place.head(name)
        except AccessDeniedError:
            return None

    def look_again() -> None:
        if [look(name) for name in names] != before and not (digest and indexed_by(place) == digest):
            raise CommitConflictError(
                "Another process wrote to the target during the conversion; its file is kept, and this one is deleted",
                url=place.url,
                remedy="Name another target, or convert again",
            )

    before = [look(name) for name in names]
    return look_again


def is_finished(place: TargetPlace, journal: Journal) -> bool:
    """Return True if an earlier run of this conversion to a checkpoint has committed, but not deleted its journal."""
    if not journal.notes:
        return False
    try:
        data, _ = get_metadata(place.store, place.key(keys.METADATA))
    except (ObjectNotFoundError, CorruptDataError, MetadataError):
        return False
    return bool(extra(decode_metadata(data, url=place.url)).get("token") == journal.token)


def is_exported(place: TargetPlace, objects: Sequence[ObjectSource], digest: str, options: TransferOptions) -> bool:
    """Return True if all files of this conversion to safetensors are at the target, with an index if needed."""
    if indexed_by(place) != (digest if len(objects) > 1 else None):
        return False
    lost: list[str] = []

    def look(entry: ObjectSource) -> None:
        # The header has the digest of the conversion.
        header, key = entry.segments[0], place.key(entry.key)
        try:
            head, info = retry_transient(
                lambda: place.store.get(key, first=header.nbytes), attempts=options.read_attempts
            )
        except (ObjectNotFoundError, AccessDeniedError):
            head, info = b"", None
        if info is None or info.size != entry.nbytes or header.data != memoryview(head):
            lost.append(entry.key)

    for_each(objects, look, options)
    return not lost


def indexed_by(place: TargetPlace) -> str | None:
    """Return the digest in the index at a target: empty if another writer wrote the index, None if there is none."""
    try:
        data, _ = place.store.get(place.key(INDEX_NAME), max_bytes=MAX_READ_BYTES)
        noted = decode_json(data, key=INDEX_NAME).get("metadata")
    except (ObjectNotFoundError, AccessDeniedError):
        # S3 answers 403 instead of 404 to callers that may not list.
        return None
    except (CorruptDataError, MetadataError):
        return ""
    return str(noted.get(DIGEST, "")) if type(noted) is dict else ""
