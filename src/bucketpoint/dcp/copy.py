"""Copy of a committed checkpoint: data objects first, then `.metadata`, by the same commit as a save.

A checkpoint at the destination stays loadable until this commit. An interrupted copy can be resumed: objects that are
complete at the destination are not sent again.
"""

from __future__ import annotations

import copy as shallow
import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint import Metadata

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.deletion.fence import AttemptFence
from bucketpoint.catalog.records import named
from bucketpoint.catalog.run import catalog_above
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.checkpoint.checksums import ObjectCheck, Region, item_regions, read_tables, table_regions
from bucketpoint.checkpoint.open import SavedCheckpoint, copy_target, damaged, look_at_objects
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME
from bucketpoint.dcp.saving.commit import commit_copy
from bucketpoint.dcp.saving.commit_put import Commit
from bucketpoint.dcp.session import PriorCommit
from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CheckpointExistsError,
    CommitConflictError,
    InvalidURLError,
    ObjectNotFoundError,
)
from bucketpoint.format import keys
from bucketpoint.format.item_info import data_paths
from bucketpoint.format.metadata.codec import decode_metadata, encode_metadata
from bucketpoint.format.metadata.facts import make_record
from bucketpoint.location import Location, Place
from bucketpoint.stopwatch import LONG_AGO, Stopwatch
from bucketpoint.stores import ObjectInfo, Store, delete_all
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import Meter, ProgressCallback, TransferOptions
from bucketpoint.transfer.copy import CopyJob, copy_objects, inside_one_service

_ELSEWHERE = "Name another destination"

COPY_OPTIONS = TransferOptions(max_inflight_bytes=256 << 20)
"""Bytes pass through the memory of this process, so the memory budget determines the size of parts: about 10 MiB."""


@dataclass(frozen=True)
class CopyPlan:
    """The steps of a copy, planned before any object is written.

    Attributes:
        paths: path of each object at the destination, by the path in the source.
        sources: size and ETag of each object, from the source's store.
        there: complete objects of an earlier, interrupted copy at the destination.
        replaces: the destination has, or may have, a checkpoint, which will be replaced.
        seen: commit found at the destination, the only one that may be replaced; None if it could not be read.
        inside: the service can copy the objects, without sending them through this process.
        token: token of the copy: the token of the original save, or a new token, with which the objects are renamed.
        catalog: catalog of the run that the copy will belong to; None if the destination is not in a run.
    """

    saved: SavedCheckpoint
    url: str
    store: Store
    prefix: str
    paths: dict[str, str]
    sources: dict[str, ObjectInfo] = field(repr=False)
    there: dict[str, ObjectInfo] = field(repr=False)
    replaces: bool
    inside: bool
    token: str
    catalog: Catalog | None
    seen: PriorCommit | None

    @property
    def nbytes(self) -> int:
        return sum(info.size for info in self.sources.values())

    @property
    def left_nbytes(self) -> int:
        """Bytes that are not at the destination yet."""
        return self.nbytes - sum(info.size for info in self.there.values())


@dataclass(frozen=True)
class Copied:
    """Outcome of a copy. `inside`: the service copied the objects, so no checksum could be compared."""

    inside: bool
    checked_bytes: int


def plan_copy(saved: SavedCheckpoint, destination: Place, *, overwrite: bool = False, into: bool = False) -> CopyPlan:
    """Examine source and destination, and plan the copy. Writes no object.

    Args:
        into: copy to a folder in the destination, with the name of the source's folder, as always if the destination
            is a run.

    Raises:
        InvalidURLError: source and destination are the same.
        CheckpointExistsError: the destination has other objects, or a checkpoint that must not, or cannot safely, be
            overwritten.
        CorruptDataError: an object of the source is missing, has another size, or was replaced.
    """
    place = copy_target(Location.of(destination), saved, into)
    (store, prefix), text = place.opened, place.url
    if (store.identity, prefix) == (saved.store.identity, saved.prefix):
        raise InvalidURLError("Source and destination are the same URL", url=text, remedy=_ELSEWHERE)
    sources = look_at_objects(saved, lambda key: retry_transient(lambda: saved.store.head(key)), COPY_OPTIONS)
    used = _used_there(store, prefix, text)
    others, seen = used or (set(), PriorCommit(there=False))
    if used is not None and seen is not None and not overwrite:
        raise CheckpointExistsError(
            "Checkpoint already exists at this URL",
            url=text,
            remedy="Name another destination, or pass --overwrite",
        )
    try:
        above = catalog_above(place)
    except AccessDeniedError:
        # Without permission to read the catalog, the record is stored next to the metadata, as without a catalog.
        above = None
    catalog = above[0] if above is not None else None
    token = named(saved.record, saved.data, saved.info).token
    assert token is not None
    paths = {path: path for path in sources}
    # A pruner that deletes an earlier copy of this checkpoint from the folder selects objects by the token in their
    # names. With the same token, it would delete the objects of the new copy too.
    pruned = catalog is not None and bool(saved.facts) and all(map(keys.token_of, paths))
    if pruned or others is None or not others.isdisjoint(paths):
        token = keys.new_token()
        paths = _moved_aside(saved, text, token)
    there = {} if used is not None or pruned else _left_behind(saved, store, prefix, sources)
    return CopyPlan(
        saved,
        text,
        store,
        prefix,
        paths,
        sources,
        there,
        replaces=used is not None and overwrite,
        inside=inside_one_service(saved.store, store),
        token=token,
        catalog=catalog,
        seen=seen,
    )


def copy_checkpoint(
    plan: CopyPlan, options: TransferOptions = COPY_OPTIONS, *, progress: ProgressCallback | None = None
) -> Copied:
    """Execute a plan. Bytes that pass through this process are compared with every recorded checksum.

    Raises:
        CorruptDataError: the source is damaged; nothing was committed.
        CheckpointExistsError, CommitConflictError: another commit was made meanwhile, or copied objects were deleted.
    """
    saved = plan.saved
    waiting = [path for path in plan.paths if path not in plan.there]
    checks = [_Checked(saved, path, plan.sources[path]) for path in waiting]
    jobs = [
        CopyJob(plan.sources[path], keys.join(plan.prefix, plan.paths[path]), check.see)
        for path, check in zip(waiting, checks, strict=True)
    ]
    meter = Meter("cp", plan.url, plan.left_nbytes, progress)
    # Objects of an interrupted copy are old, so a sweep may delete them as debris even during a fast copy.
    since = LONG_AGO if plan.there else Stopwatch()
    # A copy into a run is logged as a save of that run, with an intent, and the kind and metrics of the source.
    log = SaveLog(plan.catalog, saved.record.kind, saved.record.metrics) if plan.catalog is not None else None
    if log is not None:
        log.begin(plan.url, plan.token)
    infos, inside = copy_objects(saved.store, plan.store, jobs, options, meter=meter)
    copied = {**plan.there, **dict(zip(waiting, infos, strict=True))}
    metadata, facts, data = _metadata_there(plan, copied)
    sizes = {plan.paths[path]: info.size for path, info in copied.items()}
    items, covers = len(saved.items), saved.record.covers
    record = make_record(metadata, facts, data, sizes, items=items, metadata_etag=None, covers=covers)
    if log is not None:
        record = named(record, data, saved.info)
    request = Commit(
        plan.store,
        plan.prefix,
        plan.url,
        plan.token,
        keys.METADATA,
        overwrite=plan.replaces,
        log=log,
        seen=plan.seen,
        fence=AttemptFence(plan.store, plan.prefix, since, sizes),
    )
    _check_unchanged(plan, copied)
    commit_copy(request, data, record, paths=plan.paths.values())
    meter.finish()
    checked = 0 if inside else sum(check.nbytes for check in checks)
    return Copied(inside and bool(jobs), checked)


def files_of_model(source: Location, target: Location, *, overwrite: bool) -> list[CopyJob]:
    """Return the jobs to copy all files of a safetensors folder, as from `save_pretrained`; empty for another folder.

    Raises:
        InvalidURLError: source and destination are the same.
        CheckpointExistsError: the destination has files, and `overwrite` is False; or it has a checkpoint, which
            readers would find instead.
    """
    (store, prefix), (other, there) = source.opened, target.opened
    above = f"{prefix}/" if prefix else ""
    # For a folder, web consoles make an empty object with a name that ends with "/".
    found = [info for info in store.list(above) if not info.key.endswith("/")]
    names = [info.key[len(above) :] for info in found]
    model = any("/" not in name and name.endswith(".safetensors") for name in names)
    # A run is not copied as files, because its checkpoints need commits.
    run = any(name.endswith(f"/{keys.METADATA}") for name in names)
    if not model or run:
        return []
    if (store.identity, prefix) == (other.identity, there):
        raise InvalidURLError("Source and destination are the same URL", url=target.url, remedy=_ELSEWHERE)
    if not overwrite and next(other.list(f"{there}/" if there else ""), None) is not None:
        raise CheckpointExistsError("The destination has files", url=target.url, remedy="Pass --overwrite")
    if overwrite and _used_there(other, there, target.url) is not None:
        raise CheckpointExistsError(
            "The destination has a checkpoint, which readers would find instead of the files",
            url=target.url,
            remedy="Name another destination, or delete the checkpoint with `bucketpoint rm`",
        )
    return [CopyJob(info, keys.join(there, name)) for info, name in zip(found, names, strict=True)]


def copy_files(source: Location, target: Location, jobs: Sequence[CopyJob], meter: Meter) -> None:
    """Copy the files of a model, and last its index, or delete an old index if the model has none.

    If weights are replaced, an old index is deleted first: it would name files of two models after an interruption.
    Files that are equal to the source's may be the source under another name, whose index must stay.
    """
    (store, _), (other, there) = source.opened, target.opened
    index = keys.join(there, INDEX_NAME)
    before = {info.key: info for info in other.list(index.removesuffix(INDEX_NAME))}
    weights = [replace(job.source, key=job.target) for job in jobs if job.target.endswith(".safetensors")]
    if index in before and any(before.get(info.key, info) != info for info in weights):
        delete_all(other, [index])
    last = [job for job in jobs if job.target == index]
    for part in ([job for job in jobs if job.target != index], last):
        copy_objects(store, other, part, COPY_OPTIONS, meter=meter)
    if index in before and not last:
        delete_all(other, [index])


def _used_there(store: Store, prefix: str, url: str) -> tuple[set[str] | None, PriorCommit | None] | None:
    """Return the object paths and the commit at the destination, each None if unreadable; None without a commit."""
    try:
        data, committed = get_metadata(store, keys.join(prefix, keys.METADATA))
    except ObjectNotFoundError:
        return None
    except AccessDeniedError:
        # Without permission to list, S3 answers 403 for a missing key too. The conditional commit will detect a commit.
        return None, None
    seen = PriorCommit(there=True, etag=committed.etag)
    try:
        return data_paths(decode_metadata(data, url=url)), seen
    except BucketpointError:
        return None, seen


def _moved_aside(saved: SavedCheckpoint, url: str, token: str) -> dict[str, str]:
    """Return paths with a new token for all objects.

    A checkpoint at the destination may have objects with the same names, and must stay loadable until the commit.
    """
    moved = {}
    for path in saved.by_object:
        parsed = keys.parse_data_path(path)
        if parsed is None or not saved.facts:
            raise CheckpointExistsError(
                "Checkpoint already exists at this URL, and its data objects may have the names of those "
                "to be copied: overwriting them would damage it before the copy is committed",
                url=url,
                remedy="Delete the checkpoint at the destination first, or name another destination",
            )
        moved[path] = keys.data_path(token, *parsed[1:])
    return moved


def _left_behind(
    saved: SavedCheckpoint, store: Store, prefix: str, sources: Mapping[str, ObjectInfo]
) -> dict[str, ObjectInfo]:
    """Return the complete objects of an earlier copy at the destination.

    Only objects with the token of a save in their names are accepted: other names do not identify the content.
    """
    wanted = {keys.join(prefix, path): path for path in sources if keys.parse_data_path(path) is not None}
    if not wanted or not saved.facts:
        return {}
    try:
        listed = list(store.list(keys.join(prefix, keys.DATA_FOLDER) + "/"))
    except AccessDeniedError:
        return {}
    return {
        wanted[info.key]: info for info in listed if info.key in wanted and info.size == sources[wanted[info.key]].size
    }


def _check_unchanged(plan: CopyPlan, copied: Mapping[str, ObjectInfo]) -> None:
    """Check just before the commit that all objects exist: a sweep may have deleted objects of an interrupted copy.

    Sends one LIST for each 1,000 objects.
    """
    expected = {keys.join(plan.prefix, plan.paths[path]): info for path, info in copied.items()}
    if not expected:
        return
    above = os.path.commonprefix(list(expected))  # noqa: RUF071 (keys)
    try:
        listed = retry_transient(lambda: list(plan.store.list(above)))
    except AccessDeniedError:
        # Without permission to list, no old object was reused, so no sweep can have deleted an object.
        return
    there = {info.key: (info.size, info.etag) for info in listed}
    for key, info in expected.items():
        size, etag = there.get(key, (None, None))
        if size != info.size or (etag is not None and info.etag is not None and etag != info.etag):
            raise CommitConflictError(
                "An object of the copy was deleted or replaced during the copy, so nothing was committed",
                url=plan.url,
                key=key,
                remedy="Copy again: objects that are complete at the destination are not sent again",
            )


def _regions(saved: SavedCheckpoint, path: str, source: ObjectInfo) -> list[Region]:
    tables, items, wrong = read_tables(saved.store, saved.by_object[path], source)
    if wrong:
        fqn = items[wrong[0]][0].fqn
        raise damaged(saved, path, f"the checksums of the blocks of {fqn} differ from those written at save")
    regions: list[Region] = []
    for index, info in items:
        if not regions or info.offset >= regions[-1].stop:
            regions += item_regions(index, info, saved.shapes)
    return [*regions, *table_regions(items, tables, regions[-1].stop if regions else 0)]


class _Checked:
    """Verification of one object while it is copied: raises at the first bytes whose checksum is wrong."""

    def __init__(self, saved: SavedCheckpoint, path: str, source: ObjectInfo) -> None:
        self._saved = saved
        self._path = path
        self._source = source
        self._lock = threading.Lock()
        self._check: ObjectCheck | None = None
        self.nbytes = 0
        """Number of bytes that are compared with a checksum."""

    def see(self, start: int, view: memoryview) -> None:
        with self._lock:
            # Created when the first bytes arrive: if the service copies, no bytes arrive, and no table is needed.
            if self._check is None:
                regions = _regions(self._saved, self._path, self._source)
                self._check = ObjectCheck(regions)
                self.nbytes = sum(region.nbytes for region in regions)
        self._check.note(start, view)
        for region in self._check.wrong():
            raise damaged(
                self._saved,
                self._path,
                f"the {region.part} of {region.fqn}, bytes {region.start}-{region.stop - 1}, has a different checksum",
            )


def _metadata_there(plan: CopyPlan, copied: Mapping[str, ObjectInfo]) -> tuple[Metadata, dict[str, Any], bytes]:
    """Return the metadata to commit, bucketpoint's part of it, and the encoded metadata.

    Metadata of bucketpoint contains the URL of the commit, and the ETags of the objects, which a load checks. Both are
    replaced in the copy. Metadata of other writers contains neither, and is copied byte for byte.
    """
    saved = plan.saved
    if not saved.facts:
        return saved.metadata, {}, saved.data
    metadata = shallow.copy(saved.metadata)
    moved = {old: new for old, new in plan.paths.items() if old != new}
    if moved:
        metadata.storage_data = {index: _at(info, moved) for index, info in (saved.metadata.storage_data or {}).items()}
    if metadata.storage_meta is not None:
        metadata.storage_meta = dataclasses.replace(
            metadata.storage_meta, checkpoint_id=plan.url, save_id=keys.save_id(plan.token)
        )
    facts = {
        **saved.facts,
        "url": plan.url,
        "endpoint": plan.store.identity,
        "token": plan.token,
        "objects": {plan.paths[path]: {"size": info.size, "etag": info.etag} for path, info in sorted(copied.items())},
        "copied_from": saved.url,
    }
    if plan.replaces and plan.catalog is not None:
        # The newest record of a folder counts, and the replaced checkpoint may be newer than the source. So the copy is
        # dated now, also in the metadata, from which the record can be rebuilt.
        facts["created"] = plan.catalog.clock()
    return metadata, facts, encode_metadata(metadata, bucketpoint=facts)


def _at(info: Any, moved: Mapping[str, str]) -> Any:
    there = shallow.copy(info)
    there.relative_path = moved[info.relative_path]
    return there
