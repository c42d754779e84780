"""The bytes of a `.metadata` that is as at the save before, but for names of objects and checksums. No I/O.

To pickle an index costs microseconds an item. Where the same items lie in the same places, all of that pickle is known
but for numbers of fixed width, which are set into a copy of it. Any unpickler reads the result.
"""

from __future__ import annotations

import io
import os
import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from bucketpoint.format import storage_info as names
from bucketpoint.format.columns import Columns, unpack
from bucketpoint.format.index_ref import INDEX_ATTRIBUTE, TEXT_LENGTH, IndexRef
from bucketpoint.format.metadata import PICKLE_PROTOCOL, pickled

_PROTO = pickle.PROTO + bytes([PICKLE_PROTOCOL])
_END = pickle.SETITEMS + pickle.BUILD + pickle.STOP
_WIDE = pickle.LONG1 + b"\x08"
_CHECKSUM = (pickle.LONG1 + b"\x05", b"\0")
"""Around four bytes: any checksum as a number, and none of them negative."""


@dataclass(frozen=True)
class MetadataTemplate:
    """A pickle up to what is added at its end, with gaps.

    Attributes:
        body: opcodes without frames.
        words: where each four bytes of the checksums go, rank by rank in the order of `Columns.checksums`.
        counts: how many of them each rank has.
        paths: for each rank and object, where its path goes, and its length.
        name: where the name of the index goes; None if there is none.
    """

    body: bytes
    words: torch.Tensor
    counts: tuple[int, ...]
    paths: tuple[tuple[tuple[int, int], ...], ...]
    name: int | None = None

    def fill(self, reported: Sequence[Columns], end: dict[str, Any], index: IndexRef | None = None) -> bytes | None:
        """The metadata of a save; None if something does not fit the gaps.

        Args:
            reported: of each rank. Its layouts are those that the template was made of.
            end: the attributes that come last, two or more: plain values and `StorageMeta`.
            index: what says the same; needed if the template has a gap for its name.
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
        last = _without_frames(_unshared(end))
        if last is None:
            return None
        content = bytes(body) + last.removeprefix(pickle.EMPTY_DICT + pickle.MARK).removesuffix(pickle.SETITEMS) + _END
        return b"".join((_PROTO, pickle.FRAME, len(content).to_bytes(8, "little"), content))


def make_template(
    metadata: Metadata,
    indices: Sequence[Sequence[MetadataIndex]],
    reported: Sequence[Columns],
    *,
    indexed: bool = False,
) -> MetadataTemplate | None:
    """A template for the items of each rank, named by `indices`; None if their pickle has no such gaps.

    Args:
        metadata: without storage data.
        indexed: leave a gap for the name of an index.
    """
    marks = _Marks()
    name = marks.text(TEXT_LENGTH) if indexed else None
    storage_data: dict[MetadataIndex, Any] = {}
    items: list[list[dict[str, Any]]] = []
    paths: list[list[bytes]] = []
    for named, columns in zip(indices, reported, strict=True):
        marked = [(marks.text(len(path.encode())), None, None) for path, _, _ in columns.objects]
        paths.append([path.encode() for path, _, _ in marked])
        infos = unpack(Columns(columns.layout, tuple(marked), columns.checksums))
        for info in infos:
            values = vars(info)
            values[names._CRC32C] = marks.number()
            if names._BLOCK_CRCS in values:
                values[names._BLOCK_CRCS] = marks.block(len(values[names._BLOCK_CRCS]))
        items.append([vars(info) for info in infos])
        storage_data.update(zip(named, infos, strict=True))
    if len(storage_data) != sum(map(len, items)):
        return None
    whole = object.__new__(Metadata)
    if name is not None:
        vars(whole)[INDEX_ATTRIBUTE] = name
    vars(whole).update(
        state_dict_metadata=metadata.state_dict_metadata, planner_data=metadata.planner_data, storage_data=storage_data
    )
    source = _without_frames(pickled(whole))
    if source is None or not source.endswith(_END[:2]):
        return None
    found = _cut(source[:-2], items, paths)
    # Before all other gaps, so where it is in the source.
    return found if found is None or name is None else replace(found, name=source.index(name.encode()))


def _cut(source: bytes, items: list[list[dict[str, Any]]], paths: list[list[bytes]]) -> MetadataTemplate | None:
    """Find the marks, in the order in which they were pickled, and take note of where they end up."""
    out: list[bytes] = []
    position = shift = 0
    words: list[array[int]] = []
    counts: list[int] = []
    places: list[tuple[tuple[int, int], ...]] = []
    for mine, own_paths in zip(items, paths, strict=True):
        found_paths: dict[bytes, int] = {}
        crcs, blocks = array("q"), array("q")
        for values in mine:
            path = values["relative_path"].encode()
            if path not in found_paths:
                at = source.find(path, position)
                if at < 0:
                    return None
                found_paths[path] = at - shift
            mark = _WIDE + values[names._CRC32C].to_bytes(8, "little")
            at = source.find(mark, position)
            if at < 0:
                return None
            out += (source[position:at], _CHECKSUM[0], bytes(4), _CHECKSUM[1])
            crcs.append(at - shift + 2)
            position = at + len(mark)
            shift += len(mark) - 7
            block = values.get(names._BLOCK_CRCS)
            if block is not None:
                at = source.find(block, position)
                if at < 0:
                    return None
                blocks.extend(range(at - shift, at - shift + len(block), 4))
        words += (crcs, blocks)
        counts.append(len(crcs) + len(blocks))
        if len(found_paths) != len(own_paths):
            return None
        places.append(tuple([(found_paths[path], len(path)) for path in own_paths]))
    out.append(source[position:])
    joined = torch.cat([torch.tensor(each, dtype=torch.int64) for each in words]) if words else torch.empty(0)
    return MetadataTemplate(b"".join(out), joined, tuple(counts), tuple(places))


class _Marks:
    """Values that are found again in a pickle, as nothing else there is like them."""

    def __init__(self) -> None:
        # The last byte makes a number of eight bytes that is not negative.
        self._nonce = os.urandom(2) + b"\x5a"
        self._count = 0

    def _next(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(5, "little") + self._nonce

    def number(self) -> int:
        return int.from_bytes(self._next(), "little")

    def block(self, size: int) -> bytes:
        return self._next() + bytes(size - 8)

    def text(self, size: int) -> str:
        return self._next().hex().ljust(size, "~")


def _unshared(end: dict[str, Any]) -> bytes:
    """A pickle that numbers no object: it is put behind another one, which has numbers of its own."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=PICKLE_PROTOCOL)
    pickler.fast = True
    pickler.dump(end)
    return stream.getvalue()


def _without_frames(data: bytes) -> bytes | None:
    """The opcodes between the first and the last; None if some of them are outside of frames."""
    if not data.startswith(_PROTO):
        return None
    position, parts = len(_PROTO), []
    while data[position : position + 1] == pickle.FRAME:
        size = int.from_bytes(data[position + 1 : position + 9], "little")
        parts.append(data[position + 9 : position + 9 + size])
        position += 9 + size
    return b"".join(parts).removesuffix(pickle.STOP) if position == len(data) else None
