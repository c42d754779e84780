"""Compact encoding of integer columns: constants, one arithmetic progression per segment, or byte planes.

Offsets and sizes of chunks are mostly arithmetic progressions: offsets grow evenly, sizes repeat, the last size is
smaller. Byte planes (all lowest bytes, then all second bytes) have more repetitions for the compressor that follows.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from dataclasses import dataclass

import torch

from bucketpoint.errors import MetadataError
from bucketpoint.format.tensor_bytes import tensor_bytes

CPU = torch.device("cpu")
"""Passed explicitly to every function that makes a tensor, because a user may have set another default device."""

_CONSTANT, _PLANES, _DELTAS, _SEGMENTS = range(4)
_CONSTANT_HEAD, _PLANES_HEAD = struct.Struct("<Bq"), struct.Struct("<BqB")
_WIDEST = 8
_LIMIT = 1 << 63


def over(values: array[int]) -> torch.Tensor:
    """Return a tensor over the memory of an int64 array. `torch.tensor` would convert it number by number."""
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64, device=CPU)


class UnsuitableError(ValueError):
    """Metadata that cannot be encoded in an index."""


@dataclass(frozen=True)
class Segments:
    """Segments of a column, such as one for each tensor.

    Attributes:
        counts: int64 length of each segment.
        owner: int64 number of each value's segment.
    """

    counts: torch.Tensor
    owner: torch.Tensor

    @staticmethod
    def of(counts: torch.Tensor) -> Segments:
        return Segments(counts, torch.repeat_interleave(torch.arange(len(counts), device=CPU), counts))

    @property
    def place(self) -> torch.Tensor:
        """int64 position of each value in its segment. Not cached, as it takes as much memory as the values."""
        place = torch.arange(len(self.owner), device=CPU)
        place -= (torch.cumsum(self.counts, 0) - self.counts)[self.owner]
        return place


def encode(values: torch.Tensor) -> bytes:
    """Encode an int64 column as constant, planes or deltas.

    Raises:
        UnsuitableError: the values are too far apart.
    """
    constant = _constant(values)
    if constant is not None:
        return constant
    planes = [_planes(_PLANES, values), _planes(_DELTAS, values.diff(prepend=values.new_zeros(1)))]
    suitable = [data for data in planes if data is not None]
    if not suitable:
        raise UnsuitableError("the numbers of a column are too far apart")
    return min(suitable, key=lambda data: len(zlib.compress(data, 1)))


def encode_segments(values: torch.Tensor, segments: Segments) -> bytes:
    """Encode a column whose segments are mostly arithmetic progressions, except perhaps for the last value."""
    constant = _constant(values)
    if constant is not None:
        return constant
    counts = segments.counts
    ends = torch.cumsum(counts, 0)
    begins = ends - counts
    starts = _at(values, begins, counts > 0)
    steps = torch.where(counts > 1, _at(values, begins + 1, counts > 1) - starts, 0)
    place = segments.place
    expected = starts[segments.owner] + steps[segments.owner] * place
    lasts = torch.where(counts > 0, _at(values - expected, ends - 1, counts > 0), 0)
    off = (values != expected) & (place != (counts - 1)[segments.owner])
    bad = torch.zeros(len(counts), dtype=torch.bool, device=CPU)
    bad[segments.owner[off]] = True
    rest = values[bad[segments.owner]]
    parts = [encode(torch.where(bad, 0, column)) for column in (starts, steps, lasts)]
    parts += [encode(bad.to(torch.int64)), encode(rest)]
    return b"".join([bytes([_SEGMENTS]), *parts])


class Decoder:
    """Reader of columns in the order of their encoding. All methods raise MetadataError for malformed data."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._position = 0

    def column(self, count: int) -> torch.Tensor:
        """Read `count` values as int64. Callers must not change the result, which may be one expanded value."""
        kind = self._peek()
        if kind == _CONSTANT:
            return self._constant(count)
        if kind not in (_PLANES, _DELTAS):
            raise MetadataError("The index has a column of an unknown kind")
        _, base, width = _PLANES_HEAD.unpack(self._take(_PLANES_HEAD.size))
        if not 0 < width <= _WIDEST:
            raise MetadataError("The index has a column of an impossible width")
        data = self._take(width * count)
        if not count:
            return torch.empty(0, dtype=torch.int64, device=CPU)
        planes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if width == 1:
            values = planes.to(torch.int64)
        else:
            spread = torch.zeros((count, _WIDEST), dtype=torch.uint8, device=CPU)
            spread[:, :width] = planes.view(width, count).t()
            values = spread.view(torch.int64).view(-1)
        if base:
            values += base
        return values.cumsum_(0) if kind == _DELTAS else values

    def segmented(self, segments: Segments) -> torch.Tensor:
        """Read a column that `encode_segments` made. Callers must not change the result, as with `column`."""
        if self._peek() == _CONSTANT:
            return self._constant(len(segments.owner))
        if self._take(1)[0] != _SEGMENTS:
            raise MetadataError("The index has a column of an unknown kind")
        counts, owner = segments.counts, segments.owner
        starts, steps, lasts, bad = (self.column(len(counts)) for _ in range(4))
        if _some(steps):
            present = counts > 0
            values = _progressions(starts[present], steps[present], counts[present], steps.index_select(0, owner))
        else:
            values = starts.index_select(0, owner)
        if _some(lasts):
            present = counts > 0
            values[(torch.cumsum(counts, 0) - 1)[present]] += lasts[present]
        if _some(bad):
            others = bad != 0
            values[others.index_select(0, owner)] = self.column(int(counts[others].sum()))
        else:
            self.column(0)
        return values

    def end(self) -> None:
        """Check that all data has been read."""
        if self._position != len(self._data):
            raise MetadataError("The index has more columns than it should have")

    def _constant(self, count: int) -> torch.Tensor:
        _, value = _CONSTANT_HEAD.unpack(self._take(_CONSTANT_HEAD.size))
        return torch.tensor([value], dtype=torch.int64, device=CPU).expand(count)

    def _peek(self) -> int:
        if self._position >= len(self._data):
            raise MetadataError("The index ends early")
        return self._data[self._position]

    def _take(self, size: int) -> memoryview:
        taken = self._data[self._position : self._position + size]
        if len(taken) != size:
            raise MetadataError("The index ends early")
        self._position += size
        return taken


def narrow(values: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in the narrowest dtype, or as one expanded value if all are equal."""
    if not len(values):
        return values
    if values.stride() == (0,):
        return values
    lowest, highest = (int(bound) for bound in torch.aminmax(values))
    if lowest == highest:
        return values[:1].clone().expand(len(values))
    for dtype in (torch.int8, torch.int16, torch.int32):
        if torch.iinfo(dtype).min <= lowest and highest <= torch.iinfo(dtype).max:
            return values.to(dtype)
    return values


def _some(values: torch.Tensor) -> bool:
    """Return True if any value is not zero. For a constant, as most columns are, only one value is read."""
    return bool(values[:1].any() if values.stride() == (0,) else values.any())


def _progressions(
    starts: torch.Tensor, steps: torch.Tensor, counts: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Compute the progressions in place, to save memory: `values` contains the step of each value."""
    ends = starts + steps * (counts - 1)
    before = torch.roll(ends, 1)
    before[:1] = 0
    values[torch.cumsum(counts, 0) - counts] = starts - before
    return values.cumsum_(0)


def _at(values: torch.Tensor, places: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    steps = torch.zeros(len(places), dtype=torch.int64, device=CPU)
    steps[valid] = values[places[valid]]
    return steps


def _constant(values: torch.Tensor) -> bytes | None:
    if not len(values):
        return _CONSTANT_HEAD.pack(_CONSTANT, 0)
    lowest, highest = (int(bound) for bound in torch.aminmax(values))
    return _CONSTANT_HEAD.pack(_CONSTANT, lowest) if lowest == highest else None


def _planes(kind: int, values: torch.Tensor) -> bytes | None:
    lowest, highest = (int(bound) for bound in torch.aminmax(values))
    if highest - lowest >= _LIMIT:
        return None
    width = max(-(-(highest - lowest).bit_length() // 8), 1)
    above = values - lowest
    planes = torch.cat([((above >> (8 * number)) & 0xFF).to(torch.uint8) for number in range(width)])
    return _PLANES_HEAD.pack(kind, lowest, width) + bytes(tensor_bytes(planes))


BYTES_ENTRY = 0
"""Kind of the entries that are not tensors."""

MOST_DIMS = 4
"""Limit on the average dimensions of a chunk in a large index. A decoder takes 25 bytes for each dimension."""

_FREE_DIMS = 1 << 18


def fits(dims: torch.Tensor, counts: torch.Tensor) -> bool:
    """Return True if the chunks have few enough dimensions, so that decoding needs little memory per item."""
    # In floats, because sums of hostile integers could overflow.
    return float((dims.double() * counts).sum()) <= MOST_DIMS * float(counts.sum()) + _FREE_DIMS


def payload_sizes(
    sizes: torch.Tensor, kinds: torch.Tensor, dims: torch.Tensor, entries: Segments, itemsizes: torch.Tensor
) -> torch.Tensor:
    """Return the size of each item's elements in bytes; -1 for items that are not tensors."""
    counts, owner = entries.counts, entries.owner
    nbytes = torch.where(kinds == BYTES_ENTRY, -1, itemsizes).index_select(0, owner)
    first = torch.cumsum(counts * dims, 0) - counts * dims
    first -= torch.cumsum(counts, 0) - counts
    for axis in range(int(dims.max()) if len(dims) else 0):
        has = torch.nonzero((dims > axis).index_select(0, owner)).reshape(-1)
        places = (first + axis * counts).index_select(0, owner.index_select(0, has)).add_(has)
        nbytes[has] *= sizes.index_select(0, places)
    return nbytes


def count_blocks(blocks: torch.Tensor, payloads: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the number of block checksums of each item: 0 if the item's block size is -1."""
    covered = torch.where(payloads < 0, lengths, payloads)
    return torch.where(blocks > 0, (covered + blocks - 1) // blocks.clamp(min=1), 0)


def gaps(objects: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return, slot by slot, the bytes between an item and the preceding item in the same object."""
    order = torch.argsort(objects, stable=True)
    ends = torch.roll((offsets + lengths)[order], 1)
    mine = objects[order]
    ends[(mine != torch.roll(mine, 1)) | (torch.arange(len(mine), device=CPU) == 0)] = 0
    return torch.empty_like(offsets).scatter_(0, order, offsets[order] - ends)


def table_places(
    objects: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, nbytes: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expected positions of the tables of checksums: after an object's last item, in the order of slots.

    Args:
        nbytes: size of each slot's table.
        order: slots sorted by object.

    Returns:
        Start of each slot's table, relative to the object's first table; and start of each object's first table.
    """
    ends = torch.zeros(int(objects.max()) + 1 if len(objects) else 0, dtype=torch.int64, device=CPU)
    ends.scatter_reduce_(0, objects.long(), offsets + lengths, "amax")
    mine, sizes = objects[order], nbytes[order]
    before = sizes.cumsum(0)
    before -= sizes
    firsts = torch.zeros_like(ends)
    heads = torch.nonzero(mine != torch.roll(mine, 1)).reshape(-1)
    firsts[mine[heads].long()] = before[heads]
    before -= firsts[mine.long()]
    return torch.empty_like(before).scatter_(0, order, before), ends


def size_guess(kind: int, offsets: torch.Tensor, shapes: torch.Tensor, axes: Segments) -> torch.Tensor | int:
    """Return the guess that a writer subtracts from sizes: 0, or the distance to the start of the next chunk."""
    if kind == 0:
        return 0
    until, present = torch.roll(offsets, -1).long(), axes.counts > 0
    until[(torch.cumsum(axes.counts, 0) - 1)[present]] = shapes[present]
    until -= offsets
    return until
