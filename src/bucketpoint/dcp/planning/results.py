"""Results that each rank reports to the coordinator after its upload, encoded as columns in the order of the plan.

The encoding leaves out facts that the coordinator already knows: the items, if it assigned them, and their places in
objects, if these are the same as at the previous save.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.planning.agreement import Statement, descriptions
from bucketpoint.dcp.planning.columnar.assignments import KnownItems
from bucketpoint.dcp.planning.columnar.encoding import unaltered
from bucketpoint.errors import BucketpointError, IncompleteSaveError
from bucketpoint.format.columns import Columns, ItemColumns, ObjectFacts, pack, unpack


class AssignedPlan(NamedTuple):
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


def items_digest(items: Iterable[WriteItem]) -> bytes:
    """Return 16 bytes that identify the items, their descriptions, and their order."""
    items = list(items)
    digest = hashlib.blake2b(descriptions(items), digest_size=16)
    for index in [item.index for item in items]:
        digest.update(f"{len(index.fqn)}:{index.fqn}{tuple(index.offset) if index.offset is not None else ''}".encode())
    return digest.digest()


class NamedResults(list[WriteResult]):
    """A rank's results that name their items, on the coordinator, with the rank's `agreement.descriptions` of these."""

    def __init__(
        self,
        results: Iterable[WriteResult],
        statement: Statement | None = None,
        descriptions: bytes = b"",
    ) -> None:
        super().__init__(results)
        self.statement = statement
        self.report: bytes | None = None
        self.descriptions = descriptions


class Results(list[WriteResult]):
    """A rank's results: an ordinary list with a small pickle.

    On the coordinator the pickle becomes `PackedResults` if the order of the plan names the items, else `NamedResults`.

    Args:
        report: figures of the rank's save: see `SaveTimes.report`.
    """

    def __init__(
        self,
        results: Sequence[WriteResult],
        plan: SavePlan,
        statement: Statement | None = None,
        report: bytes | None = None,
    ) -> None:
        super().__init__(results)
        self.statement = statement
        self.report = report
        self._made_of = tuple(results)
        # Packed now: while DCP pickles the results, an error would no longer be reported to the other ranks.
        self._packed = _packed(results, plan, statement)
        self._named = b"" if self._packed is not None else _named(results, plan)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if not unaltered(self, self._made_of):
            return NamedResults, (list(self), self.statement), self._attributes
        # The statement as plain values, because the names of its class are 50 bytes from each rank.
        stated = self.statement.fields if self.statement is not None else None
        if (packed := self._packed) is not None:
            told = packed.objects, packed.layout, packed.checksums, stated
            return _packed_arrived, told, self._attributes
        return _named_arrived, (self._named, stated), self._attributes

    @property
    def _attributes(self) -> dict[str, Any]:
        # Not as an argument: a coordinator of an older version gets an attribute that it does not look at.
        return {} if self.report is None else {"report": self.report}

    def packed(self) -> PackedResults | None:
        """Return the packed form without a pickle, for a save of one process; None if the results name their items."""
        return self._packed if unaltered(self, self._made_of) else None


@dataclass(frozen=True)
class PackedResults:
    """Results of a rank as the coordinator receives them, to be joined with the plan that the rank was assigned.

    Deliberately not a list: an accidental `len()` must fail rather than report zero.
    """

    objects: tuple[ObjectFacts, ...]
    layout: ItemColumns | bytes
    checksums: bytes
    statement: Statement | None = None
    report: bytes | None = None

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


def _packed(results: Sequence[WriteResult], plan: SavePlan, statement: Statement | None) -> PackedResults | None:
    ordered = _in_order(results, plan)
    columns = pack([result.storage_data for result in ordered]) if ordered is not None else None
    if columns is None or any(result.size_in_bytes != result.storage_data.length for result in results):
        return None
    known = plan.planner_data.layout
    layout = known if columns.layout.digest == known else columns.layout
    return PackedResults(columns.objects, layout, columns.checksums, statement)


def _named(results: Sequence[WriteResult], plan: SavePlan) -> bytes:
    items = {item.index: item for item in plan.items}
    written = [items[result.index] for result in results if result.index in items]
    described = descriptions(written) if len(written) == len(results) else b""
    return zlib.compress(pickle.dumps((list(results), described)))


def _packed_arrived(
    objects: tuple[ObjectFacts, ...],
    layout: ItemColumns | bytes,
    checksums: bytes,
    stated: tuple[Any, ...] | None,
) -> PackedResults:
    return PackedResults(objects, layout, checksums, Statement(*stated) if stated else None)


def _named_arrived(named: bytes, stated: tuple[Any, ...] | None) -> NamedResults:
    results, described = pickle.loads(zlib.decompress(named))
    return NamedResults(results, Statement(*stated) if stated else None, described)


def _in_order(results: Sequence[WriteResult], plan: SavePlan) -> list[WriteResult] | None:
    """Return the results in the order of the plan; None if the coordinator cannot identify their items by the order."""
    assigned, items = plan.planner_data, plan.items
    if not isinstance(assigned, AssignedPlan) or len(results) != len(items):
        return None
    if not isinstance(items, KnownItems) or not items.unaltered:
        items = KnownItems(items, items_digest(items))
    if assigned.items != items.digest:
        return None
    ordered: list[WriteResult | None] = [None] * len(items)
    for result in results:
        at = items.order.get(id(result.index))
        if at is None:
            return None
        ordered[at] = result
    return [result for result in ordered if result is not None] if None not in ordered else None


def results_of(items: Sequence[WriteItem], columns: Columns) -> list[WriteResult]:
    """Decode the columns of these items to results."""
    return [
        WriteResult(index=item.index, size_in_bytes=info.length, storage_data=info)
        for item, info in zip(items, unpack(columns), strict=True)
    ]
