"""The stale-state alarm: a part of the state that stopped changing although training goes on."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bucketpoint.format.changes import DATA, MOMENTS, Changes
from bucketpoint.format.groups import MODEL

logger = logging.getLogger(__name__)

# Random generators are not watched: without dropout, one is drawn from only where a DataLoader begins an epoch, so that
# their state rightly stands still between saves.
_WATCHED = (MODEL, MOMENTS, DATA)

_MEANING = {
    MODEL: (
        "Training may no longer reach these weights: the optimizer holds other tensors than the model, no gradients "
        "arrive, every step is skipped, or the learning rate is 0"
    ),
    MOMENTS: (
        "The optimizer may no longer step, or the state that is saved may be a stale copy of the optimizer's own"
    ),
    DATA: ("The position that is saved may not be that of the dataloader in use, so that a restart would repeat data"),
}
_CHECK = {
    MODEL: "Check that optimizer.param_groups holds the model's own parameters and that their .grad is not None",
    MOMENTS: "Check that the optimizer whose state is saved is the one on which training calls step()",
    DATA: "Check that the dataloader whose state is saved is the one that training iterates over",
}


@dataclass(frozen=True)
class StalePart:
    """A part of the state that did not change although training went on.

    Attributes:
        part: name of the part; several names if nothing of the kind ever changed.
        kind: `model`, `moments` or `data`.
        last_changed: URL of the last save in which the part had changed; None if it changed in none since the first.
        url: the save in which it had not.
    """

    part: str
    kind: str
    last_changed: str | None
    url: str

    def __str__(self) -> str:
        since = (
            f"it last changed in {self.last_changed}"
            if self.last_changed is not None
            else "it has not changed in any save since the first save of this process"
        )
        return (
            f"no byte of {self.part!r} ({self.kind}) changed in {self.url}, although training went on; {since}. "
            f"{_MEANING[self.kind]}. {_CHECK[self.kind]}; if it is meant to stand still, ignore this warning"
        )


@dataclass
class _PartHistory:
    """The history of one part.

    Attributes:
        last_changed: URL of the last save in which the part changed; None if it never has.
        pause, longest: saves in which it has not changed since then, and the most after which it moved again.
        told: the alarm was given, and the part has not moved since.
        noted: the part was logged as frozen.
    """

    last_changed: str | None = None
    pause: int = 0
    longest: int = 0
    told: bool = False
    noted: bool = False


class StaleWatch:
    """The memory of a run's saves that decides when a part is stale.

    Kept from save to save on the coordinator. The alarm is given once for a part until it moves again. A part that
    moved again after a pause may pause as long without an alarm: models that are trained in turns do.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], _PartHistory] = {}
        self._told_kinds: set[str] = set()

    def look(self, changes: Changes, url: str, *, advanced: bool, idle_lr: bool = False) -> list[StalePart]:
        """Note the changes of a committed save and return the parts that are newly found to be stale.

        Args:
            advanced: training went on since the save compared with; without that nothing is stale.
            idle_lr: every learning rate of the state is 0, so that no change of the model is expected.
        """
        if changes.since is None:
            return []
        present: dict[str, list[tuple[str, _PartHistory]]] = {}
        for name, part in changes.parts.items():
            if part.kind not in _WATCHED:
                continue
            if part.new_items == part.items:
                # The save before held nothing of it, as when weights are saved alone in between.
                continue
            watched = self._parts.setdefault((name, part.kind), _PartHistory())
            present.setdefault(part.kind, []).append((name, watched))
            if part.changed_items:
                watched.longest = max(watched.longest, watched.pause)
                watched.last_changed, watched.pause, watched.told = url, 0, False
        if not advanced:
            return []
        stale: list[StalePart] = []
        for kind, parts in present.items():
            if kind == MODEL and idle_lr:
                continue
            if any(watched.last_changed is not None for _, watched in parts):
                still = [(name, watched) for name, watched in parts if not changes.parts[name].changed_items]
                stale += self._look_at_still(kind, still, url)
            elif kind not in self._told_kinds:
                self._told_kinds.add(kind)
                stale.append(StalePart(", ".join(name for name, _ in parts), kind, None, url))
        return stale

    def _look_at_still(self, kind: str, parts: Sequence[tuple[str, _PartHistory]], url: str) -> list[StalePart]:
        stale: list[StalePart] = []
        for name, watched in parts:
            if watched.last_changed is None:
                if not watched.noted:
                    watched.noted = True
                    logger.info("%r (%s) has not changed since the first save: it counts as frozen", name, kind)
                continue
            watched.pause += 1
            if watched.pause > watched.longest and not watched.told:
                watched.told = True
                stale.append(StalePart(name, kind, watched.last_changed, url))
        return stale


_NUMBER = re.compile(r"^(.*?)([0-9]+)$", re.DOTALL)


def advanced(since: str, url: str, changes: Changes) -> bool:
    """Return True if training went on between two saves.

    Folders of one name with a number at the end (`step-400`, `step-500`) tell by the number. For others, and for a
    checkpoint that is saved to the same URL again, anything at all that changed tells.
    """
    before, now = (_NUMBER.match(each.rstrip("/").rpartition("/")[2]) for each in (since, url))
    if since.rstrip("/") == url.rstrip("/") or before is None or now is None or before[1] != now[1]:
        return changes.changed_items > 0
    # Compared as text: a folder's name may have more digits than Python converts.
    (older, newer) = (each[2].lstrip("0") for each in (before, now))
    return (len(newer), newer) > (len(older), older)


def tell(stale: Sequence[StalePart]) -> None:
    """Warn of each stale part."""
    for each in stale:
        logger.warning("%s", each)
