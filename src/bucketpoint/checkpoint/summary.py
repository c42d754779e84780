"""What a saved checkpoint holds, and where two differ, from their metadata alone. No requests, and no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bucketpoint.checkpoint.saved import SavedCheckpoint
from bucketpoint.format import keys
from bucketpoint.format.groups import group_of
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.metadata_facts import is_tensor
from bucketpoint.format.record import CommitRecord
from bucketpoint.transfer.checksum import combine


@dataclass(frozen=True)
class Entry:
    """One key of the saved state.

    Attributes:
        dtype, shape: None for what is no tensor.
        nbytes: of a tensor's elements; else of the bytes as they are stored.
        chunks: how many pieces it was saved in.
        group: the object group of its bytes.
        crc32c: of all its elements in row-major order, whatever it was cut into; None where that is not known.
    """

    fqn: str
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    chunks: int
    group: str
    crc32c: int | None


@dataclass(frozen=True)
class Summary:
    """A checkpoint in numbers, and its entries by key."""

    url: str
    record: CommitRecord
    metadata_nbytes: int
    modified: float | None
    """When `.metadata` was written, by the store's clock, in seconds since the epoch."""
    copied_from: str | None
    ours: bool
    entries: dict[str, Entry]
    groups: dict[str, int]

    @property
    def tensors(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.dtype is not None]

    def by_dtype(self) -> dict[str, tuple[int, int]]:
        """How many tensors there are of each dtype, and their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for entry in self.tensors:
            count, nbytes = found.get(str(entry.dtype), (0, 0))
            found[str(entry.dtype)] = count + 1, nbytes + entry.nbytes
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def summarise(saved: SavedCheckpoint) -> Summary:
    """What the checkpoint holds. Raises MetadataError where its metadata is malformed."""
    stored = {(index.fqn, _place(index.offset)): info for index, info in saved.items}
    entries = {fqn: _entry(fqn, entry, stored) for fqn, entry in saved.metadata.state_dict_metadata.items()}
    groups: dict[str, int] = {}
    for entry in entries.values():
        groups[entry.group] = groups.get(entry.group, 0) + entry.nbytes
    record = saved.record
    return Summary(
        saved.url,
        record,
        len(saved.data),
        saved.info.modified,
        saved.facts.get("copied_from"),
        bool(saved.facts),
        dict(sorted(entries.items())),
        # Of objects where their names tell, which counts the frames too; of the entries where another wrote them.
        record.groups or dict(sorted(groups.items())),
    )


def _place(offset: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if offset is None else tuple(offset)


def _entry(fqn: str, entry: Any, stored: dict[tuple[str, tuple[int, ...] | None], ItemInfo]) -> Entry:
    if not is_tensor(entry):
        info = stored.get((fqn, None))
        group = _group(fqn, info, tensor=False)
        return Entry(fqn, None, None, info.length if info else 0, 1, group, info.crc32c if info else None)
    shape = tuple(entry.size)
    items = [(tuple(chunk.offsets), tuple(chunk.sizes), stored.get((fqn, tuple(chunk.offsets))))
             for chunk in entry.chunks]  # fmt: skip
    return Entry(
        fqn,
        str(entry.properties.dtype).removeprefix("torch."),
        shape,
        math.prod(shape) * entry.properties.dtype.itemsize,
        len(items),
        _group(fqn, items[0][2] if items else None, tensor=True),
        _whole_crc(shape, items),
    )


def _group(fqn: str, info: ItemInfo | None, *, tensor: bool) -> str:
    named = keys.parse_data_path(info.path) if info is not None else None
    return named[2] if named is not None else group_of(fqn, tensor=tensor)


def _whole_crc(
    shape: tuple[int, ...], items: Sequence[tuple[tuple[int, ...], tuple[int, ...], ItemInfo | None]]
) -> int | None:
    """The CRC32C of a tensor from those of its chunks, where they follow each other in its row-major order.

    So it does not depend on how many ranks saved it, as long as they cut it along the first dimension alone.
    """
    at, crc = 0, 0
    for offsets, sizes, info in sorted(items, key=lambda item: item[0]):
        if info is None or info.crc32c is None or info.payload_nbytes is None:
            return None
        if shape and (offsets[0] != at or any(offsets[1:]) or sizes[1:] != shape[1:]):
            return None
        at += sizes[0] if shape else 1
        crc = combine(crc, info.crc32c, info.payload_nbytes)
    return crc if items and at == (shape[0] if shape else 1) else None


@dataclass(frozen=True)
class Difference:
    """Where two checkpoints differ.

    Attributes:
        only_a, only_b: entries whose key the other does not have.
        changed: entries with another dtype or shape, of a and of b.
        values: keys whose checksums differ. Empty where values were not compared.
        equal, unknown: how many keys have equal checksums, and which have none that could be compared.
    """

    only_a: list[Entry]
    only_b: list[Entry]
    changed: list[tuple[Entry, Entry]]
    values: list[str]
    equal: int
    unknown: list[str]

    @property
    def same(self) -> bool:
        return not (self.only_a or self.only_b or self.changed or self.values)


def difference(a: Summary, b: Summary, *, values: bool = False) -> Difference:
    """Compare two checkpoints by key, dtype and shape, and with `values` by the checksums that were recorded."""
    both = [(a.entries[fqn], b.entries[fqn]) for fqn in a.entries if fqn in b.entries]
    changed = [(x, y) for x, y in both if (x.dtype, x.shape) != (y.dtype, y.shape)]
    alike = [(x, y) for x, y in both if (x.dtype, x.shape) == (y.dtype, y.shape)] if values else []
    known = [(x, y) for x, y in alike if x.crc32c is not None and y.crc32c is not None]
    return Difference(
        _missing_in(a.entries.values(), b),
        _missing_in(b.entries.values(), a),
        changed,
        [x.fqn for x, y in known if (x.crc32c, x.nbytes) != (y.crc32c, y.nbytes)],
        sum((x.crc32c, x.nbytes) == (y.crc32c, y.nbytes) for x, y in known),
        [x.fqn for x, y in alike if x.crc32c is None or y.crc32c is None],
    )


def _missing_in(entries: Iterable[Entry], other: Summary) -> list[Entry]:
    return [entry for entry in entries if entry.fqn not in other.entries]
