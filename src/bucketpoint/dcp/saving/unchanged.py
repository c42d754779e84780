"""Detection of items that are unchanged since the last save, and copies of their objects inside the store.

Only whole objects are copied, because every store can do this. An object is copied if unchanged items are 80 % or more
of its bytes; the other bytes of the copy are unused. Unchanged items in other objects are sent again, in separate
objects that can be copied at the next save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.saving.earlier_saves import EarlierSave, SavedItem
from bucketpoint.dcp.saving.object_layout import ItemBytes, ObjectNames, results_with
from bucketpoint.errors import BucketpointError
from bucketpoint.format import keys
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.storage_info import make_storage_info
from bucketpoint.location import parent_and_name
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import Segment, TransferOptions
from bucketpoint.transfer.checksum import crc32c, digest
from bucketpoint.transfer.copy import copy_whole
from bucketpoint.transfer.pieces import for_each

logger = logging.getLogger(__name__)

OpenUrl = Callable[[str], tuple[Store, str]]

LIVE_SHARE = 0.8
"""Least share of unchanged bytes in an object that is copied: the other bytes of the copy waste storage."""

LEAST_COPIED_BYTES = 1 << 20
"""Least number of unchanged bytes in an object that is copied: fewer are sent together with changed items."""

_SAMPLE_BYTES = 4096
_SAMPLED_FROM = 64 << 10


@dataclass(frozen=True)
class ObjectCopy:
    """An object of the last save to be copied to `path`, for these items of a group."""

    source: ObjectInfo
    source_path: str
    path: str
    group: str
    items: Sequence[tuple[ItemBytes, SavedItem]]


def sample_of(payload: Segment) -> bytes | None:
    """Return a digest of a few bytes in the middle, which detects most changes; None for a small item."""
    view = payload.data
    if view is None or view.nbytes < _SAMPLED_FROM:
        return None
    middle = view.nbytes // 2
    return xxhash.xxh3_64_digest(view[middle : middle + _SAMPLE_BYTES])


def find_unchanged(
    items: Sequence[ItemBytes], last: EarlierSave, options: TransferOptions
) -> dict[MetadataIndex, SavedItem]:
    """Return the items whose bytes have not changed since the last save, each with its location in that save.

    Items are compared by digest. If the sample of an item differs, the other bytes are not read.
    """
    asked = []
    for entry in items:
        payload, saved = entry.body, last.items.get(entry.item.index)
        if saved is None or payload.digest_seed is None or not _is_laid_out_like(entry, saved.info):
            continue
        if saved.sample is None or saved.sample == sample_of(payload):
            asked.append((entry, saved))
    unchanged: dict[MetadataIndex, SavedItem] = {}

    def compare(pair: tuple[ItemBytes, SavedItem]) -> None:
        entry, saved = pair
        payload = entry.body
        assert payload.data is not None
        assert payload.digest_seed is not None
        if digest(payload.data, payload.digest_seed) != saved.digest:
            return
        # The saved checksum goes into the new metadata. One that was read from the store may be damaged: verify it.
        if saved.sample is not None or crc32c(payload.data) == saved.info.crc32c:
            unchanged[entry.item.index] = saved

    for_each(asked, compare, options)
    return unchanged


def _is_laid_out_like(entry: ItemBytes, info: ItemInfo) -> bool:
    body = entry.body
    return (
        info.length == entry.nbytes
        and info.checked_nbytes == body.nbytes
        and info.payload_offset == entry.payload_offset
        and info.block_nbytes == min(body.block_nbytes, body.nbytes)
        and not info.transform_descriptors
    )


def plan_copies(
    groups: Mapping[str, Sequence[ItemBytes]],
    unchanged: Mapping[MetadataIndex, SavedItem],
    last: EarlierSave,
    names: ObjectNames,
) -> list[ObjectCopy]:
    """Return the objects of the last save that are worth a copy, each with the unchanged items in it."""
    found: dict[str, tuple[str, list[tuple[ItemBytes, SavedItem]]]] = {}
    for group, members in groups.items():
        for entry in members:
            saved = unchanged.get(entry.item.index)
            if saved is not None and _group_of(saved) == group:
                found.setdefault(saved.info.path, (group, []))[1].append((entry, saved))
    copies = []
    for path, (group, pairs) in found.items():
        source = last.objects.get(path)
        live = sum(saved.info.length + saved.info.table_nbytes for _, saved in pairs)
        # Without an ETag, a replaced object could not be detected.
        if source is not None and source.etag and live >= max(LEAST_COPIED_BYTES, LIVE_SHARE * source.size):
            copies.append(ObjectCopy(source, path, names.next(group), group, pairs))
    return copies


def _group_of(saved: SavedItem) -> str | None:
    parsed = keys.parse_data_path(saved.info.path)
    return parsed[2] if parsed is not None else None


def copy_object(copy: ObjectCopy, last: EarlierSave, url: str, open_url: OpenUrl) -> ObjectInfo | None:
    """Copy an object inside the store into the checkpoint at `url`; return None if the copy fails.

    The object may have been pruned or replaced meanwhile, or the credentials may not allow the copy.
    """
    try:
        store, prefix = _in_run(url, open_url)
        source, source_prefix = _in_run(last.url, open_url)
        if source.identity != store.identity:
            return None
        found = replace(copy.source, key=keys.join(source_prefix, copy.source_path))
        return copy_whole(store, found, keys.join(prefix, copy.path))
    except BucketpointError as error:
        logger.info("an unchanged object of the last save was not copied, so its bytes are sent: %s", error)
        return None


def _in_run(url: str, open_url: OpenUrl) -> tuple[Store, str]:
    """Return the store at the folder above a checkpoint, and the checkpoint's prefix in it.

    With a local path, the store of a checkpoint is the folder of the checkpoint, which contains no other checkpoint.
    """
    split = parent_and_name(url)
    if split is None:
        return open_url(url)
    store, prefix = open_url(split[0])
    return store, keys.join(prefix, split[1])


def results_of_copy(copy: ObjectCopy, done: ObjectInfo) -> list[WriteResult]:
    """Return the results that this rank reports for the items of a copied object, with unchanged offsets."""
    infos = []
    for entry, saved in copy.items:
        was = saved.info
        info = make_storage_info(
            copy.path,
            was.offset,
            was.length,
            payload_offset=was.payload_offset,
            payload_nbytes=was.payload_nbytes,
            crc32c=was.crc32c,
            block_nbytes=was.block_nbytes,
            table_offset=was.table_offset,
        )
        infos.append((entry.item.index, info))
    return results_with(infos, done)
