"""Objects from one store to another: inside the service where that can be, else through this process in pieces.

Every byte that comes through is shown to a check before the object that it belongs to can become visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bucketpoint.errors import (
    CorruptDataError,
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from bucketpoint.stores import CopiesInside, ObjectInfo, Store
from bucketpoint.transfer.budget import BufferPool
from bucketpoint.transfer.options import TransferOptions
from bucketpoint.transfer.pieces import each
from bucketpoint.transfer.progress import Meter
from bucketpoint.transfer.retry import retry_transient
from bucketpoint.transfer.upload import ObjectSource, Segment, upload_objects

_NO_REFUSAL = (TransientStoreError, ThrottledError, EndpointError, ObjectNotFoundError, PreconditionFailedError)

See = Callable[[int, memoryview], None]
"""`see(start, view)` is shown the bytes of an object from `start` on, from several threads, and raises to refuse."""


@dataclass(frozen=True)
class CopyJob:
    """One object to copy: what `head` said of the source, and the key that it gets."""

    source: ObjectInfo
    target: str
    see: See | None = None


def inside_one_service(source: Store, target: Store) -> bool:
    """Whether the service can be asked to copy between these stores by itself."""
    return isinstance(target, CopiesInside) and target.can_copy_from(source)


def copy_objects(
    source: Store, target: Store, jobs: Sequence[CopyJob], options: TransferOptions, *, meter: Meter
) -> tuple[list[ObjectInfo], bool]:
    """Copy all objects in parallel. Memory stays within `max_inflight_bytes` where the target takes parts.

    Returns:
        what the target says of each, and whether the service copied them by itself.

    Raises:
        CorruptDataError: an object has another size afterwards.
        StoreError: a request failed for good. What was begun is aborted; whole objects stay.
    """
    if jobs and isinstance(target, CopiesInside) and target.can_copy_from(source):
        try:
            first = _copy_inside(source, target, jobs[0], options, meter)
        except StoreError as error:
            # The target's credentials may not reach the source, and some services copy within a bucket, a region or a
            # partition only: whatever the refusal says, the bytes can still come through here.
            if isinstance(error, _NO_REFUSAL):
                raise
        else:
            copied = {jobs[0].target: first}

            def copy(job: CopyJob) -> None:
                copied[job.target] = _copy_inside(source, target, job, options, meter)

            each(jobs[1:], copy, options)
            return [copied[job.target] for job in jobs], True
    return _stream(source, target, jobs, options, meter), False


def _copy_inside(source: Store, target: Store, job: CopyJob, options: TransferOptions, meter: Meter) -> ObjectInfo:
    assert isinstance(target, CopiesInside)
    copies: CopiesInside = target
    attempts = options.read_attempts
    retry_transient(lambda: copies.copy_from(source, job.source, job.target), attempts=attempts)
    # The answer to a copy does not always tell the size.
    info = retry_transient(lambda: target.head(job.target), attempts=attempts)
    _check_size(target, job, info.size)
    meter.add(info.size)
    return info


def _stream(
    source: Store, target: Store, jobs: Sequence[CopyJob], options: TransferOptions, meter: Meter
) -> list[ObjectInfo]:
    pinned = source.capabilities.pinned_reads

    def fill(job: CopyJob, start: int, out: memoryview) -> None:
        etag = job.source.etag if pinned else None
        retry_transient(
            lambda: source.read_into(job.source.key, start, [out], if_match=etag), attempts=options.read_attempts
        )
        if job.see is not None:
            job.see(start, out)

    sources = [
        ObjectSource(job.target, [Segment(job.source.size, fill=partial(fill, job))] if job.source.size else [])
        for job in jobs
    ]
    pool = BufferPool(options.max_inflight_bytes)
    uploaded = upload_objects(target, sources, options, pool=pool, meter=meter)
    for job, done in zip(jobs, uploaded, strict=True):
        _check_size(target, job, done.info.size)
    return [done.info for done in uploaded]


def _check_size(target: Store, job: CopyJob, size: int) -> None:
    if size != job.source.size:
        raise CorruptDataError(
            f"the copy of an object has {size} bytes, and the original {job.source.size}",
            url=target.url,
            key=job.target,
        )
