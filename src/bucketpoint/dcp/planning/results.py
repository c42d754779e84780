"""Results that each rank reports to the coordinator after its upload, encoded as columns in the order of the plan.

The encoding leaves out facts that the coordinator already knows: the items, if it assigned them, and their places in
objects, if these are the same as at the previous save.
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

from bucketpoint.dcp.planning.agreement import Statement, crossed, descriptions
from bucketpoint.dcp.planning.columnar.assignments import KnownItems
from bucketpoint.errors import BucketpointError, IncompleteSaveError
from bucketpoint.format.columns import Columns, ItemColumns, ObjectFacts, pack, unpack


@dataclass(frozen=True)
class AssignedPlan:
    """The facts that the coordinator knows about a rank's plan: the `planner_data` of plans that our planner assigns.

    Attributes:
        entry: digest of the cached plan.
        coordinator: global rank of the coordinator that keeps the plan.
        items: digest of the items for which the coordinator expects results; empty if each result must name its item.
        layout: digest of the places of these items that the coordinator knows; None if it knows none. The coordinator
            keeps this layout for as long as the save lasts.
    """

    entry: bytes
    coordinator: int = 0
    items: bytes = b""
    layout: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the names of the fields, which would be a large part of the bytes that are sent.
        return AssignedPlan, (self.entry, self.coordinator, self.items, self.layout)


def items_digest(items: Iterable[WriteItem]) -> bytes:
    """Return 16 bytes that identify the items, their descriptions, and their order."""
    items = list(items)
    said = hashlib.blake2b(descriptions(items), digest_size=16)
    for item in items:
        index = item.index
        said.update(f"{len(index.fqn)}:{index.fqn}{tuple(index.offset) if index.offset is not None else ''}".encode())
    return said.digest()


class NamedResults(list[WriteResult]):
    """A rank's results that name their items, on the coordinator.

    Attributes:
        statement: the rank's statement on the save; None if it sent none.
        descriptions: the rank's description of each item, if it sent them: see `agreement.descriptions`.
    """

    def __init__(
        self, results: Iterable[WriteResult], statement: Statement | None = None, descriptions: bytes = b""
    ) -> None:
        super().__init__(results)
        self.statement = statement
        self.descriptions = descriptions


class Results(list[WriteResult]):
    """A rank's results: an ordinary list with a small pickle.

    On the coordinator the pickle becomes `NamedResults` if it names the items, and else `PackedResults`.
    """

    def __init__(self, results: Sequence[WriteResult], plan: SavePlan, statement: Statement | None = None) -> None:
        super().__init__(results)
        self.statement = statement
        # Packed now: while DCP pickles the results, an error would no longer be reported to the other ranks.
        self._packed = _packed(results, plan)
        self._packed_from = tuple(results)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self._packed is None or not self._unchanged():
            return NamedResults, (list(self), self.statement)
        return _arrived, (*self._packed, None if self.statement is None else self.statement.packed())

    def packed(self) -> PackedResults | None:
        """Return the packed form without a pickle, for a save of one process; None if the results name their items."""
        if self._packed is None or self._packed[-1] is not None or not self._unchanged():
            return None
        return PackedResults(*self._packed[:-1])

    def _unchanged(self) -> bool:
        return len(self) == len(self._packed_from) and all(map(operator.is_, self, self._packed_from))


class PackedResults:
    """Results of a rank as the coordinator receives them, to be joined with the plan that the rank was assigned.

    Deliberately not a list: an accidental `len()` must fail rather than report zero.
    """

    def __init__(
        self,
        objects: tuple[ObjectFacts, ...],
        layout: ItemColumns | bytes,
        checksums: bytes,
        statement: Statement | None = None,
    ) -> None:
        self.objects = objects
        self.layout = layout
        self.checksums = checksums
        self.statement = statement

    def columns(self, count: int, known: ItemColumns | None) -> Columns:
        """Return the columns that were reported for `count` items.

        Raises:
            IncompleteSaveError: the results belong to another plan, or refer to a layout that is not `known`.
        """
        layout = self.layout
        if isinstance(layout, bytes):
            if known is None or known.digest != layout:
                raise IncompleteSaveError("A rank refers to a cached plan that the coordinator does not have")
            layout = known
        if layout.count != count:
            raise IncompleteSaveError(f"{layout.count} results were reported for {count} items")
        return Columns(layout, self.objects, self.checksums)

    def __iter__(self) -> Iterator[WriteResult]:
        raise BucketpointError("The results of a rank can be read only by the writer that made them")


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
    """Return the results in the order of the plan; None if the coordinator cannot identify their items by the order."""
    dealt, items = plan.planner_data, plan.items
    if not isinstance(dealt, AssignedPlan) or len(results) != len(items):
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
    layout: ItemColumns | bytes,
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
    """Decode the columns of these items to results."""
    return _results([item.index for item in items], columns)


def _results(indices: Sequence[MetadataIndex], columns: Columns) -> list[WriteResult]:
    return [
        WriteResult(index=index, size_in_bytes=info.length, storage_data=info)
        for index, info in zip(indices, unpack(columns), strict=True)
    ]
