"""Ownership of a run's folders: a named run claims them before its first save; other runs are refused."""

from __future__ import annotations

import json

from bucketpoint.catalog.catalog import Catalog, other_run
from bucketpoint.errors import ObjectNotFoundError
from bucketpoint.format import catalog_keys
from bucketpoint.stores import delete_all


def ensure(catalog: Catalog) -> None:
    """Claim the folders for this run before a save. One GET; at the first save also a LIST and two writes.

    Raises:
        OtherRunError: the folders belong to another run, or to a run without a name.
    """
    mine = catalog.run
    if mine is None:
        return
    owner = claimed_by(catalog)
    if owner is None and mine:
        owner = _take(catalog, mine)
    if (owner or "") != mine:
        raise other_run(catalog, owner)


def claimed_by(catalog: Catalog) -> str | None:
    """Return the name of the run that has claimed the folders, or None. One GET."""
    try:
        data, _ = catalog.store.get(catalog.own_key(catalog_keys.CLAIM), first=1 << 16)
    except ObjectNotFoundError:
        return None
    name = catalog_keys.content_of(data).get("run")
    return name if isinstance(name, str) and name else None


def name_run(catalog: Catalog, name: str) -> str:
    """Claim the folders for the run `name`, whatever they contain. Return the owner's name: the first claim wins."""
    copy = catalog.own_key(catalog_keys.STEPS, catalog_keys.encode([catalog_keys.RUN, name]))
    # The copy among the steps is written first: any listing that shows a checkpoint then shows the run's name, too.
    catalog.write(copy)
    body = json.dumps({"run": name, "version": 1}, sort_keys=True).encode()
    if catalog.create(catalog.own_key(catalog_keys.CLAIM), body):
        return name
    owner = claimed_by(catalog)
    if owner is not None and owner != name:
        catalog.store.delete([copy])
    return owner or name


def unname(catalog: Catalog) -> str | None:
    """Remove the name of a run, so that jobs without a name may save there. Return the name; None if it had none."""
    owner = claimed_by(catalog)
    names = {*catalog.listed_steps().runs, *([owner] if owner else [])} - {""}
    copies = [catalog.own_key(catalog_keys.STEPS, catalog_keys.encode([catalog_keys.RUN, name])) for name in names]
    delete_all(catalog.store, [catalog.own_key(catalog_keys.CLAIM), *copies] if names else [])
    return owner or min(names, default=None)


def _take(catalog: Catalog, name: str) -> str | None:
    there = catalog.listed_steps()
    others = sorted(there.runs - {name})
    if others:
        return others[0]
    # Existing checkpoints belong to a run without a name, unless a listing names their run.
    if name not in there.runs and (there.checkpoints or there.attempts):
        return None
    return name_run(catalog, name)
