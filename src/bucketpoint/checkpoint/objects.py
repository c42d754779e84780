"""Checks of a checkpoint's objects against its metadata, and the choice of a folder for a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bucketpoint.catalog.run import names_below
from bucketpoint.checkpoint.open import SavedCheckpoint
from bucketpoint.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    CorruptDataError,
    ObjectNotFoundError,
    first_of,
)
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import CATALOG
from bucketpoint.location import Location, parent_and_name
from bucketpoint.stores import ObjectInfo
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.pieces import for_each

_NAMED_AT_MOST = 3

REMEDY = "Load another checkpoint; `bucketpoint verify` lists all damage of this one"


def look_at_objects(
    saved: SavedCheckpoint, look: Callable[[str], ObjectInfo], options: TransferOptions
) -> dict[str, ObjectInfo]:
    """Return the store's description of each object, by its path, after a check against the metadata.

    Args:
        look: returns the store's description of a key, or raises ObjectNotFoundError.

    Raises:
        CorruptDataError: an object is missing, has another size, does not hold all of its items, or was replaced.
    """
    infos: dict[str, ObjectInfo] = {}

    def check(path: str) -> None:
        try:
            info = look(saved.key(path))
        except ObjectNotFoundError:
            raise damaged(saved, path, "one of its objects is missing") from None
        for _, text in faults(saved, path, info):
            raise damaged(saved, path, text)
        infos[path] = info

    for_each(saved.by_object, check, options)
    return dict(sorted(infos.items()))


def faults(saved: SavedCheckpoint, path: str, info: ObjectInfo) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each difference between an object and the metadata."""
    size, pinned = saved.size_of(path), saved.etags.get(path)
    needed = max((item.offset + item.length for _, item in saved.by_object[path]), default=0)
    if info.size < needed or size not in (None, info.size):
        wanted = f"{size}" if size is not None else f"at least {needed}"
        yield "wrong-size", f"the object has {info.size} bytes, but {wanted} were written"
    if pinned not in (None, info.etag):
        text = "the object was replaced after the commit, so loads refuse it even if its bytes are the same"
        yield "replaced-object", text


def damaged(saved: SavedCheckpoint, path: str, reason: str) -> CorruptDataError:
    return CorruptDataError(f"The checkpoint is damaged: {reason}", url=saved.url, key=path, remedy=REMEDY)


def copy_target(place: Location, saved: SavedCheckpoint, into: bool) -> Location:
    """Return the folder for a copy: `place`, or a folder below it. Sends one LIST.

    Raises:
        CheckpointExistsError: the folder has other content.
    """
    (store, prefix), source = place.opened, parent_and_name(saved.url)
    try:
        names = names_below(store, prefix)
    except AccessDeniedError:
        names = []
        if not into or source is None:
            return place
    if keys.METADATA in names or source is None:
        return place
    below = f"{place.url}/{source[1]}"
    own = [name for name in names if not name.startswith(keys.FENCE_FOLDER)]
    if into or any(
        name.endswith("/" + keys.METADATA) or name.startswith((f"{source[1]}/", f"{CATALOG}/")) for name in own
    ):
        return place.at(below)
    strangers = [name for name in own if keys.token_of(name) is None and name not in saved.by_object]
    if strangers:
        raise CheckpointExistsError(
            f"The destination is a folder with other content: {first_of(strangers, _NAMED_AT_MOST)}",
            url=place.url,
            remedy=f"Name a new folder in it, such as {below}",
        )
    return place
