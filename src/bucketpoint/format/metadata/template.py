"""Template of a `.metadata` pickle: only object names and checksums differ between saves of one structure.

Pickling object by object would cost some 20 microseconds per item. This module joins the pickle's opcodes instead. The
next save with items at the same positions only sets its names and checksums in a copy of the bytes. Any unpickler reads
the result.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.format import item_info as names
from bucketpoint.format.index.int_columns import over
from bucketpoint.format.index.ref import INDEX_ATTRIBUTE, TEXT_LENGTH, IndexRef
from bucketpoint.format.metadata.codec import _Sharing
from bucketpoint.format.metadata.facts import without_gc
from bucketpoint.format.pickles.metadata_vocabulary import PROTOCOL, framed, recall, text_header, unframed, unshared
from bucketpoint.format.storage_info import Columns, IndexColumns
from bucketpoint.format.torch_zip import number_opcode

_END = pickle.SETITEMS + pickle.BUILD + pickle.STOP
_MADE = pickle.EMPTY_TUPLE + pickle.NEWOBJ
_BEGUN = _MADE + pickle.EMPTY_DICT + pickle.MARK
_DONE = pickle.SETITEMS + pickle.BUILD
_CHECKSUM = (pickle.LONG1 + b"\x05", b"\0")
"""Bytes of an opcode before and after the four bytes of a checksum. The last byte, 0, prevents a negative number."""

_NO_NAME = "~" * TEXT_LENGTH

_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)


@dataclass(frozen=True)
class MetadataTemplate:
    """A `Metadata` pickle without its last attributes, with gaps for names and checksums.

    Attributes:
        body: opcodes without frames.
        words: position in `body` of each four-byte checksum, rank by rank in the order of `Columns.checksums`.
        counts: number of checksums of each rank.
        paths: for each rank and object, position and length of its path.
        name: position of the reference to the index; None if the metadata has no index.
    """

    body: bytes
    words: torch.Tensor
    counts: tuple[int, ...]
    paths: tuple[tuple[tuple[int, int], ...], ...]
    name: int | None = None

    def fill(self, reported: Sequence[Columns], end: dict[str, Any], index: IndexRef | None = None) -> bytes | None:
        """Encode the metadata of a save; None if something does not fit the gaps.

        Args:
            reported: columns of each rank, with the layouts from which the template was made.
            end: the attributes that come last, two or more: plain values and `StorageMeta`.
            index: reference to the index, if the template has a gap for it.
        """
        if (index is None) != (self.name is None):
            return None
        if [4 * count for count in self.counts] != [len(each.checksums) for each in reported]:
            return None
        body = bytearray(self.body)
        if index is not None and self.name is not None:
            if len(index.text) != TEXT_LENGTH:
                return None
            body[self.name : self.name + TEXT_LENGTH] = index.text.encode("ascii")
        for columns, places in zip(reported, self.paths, strict=True):
            if len(columns.objects) != len(places):
                return None
            for (path, _, _), (at, size) in zip(columns.objects, places, strict=True):
                content = path.encode()
                if len(content) != size:
                    return None
                body[at : at + size] = content
        if len(self.words):
            checksums = bytearray(b"".join(each.checksums for each in reported))
            whole = torch.frombuffer(body, dtype=torch.uint8)
            words = torch.frombuffer(checksums, dtype=torch.uint8).view(-1, 4)
            for byte in range(4):
                whole[self.words + byte] = words[:, byte]
            del whole
        last = unframed(unshared(end))
        if last is None:
            return None
        last = last.removeprefix(pickle.EMPTY_DICT + pickle.MARK).removesuffix(pickle.SETITEMS)
        return framed(b"".join((body, last, _END)))


class _UnusualError(Exception):
    """Raised for content that this module cannot encode."""


def make_template(
    metadata: Metadata, items: IndexColumns, reported: Sequence[Columns], *, indexed: bool = False
) -> MetadataTemplate | None:
    """Make a template for items at the positions in `reported`; None if any content is not of DCP's own types.

    Args:
        metadata: metadata without storage data.
        items: items of all ranks in `reported`, each once.
        indexed: leave a gap for the reference to an index.
    """
    try:
        with without_gc(), torch.device("cpu"):
            return _Maker(metadata, items, reported, indexed=indexed).made()
    except _UnusualError:
        return None


class _Maker:
    """Assembler of a pickle. It first pushes the shared values and pops them again, so that they are in the memo."""

    def __init__(self, metadata: Metadata, items: IndexColumns, reported: Sequence[Columns], *, indexed: bool) -> None:
        self._metadata, self._items, self._reported = metadata, items, reported
        self._state = metadata.state_dict_metadata
        planner_data = metadata.planner_data
        sharing = _Sharing(self._state)
        if type(planner_data) is dict:
            planner_data = {sharing.share(name): value for name, value in planner_data.items()}
        entries = list(self._state.values())
        transforms = {name for columns in reported for name in columns.layout.transforms or ()}
        # The reference to the index comes first, because readers search only the first bytes.
        shared: list[Any] = [INDEX_ATTRIBUTE, _NO_NAME] if indexed else []
        shared += [Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, torch.Size]
        shared += [MetadataIndex, _StorageInfo, "state_dict_metadata", "planner_data", "storage_data", "properties"]
        shared += ["size", "chunks", "offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"]
        shared += ["transform_descriptors", names._PAYLOAD_OFFSET, names._PAYLOAD_NBYTES, names._CRC32C]
        shared += [names._TABLE_BLOCK_NBYTES, names._TABLE_OFFSET, *transforms, *self._state, planner_data]
        shared += [entry.properties for entry in entries if isinstance(entry, TensorStorageMetadata)]
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, protocol=PROTOCOL)
        pickler.dispatch_table = {**copyreg.dispatch_table, **sharing.reducers()}
        pickler.dump(tuple(shared))
        head = unframed(stream.getvalue())
        if head is None:
            raise _UnusualError
        self._body = bytearray(head + pickle.POP)
        self._name = head.index(_NO_NAME.encode()) if indexed else None
        # The pickler memoizes by identity. Equal strings may be different objects, so `_texts` is a table by value.
        memo = pickler.memo.copy()
        self._known = {id(one): recall(memo[id(one)][0]) for one in shared if id(one) in memo}
        self._texts = {one: self._known[id(one)] for one in shared if type(one) is str and id(one) in self._known}
        self._planner_data = self._known.get(id(planner_data), b"" if planner_data is not None else pickle.NONE)
        self._count = len(memo)
        self._shared = shared
        self._shapes: dict[torch.Size, bytes] = {}

    def made(self) -> MetadataTemplate | None:
        texts, items = self._texts, self._items
        if not self._planner_data or not {*self._state, *items.names} <= texts.keys():
            return None
        self._add(self._known[id(Metadata)], _BEGUN)
        if self._name is not None:
            self._add(texts[INDEX_ATTRIBUTE], texts[_NO_NAME])
        self._add(texts["state_dict_metadata"], pickle.EMPTY_DICT, pickle.MARK)
        for name, entry in self._state.items():
            self._add(texts[name])
            self._entry(entry)
        self._add(pickle.SETITEMS, texts["planner_data"], self._planner_data, texts["storage_data"])
        self._add(pickle.EMPTY_DICT, pickle.MARK)
        words: list[array[int]] = []
        paths = []
        for columns, (first, last) in zip(self._reported, itertools.pairwise(items.borders), strict=True):
            places, entries = self._of_rank(columns, first, last)
            words.append(entries)
            paths.append(places)
        self._add(pickle.SETITEMS)
        joined = torch.cat([over(each) for each in words]) if words else torch.empty(0)
        return MetadataTemplate(bytes(self._body), joined, tuple(map(len, words)), tuple(paths), self._name)

    def _add(self, *parts: bytes) -> None:
        self._body += b"".join(parts)

    def _entry(self, entry: Any) -> None:
        if type(entry) is BytesStorageMetadata and not vars(entry):
            self._add(self._known[id(BytesStorageMetadata)], _MADE)
            return
        if type(entry) is not TensorStorageMetadata or vars(entry).keys() != {"properties", "size", "chunks"}:
            raise _UnusualError
        if type(entry.properties) is not TensorProperties:
            raise _UnusualError
        texts = self._texts
        self._add(self._known[id(TensorStorageMetadata)], _BEGUN, texts["properties"])
        self._add(self._known[id(entry.properties)], texts["size"], self._shape(entry.size), texts["chunks"])
        self._add(pickle.EMPTY_LIST, pickle.MARK)
        begin = self._known[id(ChunkStorageMetadata)] + _BEGUN + texts["offsets"]
        then = texts["sizes"]
        body, shapes = self._body, self._shapes
        for chunk in entry.chunks:
            values = chunk.__dict__
            if type(chunk) is not ChunkStorageMetadata or len(values) != 2:
                raise _UnusualError
            offsets, sizes = values["offsets"], values["sizes"]
            if type(offsets) is not torch.Size or type(sizes) is not torch.Size:
                raise _UnusualError
            place = shapes.get(offsets) or self._shape(offsets)
            body += b"%b%b%b%b%b" % (begin, place, then, shapes.get(sizes) or self._shape(sizes), _DONE)
        self._add(pickle.APPENDS, _DONE)

    def _shape(self, shape: torch.Size) -> bytes:
        """Encode a Size: in full at its first occurrence, then as a reference to the memo."""
        if type(shape) is not torch.Size:
            raise _UnusualError
        known = self._shapes.get(shape)
        if known is not None:
            return known
        numbers = b"".join(map(number_opcode, shape))
        inner = numbers + _TUPLES[len(shape)] if len(shape) < 4 else pickle.MARK + numbers + pickle.TUPLE
        self._shapes[shape] = self._memoized()
        return self._known[id(torch.Size)] + inner + pickle.TUPLE1 + pickle.REDUCE + pickle.MEMOIZE

    def _memoized(self) -> bytes:
        """Count the next memo entry and return the opcode that refers to it."""
        self._count += 1
        return recall(self._count - 1)

    def _of_rank(self, columns: Columns, first: int, last: int) -> tuple[tuple[tuple[int, int], ...], array[int]]:
        """Add one rank's storage data, and return the positions of paths and checksums."""
        layout, texts = columns.layout, self._texts
        if layout.count != last - first:
            raise _UnusualError
        sizes = [len(path.encode()) for path, _, _ in columns.objects]
        path_refs: list[bytes | None] = [None] * len(sizes)
        places = [(0, 0)] * len(sizes)
        crcs = array("q")
        kinds: dict[tuple[int, ...], tuple[bytes, bytes]] = {}
        body, shapes = self._body, self._shapes
        begin = self._known[id(MetadataIndex)] + _BEGUN + texts["fqn"]
        to_info = _DONE + self._known[id(_StorageInfo)] + _BEGUN + texts["relative_path"]
        hint_key, offset_key, place_key = texts["index"], texts["offset"], texts["offset"]
        table_key = texts[names._TABLE_OFFSET]
        facts = zip(*[layout.column(number) for number in (2, 3, 4, 5)], strict=True)
        tables = layout.column(6)
        items = self._items
        for name, offset, hint, number, at, fact, table in zip(
            items.names[first:last], items.offsets[first:last], items.hints[first:last],
            layout.column(0), layout.column(1), facts, tables, strict=True,
        ):  # fmt: skip
            head = begin + texts[name]
            if hint >= 0:
                head += hint_key + number_opcode(hint)
            if offset is not None:
                head += offset_key + (shapes.get(offset) or self._shape(offset))
            head += to_info
            path = path_refs[number]
            if path is None:
                path = text_header(sizes[number]) + bytes(sizes[number]) + pickle.MEMOIZE
                places[number] = (len(body) + len(head) + len(path) - 1 - sizes[number], sizes[number])
                path_refs[number] = self._memoized()
            if table >= 0:
                path += table_key + number_opcode(table)
            kind = kinds.get(fact)
            if kind is None:
                kind = kinds[fact] = self._kind(fact, layout.transforms)
            between, rest = kind
            body += b"%b%b%b%b%b%b" % (head, path, place_key, number_opcode(at), between, rest)
            crcs.append(len(body) - len(rest))
        return tuple(places), crcs

    def _kind(self, fact: tuple[int, ...], transforms: tuple[str, ...] | None) -> tuple[bytes, bytes]:
        """Encode the fields after an item's offset: those before the checksum, and the checksum with the rest."""
        length, payload_offset, payload_nbytes, block_nbytes = fact
        texts = self._texts
        between = texts["length"] + number_opcode(length)
        if transforms:
            listed = b"".join([texts[name] for name in transforms])
            between += texts["transform_descriptors"] + pickle.EMPTY_LIST + pickle.MARK + listed + pickle.APPENDS
        if payload_offset >= 0:
            between += texts[names._PAYLOAD_OFFSET] + number_opcode(payload_offset)
            between += texts[names._PAYLOAD_NBYTES] + number_opcode(payload_nbytes)
        between += texts[names._CRC32C] + _CHECKSUM[0]
        rest = bytes(4) + _CHECKSUM[1]
        if block_nbytes >= 0:
            rest += texts[names._TABLE_BLOCK_NBYTES] + number_opcode(block_nbytes)
        return between, rest + _DONE
