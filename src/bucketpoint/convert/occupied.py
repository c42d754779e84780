"""What lies at the target before a conversion begins: another checkpoint, or what a run before left. Reads only."""

from __future__ import annotations

from collections.abc import Callable

from bucketpoint.convert.from_safetensors import INDEX_NAME, SINGLE_NAME
from bucketpoint.convert.journal import Journal
from bucketpoint.convert.source import BUCKETPOINT, SAFETENSORS, TORCH
from bucketpoint.convert.target import Place
from bucketpoint.errors import AccessDeniedError, CheckpointExistsError, CommitConflictError, ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.format.metadata import decode_metadata
from bucketpoint.format.metadata_facts import extra
from bucketpoint.stores import ObjectInfo, Store


def refuse_to_replace(place: Place, wanted: str, name: str, overwrite: bool) -> None:
    """Raises CheckpointExistsError where something is at the target that must not, or cannot safely, be replaced."""
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
            # Without the right to list, a key that is not there is denied like one that is. The commit will tell.
            continue
        if found:
            raise CheckpointExistsError(
                f"Checkpoint already exists: there is a {one} at the target",
                url=place.url,
                remedy="Name another target, or pass --overwrite"
                if safely
                else "Name another target, or delete what is there: its files have the names of those to be written",
            )


def _is_there(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except ObjectNotFoundError:
        return False
    return True


def watch_file(place: Place, name: str) -> Callable[[], None]:
    """Look at a file at the target. The function that is returned looks again.

    It raises CommitConflictError where another file is there now, or one where there was none.
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
                "Somebody else wrote to the target meanwhile; that file stands, and this one is discarded",
                url=place.url,
                remedy="Name another target, or convert again",
            )

    before = look()
    return look_again


def is_finished(place: Place, wanted: str, journal: Journal | None, *, whole: bool) -> bool:
    """Whether this conversion was interrupted after its commit: then only its journal is to be removed.

    Args:
        whole: all objects that the journal notes are at the target, unchanged.
    """
    if journal is None or not journal.notes:
        return False
    if wanted == SAFETENSORS:
        # An index says nothing of who wrote it.
        return whole and _is_there(place.store, keys.join(place.prefix, INDEX_NAME))
    try:
        data, _ = place.store.get(keys.join(place.prefix, keys.METADATA))
    except ObjectNotFoundError:
        return False
    metadata = decode_metadata(data, url=place.url)
    if wanted == BUCKETPOINT:
        return bool(extra(metadata).get("token") == journal.token)
    return getattr(metadata.storage_meta, "save_id", None) == journal.token


def is_committed(place: Place) -> bool:
    """Whether any checkpoint of several files is at the target."""
    return any(_is_there(place.store, keys.join(place.prefix, name)) for name in (keys.METADATA, INDEX_NAME))
