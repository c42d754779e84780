"""Ranks that are copies of the first, for jobs too large to be played: they say what real ones would, of other rows.

The coordinator cannot tell them from real ranks. Nothing is measured here, and nothing of theirs is written.
"""

from __future__ import annotations

import zlib
from array import array
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import SavePlan

from bucketpoint import SavePlanner
from bucketpoint.dcp.planning.global_plan import WriterMeta
from bucketpoint.dcp.planning.items import AssignedItems, PackedItems, PlanItems, compress, int_column
from bucketpoint.dcp.planning.results import _arrived
from bucketpoint.format import keys
from bucketpoint.format.storage_info import ItemColumns as Places
from sim.layouts import Layout

_NBYTES = (8, 16, 16, 4)
"""Of one row: of a weight, of two moments, and of the step."""


class FirstPlanner(SavePlanner):
    """The real one, whose plan the others copy."""

    sent: SavePlan

    def create_local_plan(self) -> SavePlan:
        self.sent = super().create_local_plan()
        return self.sent


class _Sent:
    """Pickles as what it stands for."""

    def __init__(self, make: Any, *arguments: Any) -> None:
        self._reduced = make, arguments

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._reduced


class CopiedPlanner:
    """A rank's planner."""

    def __init__(self, first: FirstPlanner, layout: Layout, rank: int) -> None:
        self._first, self._row = first, rank % layout.shards

    def set_up_planner(self, **_: Any) -> None:
        """Nothing is its own."""

    def create_local_plan(self) -> SavePlan:
        plan: Any = self._first.sent
        packed = plan.items.columns
        rows = sum(len(item.tensor_data.chunk.sizes) == 2 for item in plan.items)
        self._asked = PackedItems(packed.tables, compress(array("q", [self._row, 0] * rows)), packed.sizes)
        items: Any = _Sent(PlanItems, None, self._asked)
        return replace(plan, items=items)

    def finish_plan(self, plan: Any) -> SavePlan:
        self.assigned = AssignedItems(plan.items.columns.encoded, self._asked)
        finished: SavePlan = plan
        return finished


class CopiedWriter:
    """A rank's writer, which reports what it would have written."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._saves = 0

    def reset(self, url: str) -> None:
        self._saves += 1

    def storage_meta(self) -> WriterMeta:
        return WriterMeta()

    def set_up_storage_writer(self, *_: Any, **__: Any) -> None:
        """Nothing is opened."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def write_data(self, plan: SavePlan, planner: CopiedPlanner) -> CopiedWriter:
        positions, *_ = int_column(planner.assigned.encoded).view(4, -1).tolist()
        kinds = [position % 4 for position in positions]
        count = len(kinds)
        nbytes = [_NBYTES[kind] for kind in kinds]
        none = [-1] * count
        offsets, lengths, starts = list(range(0, 512 * count, 512)), [448] * count, [320] * count
        columns = ([min(kind, 1) for kind in kinds], offsets, lengths, starts, nbytes, none, none)
        places = Places(zlib.compress(b"".join(array("q", column).tobytes() for column in columns)))
        token = f"{self._saves:012x}"
        objects = tuple(
            [(keys.data_path(token, self._rank, group, 0), 512 * count, None) for group in ("model", "optim")]
        )
        checksums = bytes(range(256)) * (4 * count // 256 + 1)
        self._reported = (places, objects, checksums[: 4 * count]), planner.assigned.digest, None, None
        return self

    def value(self) -> _Sent:
        return _Sent(_arrived, *self._reported)
