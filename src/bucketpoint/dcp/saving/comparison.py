"""Comparison of a save with the one before: each rank tallies its items, and the coordinator adds the tallies up."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.saving.earlier_saves import EarlierSave
from bucketpoint.dcp.saving.stale import OnStale, StaleWatch, advanced, tell
from bucketpoint.errors import MetadataError
from bucketpoint.format.changes import COUNTS, Changes, Tally, merge, tally
from bucketpoint.format.groups import GroupRule

logger = logging.getLogger(__name__)

_ID_SIZE = 6
"""Characters of a save's id in a tally: enough to tell it from the few saves before."""


class RankTally(NamedTuple):
    """The comparison of one rank's items with the save before.

    Attributes:
        save: first characters of the id of the save for which it was made.
        rates, moving_rates: number of learning rates that the rank has saved, and of those among them that are not 0.
    """

    save: str
    parts: Tally
    rates: int
    moving_rates: int

    @property
    def fields(self) -> tuple[Any, ...]:
        """The values that are sent, not nested: with names of classes they would be 100 bytes more from each rank."""
        flat = [value for part, counts in self.parts.items() for value in (*part, *counts)]
        return self.save, self.rates, self.moving_rates, *flat

    @classmethod
    def received(cls, fields: tuple[Any, ...]) -> RankTally:
        """Return the tally that a rank has sent as `fields`."""
        save, rates, moving, *flat = fields
        step = 2 + len(COUNTS)
        parts = {(flat[at], flat[at + 1]): tuple(flat[at + 2 : at + step]) for at in range(0, len(flat), step)}
        return cls(save, cast("Tally", parts), rates, moving)


def tally_of(
    save: str,
    items: Sequence[WriteItem],
    results: Sequence[WriteResult],
    last: EarlierSave,
    planner: SavePlanner,
    rules: Sequence[GroupRule],
) -> tuple[Any, ...] | None:
    """Tally the items of this rank by part of the state, compared with an earlier save.

    Returns:
        the fields of a `RankTally`, which the rank sends with its results. None if the comparison failed.
    """
    try:
        return _tally(save, items, results, last, planner, rules).fields
    # It calls the user's planner and compares values of any class. The bytes are stored, and the save must go on.
    except Exception:
        logger.info("the items were not compared with the last save", exc_info=True)
        return None


def _tally(
    save: str,
    items: Sequence[WriteItem],
    results: Sequence[WriteResult],
    last: EarlierSave,
    planner: SavePlanner,
    rules: Sequence[GroupRule],
) -> RankTally:
    by_index = {id(item.index): item for item in items}
    written = [by_index[id(result.index)] for result in results]
    entries = [
        (item.index.fqn, item.tensor_data is not None, _elements(item), result.size_in_bytes, change)
        for item, result, change in zip(written, results, last.changes_in(results), strict=True)
    ]
    moving = list(_moving_rates(items, planner))
    return RankTally(save[:_ID_SIZE], tally(entries, rules), len(moving), sum(moving))


def compare(save: str, results: Iterable[Any], since: str | None) -> tuple[Changes, bool] | None:
    """Return what changed since the save at `since`, and whether all learning rates are 0. None if a rank cannot tell.

    Args:
        save: id of this save. A rank whose plan a planner of DCP's has kept compares for an older one.
        results: of each rank, with what `tally_of` returned as attribute `tally`.
    """
    sent = [getattr(each, "tally", None) for each in results]
    known = [RankTally.received(each) for each in sent if each is not None]
    if since is None or len(known) < len(sent) or any(each.save != save[:_ID_SIZE] for each in known):
        return None
    changes = merge([each.parts for each in known], since)
    try:
        Changes.from_plain(changes.to_plain())
    except MetadataError as error:
        # The record would be unreadable for everybody.
        logger.warning("what changed since %s is not recorded: %s", since, error)
        return None
    return changes, any(each.rates for each in known) and not any(each.moving_rates for each in known)


def report(changes: Changes, url: str, watch: StaleWatch, on_stale: OnStale, *, idle_rates: bool) -> None:
    """Log what changed in the checkpoint at `url`, and report the parts of the state that stopped changing.

    Raises:
        StaleStateError: as `tell`; and whatever the caller's own `on_stale` raises.
    """
    logger.info("changed since %s: %s", changes.since, changes)
    went_on = changes.since is not None and advanced(changes.since, url, changes)
    tell(watch.look(changes, url, advanced=went_on, idle_lr=idle_rates), on_stale)


def _elements(item: WriteItem) -> int:
    return 0 if item.tensor_data is None else math.prod(item.tensor_data.size)


def _moving_rates(items: Iterable[WriteItem], planner: SavePlanner) -> Iterable[bool]:
    """Yield for each learning rate among the items whether it is other than 0."""
    lookup = getattr(planner, "lookup_object", None)
    for item in items:
        if lookup is None or not item.index.fqn.endswith(".lr"):
            continue
        if item.type == WriteItemType.SHARD:
            continue
        value = lookup(item.index)
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            # Not as a float: an integer may be too large for one.
            yield bool(value != 0)
