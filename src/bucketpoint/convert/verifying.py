"""Verification of a target: read it again, and compare it with what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bucketpoint.convert.target import TargetPlace
from bucketpoint.transfer import BufferPool, Meter, ObjectSource, TransferOptions, Uploaded, retry_transient
from bucketpoint.transfer.checksum import CrcAccumulator, combine, fold_blocks
from bucketpoint.transfer.pieces import for_each, piece_bytes


def read_again(
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
