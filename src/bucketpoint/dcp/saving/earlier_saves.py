"""The last saves of a rank, with which the next one is compared: from the process's memory, or read from the store.

The ranks of a save must compare with the same earlier save, and only the coordinator knows which saves were committed.
So it announces to each rank, with the rank's plan, an id for this save and the id of the one to compare with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.saving.moments import MomentsWatch
from bucketpoint.errors import BucketpointError
from bucketpoint.forks import ProcessLock, renew_in_child
from bucketpoint.format import keys
from bucketpoint.format.index.ref import is_index
from bucketpoint.format.index.view import decode_index
from bucketpoint.format.item_info import ItemInfo, read_item
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.location import Location, parent_and_name
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.pieces import for_each

logger = logging.getLogger(__name__)

KEPT_SAVES = 3
"""Saves that are kept of one run: the last one committed, and those that have begun since."""

KEPT_RUNS = 4
"""Runs of which saves are kept, for a writer that saves to several."""


@dataclass(frozen=True)
class Announcement:
    """Message of the coordinator to each rank, sent with its plan.

    Attributes:
        save: id of this save.
        since: id of the last save of the run that this process committed; None if it has committed none.
        url: URL of the checkpoint to compare with, for ranks that do not know it from memory; None if they need not.
        span: name of the coordinator's span of OpenTelemetry; None if it records none.
    """

    save: str
    since: str | None = None
    url: str | None = None
    span: str | None = None

    @property
    def fields(self) -> tuple[str | None, ...]:
        """Sent as plain values: the name of a class would be 50 bytes for each rank."""
        return (self.save, self.since, self.url) if self.span is None else (self.save, self.since, self.url, self.span)

    def put_on(self, plans: Iterable[SavePlan]) -> list[SavePlan]:
        """Return the ranks' plans with the announcement, except for those with which a planner sends other data."""
        fields = self.fields
        return [replace(plan, storage_data=fields) if plan.storage_data is None else plan for plan in plans]

    @classmethod
    def received(cls, fields: Any) -> Announcement | None:
        """Return the announcement in a plan; None for anything else that a planner may put there."""
        return cls(*fields) if type(fields) is tuple and len(fields) in (3, 4) else None


class SavedItem(NamedTuple):
    """An item in an object of an earlier save.

    Attributes:
        digest: digest of the item's bytes, its frame included.
        sample: digest of a few of these bytes, by which most changes are seen; None if it is not known.
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
    """One rank's part of a save, as far as the next save needs it.

    Attributes:
        id: as announced.
        items: the items with digests.
        objects: the objects in which these lie, by path.
    """

    id: str
    url: str
    items: Mapping[MetadataIndex, SavedItem] = field(repr=False)
    objects: Mapping[str, ObjectInfo] = field(repr=False)


class EarlierSaves:
    """The last saves of this process, on this rank. A manager's writers share them."""

    def __init__(self) -> None:
        self._begin()
        renew_in_child(self, EarlierSaves._begin)

    def _begin(self) -> None:
        self._lock = ProcessLock()
        self._kept: dict[str, list[EarlierSave]] = {}
        self._committed: dict[str, tuple[str, str]] = {}
        self._watches: dict[str, MomentsWatch] = {}

    def keep(self, said: Announcement | None, url: str, written: Written) -> None:
        """Keep a save whose objects this rank has uploaded, committed or not. A save without an announcement has no id.

        A planner of DCP's that keeps plans sends an old announcement again, with the id of the save it was made for.
        """
        if said is None:
            return
        run, save = run_of(url), EarlierSave(said.save, url, written.items, written.objects)
        with self._lock:
            kept = self._kept.pop(run, [])
            known = any(each.id == save.id for each in kept)
            self._kept[run] = kept if known else [*kept, save][-KEPT_SAVES:]
            for old in list(self._kept)[:-KEPT_RUNS]:
                del self._kept[old]

    def note_committed(self, save: str, url: str) -> None:
        """Record on the coordinator that a save was committed."""
        run = run_of(url)
        with self._lock:
            self._committed.pop(run, None)
            self._committed[run] = save, url
            for old in list(self._committed)[:-KEPT_RUNS]:
                del self._committed[old]
                self._watches.pop(old, None)

    def watch(self, url: str) -> MomentsWatch:
        """Return the watch of the run of a checkpoint, on the coordinator."""
        with self._lock:
            return self._watches.setdefault(run_of(url), MomentsWatch())

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
        """Return the save that the coordinator has announced: from memory, or else from the store by `read`."""
        if said is None:
            return None
        last = self._find(run_of(url), said)
        return read(said) if last is None and said.url is not None else last

    def _find(self, run: str, said: Announcement) -> EarlierSave | None:
        """Return the save to compare with, and drop earlier ones. None if this process has not kept it."""
        with self._lock:
            kept = self._kept.get(run, [])
            at = next((at for at, save in enumerate(kept) if save.id == said.since), None)
            if at is None:
                return None
            del kept[:at]
            return kept[0]

    def __reduce__(self) -> tuple[object, ...]:
        # A checkpoint process reads what it needs from the store.
        return EarlierSaves, ()


def run_of(url: str) -> str:
    """Return the URL of the folder above a checkpoint, in which the other checkpoints of its run are."""
    split = parent_and_name(url)
    return split[0] if split is not None else url


def newest_commit(place: Location) -> str | None:
    """Return the URL of the newest checkpoint in the folder above a place; None if none is there or found.

    As many requests as `latest_checkpoint`.
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
    """Read the checkpoint to compare with from the store, for these items. None if it cannot be read.

    One or two small requests for the metadata, and one for each object that holds such items.
    """
    indices = [item.index for item in items]
    try:
        return _read(str(said.url), said, indices, options, open_url)
    except BucketpointError as error:
        logger.info("%s cannot be compared with, so everything is sent: %s", said.url, error)
        return None


def _read(
    url: str,
    said: Announcement,
    indices: Sequence[MetadataIndex],
    options: TransferOptions,
    open_url: Callable[[str], tuple[Store, str]],
) -> EarlierSave:
    from bucketpoint.checkpoint.digest_table import read_digests
    from bucketpoint.checkpoint.metadata_source import MetadataSource

    store, prefix = open_url(url)
    data = MetadataSource(store, prefix, url).read(indexed=True)
    metadata = decode_index(data, url=url) if is_index(data) else decode_metadata(data, url=url)
    stored = metadata.storage_data or {}
    infos = {index: read_item(stored[index], url=url) for index in indices if index in stored}
    committed = extra(metadata).get("objects", {})
    objects = {
        path: ObjectInfo(keys.join(prefix, path), int(committed[path]["size"]), committed[path].get("etag"))
        for path in {info.path for info in infos.values()}
        if path in committed and keys.parse_data_path(path) is not None
    }
    digests: dict[str, dict[int, bytes]] = {}

    def read(path: str) -> None:
        digests[path] = read_digests(store, objects[path].key, size=objects[path].size, etag=objects[path].etag)

    for_each(objects, read, options)
    items = {
        index: SavedItem(info, digests[info.path][info.offset], None)
        for index, info in infos.items()
        if info.offset in digests.get(info.path, {})
    }
    return EarlierSave(said.since or url, url, items, objects)
