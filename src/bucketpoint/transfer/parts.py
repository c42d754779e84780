"""Division of items into batches, and of objects into parts; completion and abort of multipart uploads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bucketpoint.errors import BucketpointError, UploadNotFoundError
from bucketpoint.stores import Capabilities, ObjectInfo, Part, Store, retry
from bucketpoint.transfer.options import MIB, TransferOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

SMALLEST_USEFUL_PART = 8 * MIB
"""Minimum size when parts are made smaller for parallelism: for smaller parts the latency of a request dominates."""

ABORT_DEADLINE_S = 30.0
"""Deadline of an abort, in seconds. A longer cleanup would delay the error of the save, which has failed already."""

_GROWTH = 1.02


@dataclass(frozen=True)
class PartPlan:
    """A division into `count` parts of `part_bytes` each; the last part has the rest."""

    nbytes: int
    part_bytes: int
    count: int

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the byte range `[start, stop)` of part `number`, counted from 1."""
        start = (number - 1) * self.part_bytes
        return start, min(start + self.part_bytes, self.nbytes)


def batched(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Split items into batches of at most `most` bytes. A larger item is alone in its batch."""
    batches: list[list[T]] = []
    size = 0
    for item in items:
        if not batches or size + nbytes(item) > most:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += nbytes(item)
    return batches


def common_part_bytes(sizes: Sequence[int], options: TransferOptions) -> int:
    """Return a part size with which objects of these sizes, uploaded together, keep all connections busy to the end.

    33 parts over 32 connections take as long as 64 parts. So a size near `part_bytes` is chosen with which the parts
    fill whole rounds of the connections. The size is at least the smaller of `SMALLEST_USEFUL_PART` and `part_bytes`,
    and at most about 1.5 times `part_bytes`.
    """
    total = sum(sizes)
    largest = options.part_bytes * 3 // 2
    waves = max(round(total / (options.part_bytes * options.connections)), 1)
    size = max(-(-total // (waves * options.connections)), min(SMALLEST_USEFUL_PART, options.part_bytes), 1)
    while size < largest and sum(-(-nbytes // size) for nbytes in sizes) > waves * options.connections:
        size = int(size * _GROWTH) + 1
    return size


def plan_parts(nbytes: int, part_bytes: int, limits: Capabilities) -> PartPlan:
    """Divide an object into equal parts, which some S3-compatible stores require, within the service's limits.

    Raises:
        BucketpointError: the object is too large for the service.
    """
    wanted = min(max(part_bytes, limits.min_part_bytes), limits.max_part_bytes)
    count = min(max(-(-nbytes // wanted), 1), limits.max_parts)
    size = max(-(-nbytes // count), 1)
    if count > 1:
        size = max(size, limits.min_part_bytes)
    if size > limits.max_part_bytes:
        raise BucketpointError(
            f"An object of {nbytes} bytes does not fit {limits.max_parts} parts of {limits.max_part_bytes} bytes",
            remedy="Lower target_object_bytes so that a rank writes several objects",
        )
    return PartPlan(nbytes=nbytes, part_bytes=size, count=max(-(-nbytes // size), 1))


def complete(store: Store, key: str, upload_id: str, parts: Iterable[Part], *, nbytes: int) -> ObjectInfo:
    """Complete a multipart upload of `nbytes`, even if an earlier attempt completed it and the reply was lost."""
    try:
        return store.complete_multipart(key, upload_id, sorted(parts, key=lambda part: part.number))
    except UploadNotFoundError:
        # An earlier attempt may have completed the upload. Only this save attempt uses the key, so an object of the
        # right size under the key can only be the completed upload.
        info = store.head(key)
        if info.size != nbytes:
            raise
        return info


def abort(store: Store, key: str, upload_id: str | None) -> None:
    """Abort a multipart upload, if one was begun. A failure is only logged: it must not hide the error of the save."""
    if upload_id is None:
        return
    try:
        with retry.deadline(ABORT_DEADLINE_S):
            store.abort_multipart(key, upload_id)
    except BucketpointError as error:
        logger.warning("could not abort the multipart upload of %s: %s", key, error)
