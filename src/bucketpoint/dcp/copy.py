"""Copy of a committed checkpoint: data objects first, then `.metadata`, by the same commit as a save.

A checkpoint at the destination stays whole until that commit. An interrupted copy is resumed: objects already there are
not sent again.
"""

from __future__ import annotations

import copy as shallow
import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint import Metadata

from bucketpoint.catalog.catalog import Catalog, get_metadata
from bucketpoint.catalog.deletion.fence import AttemptFence
from bucketpoint.catalog.records import named
from bucketpoint.catalog.run import catalog_above
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.checkpoint.block_tables import read_tables
from bucketpoint.checkpoint.objects import copy_target, damaged, look_at_objects
from bucketpoint.checkpoint.open import SavedCheckpoint
from bucketpoint.checkpoint.regions import ObjectCheck, Region, item_regions, table_regions
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

COPY_OPTIONS = TransferOptions(max_inflight_bytes=256 << 20)
"""All bytes pass through memory of this process, so the budget decides the size of parts: about 10 MiB."""


@dataclass(frozen=True)
class CopyPlan:
    """The steps of a copy, decided before anything is written.

    Attributes:
        paths: path of each object in the source, and the path that it gets at the destination.
        sources: size and ETag of each object, from the source's store.
        there: complete objects of an earlier, interrupted copy at the destination.
        replaces: a checkpoint is committed at the destination, or may be, and will be replaced.
        seen: commit found at the destination; only it may be replaced. None: it could not be read, and is not checked.
        inside: the service can copy the objects, without sending them through this process.
        token: token of the copy: that of the original save, or the fresh one in the objects' new names.
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
    """The outcome of a copy. `inside`: the service copied the objects, so that no checksum could be compared."""

    objects: int
    nbytes: int
    skipped: int
    inside: bool
    checked_bytes: int


def plan_copy(saved: SavedCheckpoint, destination: Place, *, overwrite: bool = False, into: bool = False) -> CopyPlan:
    """Look at source and destination, and plan the copy. Writes nothing.

    Args:
        into: copy to a folder in the destination, with the name of the source's. So is a copy to a run.

    Raises:
        InvalidURLError: both are the same place.
        CheckpointExistsError: the destination has a checkpoint that must not, or cannot safely, be overwritten, or
            other objects.
        CorruptDataError: an object of the source is missing, has another size, or was replaced.
    """
    place = copy_target(Location.of(destination), saved, into)
    (store, prefix), text = place.opened, place.url
    if (store.identity, prefix) == (saved.store.identity, saved.prefix):
        raise InvalidURLError("Source and destination are the same URL", url=text, remedy="Name another destination")
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
        # Without the right to read the catalog, the record goes beside the metadata, as for any writer without one.
        above = None
    catalog = above[0] if above is not None else None
    token = named(saved.record, saved.data, saved.info).token
    assert token is not None
    paths = {path: path for path in sources}
    # A pruner that deletes an earlier copy of this checkpoint from the folder picks objects by the token in their
    # names: with the same token it would delete the new copy's objects too.
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
    """Carry out a plan. Bytes that pass through this process are compared with every recorded checksum.

    Raises:
        CorruptDataError: the source is damaged; nothing was committed.
        CheckpointExistsError, CommitConflictError: another commit was made meanwhile, and stays.
    """
    saved = plan.saved
    waiting = [path for path in plan.paths if path not in plan.there]
    checks = [_Checked(saved, path, plan.sources[path]) for path in waiting]
    jobs = [
        CopyJob(plan.sources[path], keys.join(plan.prefix, plan.paths[path]), check.see)
        for path, check in zip(waiting, checks, strict=True)
    ]
    meter = Meter("cp", plan.url, plan.left_nbytes, progress)
    # Objects of an interrupted copy are old, so a sweep may delete them as debris however fast this copy is.
    since = LONG_AGO if plan.there else Stopwatch()
    # A copy into a run counts as a save of that run: it has an intent too, and the source's kind and metrics.
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
    return Copied(len(plan.paths), plan.nbytes, len(plan.there), inside and bool(jobs), checked)


def files_of_model(source: Location, target: Location, *, overwrite: bool) -> list[CopyJob]:
    """Return the copies of all files in a folder of safetensors, as `save_pretrained` writes it. Empty if it is none.

    Raises:
        CheckpointExistsError: the destination has files, and `overwrite` is False; or a checkpoint, which readers would
            find instead of the files.
    """
    (store, prefix), (other, there) = source.opened, target.opened
    above = f"{prefix}/" if prefix else ""
    # Consoles make an empty object with a "/" at the end for a folder.
    found = [info for info in store.list(above) if not info.key.endswith("/")]
    names = [info.key[len(above) :] for info in found]
    model = any("/" not in name and name.endswith(".safetensors") for name in names)
    # The checkpoints of a run are copied by their commits, and not with the files beside them.
    run = any(name.endswith(f"/{keys.METADATA}") for name in names)
    if not model or run or (store.identity, prefix) == (other.identity, there):
        return []
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
    """Copy the files of a model. A former index at the destination goes first, and the new one comes last.

    Otherwise an interrupted copy, or one of a single file, could leave an index over files that are not its own.
    """
    (store, _), (other, there) = source.opened, target.opened
    index = keys.join(there, INDEX_NAME)
    if next(other.list(index), None) is not None:
        delete_all(other, [index])
    for part in ([job for job in jobs if job.target != index], [job for job in jobs if job.target == index]):
        copy_objects(store, other, part, COPY_OPTIONS, meter=meter)


def _used_there(store: Store, prefix: str, url: str) -> tuple[set[str] | None, PriorCommit | None] | None:
    """Return the object paths and the commit of a checkpoint at the destination, each None if it cannot be read."""
    try:
        data, committed = get_metadata(store, keys.join(prefix, keys.METADATA))
    except ObjectNotFoundError:
        return None
    except AccessDeniedError:
        # Without the right to list, S3 answers 403 for a missing key too. The commit will find out.
        return None, None
    seen = PriorCommit(there=True, etag=committed.etag)
    try:
        return data_paths(decode_metadata(data, url=url)), seen
    except BucketpointError:
        return None, seen


def _moved_aside(saved: SavedCheckpoint, url: str, token: str) -> dict[str, str]:
    """Return paths with a fresh token for all objects.

    The checkpoint at the destination has objects of the same names, and must stay loadable until the commit.
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
    """Return the objects that are at the destination already.

    Only objects named by the token of a save are accepted: other names do not identify the content.
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
    """Check just before the commit that all objects still exist: a sweep may have deleted those of an old copy.

    One LIST for each 1,000 objects.
    """
    expected = {keys.join(plan.prefix, plan.paths[path]): info for path, info in copied.items()}
    if not expected:
        return
    above = os.path.commonprefix(list(expected))  # noqa: RUF071 (keys)
    try:
        listed = retry_transient(lambda: list(plan.store.list(above)))
    except AccessDeniedError:
        # Without the right to list, no object of an earlier copy was reused, so no sweep can have deleted one.
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
        """Bytes that are compared with a checksum."""

    def see(self, start: int, view: memoryview) -> None:
        with self._lock:
            # Created when the first bytes arrive: none arrive if the service copies, and then no table is read.
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
    """Return the metadata to commit, bucketpoint's part of it, and both as bytes.

    Metadata of bucketpoint holds the URL of the commit and the ETags of the objects, which a load checks: the copy gets
        new ones. Metadata of other writers holds neither, and is copied unchanged to the byte.
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
        # Of several records of one folder the youngest counts, and the replaced checkpoint may be younger than the
        # source. So the copy is dated now; in the metadata too, from which the record can be rebuilt.
        facts["created"] = plan.catalog.clock()
    return metadata, facts, encode_metadata(metadata, bucketpoint=facts)


def _at(info: Any, moved: Mapping[str, str]) -> Any:
    there = shallow.copy(info)
    there.relative_path = moved[info.relative_path]
    return there
