"""What each rank reports after its upload, as it crosses to the coordinator: columns in the order of the plan.

A result says nothing that the coordinator knows: not the items, if it dealt them out, nor where they lie, if that is as
at the save before. Nothing is uploaded and nothing is committed here.
"""

from __future__ import annotations

import hashlib
import operator
import pickle
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.agreement import Statement, crossed, descriptions
from bucketpoint.dcp.dealt_items import KnownItems
from bucketpoint.errors import BucketpointError, IncompleteSaveError
from bucketpoint.format.columns import Columns, Layout, ObjectFacts, pack, unpack


@dataclass(frozen=True)
class Dealt:
    """What a rank's plan says about what the coordinator knows: the `planner_data` of plans that our planner deals.

    Attributes:
        entry: digest of the kept plan.
        coordinator: the rank in the whole job that keeps it.
        items: digest of the items that the coordinator takes results for; empty if each result is to name its own.
        layout: digest of where it takes them to lie, if it knows; it keeps that for as long as this save lasts.
    """

    entry: bytes
    coordinator: int = 0
    items: bytes = b""
    layout: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the names of the fields, which would be a good part of what crosses.
        return Dealt, (self.entry, self.coordinator, self.items, self.layout)


def items_digest(items: Iterable[WriteItem]) -> bytes:
    """16 bytes that tell which items these are, how they are described, and their order."""
    items = list(items)
    said = hashlib.blake2b(descriptions(items), digest_size=16)
    for item in items:
        index = item.index
        said.update(f"{len(index.fqn)}:{index.fqn}{tuple(index.offset) if index.offset is not None else ''}".encode())
    return said.digest()


class NamedResults(list[WriteResult]):
    """A rank's results that name their items, on the coordinator.

    Attributes:
        statement: what the rank takes the save for, if it said so.
        descriptions: what it takes each item for, if it said so: see `agreement.descriptions`.
    """

    def __init__(
        self, results: Iterable[WriteResult], statement: Statement | None = None, descriptions: bytes = b""
    ) -> None:
        super().__init__(results)
        self.statement = statement
        self.descriptions = descriptions


class Results(list[WriteResult]):
    """A rank's results: a list like any other, which pickles small.

    On the coordinator it arrives as `NamedResults` if it tells the items itself, and else as `PackedResults`.
    """

    def __init__(self, results: Sequence[WriteResult], plan: SavePlan, statement: Statement | None = None) -> None:
        super().__init__(results)
        self.statement = statement
        # Now and not while it is pickled, when DCP no longer tells the other ranks about errors.
        self._packed = _packed(results, plan)
        self._packed_from = tuple(results)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self._packed is None or not self._unchanged():
            return NamedResults, (list(self), self.statement)
        return _arrived, (*self._packed, None if self.statement is None else self.statement.packed())

    def packed(self) -> PackedResults | None:
        """What arrives if it does not cross at all, in a save of one process; None if that is a list."""
        if self._packed is None or self._packed[-1] is not None or not self._unchanged():
            return None
        return PackedResults(*self._packed[:-1])

    def _unchanged(self) -> bool:
        return len(self) == len(self._packed_from) and all(map(operator.is_, self, self._packed_from))


class PackedResults:
    """Results of a rank as they have crossed, to be put together with the plan that the rank was dealt.

    Looks like no list, so that nobody takes it for an empty one.
    """

    def __init__(
        self,
        objects: tuple[ObjectFacts, ...],
        layout: Layout | bytes,
        checksums: bytes,
        statement: Statement | None = None,
    ) -> None:
        self.objects = objects
        self.layout = layout
        self.checksums = checksums
        self.statement = statement

    def columns(self, count: int, known: Layout | None) -> Columns:
        """What was reported of `count` items.

        Raises:
            IncompleteSaveError: they belong to another plan, or to a layout that is not at hand.
        """
        layout = self.layout
        if isinstance(layout, bytes):
            if known is None or known.digest != layout:
                raise IncompleteSaveError("A rank refers to an earlier save that the coordinator does not know")
            layout = known
        if layout.count != count:
            raise IncompleteSaveError(f"{layout.count} results were reported for {count} items")
        return Columns(layout, self.objects, self.checksums)

    def __iter__(self) -> Iterator[WriteResult]:
        raise BucketpointError("Results that were sent to the coordinator are only for the writer that made them")


def _packed(results: Sequence[WriteResult], plan: SavePlan) -> tuple[Any, ...] | None:
    ordered = _in_order(results, plan)
    known = ordered is not None
    results = results if ordered is None else ordered
    columns = pack([result.storage_data for result in results])
    if columns is None or any(result.size_in_bytes != result.storage_data.length for result in results):
        return None
    if known:
        dealt = plan.planner_data
        as_before = columns.layout.digest == dealt.layout
        return columns.objects, dealt.layout if as_before else columns.layout, columns.checksums, None
    indices = [(result.index.fqn, _plain(result.index.offset), result.index.index) for result in results]
    items = {item.index: item for item in plan.items}
    found = [items[result.index] for result in results if result.index in items]
    described = descriptions(found) if len(found) == len(results) else b""
    return columns.objects, columns.layout, columns.checksums, zlib.compress(pickle.dumps((indices, described)))


def _in_order(results: Sequence[WriteResult], plan: SavePlan) -> list[WriteResult] | None:
    """The results in the order of the plan; None if the coordinator cannot tell by that which items they are of."""
    dealt, items = plan.planner_data, plan.items
    if not isinstance(dealt, Dealt) or len(results) != len(items):
        return None
    if not isinstance(items, KnownItems) or not items.unaltered:
        items = KnownItems(items, items_digest(items))
    if dealt.items != items.digest:
        return None
    ordered: list[WriteResult | None] = [None] * len(items)
    for result in results:
        at = items.order.get(id(result.index))
        if at is None:
            return None
        ordered[at] = result
    return [result for result in ordered if result is not None] if None not in ordered else None


def _plain(offset: Any) -> tuple[int, ...] | None:
    return None if offset is None else tuple(offset)


def _arrived(
    objects: tuple[ObjectFacts, ...],
    layout: Layout | bytes,
    checksums: bytes,
    named: bytes | None,
    said: bytes | None,
) -> NamedResults | PackedResults:
    statement = None if said is None else crossed(said)
    if named is None or isinstance(layout, bytes):
        return PackedResults(objects, layout, checksums, statement)
    indices, described = pickle.loads(zlib.decompress(named))
    results = _results([MetadataIndex(*index) for index in indices], Columns(layout, objects, checksums))
    return NamedResults(results, statement, described)


def results_of(items: Sequence[WriteItem], columns: Columns) -> list[WriteResult]:
    """The results that the columns of these items stand for."""
    return _results([item.index for item in items], columns)


def _results(indices: Sequence[MetadataIndex], columns: Columns) -> list[WriteResult]:
    return [
        WriteResult(index=index, size_in_bytes=info.length, storage_data=info)
        for index, info in zip(indices, unpack(columns), strict=True)
    ]
