"""Summary of a checkpoint, and comparison of two checkpoints, from metadata alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bucketpoint.checkpoint.open import SavedCheckpoint
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import group_of
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.metadata.coverage import is_tensor
from bucketpoint.format.record import CommitRecord
from bucketpoint.transfer.checksum import combine


@dataclass(frozen=True)
class SummaryEntry:
    """One key of the saved state.

    Attributes:
        dtype, shape: None if the entry is not a tensor.
        nbytes: bytes of the elements of a tensor; stored bytes of another entry.
        chunks: number of pieces in which the entry was saved.
        group: object group of the entry's bytes.
        crc32c: CRC32C of all elements in row-major order, independent of the chunks; None if unknown.
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
    """Time at which `.metadata` was written, by the store's clock, in seconds since the epoch."""
    copied_from: str | None
    ours: bool
    entries: dict[str, SummaryEntry]
    groups: dict[str, int]

    @property
    def tensors(self) -> list[SummaryEntry]:
        return [entry for entry in self.entries.values() if entry.dtype is not None]

    def by_dtype(self) -> dict[str, tuple[int, int]]:
        """Return the number of tensors of each dtype, and their bytes."""
        totals: dict[str, tuple[int, int]] = {}
        for entry in self.tensors:
            count, nbytes = totals.get(str(entry.dtype), (0, 0))
            totals[str(entry.dtype)] = count + 1, nbytes + entry.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


def summarise(saved: SavedCheckpoint) -> Summary:
    """Summarise a checkpoint. Raises MetadataError if its metadata is malformed."""
    stored = {(index.fqn, None if index.offset is None else tuple(index.offset)): info for index, info in saved.items}
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
        bool(saved.facts) and not saved.is_safetensors,
        dict(sorted(entries.items())),
        # Sizes of objects, frames included. Objects of other writers have no group, so entries are counted instead.
        record.groups or dict(sorted(groups.items())),
    )


def _entry(fqn: str, entry: Any, stored: dict[tuple[str, tuple[int, ...] | None], ItemInfo]) -> SummaryEntry:
    if not is_tensor(entry):
        info = stored.get((fqn, None))
        group = _group(fqn, info, tensor=False)
        return SummaryEntry(fqn, None, None, info.length if info else 0, 1, group, info.crc32c if info else None)
    shape = tuple(entry.size)
    items = [(tuple(chunk.offsets), tuple(chunk.sizes), stored.get((fqn, tuple(chunk.offsets))))
             for chunk in entry.chunks]  # fmt: skip
    return SummaryEntry(
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
    """Combine the CRC32C of a tensor's chunks, if the chunks are consecutive in row-major order; else return None.

    If ranks cut the tensor along the first dimension, their number does not change the result.
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


@dataclass
class GroupDifference:
    """Numbers of the compared and of the differing keys of one object group, and of their bytes."""

    keys: int = 0
    bytes: int = 0
    differing_keys: int = 0
    differing_bytes: int = 0


@dataclass(frozen=True)
class Difference:
    """The differences between two checkpoints.

    Attributes:
        only_a, only_b: entries whose key the other checkpoint does not have.
        changed: entries with another dtype or shape, as pairs of a and b.
        values: keys whose checksums differ. Empty if values were not compared.
        equal, unknown: the number of keys with equal checksums, and the keys without checksums to compare.
        groups: the keys with checksums, by object group, the largest first.
    """

    only_a: list[SummaryEntry]
    only_b: list[SummaryEntry]
    changed: list[tuple[SummaryEntry, SummaryEntry]]
    values: list[str]
    equal: int
    unknown: list[str]
    groups: dict[str, GroupDifference]

    @property
    def same(self) -> bool:
        return not (self.only_a or self.only_b or self.changed or self.values)


def difference(a: Summary, b: Summary, *, values: bool = False) -> Difference:
    """Compare two checkpoints by key, dtype and shape, and with `values` by the recorded checksums."""
    both = [(a.entries[fqn], b.entries[fqn]) for fqn in a.entries if fqn in b.entries]
    changed = [(x, y) for x, y in both if (x.dtype, x.shape) != (y.dtype, y.shape)]
    alike = [(x, y) for x, y in both if (x.dtype, x.shape) == (y.dtype, y.shape)] if values else []
    known = [(x, y) for x, y in alike if x.crc32c is not None and y.crc32c is not None]
    return Difference(
        [entry for fqn, entry in a.entries.items() if fqn not in b.entries],
        [entry for fqn, entry in b.entries.items() if fqn not in a.entries],
        changed,
        [x.fqn for x, y in known if _differ(x, y)],
        sum(not _differ(x, y) for x, y in known),
        [x.fqn for x, y in alike if x.crc32c is None or y.crc32c is None],
        _by_group(known),
    )


def _differ(x: SummaryEntry, y: SummaryEntry) -> bool:
    return (x.crc32c, x.nbytes) != (y.crc32c, y.nbytes)


def _by_group(pairs: Sequence[tuple[SummaryEntry, SummaryEntry]]) -> dict[str, GroupDifference]:
    groups: dict[str, GroupDifference] = {}
    for x, y in pairs:
        group = groups.setdefault(y.group, GroupDifference())
        group.keys += 1
        group.bytes += y.nbytes
        if _differ(x, y):
            group.differing_keys += 1
            group.differing_bytes += y.nbytes
    return dict(sorted(groups.items(), key=lambda entry: (-entry[1].bytes, entry[0])))
