"""Results that each rank reports to the coordinator after its upload, and their union on the coordinator.

A rank whose items were assigned as columns reports columns in the same order, so that results need not name items.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.planning.agreement import Statement, descriptions, rank_of
from bucketpoint.dcp.planning.global_plan import GlobalPlan, PlannedMetadata, Templates, shapes_of
from bucketpoint.dcp.planning.items import AssignedItems, assigned_items
from bucketpoint.dcp.planning.nested_state import INT_KEYS, plain_int_keys
from bucketpoint.errors import BucketpointError, IncompleteSaveError
from bucketpoint.format.index.int_columns import over
from bucketpoint.format.metadata.coverage import uncovered
from bucketpoint.format.metadata.facts import without_gc
from bucketpoint.format.metadata.template import make_template
from bucketpoint.format.storage_info import PAYLOAD_NBYTES, Columns, ItemColumns, pack, unpack


@dataclass(frozen=True)
class Results:
    """Report of a rank to the coordinator. Columns have a meaning only together with the plan.

    Attributes:
        content: columns; or the pickle of results that name their items, and of the items' `agreement.descriptions`.
        items: digest of the items to which the columns belong.
        report: figures of the rank's save: see `SaveTimes.report`.
        own: the results as a list, for a writer that wraps ours; None on every rank that receives the report.
    """

    content: Columns | bytes
    items: bytes
    statement: Statement | None
    report: bytes | None
    own: Sequence[WriteResult] | None = field(default=None, compare=False, repr=False)

    def __iter__(self) -> Iterator[WriteResult]:
        if self.own is None:
            raise BucketpointError(
                "The results of another rank are columns, which cannot be iterated",
                remedy="Read each rank's results where its write_data has returned them",
            )
        return iter(self.own)

    @staticmethod
    def of(
        results: Sequence[WriteResult], plan: SavePlan, statement: Statement | None = None, report: bytes | None = None
    ) -> Results:
        assigned = assigned_items(plan.items)
        # Pack here: an error while DCP pickles the results would not be reported to the other ranks.
        columns = _columns(results, plan) if assigned is not None else None
        if assigned is not None and columns is not None:
            return Results(columns, assigned.digest, statement, report, results)
        items = {item.index: item for item in plan.items}
        written = [items[result.index] for result in results if result.index in items]
        described = descriptions(written) if len(written) == len(results) else b""
        content = zlib.compress(pickle.dumps((list(results), described)))
        return Results(content, b"", statement, report, results)

    @cached_property
    def named(self) -> tuple[list[WriteResult], bytes]:
        """Results that name their items, and the items' descriptions; empty if the content is columns."""
        named: tuple[list[WriteResult], bytes] = ([], b"")
        return named if isinstance(self.content, Columns) else pickle.loads(zlib.decompress(self.content))

    def __reduce__(self) -> tuple[Any, ...]:
        # Plain values, because each class name in a pickle would add 50 bytes for every rank.
        content: Any = self.content
        if isinstance(content, Columns):
            content = content.layout, content.objects, content.checksums
        return _arrived, (content, self.items, self.statement.fields if self.statement else None, self.report)


def _arrived(content: Any, items: bytes, stated: tuple[Any, ...] | None, report: bytes | None) -> Results:
    content = content if isinstance(content, bytes) else Columns(*content)
    return Results(content, items, Statement(*stated) if stated else None, report)


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


# -- on the coordinator -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankResults:
    """The results that all ranks reported.

    Attributes:
        ranks: for each rank, columns, or a list of results as in DCP.
        plan: the plan; None if the metadata is not a `PlannedMetadata`.
    """

    ranks: Sequence[Columns | Sequence[WriteResult]]
    metadata: Metadata
    plan: GlobalPlan | None

    @property
    def count(self) -> int:
        return sum(each.layout.count if isinstance(each, Columns) else len(each) for each in self.ranks)

    @property
    def facts(self) -> dict[str, Any]:
        """Values that the plan adds to the metadata."""
        return {INT_KEYS: plain_int_keys(self.plan.int_keys)} if self.plan is not None and self.plan.int_keys else {}

    @property
    def known(self) -> list[Columns]:
        return [each for each in self.ranks if isinstance(each, Columns)]

    def objects(self) -> dict[str, dict[str, Any]]:
        """Return size and ETag of each object that is named in columns, by path."""
        return {
            path: {"size": size, "etag": etag}
            for columns in self.known
            for path, size, etag in columns.objects
            if size is not None
        }

    def uncovered(self) -> Sequence[tuple[str, str]]:
        """Return the tensors that the ranks do not hold completely, with the reasons: see `coverage.uncovered`."""
        plan = self.plan
        if (
            plan is not None
            and self.metadata.state_dict_metadata is plan.metadata.state_dict_metadata
            and shapes_of(self.metadata) == plan.shapes
        ):
            return plan.uncovered
        return list(uncovered(self.metadata, {}))

    def results(self) -> list[Sequence[WriteResult]]:
        """Return each rank's results as lists, decoded from columns where needed."""
        with without_gc():
            return [self._decoded(rank, each) for rank, each in enumerate(self.ranks)]

    def _decoded(self, rank: int, results: Columns | Sequence[WriteResult]) -> Sequence[WriteResult]:
        if not isinstance(results, Columns):
            return results
        assigned = self.plan.items[rank] if self.plan is not None else None
        assert isinstance(assigned, AssignedItems)
        return [
            WriteResult(index=item.index, size_in_bytes=info.length, storage_data=info)
            for item, info in zip(assigned.items(), unpack(results), strict=True)
        ]

    def templates(self, *, indexed: bool) -> Templates | None:
        """Return the part of the metadata that the next save can reuse, with that of the index if `indexed`.

        None if the metadata must be encoded item by item: a rank sent no columns, the planner's metadata was altered,
        or an item does not have the planned size.
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


def reported(results: Sequence[Any], metadata: Metadata) -> RankResults:
    """Join the ranks' reports with the plan.

    Raises:
        IncompleteSaveError: a rank's results do not fit the items that it was assigned.
    """
    plan = metadata.plan if isinstance(metadata, PlannedMetadata) else None
    layouts: Sequence[ItemColumns | None] = plan.templates.layouts if plan and plan.templates else [None] * len(results)
    every: list[Columns | Sequence[WriteResult]] = []
    for rank, sent in enumerate(results):
        if not isinstance(sent, Results) or not isinstance(sent.content, Columns):
            every.append(sent.named[0] if isinstance(sent, Results) else sent)
            continue
        if plan is None or rank >= len(plan.items):
            raise IncompleteSaveError(
                "The plan does not belong to the metadata that was passed with it",
                remedy="A planner that alters the metadata of SavePlanner must use dataclasses.replace",
            )
        assigned, sender = plan.items[rank], rank_of(rank, sent.statement)
        if not isinstance(assigned, AssignedItems) or sent.items != assigned.digest:
            raise IncompleteSaveError("A rank reported items that it was not assigned", rank=sender)
        # Prefer the equal layout of the last save: it is already decoded.
        layout = before if (before := layouts[rank]) == sent.content.layout else sent.content.layout
        count = plan.assignment.count(rank) if plan.assignment is not None else 0
        if layout.count != count:
            raise IncompleteSaveError(f"{layout.count} results were reported for {count} items", rank=sender)
        every.append(replace(sent.content, layout=layout))
    return RankResults(every, metadata, plan)
