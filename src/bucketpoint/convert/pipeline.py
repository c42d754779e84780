"""A conversion from plan to commit: objects are written within the memory budget, and the commit comes last.

The writers (`to_...`) decide which objects are written; this module writes them, in the same way for every format.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bucketpoint.catalog.run import catalog_above
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME
from bucketpoint.convert.detect import AUTO, format_of, open_object, open_place, open_source
from bucketpoint.convert.journal import NAME, name_of, open_journal, remove_stale
from bucketpoint.convert.payload_reader import Filling
from bucketpoint.convert.plan import Converted, ConvertOptions, ConvertPlan
from bucketpoint.convert.source import SAFETENSORS, SAFETENSORS_SUFFIX, TORCH, Source
from bucketpoint.convert.target import (
    TargetPlace,
    Worker,
    check_worker,
    copy_beside,
    former_weights,
    has_files,
    indexed_by,
    is_exported,
    refuse_own_source,
    watch_files,
    will_replace,
)
from bucketpoint.convert.to_bucketpoint import plan_bucketpoint
from bucketpoint.convert.to_files import plan_safetensors, plan_torch
from bucketpoint.errors import AccessDeniedError, BucketpointError, CheckpointExistsError, CommitConflictError
from bucketpoint.format.item_names import renaming
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
from bucketpoint.transfer.pieces import batched, for_each, piece_bytes
from bucketpoint.version import __version__

logger = logging.getLogger(__name__)

CONVERT_OPTIONS = TransferOptions(max_inflight_bytes=256 << 20)
"""Default options. All bytes pass through leased memory, so the budget limits the size of parts: to about 5 MiB."""

_BATCH_BYTES = 1 << 30
"""Bytes of the objects in a batch; the next batch begins when all of them are uploaded."""
_SMALLEST_BUDGET = 1 << 20


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
    worker: Worker | None = None,
) -> ConvertPlan:
    """Inspect source and target, and plan the conversion. Writes nothing.

    Args:
        source: URL or local path of the checkpoint to read.
        target: URL or local path of the checkpoint to write.
        from_format: one of `FORMATS`, or `"auto"`: detected from the source's content.
        to_format: one of `TARGETS`, or `"auto"`: by the target's ending, a file of torch.save or of safetensors, else a
            folder of bucketpoint.
        options: options that determine the content of the target.
        source_options, target_options: storage options of the source and of the target, as for `BucketWriter`.
        source_fs, target_fs: fsspec filesystems of the source and of the target, in place of the stores of the URLs.
        transfer: sizes and limits of the transfer.
        worker: number of this worker and number of all workers, which share the files of safetensors. A worker that
            finds all files written commits.

    Raises:
        CheckpointNotFoundError: there is nothing to convert.
        CheckpointExistsError: a checkpoint or file exists at the target.
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
    if worker is not None:
        check_worker(worker)
        if wanted != SAFETENSORS or url.endswith(SAFETENSORS_SUFFIX):
            raise BucketpointError(
                "Workers share only the files of a folder of safetensors", url=url, remedy="Leave --workers out"
            )
    names = _new_names(opened, chosen) if wanted == SAFETENSORS else {}
    filling = Filling(opened.bytes, transfer.max_inflight_bytes // 4)
    if wanted == TORCH or url.endswith(SAFETENSORS_SUFFIX):
        store, key = open_object(there)
        folder, _, name = key.rpartition("/")
        place = TargetPlace(store, folder, url)
        if wanted == TORCH:
            layout = plan_torch(opened, filling, name, trusted=chosen.trusted)
        else:
            layout = plan_safetensors(opened, filling, place, names, chosen.shard_bytes, name)
        watch = watch_files(place, [name])
        replaces = will_replace(place, wanted, name, chosen.overwrite)
        return ConvertPlan(opened, wanted, place, layout, filling, transfer, replaces=replaces, watch=watch)
    store, folder = open_place(there)
    place = TargetPlace(store, folder, url)
    digest = _digest(opened, wanted, chosen, names)
    journal, other = open_journal(place, digest, NAME if worker is None else name_of(worker))
    token, log = journal.token, None
    watch = watch_files(place, [INDEX_NAME, SINGLE_NAME] if wanted == SAFETENSORS else [], digest)
    removes = worker is not None and chosen.overwrite
    replaces = removes and will_replace(place, wanted, "", overwrite=True, removes=True)
    if wanted == SAFETENSORS:
        layout = plan_safetensors(opened, filling, place, names, chosen.shard_bytes, digest=digest, replaces=replaces)
        finished = is_exported(place, layout.objects, digest, transfer)
        if finished and replaces:
            # A run that ended before it had deleted the former weights is continued.
            with contextlib.suppress(AccessDeniedError):
                finished = not former_weights(place, [entry.key for entry in layout.objects])
    else:
        log = _log_there(there, opened)
        finished = journal.is_committed()
        layout = plan_bucketpoint(
            opened, filling, place, token=token, object_bytes=chosen.object_bytes, overwrite=chosen.overwrite, log=log
        )
    several = len(layout.objects) > 1
    done = journal.done(layout.objects, transfer) if journal.notes else {}
    if removes and not finished:
        refuse_own_source(opened, place)
    plan = ConvertPlan(
        opened, wanted, place, layout, filling, transfer, journal if finished or several else None, other, finished,
        log, token, done, worker=worker, digest=digest, watch=watch,
    )  # fmt: skip
    if finished or not plan.objects:
        return plan
    replaces = replaces if removes else will_replace(place, wanted, "", chosen.overwrite, removes=worker is not None)
    return replace(plan, replaces=replaces)


def run_conversion(
    plan: ConvertPlan, *, verify: bool = False, progress: ProgressCallback | None = None, commit: bool = True
) -> Converted:
    """Execute the plan. The target becomes visible only once all of it is written.

    Args:
        plan: result of `plan_conversion`.
        progress: called with a `Progress` as bytes are written.
        verify: read the target again, and compare it with the checksums of the sent bytes.
        commit: False leaves the commit to `commit_conversion`.

    Raises:
        CorruptDataError: the source is damaged, or changed meanwhile; nothing was committed.
        CheckpointExistsError, CommitConflictError: another process wrote to the target meanwhile.
        StoreError: a request failed, after all retries. A new run keeps the objects that this run has written.
    """
    objects, done = plan.objects, dict(plan.there)
    skipped = len(done)
    pool = BufferPool(_on_the_way(plan.transfer).max_inflight_bytes)
    meter = Meter("convert", plan.place.url, plan.left_nbytes, progress)
    if not plan.finished:
        if plan.journal is not None and objects:
            plan.journal.begin(objects)
        if plan.log is not None:
            plan.log.begin(plan.place.url, plan.token)
        beside, to_file = plan.source.folder, plan.place.url.endswith(SAFETENSORS_SUFFIX)
        first = plan.worker is None or plan.worker[0] == 0
        if plan.format == SAFETENSORS and not to_file and first and beside is not None:
            copy_beside(plan.source.bytes.store, beside, plan.place, _on_the_way(plan.transfer))
        _send(plan, done, pool, meter)
        plan.source.bytes.check_unchanged()
    committed = plan.finished or (commit and _commit(plan, done))
    # Checksums of objects that an earlier run has sent are only in the journal.
    sent = [entry for entry in objects if entry.key in done] if plan.finished else objects
    damaged: list[str] = []
    if verify:
        damaged = _read_again(plan.place, sent, done, _on_the_way(plan.transfer), meter)
    if committed:
        _tidy(plan, partial(_remove_leftovers, plan))
    meter.finish()
    return Converted(
        len(objects),
        plan.nbytes,
        skipped,
        plan.filling.checked_bytes,
        sum(entry.nbytes for entry in sent) if verify else None,
        damaged,
        pool.peak_bytes + plan.filling.pool.peak_bytes + plan.source.bytes.cache.nbytes,
        committed,
    )


def commit_conversion(plan: ConvertPlan) -> bool:
    """Commit the objects that the workers have written, and delete their journals. Returns False if any is missing."""
    if not _commit(plan, {}):
        return False
    _tidy(plan, partial(_remove_leftovers, plan))
    return True


def _commit(plan: ConvertPlan, done: Mapping[str, Uploaded]) -> bool:
    """Commit if the objects of all workers are at the target, unchanged. Returns False if any is missing."""
    objects = plan.layout.objects
    if plan.worker is not None and plan.journal is not None:
        plan.journal.join(plan.workers)
        done = plan.journal.done(objects, plan.transfer)
    elif plan.worker is not None:
        # A single file becomes visible as a whole by its upload. Former weights are deleted only beside it.
        if plan.replaces and has_files(plan.place, objects, plan.transfer):
            plan.layout.commit([])
        return is_exported(plan.place, objects, plan.digest, plan.transfer)
    if len(done) < len(objects):
        # Another worker that ended at the same time may have committed and deleted the journals.
        return bool(plan.digest) and plan.worker is not None and indexed_by(plan.place) == plan.digest
    ordered = [done[entry.key] for entry in objects]
    _check_unchanged(plan, ordered)
    if len(objects) > 1:
        _give_way(plan)
    try:
        plan.layout.commit(ordered)
    except CheckpointExistsError:
        _give_way(plan)
        raise
    return True


def _give_way(plan: ConvertPlan) -> None:
    """If another conversion has committed safetensors, delete this one's files and raise CommitConflictError."""
    try:
        plan.watch()
    except CommitConflictError:
        if plan.journal is not None:
            _tidy(plan, partial(remove_stale, plan.place, [entry.key for entry in plan.layout.objects]))
            _tidy(plan, plan.journal.remove)
        raise


def _remove_leftovers(plan: ConvertPlan) -> None:
    """Delete the journals after the commit, and the objects of earlier conversions that did not finish."""
    journal = plan.journal or plan.other
    if journal is None:
        return
    if plan.journal is None:
        journal.join(plan.workers)
    stale = journal.leftovers() - {entry.key for entry in plan.layout.objects}
    # S3 answers 403 instead of 404 to callers that may not list.
    with contextlib.suppress(AccessDeniedError):
        # Objects that a commit in the other format names must stay.
        if stale and plan.place.head(METADATA if plan.format == SAFETENSORS else INDEX_NAME) is None:
            remove_stale(plan.place, stale)
    journal.remove(plan.workers)


def _new_names(source: Source, options: ConvertOptions) -> dict[str, str]:
    """Map the keys that are to be written to their names in safetensors."""
    rename, prefix = renaming(options.names), options.prefix
    named = {fqn: rename(fqn[len(prefix) :]) for fqn in source.metadata.state_dict_metadata if fqn.startswith(prefix)}
    return {fqn: name for fqn, name in named.items() if name is not None}


def _within(transfer: TransferOptions) -> TransferOptions:
    """Limit the size of single PUTs, which must fit into the half of the budget that is for bytes in flight."""
    budget = max(transfer.max_inflight_bytes, _SMALLEST_BUDGET)
    return replace(transfer, max_inflight_bytes=budget, single_put_bytes=min(transfer.single_put_bytes, budget // 4))


def _on_the_way(transfer: TransferOptions) -> TransferOptions:
    """Return options with half of the budget, for bytes in flight. The rest is for rearranged chunks and the cache."""
    return replace(transfer, max_inflight_bytes=transfer.max_inflight_bytes // 2)


def _digest(source: Source, wanted: str, options: ConvertOptions, names: Mapping[str, str]) -> str:
    content: tuple[Any, ...] = (__version__, source.format, source.fingerprint, wanted, sorted(source.excluded))
    content = (*content, options.prefix, sorted(names.items()))
    sizes = (options.shard_bytes, options.object_bytes)
    return hashlib.sha256(repr((content, sizes)).encode()).hexdigest()


def _log_there(target: Location, source: Source) -> SaveLog | None:
    """Return the log of the run that contains the target, if any: a conversion into a run counts as a save."""
    try:
        run = catalog_above(target)
    except AccessDeniedError:
        # A caller that may only write there writes the record beside the metadata, like any writer without a catalog.
        return None
    return None if run is None else SaveLog(run[0], source.kind, source.metrics)


def _send(plan: ConvertPlan, done: dict[str, Uploaded], pool: BufferPool, meter: Meter) -> None:
    """Write the missing objects, and note each in the journal."""
    missing = [entry for entry in plan.objects if entry.key not in done]
    try:
        for batch in batched(missing, lambda entry: entry.nbytes, _BATCH_BYTES):
            uploaded = _upload(plan, batch, pool, meter)
            done.update(zip((entry.key for entry in batch), uploaded, strict=True))
    except CommitConflictError:
        # Files are deleted only now, when no upload is under way.
        _give_way(plan)
        raise
    except BaseException:
        if plan.journal is not None:
            _tidy(plan, plan.journal.flush)
        raise
    if plan.journal is not None:
        plan.journal.flush()
        _give_way(plan)


def _upload(plan: ConvertPlan, batch: Sequence[ObjectSource], pool: BufferPool, meter: Meter) -> list[Uploaded]:
    def note(number: int, uploaded: Uploaded) -> None:
        if plan.journal is not None:
            plan.journal.note(batch[number], uploaded)

    sources = [replace(entry, key=plan.place.key(entry.key)) for entry in batch]
    options = _on_the_way(plan.transfer)
    return upload_objects(
        plan.place.store, sources, options, pool=pool, meter=meter, acknowledged=note, ending=plan.watch
    )


def _tidy(plan: ConvertPlan, remove: Callable[[], None]) -> None:
    """Run a cleanup, and only log a failure: a writer may lack the right to delete."""
    try:
        remove()
    except BucketpointError as error:
        logger.warning("temporary objects of the conversion were not deleted at %s: %s", plan.place.url, error)


def _check_unchanged(plan: ConvertPlan, uploaded: Sequence[Uploaded]) -> None:
    """Check before the commit that all objects are still as they were written.

    Another run of this conversion writes the same keys, and may have replaced or deleted an object.
    """

    def look(pair: tuple[ObjectSource, Uploaded]) -> None:
        entry, known = pair[0], pair[1].info
        info = retry_transient(lambda: plan.place.head(entry.key), attempts=plan.transfer.read_attempts)
        if info is None or info.size != entry.nbytes or (known.etag is not None and info.etag != known.etag):
            raise CommitConflictError(
                "Another process wrote to the target during the conversion, so nothing was committed",
                url=plan.place.url,
                key=plan.place.key(entry.key),
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
