"""Checks of the target before a conversion: another checkpoint, or the remains of an earlier run."""

from __future__ import annotations

from collections.abc import Callable

from bucketpoint.convert.journal import Journal
from bucketpoint.convert.readers.from_safetensors import INDEX_NAME, SINGLE_NAME
from bucketpoint.convert.source import BUCKETPOINT, SAFETENSORS, TORCH
from bucketpoint.convert.target import TargetPlace
from bucketpoint.errors import AccessDeniedError, CheckpointExistsError, CommitConflictError, ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.stores import ObjectInfo, Store


def refuse_to_replace(place: TargetPlace, wanted: str, name: str, overwrite: bool) -> None:
    """Refuse a target whose content must not, or cannot safely, be replaced.

    Raises:
        CheckpointExistsError: there is such content.
    """
    safely = wanted in (BUCKETPOINT, TORCH)
    if overwrite and safely:
        return
    names = {TORCH: (name,), SAFETENSORS: (INDEX_NAME, SINGLE_NAME)}.get(wanted, (keys.METADATA,))
    for one in names:
        try:
            found = _is_there(place.store, keys.join(place.prefix, one))
        except AccessDeniedError:
            if wanted != BUCKETPOINT:
                raise
            # Without the right to list, a missing key is denied just like a present one. The commit will find out.
            continue
        if found:
            raise CheckpointExistsError(
                f"A checkpoint already exists at the target: it has a {one}",
                url=place.url,
                remedy="Name another target, or pass --overwrite"
                if safely
                else "Name another target, or delete the files at this one, which have the same names as the new files",
            )


def _is_there(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except ObjectNotFoundError:
        return False
    return True


def watch_file(place: TargetPlace, name: str) -> Callable[[], None]:
    """Look at a file at the target, and return a function that looks again.

    That function raises CommitConflictError if the file was replaced meanwhile, or has appeared.
    """
    key = keys.join(place.prefix, name)

    def look() -> ObjectInfo | None:
        try:
            return place.store.head(key)
        except (ObjectNotFoundError, AccessDeniedError):
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


def is_finished(place: TargetPlace, wanted: str, journal: Journal | None, *, whole: bool) -> bool:
    """Return True if this conversion was interrupted after its commit, so that only its journal is left to remove.

    Args:
        whole: True if all objects that the journal notes are at the target, unchanged.
    """
    if journal is None or not journal.notes:
        return False
    if wanted == SAFETENSORS:
        # An index does not record its writer, so the unchanged objects have to serve as evidence.
        return whole and _is_there(place.store, keys.join(place.prefix, INDEX_NAME))
    try:
        data, _ = place.store.get(keys.join(place.prefix, keys.METADATA))
    except ObjectNotFoundError:
        return False
    metadata = decode_metadata(data, url=place.url)
    if wanted == BUCKETPOINT:
        return bool(extra(metadata).get("token") == journal.token)
    return getattr(metadata.storage_meta, "save_id", None) == journal.token


def is_committed(place: TargetPlace) -> bool:
    """Return True if any checkpoint of several files is at the target."""
    return any(_is_there(place.store, keys.join(place.prefix, name)) for name in (keys.METADATA, INDEX_NAME))
