"""A conversion from plan to commit: objects are written within the memory budget, and the commit comes last.

The modules in `writers` decide which objects are written; this module writes them, in the same way for every format.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bucketpoint.catalog.run import catalog_above
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME
from bucketpoint.convert.detect import AUTO, format_of, open_object, open_place, open_source
from bucketpoint.convert.journal import Journal, open_journal, remove_stale
from bucketpoint.convert.occupied import is_finished, watch_file, will_replace
from bucketpoint.convert.payload_reader import Filling
from bucketpoint.convert.source import SAFETENSORS, SAFETENSORS_SUFFIX, TORCH, Source
from bucketpoint.convert.target import TargetLayout, TargetPlace
from bucketpoint.convert.writers.to_bucketpoint import plan_bucketpoint
from bucketpoint.convert.writers.to_safetensors import SHARD_BYTES, plan_safetensors
from bucketpoint.convert.writers.to_torch import plan_torch
from bucketpoint.errors import AccessDeniedError, BucketpointError, CommitConflictError
from bucketpoint.format.keys import METADATA
from bucketpoint.location import Location, Place
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import (
    BufferPool,
    Meter,
    ObjectSource,
    ProgressCallback,
    TransferOptions,
    Uploaded,
    upload_objects,
)
from bucketpoint.transfer.checksum import CrcAccumulator, combine, fold_blocks
from bucketpoint.transfer.parts import batched
from bucketpoint.transfer.pieces import for_each, piece_bytes
from bucketpoint.version import __version__

logger = logging.getLogger(__name__)

CONVERT_OPTIONS = TransferOptions(max_inflight_bytes=256 << 20)
"""Default options. All bytes pass through leased memory, so the budget decides the size of parts: about 5 MiB."""

OBJECT_BYTES = 1 << 30
"""Bytes of one object of a checkpoint: the most that an interruption costs, yet large enough for few objects."""

_BATCH_BYTES = 1 << 30
"""Bytes of objects that are uploaded together; the next batch waits for them."""
_SMALLEST_BUDGET = 1 << 20


@dataclass(frozen=True)
class ConvertOptions:
    """Options that decide the content of the target.

    Attributes:
        prefix: prefix of the keys in the DCP checkpoint, such as `model`, to which a dot is added. Writing safetensors
            removes it, and leaves out other keys; reading safetensors puts it before each key.
        shard_bytes: bytes of tensors in one safetensors file.
        object_bytes: bytes of one object of a checkpoint of bucketpoint.
        overwrite: replace an existing target, if the format allows it in one atomic step.
        trusted: unpickle without the allow-list.
        exclude: patterns of keys to leave out, as the source has them: of `fnmatch`, such as `model.rope.*`. A pattern
            without wildcards also leaves out every key below it.
    """

    prefix: str = ""
    shard_bytes: int = SHARD_BYTES
    object_bytes: int = OBJECT_BYTES
    overwrite: bool = False
    trusted: bool = False
    exclude: str | Sequence[str] = ()


@dataclass(frozen=True)
class ConvertPlan:
    """Plan of a conversion.

    Attributes:
        source: the opened source.
        format: format of the target.
        place: the store and the keys of the target.
        layout: the objects of the target, with the bytes of each.
        filling: conversion of the source's bytes to those of the target's objects.
        transfer: sizes and limits of the transfer.
        journal: None if there is only one object, which appears whole or not at all.
        other: journal of another conversion that was found at the target.
        finished: True if an earlier run has committed, and only its journal is left.
        log: log of the run in which the target becomes a checkpoint; None if it lies in no run.
        token: token of the attempt, in the keys of the objects that it writes.
        there: objects that an interrupted run has written, by key.
        replaces: a checkpoint or file is at the target, and will be replaced.
    """

    source: Source
    format: str
    place: TargetPlace
    layout: TargetLayout
    filling: Filling
    transfer: TransferOptions
    journal: Journal | None = None
    other: Journal | None = None
    finished: bool = False
    log: SaveLog | None = None
    token: str = ""
    there: Mapping[str, Uploaded] = field(default_factory=dict, repr=False)
    replaces: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all objects of the target, without the commit."""
        return sum(entry.nbytes for entry in self.layout.objects)

    @property
    def left_nbytes(self) -> int:
        """Bytes that are not at the target yet."""
        return sum(entry.nbytes for entry in self.layout.objects if entry.key not in self.there)


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        objects: number of objects of the target.
        nbytes: bytes of all objects of the target.
        skipped: number of objects that an interrupted run had written.
        checked_bytes: bytes of the source that were compared with its checksums.
        verified_bytes: bytes read again at the target; None if that was not requested.
        damaged: objects that did not read back as they were written.
        peak_bytes: most memory held for bytes in flight.
    """

    objects: int
    nbytes: int
    skipped: int
    checked_bytes: int
    verified_bytes: int | None
    damaged: Sequence[str]
    peak_bytes: int


def plan_conversion(
    source: Place,
    target: Place,
    *,
    from_format: str = AUTO,
    to_format: str = AUTO,
    options: ConvertOptions | None = None,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    source_fs: Any = None,
    target_fs: Any = None,
    transfer: TransferOptions = CONVERT_OPTIONS,
) -> ConvertPlan:
    """Look at source and target, and plan the conversion. Writes nothing.

    Args:
        source: URL or local path of the checkpoint to read.
        target: URL or local path of the checkpoint to write.
        from_format: one of `FORMATS`, or `"auto"`: detected from the source's content.
        to_format: one of `TARGETS`, or `"auto"`: by the target's ending, a file of torch.save or of safetensors, else a
            folder of bucketpoint.
        options: options that decide the content of the target.
        source_options, target_options: storage options of the source and of the target, as for `BucketWriter`.
        source_fs, target_fs: an fsspec filesystem of your own for the source, and for the target.
        transfer: sizes and limits of the transfer.

    Raises:
        CheckpointNotFoundError: there is nothing to convert.
        CheckpointExistsError: there is a checkpoint or file at the target already.
        UnsafeDataError: the source names something outside the allow-list.
        MismatchError: the target's format cannot hold the source's content, or a pattern in `exclude` matches no key.
        MetadataError, CorruptDataError: the source is damaged.
    """
    chosen = options or ConvertOptions()
    if chosen.prefix and not chosen.prefix.endswith("."):
        chosen = replace(chosen, prefix=f"{chosen.prefix}.")
    transfer = _within(transfer)
    there = Location.of(target, target_options, target_fs)
    url = there.url
    opened = open_source(
        Location.of(source, source_options, source_fs),
        from_format,
        prefix=chosen.prefix,
        exclude=chosen.exclude,
        trusted=chosen.trusted,
        transfer=transfer,
    )
    wanted = format_of(url, to_format, opened)
    if chosen.prefix and SAFETENSORS not in (opened.format, wanted):
        raise BucketpointError(
            f"--prefix is only for safetensors, and this conversion is from {opened.format} to {wanted}",
            remedy="Leave --prefix out",
        )
    filling = Filling(opened.bytes, transfer.max_inflight_bytes // 4)
    if wanted == TORCH or url.endswith(SAFETENSORS_SUFFIX):
        store, key = open_object(there)
        folder, _, name = key.rpartition("/")
        place = TargetPlace(store, folder, url)
        if wanted == TORCH:
            before_end = watch_file(place, name)
            layout = plan_torch(opened, filling, name, trusted=chosen.trusted, before_end=before_end)
        else:
            layout = plan_safetensors(opened, filling, place, chosen.prefix, chosen.shard_bytes, name)
        replaces = will_replace(place, wanted, name, chosen.overwrite)
        return ConvertPlan(opened, wanted, place, layout, filling, transfer, replaces=replaces)
    store, folder = open_place(there)
    place = TargetPlace(store, folder, url)
    journal, other = open_journal(place, _digest(opened, wanted, chosen))
    token, log = journal.token, None
    if wanted == SAFETENSORS:
        layout = plan_safetensors(opened, filling, place, chosen.prefix, chosen.shard_bytes)
    else:
        log = _log_there(there, opened)
        layout = plan_bucketpoint(
            opened, filling, place, token=token, object_bytes=chosen.object_bytes, overwrite=chosen.overwrite, log=log
        )
    done = journal.done(layout.objects, transfer) if journal.notes else {}
    finished = is_finished(place, wanted, journal, whole=len(done) == len(layout.objects))
    replaces = not finished and will_replace(place, wanted, "", chosen.overwrite)
    kept = journal if finished or len(layout.objects) > 1 else None
    return ConvertPlan(
        opened, wanted, place, layout, filling, transfer, kept, other, finished, log, token, done, replaces
    )


def run_conversion(plan: ConvertPlan, *, verify: bool = False, progress: ProgressCallback | None = None) -> Converted:
    """Carry out the plan. The target exists once all of it is written, or not at all.

    Args:
        plan: the plan, as `plan_conversion` returns it.
        progress: called with a `Progress` as bytes are written.
        verify: read the target again, and compare it with the checksums of the sent bytes.

    Raises:
        CorruptDataError: the source is damaged, or changed meanwhile; nothing was committed.
        CheckpointExistsError, CommitConflictError: somebody else wrote to the target meanwhile.
        StoreError: a request failed, after all retries. A new run continues after the objects of this one.
    """
    objects, done = plan.layout.objects, dict(plan.there)
    skipped = len(done)
    pool = BufferPool(_on_the_way(plan.transfer).max_inflight_bytes)
    meter = Meter("convert", plan.place.url, plan.left_nbytes, progress)
    stale = dict(plan.journal.stale) if plan.journal is not None else {}
    if not plan.finished:
        if plan.other is not None:
            stale = {**plan.other.leftovers(), **stale}
        if stale and any(plan.place.head(name) is not None for name in (METADATA, INDEX_NAME)):
            # A committed object is no remnant, whoever wrote it.
            stale = {}
        if plan.journal is not None:
            plan.journal.begin(objects, stale)
        if plan.log is not None:
            plan.log.begin(plan.place.url, plan.token)
        _send(plan, done, pool, meter)
        ordered = [done[entry.key] for entry in objects]
        plan.source.bytes.check_unchanged()
        _check_unchanged(plan, ordered)
        plan.layout.commit(ordered)
    if stale:
        _tidy(plan, partial(remove_stale, plan.place, stale, {entry.key for entry in objects}, plan.transfer))
    if stale and plan.journal is None and plan.other is not None:
        _tidy(plan, plan.other.remove)
    damaged: list[str] = []
    if verify:
        damaged = _read_again(plan.place, objects, done, _on_the_way(plan.transfer), meter)
    if plan.journal is not None:
        _tidy(plan, plan.journal.remove)
    meter.finish()
    return Converted(
        len(objects),
        plan.nbytes,
        skipped,
        plan.filling.checked_bytes,
        plan.nbytes if verify else None,
        damaged,
        pool.peak_bytes + plan.filling.pool.peak_bytes + plan.source.bytes.cache.nbytes,
    )


def _within(transfer: TransferOptions) -> TransferOptions:
    """Limit the size of single PUTs: half of the budget is for bytes in flight, and one PUT must fit into it."""
    budget = max(transfer.max_inflight_bytes, _SMALLEST_BUDGET)
    return replace(transfer, max_inflight_bytes=budget, single_put_bytes=min(transfer.single_put_bytes, budget // 4))


def _on_the_way(transfer: TransferOptions) -> TransferOptions:
    """Return options with the half of the budget for bytes in flight.

    The rest is for rearranged chunks and small reads.
    """
    return replace(transfer, max_inflight_bytes=transfer.max_inflight_bytes // 2)


def _digest(source: Source, wanted: str, options: ConvertOptions) -> str:
    content = (__version__, source.format, source.fingerprint, wanted, options.prefix, sorted(source.excluded))
    sizes = (options.shard_bytes, options.object_bytes)
    return hashlib.sha256(repr((content, sizes)).encode()).hexdigest()


def _log_there(target: Location, source: Source) -> SaveLog | None:
    """Return the log of the run that contains the target, if any: a conversion into a run is one of its saves."""
    try:
        run = catalog_above(target)
    except AccessDeniedError:
        # A caller who may only write there leaves just the record beside the metadata, like any writer without a
        # catalog.
        return None
    return None if run is None else SaveLog(run[0], source.kind, source.metrics)


def _send(plan: ConvertPlan, done: dict[str, Uploaded], pool: BufferPool, meter: Meter) -> None:
    """Write the objects that are not there yet, and note each in the journal."""
    missing = [entry for entry in plan.layout.objects if entry.key not in done]
    try:
        for batch in batched(missing, lambda entry: entry.nbytes, _BATCH_BYTES):
            uploaded = _upload(plan, batch, pool, meter)
            done.update(zip((entry.key for entry in batch), uploaded, strict=True))
    except BaseException:
        if plan.journal is not None:
            _tidy(plan, plan.journal.flush)
        raise
    if plan.journal is not None:
        plan.journal.flush()


def _upload(plan: ConvertPlan, batch: Sequence[ObjectSource], pool: BufferPool, meter: Meter) -> list[Uploaded]:
    def note(number: int, uploaded: Uploaded) -> None:
        if plan.journal is not None:
            plan.journal.note(batch[number], uploaded)

    sources = [replace(entry, key=plan.place.key(entry.key)) for entry in batch]
    options = _on_the_way(plan.transfer)
    return upload_objects(plan.place.store, sources, options, pool=pool, meter=meter, acknowledged=note)


def _tidy(plan: ConvertPlan, remove: Callable[[], None]) -> None:
    """Run a cleanup, and only log a failure: a writer may lack the right to delete."""
    try:
        remove()
    except BucketpointError as error:
        logger.warning("temporary objects of the conversion were not deleted at %s: %s", plan.place.url, error)


def _check_unchanged(plan: ConvertPlan, uploaded: Sequence[Uploaded]) -> None:
    """Check that all objects are still as they were written, before the commit.

    If names are fixed, two conversions to one place overwrite each other's objects: neither may then commit.
    """

    def look(pair: tuple[ObjectSource, Uploaded]) -> None:
        entry, known = pair[0], pair[1].info
        key = plan.place.key(entry.key)
        info = retry_transient(lambda: plan.place.store.head(key), attempts=plan.transfer.read_attempts)
        if info.size != entry.nbytes or (known.etag is not None and info.etag != known.etag):
            raise CommitConflictError(
                "Another process wrote to the target during the conversion, so nothing was committed",
                url=plan.place.url,
                key=key,
            )

    for_each(zip(plan.layout.objects, uploaded, strict=True), look, plan.transfer)


def _read_again(
    place: TargetPlace,
    objects: Sequence[ObjectSource],
    done: Mapping[str, Uploaded],
    options: TransferOptions,
    meter: Meter,
) -> list[str]:
    """Read all objects, and return the paths of those that differ from what was sent."""
    pool, step = BufferPool(options.max_inflight_bytes), piece_bytes(options)
    sums = {entry.key: CrcAccumulator(entry.nbytes) for entry in objects}

    def read(piece: tuple[ObjectSource, int]) -> None:
        entry, start = piece
        key, nbytes = place.key(entry.key), min(step, entry.nbytes - start)
        with pool.lease(nbytes) as view:
            retry_transient(lambda: place.store.read_into(key, start, [view]), attempts=options.read_attempts)
            sums[entry.key].take(start, view)
        meter.add(nbytes)

    meter.total_bytes += sum(entry.nbytes for entry in objects)
    for_each(((entry, start) for entry in objects for start in range(0, entry.nbytes, step)), read, options)

    def damaged(entry: ObjectSource) -> bool:
        return entry.key not in done or sums[entry.key].total() != _sent(entry, done[entry.key])

    return [entry.key for entry in objects if damaged(entry)]


def _sent(entry: ObjectSource, uploaded: Uploaded) -> int:
    """Compute the CRC32C of a sent object from those of its blocks."""
    total = 0
    for segment, crcs in zip(entry.segments, uploaded.block_crcs, strict=True):
        total = combine(total, fold_blocks(crcs, segment.nbytes, segment.block_nbytes), segment.nbytes)
    return total
