"""The earlier save of a rank with which the next save is compared, from memory or from the store.

All ranks must compare with the same earlier save, and only the coordinator learns which saves were committed. So the
coordinator sends each rank, with its plan, the id of this save and the id of the save to compare with.

After each commit the coordinator also compares the checksums of an optimizer's moments with those of the last save.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.planning.global_plan import with_last
from bucketpoint.dcp.planning.results import RankResults
from bucketpoint.errors import BucketpointError
from bucketpoint.forks import process_lock
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import OPTIM
from bucketpoint.format.index.ref import is_index
from bucketpoint.format.index.view import decode_index
from bucketpoint.format.item_info import ItemInfo, read_item
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.storage_info import OBJECT, PAYLOAD_NBYTES, Columns, pack
from bucketpoint.location import Location, parent_and_name
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.pieces import for_each

logger = logging.getLogger(__name__)

_ELEMENT_BYTES = 8
"""Largest size of one element. Larger tensors of an optimizer are moments, smaller ones may be step counters."""

_ALARM = (
    "no byte of the optimizer's moments (group %r) changed in %s, although training continued: they have not changed "
    "since %s. The optimizer may no longer step, or the state that is saved may be a stale copy. Check that "
    "the optimizer whose state is saved is the one on which training calls step(); if it should not change, "
    "ignore this warning"
)

_STILL_SAVES = 2
"""Number of consecutive saves, at rising steps and with unchanged moments, after which a warning is logged. More than
one, because a first trial of the library often saves twice without training."""


KEPT_SAVES = 3
"""Saves kept for each run: the last committed save, and saves that have begun since."""

KEPT_RUNS = 4
"""Runs whose saves are kept, for a writer that saves to several runs."""


@dataclass(frozen=True)
class Announcement:
    """Message of the coordinator to each rank, sent with its plan.

    Attributes:
        save: id of this save.
        since: id of the last save of the run that the coordinator's process committed; None if there is none.
        url: URL of the checkpoint to compare with, for ranks that have not kept save `since`; None if there is none.
        span: name of the coordinator's OpenTelemetry span; None without OpenTelemetry.
    """

    save: str
    since: str | None = None
    url: str | None = None
    span: str | None = None

    def put_on(self, plans: Iterable[SavePlan]) -> list[SavePlan]:
        """Return the plans with the announcement added, except to plans that hold other data of a planner."""
        # Only the values are sent: the name of a class would add 50 bytes for each rank.
        fields = (self.save, self.since, self.url, self.span)[: 3 if self.span is None else 4]
        return [replace(plan, storage_data=fields) if plan.storage_data is None else plan for plan in plans]

    @classmethod
    def received(cls, fields: Any) -> Announcement | None:
        """Return the announcement from a plan's data; None for other data of a planner."""
        return cls(*fields) if type(fields) is tuple and len(fields) in (3, 4) else None


class SavedItem(NamedTuple):
    """An item in an object of an earlier save.

    Attributes:
        digest: digest of the item's bytes, with its frame.
        sample: digest of a few of these bytes, which detects most changes; None if unknown.
    """

    info: ItemInfo
    digest: bytes
    sample: bytes | None


@dataclass
class Written:
    """Result of writing one rank's items.

    Attributes:
        items: each item with its digest; empty if none were computed.
        objects: the objects that hold these items, by path.
        copied_nbytes: bytes of the items that the store copied.
    """

    results: list[WriteResult] = field(default_factory=list)
    items: dict[MetadataIndex, SavedItem] = field(default_factory=dict)
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    copied_nbytes: int = 0


@dataclass(frozen=True)
class EarlierSave:
    """One rank's part of a save, for comparison with the next save.

    Attributes:
        items: the items with digests.
        objects: the objects that hold these items, by path.
    """

    id: str
    url: str
    items: Mapping[MetadataIndex, SavedItem] = field(repr=False)
    objects: Mapping[str, ObjectInfo] = field(repr=False)


@dataclass
class _Moments:
    """The optimizer's moments in one group of objects, at the last save with this group.

    Attributes:
        digest: digest of the checksums of the moments.
        url: URL of the save.
        changed: URL of the last save in which the moments changed; None if they never changed.
        still: number of saves at rising steps since the last change.
    """

    digest: bytes
    url: str
    changed: str | None = None
    still: int = 0


class EarlierSaves:
    """The last saves of this process, on this rank. A manager's writers share them."""

    def __init__(self) -> None:
        self._lock = process_lock()
        self._kept: dict[str, list[EarlierSave]] = {}
        self._committed: dict[str, tuple[str, str]] = {}
        self._moments: dict[str, dict[str, _Moments]] = {}

    def keep(self, said: Announcement | None, url: str, written: Written) -> None:
        """Keep a save whose objects this rank has uploaded, committed or not, if it has an announcement with a new id.

        DCP's planner repeats old announcements with its cached plans.
        """
        if said is None:
            return
        run, save = run_of(url), EarlierSave(said.save, url, written.items, written.objects)
        with self._lock:
            kept = self._kept.get(run, [])
            if all(each.id != save.id for each in kept):
                kept = [*kept, save][-KEPT_SAVES:]
            self._kept = with_last(self._kept, run, kept, KEPT_RUNS)

    def note_committed(self, save: str, url: str) -> None:
        """Record on the coordinator that a save was committed."""
        with self._lock:
            self._committed = with_last(self._committed, run_of(url), (save, url), KEPT_RUNS)

    def watch_moments(self, url: str, results: RankResults) -> None:
        """Compare the moments in a committed save with the last save of the run, on the coordinator.

        Warns if they do not change, once until they change again.
        """
        with self._lock:
            groups = self._moments.get(run_of(url), {})
            self._moments = with_last(self._moments, run_of(url), groups, KEPT_RUNS)
        for group, digest in _checksum_digests(results).items():
            last = groups.setdefault(group, _Moments(digest, url))
            if digest != last.digest:
                last.changed, last.still = url, 0
            elif is_later(url, last.url):
                last.still += 1
                if last.still == _STILL_SAVES:
                    logger.warning(_ALARM, group, url, last.changed or "the first save of this process")
            last.digest, last.url = digest, url

    def announcement(self, url: str, save: str, newest: Callable[[], str | None]) -> Announcement:
        """Return the coordinator's announcement for the save with this id.

        Args:
            newest: finds the newest checkpoint of the run in the store, for the first save of a process.
        """
        since, last = self._committed.get(run_of(url)) or (None, None)
        return Announcement(save, since, newest() if since is None else last)

    def compared_with(
        self, url: str, said: Announcement | None, read: Callable[[Announcement], EarlierSave | None]
    ) -> EarlierSave | None:
        """Return the announced save to compare with, from memory, or else from the store by `read`."""
        if said is None:
            return None
        with self._lock:
            kept = self._kept.get(run_of(url), [])
            at = next((at for at, save in enumerate(kept) if save.id == said.since), None)
            if at is not None:
                # No later save is compared with an older one.
                del kept[:at]
                return kept[0]
        return read(said) if said.url is not None else None

    def __reduce__(self) -> tuple[object, ...]:
        # A checkpoint process reads earlier saves from the store.
        return EarlierSaves, ()


def run_of(url: str) -> str:
    """Return the URL of the folder that contains a checkpoint and the other checkpoints of its run."""
    split = parent_and_name(url)
    return split[0] if split is not None else url


def newest_commit(place: Location) -> str | None:
    """Return the URL of the newest checkpoint of the run; None without one, or if the search fails.

    Sends as many requests as `latest_checkpoint`.
    """
    from bucketpoint.catalog.catalog import latest_checkpoint

    split = parent_and_name(place.url)
    try:
        return None if split is None else latest_checkpoint(place.at(split[0]))
    except BucketpointError as error:
        logger.info("the last checkpoint of the run was not found, so everything is sent: %s", error)
        return None


def read_earlier_save(
    items: Sequence[WriteItem],
    options: TransferOptions,
    open_url: Callable[[str], tuple[Store, str]],
    said: Announcement,
) -> EarlierSave | None:
    """Read from the store the save to compare with, for these items only; return None if the save cannot be read.

    Sends one or two small requests for the metadata, and one for each object that holds such items.
    """
    from bucketpoint.checkpoint.checksums import read_digests
    from bucketpoint.checkpoint.metadata_source import MetadataSource

    url = str(said.url)
    digests: dict[str, dict[int, bytes]] = {}

    def read(path: str) -> None:
        digests[path] = read_digests(store, objects[path].key, size=objects[path].size, etag=objects[path].etag)

    try:
        store, prefix = open_url(url)
        data = MetadataSource(store, prefix, url).read(indexed=True)
        metadata = decode_index(data, url=url) if is_index(data) else decode_metadata(data, url=url)
        stored = metadata.storage_data or {}
        infos = {item.index: read_item(stored[item.index], url=url) for item in items if item.index in stored}
        committed = extra(metadata).get("objects", {})
        objects = {
            path: ObjectInfo(keys.join(prefix, path), int(committed[path]["size"]), committed[path].get("etag"))
            for path in {info.path for info in infos.values()}
            if path in committed and keys.parse_data_path(path) is not None
        }
        for_each(objects, read, options)
    except BucketpointError as error:
        logger.info("%s cannot be compared, so everything is sent: %s", url, error)
        return None
    saved = {
        index: SavedItem(info, digests[info.path][info.offset], None)
        for index, info in infos.items()
        if info.offset in digests.get(info.path, {})
    }
    return EarlierSave(said.since or url, url, saved, objects)


# -- the moments of an optimizer ---------------------------------------------------------------------------------------

_NUMBER = re.compile(r"^(.*?)([0-9]+)$", re.DOTALL)


def is_later(url: str, last: str) -> bool:
    """Return True if the names of two folders differ only in the number at their end, and that of `url` is higher."""
    before, now = (_NUMBER.match(each.rstrip("/").rpartition("/")[2]) for each in (last, url))
    if before is None or now is None or before[1] != now[1]:
        return False
    # Compared as text: a folder's name may have more digits than Python converts.
    (older, newer) = (each[2].lstrip("0") for each in (before, now))
    return (len(newer), newer) > (len(older), older)


def _checksum_digests(results: RankResults) -> dict[str, bytes]:
    """Return a digest of the checksums of the moments in each group of objects, with no Python object per item."""
    digests: dict[str, Any] = {}
    for reported in results.ranks:
        # Results that name their items are packed here. If columns cannot hold them, they are not watched.
        columns = reported if isinstance(reported, Columns) else pack([result.storage_data for result in reported])
        if columns is None:
            continue
        checksums = np.frombuffer(columns.checksums, "<u4")
        objects, sizes = (np.asarray(columns.layout.column(number)) for number in (OBJECT, PAYLOAD_NBYTES))
        parsed = [keys.parse_data_path(path) for path, _, _ in columns.objects]
        # Objects of groups that do not belong to an optimizer get an empty name.
        groups = np.array([path[2] if path is not None and OPTIM in path[2] else "" for path in parsed])
        for group in sorted({*groups.tolist()} - {""}):
            mine = checksums[(groups == group)[objects] & (sizes > _ELEMENT_BYTES)]
            if mine.size:
                digests.setdefault(group, hashlib.blake2b(digest_size=16)).update(mine.tobytes())
    return {group: digest.digest() for group, digest in digests.items()}
