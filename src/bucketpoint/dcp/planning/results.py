"""Results that each rank reports to the coordinator after its upload, and their union on the coordinator.

A rank that was assigned columns of items reports columns in the order of these items, so that no result names its item.
"""

from __future__ import annotations

import pickle
import zlib
from collections import UserList
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.planning.agreement import Statement, descriptions
from bucketpoint.dcp.planning.columnar.encoding import unaltered
from bucketpoint.dcp.planning.columnar.plan_items import AssignedItems, assigned_items
from bucketpoint.dcp.planning.global_plan import GlobalPlan, Templates
from bucketpoint.dcp.planning.nested_state import INT_KEYS, plain_int_keys
from bucketpoint.dcp.planning.planned_metadata import PlannedMetadata
from bucketpoint.errors import BucketpointError, IncompleteSaveError
from bucketpoint.format.columns import PAYLOAD_NBYTES, Columns, ItemColumns, pack, unpack
from bucketpoint.format.index.int_columns import over
from bucketpoint.format.metadata.coverage import uncovered
from bucketpoint.format.metadata.facts import without_gc
from bucketpoint.format.metadata.template import make_template


class Results(UserList[WriteResult]):
    """A rank's results: a list with a small pickle.

    If columns are sent, the coordinator has no list: it reads `columns` together with the plan. Results without columns
        name their items, and are sent with the rank's `agreement.descriptions` of them.

    Attributes:
        statement: the rank's statement on the save (see `agreement`).
        report: figures of the rank's save: see `SaveTimes.report`.
        items: digest of the items to which the columns belong.
        descriptions: empty on the rank itself.
    """

    def __init__(self, results: Iterable[WriteResult] = (), statement: Statement | None = None) -> None:
        super().__init__(results)
        self.statement = statement
        self.report: bytes | None = None
        self.items = b""
        self.descriptions = b""
        self._columns: Columns | None = None
        self._named: tuple[list[WriteResult], bytes] | bytes = b""
        self._made_of = tuple(self.data)

    @staticmethod
    def of(
        results: Sequence[WriteResult], plan: SavePlan, statement: Statement | None = None, report: bytes | None = None
    ) -> Results:
        """Return the results of this rank for the items of a plan."""
        made = Results(results, statement)
        made.report = report
        assigned = assigned_items(plan.items)
        # Packed now: while DCP pickles the results, an error would no longer be reported to the other ranks.
        if assigned is not None:
            made._columns, made.items = _columns(results, plan), assigned.digest
        if made._columns is None:
            made._named = _named(results, plan)
        return made

    @property
    def columns(self) -> Columns | None:
        """The columns; None if the results name their items, or if the list has been altered."""
        there = "data" not in vars(self) or unaltered(self.data, self._made_of)
        return self._columns if there else None

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise BucketpointError("The results of a rank can be read only by the writer that made them")
        raise AttributeError(name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The statement as plain values, because the names of its class are 50 bytes from each rank.
        stated = self.statement.fields if self.statement is not None else None
        if (columns := self.columns) is not None:
            content: Any = (columns.layout, columns.objects, columns.checksums, self.items)
        elif unaltered(self.data, self._made_of):
            content = self._named
        else:
            content = zlib.compress(pickle.dumps((list(self.data), b"")))
        return _arrived, (content, stated, self.report)


def _arrived(content: Any, stated: tuple[Any, ...] | None, report: bytes | None) -> Results:
    made = Results((), Statement(*stated) if stated else None)
    made.report = report
    if isinstance(content, bytes):
        made.data, made.descriptions = pickle.loads(zlib.decompress(content))
        made._made_of = tuple(made.data)
        made._named = content
    else:
        *columns, made.items = content
        made._columns = Columns(*columns)
        del made.data
    return made


def _columns(results: Sequence[WriteResult], plan: SavePlan) -> Columns | None:
    """Return the results as columns in the order of the plan; None if columns cannot hold them."""
    order = {id(item.index): at for at, item in enumerate(plan.items)}
    ordered: list[Any] = [None] * len(order)
    for result in results:
        at = order.get(id(result.index))
        if at is None or result.size_in_bytes != result.storage_data.length:
            return None
        ordered[at] = result.storage_data
    return None if None in ordered else pack(ordered)


def _named(results: Sequence[WriteResult], plan: SavePlan) -> bytes:
    items = {item.index: item for item in plan.items}
    written = [items[result.index] for result in results if result.index in items]
    described = descriptions(written) if len(written) == len(results) else b""
    return zlib.compress(pickle.dumps((list(results), described)))


# -- on the coordinator -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankResults:
    """The results that all ranks reported: lists of results as in DCP, or columns.

    Attributes:
        sent: the results of each rank, as received.
        plan: the plan, if the metadata is a `PlannedMetadata`.
        columns: columns of each rank; None for a rank whose results name their items.
    """

    sent: Sequence[Any]
    metadata: Metadata
    plan: GlobalPlan | None
    columns: tuple[Columns | None, ...]

    @property
    def count(self) -> int:
        """Number of items that were reported."""
        return sum(
            len(each) if columns is None else columns.layout.count
            for each, columns in zip(self.sent, self.columns, strict=True)
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Values that the plan adds to the metadata."""
        return {INT_KEYS: plain_int_keys(self.plan.int_keys)} if self.plan is not None and self.plan.int_keys else {}

    @property
    def known(self) -> list[Columns]:
        """Columns of the ranks that sent columns."""
        return [columns for columns in self.columns if columns is not None]

    def objects(self) -> dict[str, dict[str, Any]]:
        """Return size and ETag of each object that is named in columns, by path."""
        return {
            path: {"size": size, "etag": etag}
            for columns in self.known
            for path, size, etag in columns.objects
            if size is not None
        }

    def uncovered(self) -> Sequence[tuple[str, str]]:
        """Return the tensors that the ranks hold only in part, with the reasons: see `uncovered`."""
        plan = self.plan
        if plan is not None and self.metadata.state_dict_metadata is plan.metadata.state_dict_metadata:
            return plan.uncovered
        return list(uncovered(self.metadata, {}))

    def results(self) -> list[list[WriteResult]]:
        """Return each rank's results as lists, decoded from columns where needed."""
        with without_gc():
            return [
                each if columns is None else _results_of(self._assigned(rank), columns)
                for rank, (each, columns) in enumerate(zip(self.sent, self.columns, strict=True))
            ]

    def _assigned(self, rank: int) -> AssignedItems:
        assert self.plan is not None
        items = self.plan.items[rank]
        assert isinstance(items, AssignedItems)
        return items

    def templates(self, *, indexed: bool) -> Templates | None:
        """Return the part of the metadata that the next save can reuse.

        None if the metadata must be made of an object for each item: a rank sent no columns, the planner's metadata was
        altered, or an item is missing.

        Args:
            indexed: the checkpoint gets an index too.
        """
        plan = self.plan
        if plan is None or plan.assignment is None or len(self.known) != len(plan.items):
            return None
        planned = plan.metadata
        if self.metadata.state_dict_metadata is not planned.state_dict_metadata:
            return None
        if self.metadata.planner_data is not planned.planner_data:
            return None
        layouts = tuple([columns.layout for columns in self.known])
        if plan.templates is None or (plan.templates.layouts, plan.templates.indexed) != (layouts, indexed):
            stored = torch.cat([over(layout.column(PAYLOAD_NBYTES)) for layout in layouts])
            expected, items = plan.assignment.nbytes, plan.assignment.index
            if ((stored >= 0) & (expected >= 0) & (stored != expected)).any():
                return None
            index = None
            if indexed:
                from bucketpoint.format.index.encode import make_index

                index = make_index(planned, items, self.known)
            metadata = make_template(planned, items, self.known, indexed=index is not None)
            plan.templates = Templates(layouts, indexed, metadata, index)
        return plan.templates


def _results_of(assigned: AssignedItems, columns: Columns) -> list[WriteResult]:
    return [
        WriteResult(index=item.index, size_in_bytes=info.length, storage_data=info)
        for item, info in zip(assigned.items(), unpack(columns), strict=True)
    ]


def reported(results: Sequence[Any], metadata: Metadata) -> RankResults:
    """Join the ranks' reports with the plan.

    Raises:
        IncompleteSaveError: a rank's results do not fit the items that it was assigned.
    """
    plan = metadata.plan if isinstance(metadata, PlannedMetadata) else None
    every = [sent.columns if isinstance(sent, Results) else None for sent in results]
    layouts: Sequence[ItemColumns | None] = plan.templates.layouts if plan and plan.templates else [None] * len(every)
    for rank, (sent, columns) in enumerate(zip(results, every, strict=True)):
        if columns is None:
            continue
        if plan is None or rank >= len(plan.items):
            raise IncompleteSaveError(
                "The plan does not belong to the metadata that was passed with it",
                remedy="A planner that alters the metadata of SavePlanner must use dataclasses.replace",
            )
        assigned = plan.items[rank]
        if not isinstance(assigned, AssignedItems) or sent.items != assigned.digest:
            raise IncompleteSaveError("A rank reported items that it was not assigned", rank=plan.senders[rank])
        # The layout of the last save is decoded.
        layout = before if (before := layouts[rank]) == columns.layout else columns.layout
        count = plan.assignment.count(rank) if plan.assignment is not None else 0
        if layout.count != count:
            raise IncompleteSaveError(
                f"{layout.count} results were reported for {count} items", rank=plan.senders[rank]
            )
        every[rank] = replace(columns, layout=layout)
    return RankResults(results, metadata, plan, tuple(every))
