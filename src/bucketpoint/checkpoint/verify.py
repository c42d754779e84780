"""Verification of a checkpoint in its store: every byte is read, and every recorded checksum is compared.

Damage is collected, not raised: a report names all damage of a checkpoint. The transfer options bound the memory.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.catalog.run import record_above
from bucketpoint.checkpoint.checksums import ObjectCheck, Region, item_regions, read_tables, table_regions
from bucketpoint.checkpoint.open import SavedCheckpoint, faults
from bucketpoint.errors import (
    AccessDeniedError,
    CorruptDataError,
    MetadataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    first_of,
)
from bucketpoint.format import keys
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.metadata.coverage import lacking_ranks, uncovered
from bucketpoint.format.pickles.items import check_archive
from bucketpoint.format.record import MAX_RECORD_BYTES, CommitRecord
from bucketpoint.stores import ObjectInfo, pinned
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import BufferPool, Meter, ProgressCallback, TransferOptions
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.pieces import RangeFile, Read, for_each, piece_bytes

VERIFY_OPTIONS = TransferOptions(max_inflight_bytes=256 << 20)
"""The bytes are not kept, so the whole memory budget serves larger reads: about 10 MiB for each connection."""

_CHANGED = (CorruptDataError, ObjectNotFoundError, PreconditionFailedError)

_NO_CHECKSUM = "its writer recorded no checksum"
_NOT_FRAMED = "the torch.save archive around the tensor has a form that this version does not write"
_UNCLAIMED = "no item uses these bytes"
_OVERLAP = "another item uses the same bytes"


@dataclass(frozen=True)
class Damage:
    """One fault of a checkpoint.

    Attributes:
        kind: `missing-object`, `wrong-size`, `replaced-object`, `checksum`, `missing-item`, `metadata` or `record`.
        path: path of the object within the checkpoint.
        item: the state-dict key, if the fault concerns one.
        start, stop: the range of bytes in the object.
    """

    kind: str
    path: str
    message: str
    item: str | None = None
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class Verification:
    """Report on one checkpoint. `unchecked` counts the bytes that were read and could not be compared, by reason."""

    url: str
    objects: int
    items: int
    read_bytes: int
    checked_bytes: int
    damage: Sequence[Damage]
    unchecked: dict[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        return not self.damage


def verify(
    saved: SavedCheckpoint, options: TransferOptions = VERIFY_OPTIONS, *, progress: ProgressCallback | None = None
) -> Verification:
    """Read every byte of a checkpoint and compare it with everything that was recorded about it.

    The checks are: the objects' presence, size and pinned ETag; the CRC32C of every block that bucketpoint wrote and of
    the frames around it; the CRC32 inside other writers' torch.save archives; the metadata against its record, beside
    it or in the run's catalog; the chunks against the tensors; and the index against the metadata.

    Raises:
        StoreError: the store fails, or refuses access. Damage is never raised.
    """
    run = _Run(saved, options)
    run.check_metadata()
    run.check_items_are_named()
    run.check_coverage()
    plans = run.plan()
    total = sum(plan.info.size for plan in plans) + (saved.index.size if saved.index is not None else 0)
    meter = Meter("verify", saved.url, total, progress)
    run.check_index(meter)
    run.read(plans, meter)
    meter.finish()
    return Verification(
        saved.url,
        objects=len(saved.by_object),
        items=len(saved.items),
        read_bytes=meter.done_bytes,
        checked_bytes=run.checked,
        damage=sorted(run.damage, key=lambda damage: (damage.path, damage.start or 0)),
        unchecked=dict(run.unchecked),
        notes=run.notes,
    )


_Items = Sequence[tuple[MetadataIndex, ItemInfo]]


@dataclass
class _ObjectPlan:
    """One existing object. `check` is None if no item has a checksum of bucketpoint."""

    path: str
    info: ObjectInfo
    items: _Items
    check: ObjectCheck | None


class _Run:
    """State and results of one verification. Any thread may add results."""

    def __init__(self, saved: SavedCheckpoint, options: TransferOptions) -> None:
        self.saved = saved
        self.options = options
        self.damage: list[Damage] = []
        self.unchecked: Counter[str] = Counter()
        self.notes: list[str] = []
        self.checked = 0
        self._lock = threading.Lock()
        self._pool = BufferPool(options.max_inflight_bytes)

    def check_metadata(self) -> None:
        """Compare the metadata with its commit record, which holds a checksum of the metadata and one of itself.

        The record is a cache: a missing record is not damage.
        """
        if self.saved.is_safetensors:
            self.notes.append("safetensors have no checksums: their headers, sizes and ETags were checked")
            return
        reasons, beside, saved = [], "beside it", self.saved
        above = partial(record_above, saved.place)
        for where, read in ((beside, self._record_beside), ("in a catalog above it", above)):
            try:
                record = read()
            except AccessDeniedError as error:
                reasons.append(error.message)
                continue
            except (CorruptDataError, MetadataError) as error:
                reasons.append(error.message)
                if where == beside:
                    self._add("record", keys.RECORD, error.message)
                continue
            if record is None:
                reasons.append(f"there is no commit record {where}")
            elif not self._is_of_this_save(record):
                reasons.append(f"the commit record {where} belongs to another save")
            else:
                if record.metadata_crc32c not in (None, crc32c(memoryview(self.saved.data))):
                    self._add("metadata", keys.METADATA, "its CRC32C differs from the one that was committed")
                return
        self.notes.append(f"{keys.METADATA} was not compared with a record: {', and '.join(reasons)}")

    def _record_beside(self) -> CommitRecord | None:
        try:
            data, _ = self.saved.store.get(self.saved.key(keys.RECORD), max_bytes=MAX_RECORD_BYTES)
        except ObjectNotFoundError:
            return None
        return CommitRecord.from_json(data, url=self.saved.url)

    def _is_of_this_save(self, record: CommitRecord) -> bool:
        # The token in the metadata may be damaged; the names of the objects contain the token, too.
        parsed = [keys.parse_data_path(path) for path in self.saved.by_object]
        tokens = {self.saved.facts.get("token"), *(path[0] for path in parsed if path is not None)} - {None}
        if tokens:
            return record.token in tokens
        # Other writers' metadata has no token; the record of an adopted checkpoint is identified by the metadata's
        # ETag.
        return record.metadata_etag is not None and record.metadata_etag == self.saved.info.etag

    def check_index(self, meter: Meter) -> None:
        """Compare the index, which loads read in place of the metadata, with the metadata's reference to it."""
        ref, saved = self.saved.index, self.saved
        if ref is None:
            return
        key = saved.key(ref.path)
        try:
            info = retry_transient(lambda: saved.store.head(key))
            if info.size != ref.size:
                text = (
                    f"the index has {info.size} bytes, but {ref.size} were written; loads read {keys.METADATA} instead"
                )
                self._add("wrong-size", ref.path, text)
                return
            size = min(piece_bytes(self.options), ref.size)
            raw = RangeFile(self._read_of(info), key, 0, ref.size)
            digest = hashlib.sha256()
            with self._pool.lease(size), io.BufferedReader(raw, size) as file:
                while piece := file.read(size):
                    digest.update(piece)
        except ObjectNotFoundError:
            text = f"the index is missing; loads read all of {keys.METADATA} instead"
            self._add("missing-object", ref.path, text)
            return
        except _CHANGED as error:
            self._add_changed(ref.path, error)
            return
        meter.add(ref.size)
        self._count(None, ref.size)
        if digest.hexdigest() != ref.digest:
            text = f"the index differs from the one that was written; loads read {keys.METADATA} instead"
            self._add("checksum", ref.path, text)

    def check_items_are_named(self) -> None:
        """Check that the metadata names data for every chunk of a tensor and for every other entry."""
        stored = self.saved.metadata.storage_data or {}
        for fqn, entry in self.saved.metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                wanted = [MetadataIndex(fqn)]
            else:
                wanted = [MetadataIndex(fqn, chunk.offsets) for chunk in entry.chunks]
            missing = sum(index not in stored for index in wanted)
            if missing:
                text = f"the metadata names no data for {missing} of its {len(wanted)} chunks"
                self._add("missing-item", keys.METADATA, text, item=fqn)

    def check_coverage(self) -> None:
        """Check that the chunks cover the tensors."""
        for fqn, text in uncovered(self.saved.metadata, self.saved.facts):
            self._add("missing-item", keys.METADATA, text, item=fqn)
        ranks = self.saved.facts.get("world_size") or 1
        self.notes += [f"{name} {text}" for name, text in lacking_ranks(self.saved.metadata.state_dict_metadata, ranks)]

    def plan(self) -> list[_ObjectPlan]:
        """Check that every object exists and has the right size and ETag, and plan the reads of its bytes."""
        plans: list[_ObjectPlan | None] = []
        for_each(self.saved.by_object, lambda path: plans.append(self._plan_object(path)), self.options)
        return sorted((plan for plan in plans if plan is not None), key=lambda plan: plan.path)

    def _plan_object(self, path: str) -> _ObjectPlan | None:
        saved, key = self.saved, self.saved.key(path)
        items = saved.by_object[path]
        try:
            info = retry_transient(lambda: saved.store.head(key))
        except ObjectNotFoundError:
            named = first_of(list(dict.fromkeys(index.fqn for index, _ in items)), 3) or "nothing"
            self._add("missing-object", path, f"the object is missing, and with it {named}")
            return None
        # The bytes of an object of the wrong size are compared anyway, to find the lost items.
        for kind, text in faults(saved, path, info):
            self._add(kind, path, text)
        if not any(item.crc32c is not None for _, item in items):
            return _ObjectPlan(path, info, items, None)
        return _ObjectPlan(path, info, items, ObjectCheck(self._regions(path, items, info)))

    def _tables(self, path: str, items: _Items, info: ObjectInfo) -> tuple[dict[int, memoryview], _Items]:
        """Return the checksum tables of an object's items, and the items with the checksums of undamaged tables."""
        try:
            tables, known, wrong = read_tables(self.saved.store, items, info)
        except _CHANGED as error:
            self._add_changed(path, error)
            return {}, items
        for number in wrong:
            start = items[number][1].table_offset or 0
            text = "the checksums of its blocks differ from those written at save, so no part of it can be loaded alone"
            stop = start + len(tables[number])
            self._add("checksum", path, text, item=items[number][0].fqn, start=start, stop=stop)
        return tables, known

    def _regions(self, path: str, items: _Items, object_info: ObjectInfo) -> list[Region]:
        """Return the regions of an object that bucketpoint wrote. Bytes that cannot be compared are counted."""
        size = object_info.size
        tables, items = self._tables(path, items, object_info)
        regions: list[Region] = []
        at = 0
        for index, info in items:
            if info.offset < at:
                self._count(_OVERLAP, info.length)
                continue
            self._count(_UNCLAIMED, info.offset - at)
            at = info.offset + info.length
            own = list(item_regions(index, info, self.saved.shapes))
            inside = [region for region in own if region.stop <= size]
            if len(inside) < len(own):
                text = f"the object ends at byte {size}, before the end of the item"
                self._add("wrong-size", path, text, item=index.fqn, start=own[len(inside)].start, stop=at)
            compared = sum(region.nbytes for region in own)
            self._count(_NO_CHECKSUM if info.crc32c is None else _NOT_FRAMED, info.length - compared)
            regions += inside
        for region in table_regions(items, tables, at):
            self._count(_UNCLAIMED, region.start - at)
            at = region.stop
            regions.append(region)
        self._count(_UNCLAIMED, max(size - at, 0))
        self._count(None, sum(region.nbytes for region in regions))
        return regions

    def read(self, plans: Sequence[_ObjectPlan], meter: Meter) -> None:
        for_each(self._tasks(plans, meter), lambda task: task(), self.options)
        for plan in plans:
            for region in plan.check.wrong() if plan.check is not None else ():
                text = f"the CRC32C of its {region.part} differs from the recorded {region.crc32c:08x}"
                self._add("checksum", plan.path, text, item=region.fqn, start=region.start, stop=region.stop)

    def _tasks(self, plans: Sequence[_ObjectPlan], meter: Meter) -> Iterator[Callable[[], None]]:
        step = piece_bytes(self.options)
        for plan in plans:
            if plan.check is None:
                for index, info in plan.items:
                    yield partial(self._read_foreign, plan, index, info, meter)
                continue
            for start in range(0, plan.info.size, step):
                yield partial(self._read_piece, plan, start, min(start + step, plan.info.size), meter)

    def _read_piece(self, plan: _ObjectPlan, start: int, stop: int, meter: Meter) -> None:
        assert plan.check is not None
        with self._pool.lease(stop - start) as view:
            try:
                self._read_of(plan.info)(self.saved.key(plan.path), start, view)
            except _CHANGED as error:
                self._add_changed(plan.path, error, start=start, stop=stop)
                return
            plan.check.note(start, view)
        meter.add(stop - start)

    def _read_foreign(self, plan: _ObjectPlan, index: MetadataIndex, info: ItemInfo, meter: Meter) -> None:
        """Read an item without a checksum of bucketpoint. An archive of torch.save contains checksums to compare."""
        stop = info.offset + info.length
        place: dict[str, Any] = {"item": index.fqn, "start": info.offset, "stop": stop}
        if stop > plan.info.size:
            text = f"the object ends at byte {plan.info.size}, before the end of the item"
            self._add("wrong-size", plan.path, text, **place)
            return
        key = self.saved.key(plan.path)
        size = max(min(piece_bytes(self.options), info.length), 1)
        raw = RangeFile(self._read_of(plan.info), key, info.offset, stop)
        try:
            # The reader has its own buffer; the lease only keeps all such buffers within the budget.
            with self._pool.lease(size), io.BufferedReader(raw, size) as file:
                raw_bytes = bool(info.transform_descriptors) or info.payload_offset is not None
                damage = None if raw_bytes else check_archive(file)
                if damage is None:
                    file.seek(0)
                    while file.read(size):
                        pass
        except _CHANGED as error:
            self._add_changed(plan.path, error, **place)
            return
        meter.add(info.length)
        if damage:
            self._add("checksum", plan.path, f"its archive is damaged: {damage}", **place)
        self._count(_NO_CHECKSUM if damage is None else None, info.length)

    def _read_of(self, info: ObjectInfo) -> Read:
        """Return a function that reads bytes of the object of `info`, pinned by its ETag if the store can pin reads."""
        store, etag = self.saved.store, pinned(self.saved.store, info.etag)
        return lambda key, start, out: retry_transient(lambda: store.read_into(key, start, [out], if_match=etag))

    def _add(self, kind: str, path: str, message: str, **where: Any) -> None:
        self.damage.append(Damage(kind, path, message, **where))

    def _add_changed(self, path: str, error: StoreError, **where: Any) -> None:
        self._add("replaced-object", path, f"the object changed while it was read: {error.message}", **where)

    def _count(self, reason: str | None, nbytes: int) -> None:
        """Count bytes that could not be compared for `reason`, or bytes that were compared (None)."""
        if not nbytes:
            return
        with self._lock:
            if reason is None:
                self.checked += nbytes
            else:
                self.unchecked[reason] += nbytes
