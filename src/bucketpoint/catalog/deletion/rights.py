"""The right to delete data, which is checked before a checkpoint is ended.

A marker in place of `.metadata` ends a checkpoint, and a role that saves may write one. Without the right to delete,
such a role would end checkpoints for good and leave all their data.
"""

from __future__ import annotations

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.errors import AccessDeniedError
from bucketpoint.stores.trials import SCRATCH

_NOBODYS = f"{SCRATCH}delete"
"""Name of an object that nobody writes. In a bucket with versioning its deletion leaves a delete marker."""

_granted: set[tuple[str, str]] = set()
"""Stores and prefixes where this process may delete."""


def require_deletes(catalog: Catalog, folder: str) -> None:
    """Check that data in a checkpoint's folder may be deleted, by a deletion of an object that does not exist.

    Costs one request for each store and prefix of a process.

    Raises:
        AccessDeniedError: the deletion was refused.
        StoreError: the request failed for good.
    """
    place = catalog.store.identity, catalog.prefix
    if place in _granted:
        return
    try:
        kept = next(iter(catalog.store.delete([_key(catalog, folder)])), None)
        reason, remedy = (f"{kept.code}: {kept.message}", kept.remedy) if kept is not None else (None, None)
    except AccessDeniedError as error:
        reason, remedy = error.message, error.remedy
    if reason is not None:
        raise AccessDeniedError(
            f"These credentials may not delete data, so no checkpoint was deleted ({reason.rstrip('.')})",
            url=catalog.url,
            remedy=f"{f'{remedy}. ' if remedy else ''}Delete with the role pruner, which may delete, and let other "
            "jobs have a policy with when: manual",
        )
    _granted.add(place)


def _key(catalog: Catalog, folder: str) -> str:
    # Among the data: a trainer may delete notes.
    return catalog.key(f"{folder}/{_NOBODYS}")
