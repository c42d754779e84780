"""Encoder of an index: the content of a large `.metadata` in columns, at a few bytes per chunk.

An index is a head and five parts: names and kinds of the entries, the planner's paths of the entries, columns of
numbers (these three are equal in every save of one structure), facts of this save, and the checksum of each item.
`decode.py` reads an index; `ref.py` finds it.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.format.index.decode import HEAD, largest_part
from bucketpoint.format.index.int_columns import (
    BYTES_ENTRY,
    CPU,
    Segments,
    UnsuitableError,
    count_blocks,
    encode,
    encode_segments,
    fits,
    gaps,
    over,
    payload_sizes,
    size_guess,
    table_places,
)
from bucketpoint.format.index.ref import INDEX_ATTRIBUTE, MAGIC
from bucketpoint.format.pickles.vocabulary import DTYPE_NAMES
from bucketpoint.format.storage_info import COLUMNS, Columns, IndexColumns, pack
from bucketpoint.format.tensor_bytes import tensor_bytes

SIZE_GUESSES = 2

_UNSUITABLE = (UnsuitableError, AttributeError, TypeError, OverflowError)
"""Errors raised by content of other types than DCP's. No index is written for such metadata."""

_STATE = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", INDEX_ATTRIBUTE}


@dataclass(frozen=True)
class IndexTemplate:
    """An index without the facts and checksums of one save.

    Attributes:
        parts: the compressed parts that are equal in every save, and their uncompressed sizes.
        slots: for each item of the storage data, its slot (its number) in the index.
        objects: number of data objects.
    """

    parts: tuple[tuple[bytes, int], ...]
    slots: torch.Tensor
    objects: int

    def fill(
        self,
        checksums: bytes,
        paths: Sequence[str],
        *,
        bucketpoint: dict[str, Any],
        storage_meta: StorageMeta | None,
        version: str | None,
    ) -> bytes | None:
        """Encode the index of a save; None if the content does not fit the template.

        Args:
            checksums: CRC32C of each item in 4 bytes, in the order of the storage data.
            paths: paths of the objects, in the order of their first items in the storage data.
            bucketpoint: the attribute `bucketpoint` of `.metadata`.
            version: the attribute `version` of `.metadata`.
        """
        if len(checksums) != 4 * len(self.slots) or len(paths) != self.objects:
            return None
        facts = _facts(paths, bucketpoint, storage_meta, version)
        if facts is None:
            return None
        ordered = torch.empty(len(self.slots), dtype=torch.int32, device=CPU)
        ordered[self.slots] = torch.frombuffer(bytearray(checksums), dtype=torch.int32)
        raw = bytes(tensor_bytes(ordered))
        stored = [*self.parts, (zlib.compress(facts), len(facts)), (raw, len(raw))]
        sizes = itertools.chain.from_iterable((len(data), size) for data, size in stored)
        head = HEAD.pack(MAGIC, len(self.slots), *sizes)
        whole = b"".join([head, *(data for data, _ in stored)])
        return whole if all(size <= largest_part(len(whole)) for _, size in stored) else None


def encode_index(metadata: Metadata, *, bucketpoint: dict[str, Any]) -> bytes | None:
    """Encode the index of metadata with storage data; `bucketpoint` is the attribute of that name in `.metadata`.

    Returns:
        None if an index cannot represent the metadata, because of other writers' types or items without checksums.
    """
    try:
        items, columns = _columns_of(metadata.storage_data)
        template = make_index(metadata, items, [columns])
        if template is None:
            return None
        return template.fill(
            columns.checksums,
            [path for path, _, _ in columns.objects],
            bucketpoint=bucketpoint,
            storage_meta=metadata.storage_meta,
            version=metadata.version,
        )
    except _UNSUITABLE:
        return None


def make_index(metadata: Metadata, items: IndexColumns, reported: Sequence[Columns]) -> IndexTemplate | None:
    """Make an index template for all saves with items at the same positions, with no Python object per item.

    Args:
        metadata: metadata, whose storage data is ignored.
        items: items of all ranks in `reported`, each once.
        reported: columns of each rank, whose checksums are ignored.

    Returns:
        None in the cases in which `encode_index` returns None.
    """
    try:
        entries = metadata.state_dict_metadata
        _require(vars(metadata).keys() <= _STATE and type(entries) is dict)
        transforms = {columns.layout.transforms for columns in reported if columns.layout.count}
        _require(len(transforms) == 1)
        firsts = [*itertools.accumulate((len(columns.objects) for columns in reported), initial=0)]
        layouts = []
        for columns, first in zip(reported, firsts, strict=False):
            layout = [over(columns.layout.column(n)) for n in range(COLUMNS)]
            layouts.append([layout[0] + first, *layout[1:]])
        joined = [torch.cat(parts) for parts in zip(*layouts, strict=True)]
        table = _Entries(entries)
        slots, hints = _places(entries, table, items)
        structure = {
            "names": list(entries),
            "properties": list(table.properties),
            "transforms": list(transforms.pop() or ()),
        }
        mappings = _mappings(metadata.planner_data, entries)
        static = [_json(structure), _json(mappings), _columns(table, hints, joined, slots)]
        return IndexTemplate(tuple([(zlib.compress(part), len(part)) for part in static]), slots, firsts[-1])
    except _UNSUITABLE:
        return None


def _columns_of(storage_data: Any) -> tuple[IndexColumns, Columns]:
    _require(type(storage_data) is dict and len(storage_data) > 0)
    for index, info in storage_data.items():
        transforms = info.transform_descriptors
        _require(transforms is None or (type(transforms) is list and len(transforms) > 0))
        _require(index.index is None or (type(index.index) is int and index.index >= 0))
    columns = pack(list(storage_data.values()))
    if columns is None:
        raise UnsuitableError
    hints = [-1 if index.index is None else index.index for index in storage_data]
    names, offsets = [index.fqn for index in storage_data], [index.offset for index in storage_data]
    return IndexColumns(names, offsets, hints, (0, len(names))), columns


class _Entries:
    """Entries of `state_dict_metadata` as columns. Offsets and sizes of chunks are sorted by axis, then by chunk."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.properties: dict[tuple[Any, ...], int] = {}
        self.kinds, self.dims, self.counts, self.shapes = (array("q") for _ in range(4))
        self.itemsizes = array("q")
        self.offsets, self.sizes = array("q"), array("q")
        for fqn, entry in entries.items():
            _require(type(fqn) is str)
            if type(entry) is BytesStorageMetadata:
                self._add(BYTES_ENTRY, 0, 1, 0)
                continue
            _require(type(entry) is TensorStorageMetadata and type(entry.size) is torch.Size)
            chunks = entry.chunks
            _require({*map(type, chunks)} <= {ChunkStorageMetadata})
            dims = len(entry.size)
            for boxes, column in (
                ([chunk.offsets for chunk in chunks], self.offsets),
                ([chunk.sizes for chunk in chunks], self.sizes),
            ):
                _require({*map(type, boxes)} <= {torch.Size} and {*map(len, boxes)} <= {dims})
                for axis in zip(*boxes, strict=True):
                    column.extend(axis)
            self._add(self._kind(entry.properties), dims, len(chunks), entry.properties.dtype.itemsize)
            self.shapes.extend(entry.size)

    def _add(self, kind: int, dims: int, count: int, itemsize: int) -> None:
        self.kinds.append(kind)
        self.dims.append(dims)
        self.counts.append(count)
        self.itemsizes.append(itemsize)

    def _kind(self, properties: TensorProperties) -> int:
        _require(type(properties) is TensorProperties)
        dtype, layout, requires_grad, memory_format, pin_memory = properties.__getstate__()[:5]  # type: ignore[no-untyped-call]
        _require(type(requires_grad) is bool and type(pin_memory) is bool)
        names = (str(value).removeprefix("torch.") for value in (dtype, layout))
        fields = (*names, requires_grad, memory_format.value, pin_memory)
        # Readers refuse dtypes with other names. Such metadata is read only from `.metadata`, with `trusted=True`.
        _require(fields[0] in DTYPE_NAMES)
        return self.properties.setdefault(fields, len(self.properties) + 1)


def _places(entries: dict[str, Any], table: _Entries, items: IndexColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slot of each item, and DCP's hint of each slot."""
    firsts = dict(zip(entries, itertools.accumulate(table.counts, initial=0), strict=False))
    found: dict[str, dict[Any, int]] = {}
    slots, hints = array("q"), array("q")
    for fqn, offset, hint in zip(items.names, items.offsets, items.hints, strict=True):
        entry = entries.get(fqn)
        if type(entry) is TensorStorageMetadata:
            chunks = entry.chunks
            if not 0 <= hint < len(chunks) or chunks[hint].offsets != offset:
                _require(type(offset) is torch.Size)
                if fqn not in found:
                    found[fqn] = {chunk.offsets: number for number, chunk in enumerate(chunks)}
                place = found[fqn].get(offset, -1)
                _require(place >= 0)
            else:
                place = hint
            slots.append(firsts[fqn] + place)
        else:
            _require(entry is not None and offset is None)
            slots.append(firsts[fqn])
        hints.append(hint)
    places = over(slots)
    total = sum(table.counts)
    _require(len(places) == total and int(torch.bincount(places, minlength=total).max()) == 1)
    ordered = torch.empty_like(places)
    ordered[places] = over(hints)
    return places, ordered


def _columns(table: _Entries, hints: torch.Tensor, layout: list[torch.Tensor], slots: torch.Tensor) -> bytes:
    chunk_offsets, chunk_sizes = over(table.offsets), over(table.sizes)
    kinds, dims, counts, shapes, itemsizes = (
        over(column) for column in (table.kinds, table.dims, table.counts, table.shapes, table.itemsizes)
    )
    _require(fits(dims, counts))
    entries, axes = Segments.of(counts), Segments.of(counts.repeat_interleave(dims))
    parts = [encode(column) for column in (kinds, dims, counts, shapes)]
    parts += [encode_segments(chunk_offsets, axes)]
    guesses = [
        encode_segments(chunk_sizes - size_guess(kind, chunk_offsets, shapes, axes), axes)
        + encode(torch.tensor([kind], device=CPU))
        for kind in range(SIZE_GUESSES)
    ]
    parts += [min(guesses, key=lambda data: len(zlib.compress(data, 1)))]
    objects, offsets, lengths, payload_offsets, payloads, blocks, tables = (
        torch.empty_like(column).scatter_(0, slots, column) for column in layout
    )
    expected = payload_sizes(chunk_sizes, kinds, dims, entries, itemsizes)
    counted, tabled = count_blocks(blocks, payloads, lengths), bool((tables >= 0).any())
    _require(bool(torch.equal(tables >= 0, counted > 0)))
    parts += [
        encode_segments(column, entries)
        for column in (
            hints, objects, payloads - expected, lengths - payloads.clamp(min=0), payload_offsets, blocks,
            gaps(objects, offsets, lengths),
        )
    ]  # fmt: skip
    parts += [encode(torch.tensor([int(tabled)], device=CPU))]
    if tabled:
        begins, ends = table_places(objects, offsets, lengths, 4 * counted, torch.argsort(objects, stable=True))
        expected = ends[objects] + begins
        parts += [encode_segments(torch.where(tables >= 0, tables - expected, 0), entries)]
    return b"".join(parts)


def _mappings(planner_data: Any, entries: dict[str, Any]) -> Any:
    """Return DCP's paths of flattened names: as a list, if their names are those of the entries in the same order."""
    if planner_data is None:
        return None
    _require(type(planner_data) is dict)
    for name, path in planner_data.items():
        _require(type(name) is str and type(path) is tuple and all(type(step) in (str, int) for step in path))
    if list(planner_data) == list(entries):
        return list(planner_data.values())
    return dict(planner_data)


def _facts(
    paths: Sequence[str], bucketpoint: dict[str, Any], meta: StorageMeta | None, version: str | None
) -> bytes | None:
    objects = bucketpoint.get("objects")
    known: dict[str, Any] = objects if objects is not None else {}
    rest = {name: value for name, value in bucketpoint.items() if name != "objects"}
    if any(type(fact) is not dict or set(fact) != {"size", "etag"} for fact in known.values()):
        return None
    named = dict.fromkeys(paths)
    listed = [*paths, *(path for path in known if path not in named)]
    told = [[path, known[path]["size"], known[path]["etag"]] if path in known else [path] for path in listed]
    storage_meta = None
    if meta is not None:
        where = meta.checkpoint_id
        where = os.fspath(where) if isinstance(where, os.PathLike) else where
        storage_meta = [where, meta.save_id, meta.load_id, list(meta.modules)]
    document = {
        "paths": len(paths),
        "table": objects is not None,
        "objects": told,
        "bucketpoint": rest,
        "storage_meta": storage_meta,
        # A list, which is empty in an index of metadata without this attribute.
        "version": [version],
    }
    try:
        data = _json(document)
    except (TypeError, ValueError):
        return None
    # JSON turns tuples into lists, and numbers as keys into text: refuse facts that would change.
    return data if json.loads(data)["bucketpoint"] == rest else None


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _require(holds: bool) -> None:
    if not holds:
        raise UnsuitableError
