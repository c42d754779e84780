"""Checks of the target before a conversion: another checkpoint, or the remains of an earlier run."""

from __future__ import annotations

import re
from collections.abc import Callable

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
from bucketpoint.transfer.pieces import MAX_READ_BYTES

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

DIGEST = "bucketpoint"
"""Field of an index of ours for the digest of the conversion that wrote it."""


def will_replace(place: TargetPlace, wanted: str, name: str, overwrite: bool, *, removes: bool = False) -> bool:
    """Return True if the conversion replaces a checkpoint or file at the target.

    Args:
        name: name of the file to write; empty for a folder.
        removes: the caller removes former weights first.

    Raises:
        CheckpointExistsError: the target has content that must not, or cannot safely, be replaced.
    """
    safely = removes or wanted in (BUCKETPOINT, TORCH)
    allowed = overwrite and safely
    remedy = "Name another target, or delete the files at this one, which have the same names as the new files"
    if safely:
        remedy = "Name another target, or pass --overwrite"
    in_folder = (INDEX_NAME, SINGLE_NAME) if wanted == SAFETENSORS else (keys.METADATA,)
    for path in (name,) if name else in_folder:
        try:
            info = place.head(path)
        except AccessDeniedError:
            if wanted != BUCKETPOINT and not allowed:
                raise
            # Without the right to list, a missing key is denied just like a present one. The commit will find out.
            continue
        if info is not None:
            if allowed:
                return True
            message = f"Checkpoint already exists at this URL: it has a {path}"
            raise CheckpointExistsError(message, url=place.url, remedy=remedy)
    return False


def remove_weights(place: TargetPlace) -> None:
    """Delete the weights in a folder of Hugging Face's layout: the index first, so that none names a missing file."""
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


def watch_file(place: TargetPlace, name: str) -> Callable[[], None]:
    """Look at a file at the target, and return a function that looks again.

    That function raises CommitConflictError if the file was replaced meanwhile, or has appeared.
    """

    def look() -> ObjectInfo | None:
        try:
            return place.head(name)
        except AccessDeniedError:
            return None

    def look_again() -> None:
        if look() != before:
            raise CommitConflictError(
                "Another process wrote to the target during the conversion; its file stays, and this one is discarded",
                url=place.url,
                remedy="Name another target, or convert again",
            )

    before = look()
    return look_again


def is_finished(place: TargetPlace, wanted: str, journal: Journal, *, whole: bool, alone: bool = True) -> bool:
    """Return True if this conversion was interrupted after its commit, so that only journals are left to remove.

    Args:
        whole: True if all objects that the journal notes are at the target, unchanged.
        alone: no other worker writes a part of the target. Otherwise one may have removed this journal.
    """
    if not journal.notes and alone:
        return False
    try:
        if wanted == SAFETENSORS:
            return (whole or not alone) and indexed_by(place) == journal.digest
        data, _ = get_metadata(place.store, place.key(keys.METADATA))
    except (ObjectNotFoundError, CorruptDataError, MetadataError):
        return False
    return bool(extra(decode_metadata(data, url=place.url)).get("token") == journal.token)


def indexed_by(place: TargetPlace) -> str | None:
    """Return the digest of the conversion that wrote the index at a target; empty for another writer's.

    None if there is no index.
    """
    try:
        data, _ = place.store.get(place.key(INDEX_NAME), max_bytes=MAX_READ_BYTES)
        noted = decode_json(data, key=INDEX_NAME).get("metadata")
    except (ObjectNotFoundError, AccessDeniedError):
        # S3 answers 403 instead of 404 to callers that may not list.
        return None
    except (CorruptDataError, MetadataError):
        return ""
    return str(noted.get(DIGEST, "")) if type(noted) is dict else ""
