"""Removal of one checkpoint that a person names, with a record or without, by the steps of a prune."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bucketpoint.catalog.catalog import Catalog, get_metadata, open_catalog
from bucketpoint.catalog.deletion import lock as locks
from bucketpoint.catalog.deletion.delete import delete_checkpoints
from bucketpoint.catalog.deletion.fence import Stopwatch
from bucketpoint.catalog.deletion.pruner import still_goes
from bucketpoint.catalog.deletion.rights import require_deletes
from bucketpoint.catalog.deletion.wholeness import is_whole
from bucketpoint.catalog.prune_report import Pruned
from bucketpoint.catalog.reconcile import metadata_record, reconcile
from bucketpoint.catalog.run import catalog_above, parent_and_name
from bucketpoint.catalog.snapshot import BY_STEP, DELETE, Checkpoint, Snapshot
from bucketpoint.catalog.survey import size_of
from bucketpoint.catalog.tombstones import claim, schedule_deletion
from bucketpoint.errors import CheckpointNotFoundError, InvalidURLError, ObjectNotFoundError, first_of
from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import StepTemplate
from bucketpoint.format.metadata.deletion_marker import parse_marker
from bucketpoint.retention.row import FULL
from bucketpoint.stores import this_url

logger = logging.getLogger(__name__)

LOOKED_AT_MOST = 20
"""Most checkpoints that are searched for a whole one. So many damaged ones in a row are no accident of one save."""

_NUMBERED = re.compile(r"(.*?)[0-9]{1,16}([^0-9]*)", re.ASCII | re.DOTALL)


class OneFolder(StepTemplate):
    """The template of a folder whose name has no number: it fits this folder alone, as step 0."""

    def folder(self, step: int) -> str:
        return self.text

    def step_of(self, folder: str) -> int | None:
        return 0 if folder == self.text else None

    def _parts(self) -> tuple[str, str]:
        return self.text, ""


@dataclass(frozen=True)
class Removal:
    """A checkpoint to remove.

    Attributes:
        checkpoint: with its token and the mark of its `.metadata`, even if it has no record.
        bytes: bytes of its data.
        reasons: reasons to keep it. Only a person overrides them.
    """

    catalog: Catalog
    checkpoint: Checkpoint
    bytes: int
    reasons: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return self.catalog.url_of_folder(self.checkpoint.folder)


def plan_removal(url: str, *, storage_options: Mapping[str, Any] | None = None, fs: Any = None) -> Removal:
    """Inspect a checkpoint to remove, and the rest of its run. Changes nothing.

    Raises:
        InvalidURLError: the URL cannot be that of a checkpoint.
        CheckpointNotFoundError: there is no checkpoint at the URL.
    """
    catalog, folder = _run_of(url, storage_options, fs)
    snapshot = catalog.with_unrecorded(catalog.snapshot())
    checkpoint = next((checkpoint for checkpoint in snapshot.checkpoints if checkpoint.folder == folder), None)
    if checkpoint is None:
        raise _not_there(catalog, folder)
    nbytes = sum(checkpoint.groups.values()) if checkpoint.key is not None else size_of(catalog, folder)
    if checkpoint.key is None:
        checkpoint = _identified(catalog, checkpoint)
    elif committed := catalog.metadata_info(folder):
        # A person means the checkpoint that is there now, damaged or not, and not the one in the record.
        checkpoint = replace(checkpoint, mark=catalog_keys.mark_of(committed.etag))
    return Removal(catalog, checkpoint, nbytes, tuple(_reasons(catalog, snapshot, checkpoint)))


def remove(removal: Removal, *, holder: str, force: bool = False) -> Pruned:
    """Delete the checkpoint by the steps of a prune: a tombstone that is due at once, a claim, the commit, the data.

    Args:
        holder: name of the remover, for the pruner's lock.
        force: remove it despite all reasons to keep it.

    Raises:
        AccessDeniedError: data may not be deleted. Nothing was begun.
        StoreError: a request failed for good. The next prune or removal finishes what was begun.
    """
    catalog, one = removal.catalog, removal.checkpoint
    require_deletes(catalog, one.folder)
    lock = locks.acquire(catalog, holder)
    if lock is None:
        return Pruned(stopped=locks.held_by(catalog))
    catalog = lock.catalog
    try:
        done = Pruned()
        reconcile(catalog, catalog.snapshot())
        key = schedule_deletion(catalog, one, DELETE, due=catalog.due(0.0), reason="a person deleted it by name")
        stones = [stone for stone in catalog.steps().notes.tombstones if stone.key == key]
        begun = claim(catalog, stones[0]) if stones else None
        if begun is None:
            done.refused[one.step, one.id] = "its tombstone was withdrawn meanwhile"
            return done
        # Listed again, now that the claim is visible: a pin, lease or save that came meanwhile is in this listing.
        snapshot = catalog.snapshot()
        held = None if force else " and ".join(_reasons(catalog, catalog.with_unrecorded(snapshot), one)) or None
        if held is not None:
            done.refused[one.step, one.id] = held
        if still_goes(catalog, snapshot, begun, done, held=held, taken_over=False):
            delete_checkpoints(catalog, snapshot, [begun], done, Stopwatch(), by="by `bucketpoint rm`")
        if done.deleted:
            logger.info("%s is deleted", removal.url)
        return done
    finally:
        locks.give_back(lock)


def _run_of(url: str, storage_options: Mapping[str, Any] | None, fs: Any) -> tuple[Catalog, str]:
    """Return the run of a checkpoint, and its folder there. Without a catalog the folder's name tells the template."""
    split = parent_and_name(url)
    if split is None:
        raise InvalidURLError(
            "The URL names no folder: a checkpoint at the root of a bucket cannot be told from what else lies there",
            url=url,
            remedy="Pass a URL such as s3://bucket/run/step-5, or delete .metadata, then data/, with the store's tool",
        )
    known = catalog_above(url.rstrip("/"), storage_options=storage_options, fs=fs)
    if known is not None:
        return known
    root, folder = split
    match = _NUMBERED.fullmatch(folder)
    catalog = open_catalog(root, storage_options=storage_options, fs=fs)
    fits = match is not None and not {"{", "}"} & set(folder)
    template = StepTemplate(f"{match[1]}{{step}}{match[2]}") if match is not None and fits else OneFolder(folder)
    return replace(catalog, template=template), folder


def _not_there(catalog: Catalog, folder: str) -> CheckpointNotFoundError:
    message = f"There is no checkpoint at {this_url(catalog.store)}"
    remedy = "Check the URL; `bucketpoint gc --deep` on the run deletes the data of saves that never committed"
    with contextlib.suppress(ObjectNotFoundError):
        marker = parse_marker(get_metadata(catalog.store, catalog.metadata_key(folder))[0])
        if marker is not None:
            message = marker.text
            remedy = "The next prune, or `bucketpoint gc --deep`, deletes the remaining objects"
    return CheckpointNotFoundError(message, url=catalog.url_of_folder(folder), remedy=remedy)


def _identified(catalog: Catalog, one: Checkpoint) -> Checkpoint:
    """Add the token, which only the metadata tells, to a checkpoint without a record. One GET."""
    record = metadata_record(catalog, one.folder)
    if record is not None:
        return replace(one, id=record.token or "", mark=catalog_keys.mark_of(record.metadata_etag))
    try:
        data, info = get_metadata(catalog.store, catalog.metadata_key(one.folder))
    except ObjectNotFoundError:
        raise _not_there(catalog, one.folder) from None
    # The metadata is damaged. What is left of it may still contain the tokens of its data.
    return replace(one, id=hashlib.sha256(data).hexdigest()[:12], mark=catalog_keys.mark_of(info.etag))


def _reasons(catalog: Catalog, snapshot: Snapshot, one: Checkpoint) -> list[str]:
    """Return the reasons to keep a checkpoint: it is held, or the run would have no whole one without it.

    The search for the newest whole checkpoint costs two GETs and a LIST, and as much for each damaged one that is
    newer.
    """
    reasons = [f"it is {held}" for held in sorted(snapshot.held().get(one.step, ()))]
    if one.kind != FULL:
        return reasons
    going = snapshot.going() - {one.name}
    full = [other for other in snapshot.full if other.name not in going]
    whole = next((other for other in full[: -LOOKED_AT_MOST - 1 : -1] if is_whole(catalog, other)), None)
    if whole is None:
        reasons.append("its run has no whole checkpoint")
    elif whole.folder == one.folder:
        due = [str(other.step) for other in snapshot.full if other.name in going and BY_STEP(other) > BY_STEP(one)]
        newer = f" that is not due for deletion, as step {first_of(due, 3)} is" if due else ""
        reasons.append(f"it is the newest whole checkpoint of its run{newer}")
    return reasons
