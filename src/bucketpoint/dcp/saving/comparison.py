"""Comparison of a save with the one before: each rank tallies its items, and the coordinator adds the tallies up."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from bucketpoint.dcp.saving.earlier_saves import Announcement, EarlierSave, Written
from bucketpoint.dcp.saving.stale import StaleWatch, advanced, tell
from bucketpoint.errors import MetadataError
from bucketpoint.format.changes import COUNTS, Changes, Tally, merge, tally
from bucketpoint.format.groups import GroupRule

logger = logging.getLogger(__name__)

_ID_SIZE = 6
"""Characters of a save's id in a tally: enough to tell it from the few saves before."""


class RankTally(NamedTuple):
    """The comparison of one rank's items with the save before.

    Attributes:
        save: first characters of the id of the save for which it was made; empty if there was none before.
        rates, moving_rates: the rank has saved a learning rate, and one that is not 0.
        checked_finite: the rank has counted the values that are not finite.
        copied_nbytes: bytes of its items that the store copied.
    """

    save: str
    parts: Tally
    rates: bool
    moving_rates: bool
    checked_finite: bool = False
    copied_nbytes: int = 0

    @property
    def fields(self) -> tuple[Any, ...]:
        """The values that are sent, not nested: with names of classes they would be 100 bytes more from each rank."""
        sent = _sent_counts(self.checked_finite)
        flat = [value for part, counts in self.parts.items() for value in (*part, *counts[:sent])]
        return self.save, self.rates, self.moving_rates, self.checked_finite, self.copied_nbytes, *flat

    @classmethod
    def received(cls, fields: tuple[Any, ...]) -> RankTally:
        """Return the tally that a rank has sent as `fields`."""
        save, rates, moving, checked, copied, *flat = fields
        step = 2 + _sent_counts(checked)
        rest = () if checked else (0,)
        parts = {(flat[at], flat[at + 1]): (*flat[at + 2 : at + step], *rest) for at in range(0, len(flat), step)}
        return cls(save, parts, rates, moving, checked, copied)


def _sent_counts(checked_finite: bool) -> int:
    # The last count is that of values that are not finite.
    return len(COUNTS) if checked_finite else len(COUNTS) - 1


def tally_of(
    said: Announcement | None,
    items: Sequence[WriteItem],
    written: Written,
    last: EarlierSave | None,
    planner: SavePlanner,
    rules: Sequence[GroupRule],
) -> tuple[Any, ...] | None:
    """Tally the items of this rank by part of the state, compared with an earlier save.

    Args:
        last: the earlier save; None if there is none.

    Returns:
        the fields of a `RankTally`, which the rank sends with its results. None if there is nothing to tell, or if the
        comparison failed.
    """
    if said is None or last is None:
        return None
    try:
        return _tally(said.save, items, written, last, planner, rules).fields
    # It calls the user's planner and compares values of any class. The bytes are stored, and the save must go on.
    except Exception:
        logger.info("the items were not compared with the last save", exc_info=True)
        return None


def _tally(
    save: str,
    items: Sequence[WriteItem],
    written: Written,
    last: EarlierSave,
    planner: SavePlanner,
    rules: Sequence[GroupRule],
) -> RankTally:
    by_index = {id(item.index): item for item in items}
    results = written.results
    ordered = [by_index[id(result.index)] for result in results]
    changes = last.changes_in(results)
    entries = [
        (
            item.index.fqn,
            item.tensor_data is not None,
            _elements(item),
            result.size_in_bytes,
            change,
            0,
        )
        for item, result, change in zip(ordered, results, changes, strict=True)
    ]
    moving = list(_moving_rates(items, planner))
    return RankTally(
        save[:_ID_SIZE], tally(entries, rules), bool(moving), any(moving), copied_nbytes=written.copied_nbytes
    )


def compare(save: str, results: Iterable[Any], since: str | None) -> tuple[Changes, bool] | None:
    """Return what changed since the save at `since`, and whether all learning rates are 0. None if a rank cannot tell.

    Args:
        save: id of this save. A rank whose plan a planner of DCP's has kept compares for an older one.
        results: of each rank, with what `tally_of` returned as attribute `tally`.
    """
    sent = [getattr(each, "tally", None) for each in results]
    known = [RankTally.received(each) for each in sent if each is not None]
    if not known or len(known) < len(sent):
        return None
    if since is None or any(each.save != save[:_ID_SIZE] for each in known):
        return None
    copied = sum(each.copied_nbytes for each in known)
    changes = merge([each.parts for each in known], since, copied_nbytes=copied)
    try:
        Changes.from_plain(changes.to_plain())
    except MetadataError as error:
        # The record would be unreadable for everybody.
        logger.warning("what changed since %s is not recorded: %s", since, error)
        return None
    return changes, any(each.rates for each in known) and not any(each.moving_rates for each in known)


def report(changes: Changes, url: str, watch: StaleWatch, *, idle_rates: bool) -> None:
    """Log what changed in the checkpoint at `url`, and warn of the parts of the state that stopped changing."""
    if changes.since is None:
        return
    logger.info("changed since %s: %s", changes.since, changes)
    tell(watch.look(changes, url, advanced=advanced(changes.since, url, changes), idle_lr=idle_rates))


def _elements(item: WriteItem) -> int:
    return 0 if item.tensor_data is None else math.prod(item.tensor_data.size)


def _moving_rates(items: Iterable[WriteItem], planner: SavePlanner) -> Iterable[bool]:
    """Yield for each learning rate among the items whether it is other than 0."""
    lookup = getattr(planner, "lookup_object", None)
    for item in items:
        # Of an optimizer's groups, and of the schedulers in torch.optim, where it is a list.
        if lookup is None or not item.index.fqn.endswith((".lr", "._last_lr")) or item.type == WriteItemType.SHARD:
            continue
        found = lookup(item.index)
        for value in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                # Not as a float: an integer may be too large for one.
                yield bool(value != 0)
