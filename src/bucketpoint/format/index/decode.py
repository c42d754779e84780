"""Decoder of an index to columns of numbers, which are checked once and from which single items are looked up."""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex, TensorProperties

from bucketpoint.errors import MetadataError
from bucketpoint.format import item_info as names
from bucketpoint.format.index.int_columns import (
    CPU,
    Decoder,
    Segments,
    count_blocks,
    fits,
    narrow,
    over,
    payload_sizes,
    size_guess,
    table_places,
)
from bucketpoint.format.index.ref import is_index
from bucketpoint.format.pickles.vocabulary import DTYPE_NAMES
from bucketpoint.format.tensor_bytes import tensor_bytes

PARTS = ("structure", "mappings", "columns", "facts", "checksums")
HEAD = struct.Struct("<8sQ8x" + "QQ" * len(PARTS) + "16x")
"""Magic, number of items, then stored and uncompressed size of each part. The padding is zeros."""

LARGEST_RATIO = 64
"""Limit on a part: this multiple of the index's size, plus 1 MiB, so that a hostile index cannot exhaust memory."""

_MAX_DIMS = 64
_MAX_NBYTES = 1 << 62
_FREE_ENTRIES = 1 << 12
_CODES: dict[torch.dtype, Any] = {torch.int8: "b", torch.int16: "h", torch.int32: "i", torch.int64: "q"}


def largest_part(nbytes: int) -> int:
    """Return the limit on the uncompressed size of a part of an index of `nbytes` bytes."""
    return LARGEST_RATIO * nbytes + (1 << 20)


class Index:
    """Content of an index, pickled as the index's bytes. A slot is an item's number among all items.

    Attributes:
        names: names of the entries, in order.
        counts, first: number of chunks of each entry, and slot of its first chunk.
        overlaps: True if the chunks of a tensor have more elements than the tensor.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._parts, items = _parts(data)
        structure, facts = (json.loads(self._content(name)) for name in ("structure", "facts"))
        self.names: list[str] = structure["names"]
        _require(type(self.names) is list and set(map(type, self.names)) <= {str}, "names")
        self._properties = [_properties(*told) for told in structure["properties"]]
        self._transforms: list[str] | None = structure["transforms"] or None
        _require(all(type(name) is str for name in self._transforms or ()), "transforms")
        self._paths = [told[0] for told in facts["objects"][: facts["paths"]]]
        _require(set(map(type, self._paths)) <= {str}, "paths")
        del structure, facts
        checksums, size = self._parts["checksums"]
        _require(len(checksums) == size == 4 * items, "checksums")
        self._checksums = checksums.cast("I")
        self._take_columns(Decoder(self._content("columns")), items)
        self.numbers = dict(zip(self.names, range(len(self.names)), strict=True))
        _require(len(self.numbers) == len(self.names), "names twice")

    def __reduce__(self) -> tuple[Any, ...]:
        return Index, (self._data,)

    def _content(self, name: str) -> bytes:
        """Decompress a part. Raises MetadataError unless its content has the stated size."""
        stored, size = self._parts[name]
        machine = zlib.decompressobj()
        # Allow one more byte than stated, to detect a stream that is longer.
        content = machine.decompress(stored, size + 1)
        _require(machine.eof and not machine.unused_data and len(content) == size, name)
        return content

    def facts(self) -> dict[str, Any]:
        """Return the facts of the save: objects, `storage_meta`, `version` and other facts of bucketpoint."""
        told: dict[str, Any] = json.loads(self._content("facts"))
        return told

    @property
    def has_mappings(self) -> bool:
        return self._content("mappings") != b"null"

    @cached_property
    def mappings(self) -> dict[str, tuple[Any, ...]]:
        mappings = json.loads(self._content("mappings"))
        if isinstance(mappings, dict):
            return {name: tuple(path) for name, path in mappings.items()}
        return {name: tuple(path) for name, path in zip(self.names, mappings, strict=True)}

    def _take_columns(self, decoder: Decoder, items: int) -> None:
        total = len(self.names)
        kinds, dims, counts = (decoder.column(total) for _ in range(3))
        _require(bool(((kinds >= 0) & (kinds <= len(self._properties))).all()), "kinds")
        _require(bool(((dims >= 0) & (dims <= _MAX_DIMS)).all()), "dimensions")
        # Limit by the number of items: each takes 4 bytes of checksum, while compressed columns could claim any size.
        _require(int(dims.sum()) <= _MAX_DIMS * (items + _FREE_ENTRIES), "dimensions")
        _require(fits(dims, counts), "dimensions")
        _require(bool(((counts >= 0) & (counts <= items)).all()) and int(counts.sum()) == items, "counts")
        _require(bool(((counts == 1) & (dims == 0))[kinds == 0].all()), "bytes entries")
        shapes = decoder.column(int(dims.sum()))
        self.offsets, self.sizes = _boxes(decoder, shapes, Segments.of(counts.repeat_interleave(dims)))
        itemsizes = torch.tensor([0, *(each.dtype.itemsize for each in self._properties)], device=CPU)[kinds]
        nbytes = _check_shapes(shapes, dims, itemsizes)
        self.kinds, self.dims, self.counts, self.shapes = (_array(each) for each in (kinds, dims, counts, shapes))
        self.first = _array(torch.cumsum(counts, 0) - counts)
        self.first_box = _array(torch.cumsum(counts * dims, 0) - counts * dims)
        self.first_size = _array(torch.cumsum(dims, 0) - dims)
        self._offset_column, self._size_column = Column(self.offsets), Column(self.sizes)
        # From here on, drop each column after its last use: all of them together take more memory than the result.
        entries = Segments.of(counts)
        expected = payload_sizes(self.sizes, kinds, dims, entries, itemsizes)
        # In floats, because a sum of integers could overflow.
        volumes = torch.zeros(total, dtype=torch.float64, device=CPU).index_add_(0, entries.owner, expected.double())
        self.overlaps = bool((volumes > nbytes * (1 + 1e-9))[kinds != 0].any())
        del volumes, nbytes
        self._hints = Column(decoder.segmented(entries))
        objects = narrow(decoder.segmented(entries))
        _require(bool(((objects >= 0) & (objects < len(self._paths))).all()), "objects")
        self._objects = Column(objects)
        payloads = decoder.segmented(entries) + expected
        del expected
        lengths = decoder.segmented(entries) + payloads.clamp(min=0)
        _require(bool((lengths >= 0).all()), "lengths")
        self._payload_offsets = Column(decoder.segmented(entries))
        sizes_of_blocks = decoder.segmented(entries)
        self._block_nbytes = Column(sizes_of_blocks)
        counted = count_blocks(sizes_of_blocks, payloads, lengths)
        _require(bool((counted >= 0).all()), "blocks")
        del sizes_of_blocks
        self._payloads = Column(payloads)
        del payloads
        between = decoder.segmented(entries)
        order = torch.argsort(objects, stable=True)
        offsets = _offsets(objects, between, lengths, order)
        self.tabled = bool(decoder.column(1)[0])
        _require(self.tabled or not counted.any(), "blocks")
        if self.tabled:
            counted *= 4
            begins, ends = table_places(objects, offsets, lengths, counted, order)
            begins += decoder.segmented(entries)
            self._tables, self._first_tables = Column(begins), _array(ends)
        decoder.end()
        del entries, order, counted
        self._at = Column(offsets)
        self._lengths = Column(lengths)

    # -- lookups for DCP's mappings -----------------------------------------------------------------------------------

    def properties(self, number: int) -> TensorProperties | None:
        """Return the properties of a tensor; None for an entry that is not a tensor."""
        kind = self.kinds[number]
        if kind == 0:
            return None
        properties = object.__new__(TensorProperties)
        vars(properties).update(vars(self._properties[kind - 1]))
        return properties

    def shape(self, number: int) -> torch.Size:
        first = self.first_size[number]
        return torch.Size(self.shapes[first : first + self.dims[number]])

    def boxes(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return offsets and sizes of an entry's chunks, as int64 of shape (dimensions, chunks)."""
        first, shape = self.first_box[number], (self.dims[number], self.counts[number])
        stop = first + shape[0] * shape[1]
        return self.offsets[first:stop].reshape(shape).long(), self.sizes[first:stop].reshape(shape).long()

    def cut(self) -> list[int]:
        """Return the numbers of the tensors that are not stored as one whole chunk."""
        kinds, dims, counts, shapes = map(over, (self.kinds, self.dims, self.counts, self.shapes))
        first_box, first_size = over(self.first_box), over(self.first_size)
        cut = counts != 1
        for axis in range(int(dims.max()) if len(dims) else 0):
            here = torch.nonzero((dims > axis) & ~cut).reshape(-1)
            cut[here] = self.sizes[first_box[here] + axis] != shapes[first_size[here] + axis]
        numbers: list[int] = torch.nonzero(cut & (kinds != 0)).reshape(-1).tolist()
        return numbers

    def box(self, number: int, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offsets and sizes of one chunk."""
        first, count = self.first_box[number] + chunk, self.counts[number]
        places = range(first, first + count * self.dims[number], count) if count else ()
        return tuple([self._offset_column[at] for at in places]), tuple([self._size_column[at] for at in places])

    def find(self, number: int, offset: Sequence[int], hint: int | None) -> int | None:
        """Return the number of the chunk that begins at `offset` in entry `number`, or None."""
        wanted, dims = tuple(offset), self.dims[number]
        if len(wanted) != dims:
            return None
        if hint is not None and 0 <= hint < self.counts[number] and self.box(number, hint)[0] == wanted:
            return hint
        place = torch.tensor(wanted, dtype=torch.int64, device=CPU).reshape(dims, 1)
        matches = torch.nonzero((self.boxes(number)[0] == place).all(0)).reshape(-1)
        return int(matches[0]) if len(matches) else None

    def slot(self, index: Any) -> int | None:
        """Return the slot of an item by its DCP index, or None."""
        if not isinstance(index, MetadataIndex):
            return None
        number = self.numbers.get(index.fqn)
        if number is None:
            return None
        if self.kinds[number] == 0:
            return self.first[number] if index.offset is None else None
        chunk = None if index.offset is None else self.find(number, index.offset, index.index)
        return None if chunk is None else self.first[number] + chunk

    def info(self, slot: int) -> _StorageInfo:
        """Return the `_StorageInfo` of an item, with bucketpoint's attributes."""
        info = object.__new__(_StorageInfo)
        values = vars(info)
        values["relative_path"] = self._paths[self._objects[slot]]
        values["offset"], values["length"] = self._at[slot], self._lengths[slot]
        if self._transforms:
            values["transform_descriptors"] = list(self._transforms)
        if self._payload_offsets[slot] >= 0:
            values[names._PAYLOAD_OFFSET] = self._payload_offsets[slot]
            values[names._PAYLOAD_NBYTES] = self._payloads[slot]
        values[names._CRC32C] = self._checksums[slot]
        if self.tabled and self._block_nbytes[slot] > 0:
            values[names._TABLE_BLOCK_NBYTES] = self._block_nbytes[slot]
            values[names._TABLE_OFFSET] = self._first_tables[self._objects[slot]] + self._tables[slot]
        return info

    def indices(self) -> Iterator[MetadataIndex]:
        """Yield the DCP index of each item, slot by slot."""
        for number, name in enumerate(self.names):
            for chunk in range(self.counts[number]):
                hint: int | None = self._hints[self.first[number] + chunk]
                offset = None if self.kinds[number] == 0 else self.box(number, chunk)[0]
                yield MetadataIndex(name, offset, None if hint == -1 else hint)


class Column:
    """Integers in the fewest bytes that hold them, read one at a time."""

    def __init__(self, values: torch.Tensor) -> None:
        kept = narrow(values)
        self._constant = int(kept[0]) if len(kept) and kept.stride() == (0,) else None
        if self._constant is None:
            self._kept = kept.contiguous()
            self._numbers = tensor_bytes(self._kept).cast(_CODES[self._kept.dtype])

    def __getitem__(self, place: int) -> int:
        return self._numbers[place] if self._constant is None else self._constant


def _parts(data: bytes) -> tuple[dict[str, tuple[memoryview, int]], int]:
    """Return stored bytes and checked uncompressed size of each part, and the number of items."""
    if len(data) < HEAD.size or not is_index(data):
        raise MetadataError("The object is not an index, or is cut off")
    _, items, *sizes = HEAD.unpack_from(data)
    _require(sum(sizes[::2]) + HEAD.size == len(data), "length")
    _require(all(size <= largest_part(len(data)) for size in sizes[1::2]), "size")
    # Checksums are not compressed, so a hostile head that claims more items than the data has bytes for is refused.
    _require(4 * items <= len(data), "number of items")
    parts, at = {}, HEAD.size
    for name, stored, size in zip(PARTS, sizes[::2], sizes[1::2], strict=True):
        parts[name] = memoryview(data)[at : at + stored], size
        at += stored
    return parts, items


def _properties(dtype: Any, layout: Any, requires_grad: Any, memory_format: Any, pin_memory: Any) -> TensorProperties:
    _require(dtype in DTYPE_NAMES and type(requires_grad) is bool and type(pin_memory) is bool, "tensor properties")
    kinds: tuple[Any, ...] = (getattr(torch, dtype, None), getattr(torch, str(layout), None))
    _require(isinstance(kinds[0], torch.dtype) and isinstance(kinds[1], torch.layout), "tensor properties")
    properties = object.__new__(TensorProperties)
    properties.__setstate__((*kinds, requires_grad, _MEM_FORMAT_ENCODING(memory_format), pin_memory))  # type: ignore[no-untyped-call]
    return properties


def _check_shapes(shapes: torch.Tensor, dims: torch.Tensor, itemsizes: torch.Tensor) -> torch.Tensor:
    """Check the shapes, and return the bytes of each tensor as float64."""
    _require(bool((shapes >= 0).all()), "shapes")
    # In floats, because a product of integers could overflow to a number below the limit.
    nbytes, first = itemsizes.double(), torch.cumsum(dims, 0) - dims
    for axis in range(int(dims.max()) if len(dims) else 0):
        has = dims > axis
        nbytes[has] *= shapes[first[has] + axis]
    _require(bool((nbytes < _MAX_NBYTES).all()), "number of elements")
    return nbytes


def _boxes(decoder: Decoder, shapes: torch.Tensor, axes: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode offsets and sizes of all chunks, and check that the chunks lie within their tensors."""
    values = decoder.segmented(axes)
    _require(bool((values >= 0).all()), "offsets of chunks")
    offsets = narrow(values)
    del values
    sizes = decoder.segmented(axes)
    guess = size_guess(int(decoder.column(1)[0]), offsets, shapes, axes)
    if isinstance(guess, torch.Tensor):
        sizes = guess.add_(sizes)
    _require(bool((sizes >= 0).all()), "sizes of chunks")
    # Two subtractions, because the sum of offset and size could overflow.
    room = shapes.index_select(0, axes.owner)
    room -= offsets
    _require(bool((room >= 0).all()), "chunks outside of their tensors")
    room -= sizes
    _require(bool((room >= 0).all()), "chunks outside of their tensors")
    return offsets, narrow(sizes)


def _offsets(objects: torch.Tensor, between: torch.Tensor, lengths: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Compute each item's offset from the gap to the preceding item of its object; `order` is sorted by object."""
    mine = objects[order]
    firsts = torch.nonzero(mine != torch.roll(mine, 1)).reshape(-1)
    if not len(firsts):
        firsts = torch.zeros(min(len(mine), 1), dtype=torch.int64, device=CPU)
    del mine
    ends = between[order]
    ends += lengths[order]
    ends = ends.cumsum_(0)
    before = ends[(firsts - 1).clamp(min=0)]
    before[:1] = 0
    counts = torch.diff(firsts, append=torch.tensor([len(order)], device=CPU))
    ends -= torch.repeat_interleave(before, counts)
    ends -= lengths[order]
    offsets = torch.empty_like(ends).scatter_(0, order, ends)
    _require(bool(((offsets >= 0) & (offsets < _MAX_NBYTES)).all()), "offsets")
    return offsets


def _array(values: torch.Tensor) -> array[int]:
    flat, kept = values.contiguous(), array("q")
    kept.frombytes(tensor_bytes(flat))
    return kept


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise MetadataError(f"The index contradicts itself: {what}")
