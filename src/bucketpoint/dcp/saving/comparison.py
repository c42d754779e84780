"""Comparison of a save with the one before: each rank tallies its items, and the coordinator adds the tallies up."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.saving.earlier_saves import EarlierSave
from bucketpoint.dcp.saving.stale import OnStale, StaleWatch, advanced, tell
from bucketpoint.format.changes import Changes, Tally, merge, tally
from bucketpoint.format.groups import GroupRule

logger = logging.getLogger(__name__)

RankTally = tuple[Tally, int, int]
"""Tally of one rank's items, and how many learning rates it has saved, and how many of these are not 0."""


def tally_of(
    items: Sequence[WriteItem],
    results: Sequence[WriteResult],
    last: EarlierSave,
    planner: SavePlanner,
    rules: Sequence[GroupRule],
) -> RankTally:
    """Tally the items of this rank by part of the state, compared with an earlier save."""
    by_index = {id(item.index): item for item in items}
    written = [by_index[id(result.index)] for result in results]
    entries = [
        (item.index.fqn, item.tensor_data is not None, _elements(item), result.size_in_bytes, changed)
        for item, result, changed in zip(written, results, last.changed(results), strict=True)
    ]
    rates = list(_learning_rates(items, planner))
    return tally(entries, rules), len(rates), sum(rate != 0 for rate in rates)


def compare(results: Iterable[Any], since: str | None) -> tuple[Changes, bool] | None:
    """Return what changed since the save at `since`, and whether all learning rates are 0. None if a rank cannot tell.

    Args:
        results: of each rank, with its `RankTally` as attribute `tally`.
    """
    tallies: list[RankTally | None] = [getattr(each, "tally", None) for each in results]
    known = [each for each in tallies if each is not None]
    if since is None or len(known) < len(tallies):
        return None
    rates, moving = sum(each[1] for each in known), sum(each[2] for each in known)
    return merge([each[0] for each in known], since), bool(rates) and not moving


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


def _learning_rates(items: Iterable[WriteItem], planner: SavePlanner) -> Iterable[float]:
    lookup = getattr(planner, "lookup_object", None)
    for item in items:
        if lookup is None or not item.index.fqn.endswith(".lr"):
            continue
        if item.type == WriteItemType.SHARD:
            continue
        value = lookup(item.index)
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            yield float(value)
