"""Copies of objects between stores: inside the service if possible, otherwise in pieces through this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from bucketpoint.errors import (
    CorruptDataError,
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientStoreError,
)
from bucketpoint.stores import CopiesInside, ObjectInfo, Store, pinned
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer.options import Meter, TransferOptions
from bucketpoint.transfer.pieces import for_each
from bucketpoint.transfer.tasks import BufferPool
from bucketpoint.transfer.upload import ObjectSource, Segment, upload_objects

_NO_REFUSAL = (TransientStoreError, ThrottledError, EndpointError, ObjectNotFoundError, PreconditionFailedError)

See = Callable[[int, memoryview], None]
"""`see(start, view)` checks bytes of an object from offset `start` on, before they are sent. It is called from several
threads, and raises to stop the copy."""


@dataclass(frozen=True)
class CopyJob:
    """One object to copy to the key `target`. `see` checks the bytes if they pass through this process."""

    source: ObjectInfo
    target: str
    see: See | None = None


def inside_one_service(source: Store, target: Store) -> bool:
    """Return True if the service can be asked to copy between these stores."""
    return isinstance(target, CopiesInside) and target.can_copy_from(source)


def copy_objects(
    source: Store, target: Store, jobs: Sequence[CopyJob], options: TransferOptions, *, meter: Meter
) -> tuple[list[ObjectInfo], bool]:
    """Copy all objects in parallel. Memory stays within `max_inflight_bytes` if the target has multipart uploads.

    Returns:
        The target's description of each object, and True if the service copied them.

    Raises:
        CorruptDataError: a copy and its source differ in size.
        StoreError: a request failed, after all retries. Open uploads are aborted; copied objects are not deleted.
    """
    if jobs and inside_one_service(source, target):
        try:
            first = _copy_inside(source, target, jobs[0], meter)
        except StoreError as error:
            # The target's credentials may have no access to the source, and some services copy only within a bucket, a
            # region or a partition. After any such refusal the bytes can still pass through this process.
            if isinstance(error, _NO_REFUSAL):
                raise
        else:
            copied = {jobs[0].target: first}

            def copy(job: CopyJob) -> None:
                copied[job.target] = _copy_inside(source, target, job, meter)

            for_each(jobs[1:], copy, options)
            return [copied[job.target] for job in jobs], True
    return _stream(source, target, jobs, options, meter), False


def copy_whole(store: Store, source: ObjectInfo, target: str) -> ObjectInfo:
    """Copy one object inside a store, and verify that the source still has the ETag of `source`.

    Sends a copy request and a HEAD. Only the store retries transient failures: the caller can upload the bytes instead.

    Raises:
        ObjectNotFoundError, PreconditionFailedError: the source was deleted or replaced. The copy is deleted.
    """
    done = store.copy(source, target)
    try:
        # Some services ignore the condition of a copy. An object that is unchanged now was unchanged during the copy.
        now = store.head(source.key)
        if (now.etag, now.size) != (source.etag, source.size):
            raise PreconditionFailedError("the object was replaced during its copy", url=f"{store.url}/{source.key}")
        _check_size(store, source, done)
    except StoreError:
        with contextlib.suppress(StoreError):
            store.delete([target])
        raise
    return done


def _copy_inside(source: Store, target: Store, job: CopyJob, meter: Meter) -> ObjectInfo:
    copies = cast("CopiesInside", target)
    retry_transient(lambda: copies.copy_from(source, job.source, job.target))
    # The reply to a copy does not always contain the size.
    info = retry_transient(lambda: target.head(job.target))
    _check_size(target, job.source, info)
    meter.add(info.size)
    return info


def _stream(
    source: Store, target: Store, jobs: Sequence[CopyJob], options: TransferOptions, meter: Meter
) -> list[ObjectInfo]:
    def fill(job: CopyJob, start: int, out: memoryview) -> None:
        etag = pinned(source, job.source.etag)
        retry_transient(lambda: source.read_into(job.source.key, start, [out], if_match=etag))
        if job.see is not None:
            job.see(start, out)

    sources = [
        ObjectSource(job.target, [Segment(job.source.size, fill=partial(fill, job))] if job.source.size else [])
        for job in jobs
    ]
    pool = BufferPool(options.max_inflight_bytes)
    uploaded = upload_objects(target, sources, options, pool=pool, meter=meter)
    for job, done in zip(jobs, uploaded, strict=True):
        _check_size(target, job.source, done.info)
    return [done.info for done in uploaded]


def _check_size(target: Store, source: ObjectInfo, copied: ObjectInfo) -> None:
    if copied.size != source.size:
        raise CorruptDataError(
            f"the copy of an object has {copied.size} bytes, and the original {source.size}",
            url=target.url,
            key=copied.key,
        )
