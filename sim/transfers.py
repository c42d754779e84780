"""What a rank sends and asks for: objects, parts and keys, planned by the code that plans them in earnest."""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from bucketpoint.dcp.saving.object_layout import DEFAULT_OBJECT_BYTES
from bucketpoint.format import keys
from bucketpoint.stores.s3.store import CAPABILITIES
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.download import Extent, Request, plan_requests
from bucketpoint.transfer.long_reads import join_requests
from bucketpoint.transfer.pieces import common_part_bytes, plan_parts
from sim.limiters import Ints
from sim.store import ObjectWork, Work

WEIGHTS_SHARE = 0.2
"""bf16 weights beside two fp32 moments: 2 of 10 bytes a parameter."""

Chunks = Mapping[str, Sequence[float]]
"""Relative sizes of a rank's tensors, by object group."""


def llama_chunks(
    layers: int = 126, hidden: int = 16384, ffn: int = 53248, kv: int = 1024, vocab: int = 128256
) -> Chunks:
    """The 405B shape: 1,137 parameters, each with two moments."""
    layer = [hidden * width for width in (hidden, kv, kv, hidden, ffn, ffn, ffn, 1, 1)]
    weights = [float(size) for size in (hidden * vocab, *layer * layers, hidden, hidden * vocab)]
    return {"model": weights, "optim": [size for size in weights for _ in range(2)]}


TOKEN = "0" * 12


def object_sizes(nbytes: int) -> list[tuple[str, int, int]]:
    """(group, number, bytes) of the objects of a rank that writes `nbytes`."""
    weights = int(nbytes * WEIGHTS_SHARE)
    found = []
    for group, size in (("model", weights), ("optim", nbytes - weights)):
        count = max(1, -(-size // DEFAULT_OBJECT_BYTES))
        borders = [size * at // count for at in range(count + 1)]
        found += [(group, at, borders[at + 1] - borders[at]) for at in range(count)]
    return found


def save_work(nbytes: int, options: TransferOptions, *, device: bool = False) -> Work:
    """The uploads of a rank. `device`: of tensors that are not in host memory and pass through leased buffers."""
    sizes = [size for _, _, size in object_sizes(nbytes)]
    part_bytes = common_part_bytes(sizes, options)
    if device:
        part_bytes = min(part_bytes, options.lease_bytes)
    objects = []
    for size in sizes:
        if size <= options.single_put_bytes:
            objects.append(ObjectWork((size,), multipart=False))
            continue
        plan = plan_parts(size, part_bytes, CAPABILITIES)
        bounds = [plan.bounds(number) for number in range(1, plan.count + 1)]
        objects.append(ObjectWork(tuple(stop - start for start, stop in bounds), multipart=True))
    return Work(tuple(objects), write=True)


def load_work(nbytes: int, options: TransferOptions, *, device: bool = False, chunks: Chunks | None = None) -> Work:
    """The ranged reads of a rank that loads what it saved, in the same layout."""
    longest = options.lease_bytes if device else options.part_bytes
    begun: dict[str, int] = defaultdict(int)
    ends = {group: _ends(sizes, nbytes, group) for group, sizes in (chunks or llama_chunks()).items()}
    requests, sizes = list[Request](), object_sizes(nbytes)
    for group, number, size in sizes:
        low, high = begun[group], begun[group] + size
        begun[group] = high
        # Address space and no memory: nothing ever touches it.
        memory = memoryview(mmap.mmap(-1, max(size, 1)))
        cuts = sorted({0, size, *(end - low for end in ends[group] if low < end < high)})
        extents = [
            Extent(
                f"{group}-{number}",
                start,
                stop,
                deliver=_nowhere,
                direct=None if device else memory[start:stop],
                direct_start=start,
            )
            for first, last in pairwise(cuts)
            for start, stop in _pieces(first, last, longest)
        ]
        requests += plan_requests(extents, options)
    reads: dict[str, list[int]] = defaultdict(list)
    for read in join_requests(requests, options):
        reads[read[0].key].append(read[-1].stop - read[0].start)
    return Work(
        tuple(ObjectWork(tuple(reads[f"{group}-{number}"]), multipart=False) for group, number, _ in sizes), write=False
    )


def partitions(ranks: int, nbytes: int, count: int) -> Ints:
    """The partition of each rank's objects, int64[ranks, objects], if the store splits at the folders of `data/`."""
    found = np.zeros((ranks, len(object_sizes(nbytes))), np.int64)
    if count == 1:
        return found
    for rank in range(ranks):
        for at, (group, number, _) in enumerate(object_sizes(nbytes)):
            path = keys.data_path(TOKEN, rank, group, number)
            found[rank, at] = int(path.split("/")[1], 16) * count // 256
    return found


def _ends(sizes: Sequence[float], nbytes: int, group: str) -> list[int]:
    """Where each tensor of a group ends, if all of them take the group's share of the bytes."""
    share = sum(size for name, _, size in object_sizes(nbytes) if name == group)
    return [int(share * end / sum(sizes)) for end in accumulate(sizes)]


def _pieces(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]


def _nowhere(view: memoryview | None) -> None:
    return None
