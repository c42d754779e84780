"""`CommitInfo`: description of a checkpoint for `on_commit`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bucketpoint.dcp.stats import SaveStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CommitInfo:
    """Description of a committed checkpoint for `on_commit`.

    Attributes:
        url: URL of the checkpoint.
        step: training step; None if the save has no log in a catalog.
        nbytes: bytes of the checkpoint's data on all ranks.
        blocked_s: seconds for which `async_save` blocked training on the coordinator.
        commit_s: seconds from the call of `async_save` to the commit, on the coordinator.
        metrics: metrics of the step at the time of the save.
        stats: figures of the save; None with a checkpoint process.
    """

    url: str
    step: int | None
    nbytes: int
    blocked_s: float
    commit_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    stats: SaveStats | None = None


OnCommit = Callable[[CommitInfo], None]


def tell(on_commit: OnCommit, info: CommitInfo) -> None:
    """Call `on_commit` and log its error, which must not fail the committed save."""
    try:
        on_commit(info)
    except KeyboardInterrupt:
        # Only the main thread receives a KeyboardInterrupt, and the program should stop.
        raise
    # SystemExit or DCP's CheckpointException would end the thread that must report the end of the save.
    except BaseException:
        logger.exception("%s is committed, but on_commit raised an error", info.url)
