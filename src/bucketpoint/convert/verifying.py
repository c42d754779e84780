"""Verification of a target: read it again, and compare it with what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bucketpoint.convert.target import TargetObject, TargetPlace
from bucketpoint.format import keys
from bucketpoint.transfer import BufferPool, Meter, TransferOptions, Uploaded, retry_transient
from bucketpoint.transfer.checksum import CrcAccumulator, combine, fold_blocks
from bucketpoint.transfer.pieces import for_each, piece_bytes


def read_again(
    place: TargetPlace,
    objects: Sequence[TargetObject],
    done: Mapping[str, Uploaded],
    options: TransferOptions,
    meter: Meter,
) -> list[str]:
    """Read all objects, and return the paths of those that differ from what was sent."""
    pool, step = BufferPool(options.max_inflight_bytes), piece_bytes(options)
    found = {entry.path: CrcAccumulator(entry.nbytes) for entry in objects}

    def read(piece: tuple[TargetObject, int]) -> None:
        entry, start = piece
        key, nbytes = keys.join(place.prefix, entry.path), min(step, entry.nbytes - start)
        with pool.lease(nbytes) as view:
            retry_transient(lambda: place.store.read_into(key, start, [view]), attempts=options.read_attempts)
            found[entry.path].take(start, view)
        meter.add(nbytes)

    meter.total_bytes += sum(entry.nbytes for entry in objects)
    for_each(((entry, start) for entry in objects for start in range(0, entry.nbytes, step)), read, options)
    damaged = []
    for entry in objects:
        if entry.path not in done or found[entry.path].total() != _sent(entry, done[entry.path]):
            damaged.append(entry.path)
    return damaged


def _sent(entry: TargetObject, uploaded: Uploaded) -> int:
    """Compute the CRC32C of a sent object from those of its blocks."""
    total = 0
    for segment, crcs in zip(entry.segments, uploaded.block_crcs, strict=True):
        total = combine(total, fold_blocks(crcs, segment.nbytes, segment.block_nbytes), segment.nbytes)
    return total
