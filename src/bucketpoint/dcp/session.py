"""One save under way as a state machine, and the configuration that writer and reader share."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from bucketpoint.catalog.deletion.fence import Stopwatch
from bucketpoint.dcp.planning.agreement import Statement
from bucketpoint.errors import BucketpointError, InvalidURLError
from bucketpoint.format.keys import new_token
from bucketpoint.stores import Store, open_store
from bucketpoint.stores import as_url as as_url


@dataclass(frozen=True)
class Location:
    """Configuration to reach the store of a checkpoint. Holds no connection, so that it can be pickled.

    Attributes:
        schemes: URL schemes that are accepted; empty for any.
        fs: a filesystem of the user's own, which then serves every URL.
    """

    schemes: tuple[str, ...] = ()
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    fs: Any = field(default=None, repr=False)

    def open(self, url: str | None) -> tuple[Store, str]:
        """Return the store and the key prefix of a checkpoint URL. Opens no connection."""
        if url is None:
            raise InvalidURLError(
                "No checkpoint URL was given", remedy="Pass checkpoint_id= to DCP, or the path to the constructor"
            )
        return open_store(url, storage_options=self.storage_options, fs=self.fs, schemes=self.schemes)


def world_size() -> int:
    """Return the number of ranks in this job, for saves and loads without collectives too."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class SaveState(enum.Enum):
    """State of a save: `OPEN -> UPLOADING -> UPLOADED -> COMMITTED`, or `ABORTED` from any but `COMMITTED`."""

    OPEN = "open"
    UPLOADING = "uploading"
    UPLOADED = "uploaded"
    COMMITTED = "committed"
    ABORTED = "aborted"


_MOVES = {
    SaveState.OPEN: {SaveState.UPLOADING, SaveState.ABORTED},
    SaveState.UPLOADING: {SaveState.UPLOADED, SaveState.ABORTED},
    SaveState.UPLOADED: {SaveState.COMMITTED, SaveState.ABORTED},
    SaveState.COMMITTED: set(),
    SaveState.ABORTED: set(),
}


@dataclass(frozen=True)
class PriorCommit:
    """The commit that was found at a URL when an attempt began.

    Attributes:
        there: a checkpoint was committed.
        etag: ETag of the checkpoint's metadata; None if there was no checkpoint, or if the store has no ETags.
    """

    there: bool
    etag: str | None = None


@dataclass
class SaveSession:
    """The state of one save on this rank, kept on the thread on which DCP runs the save.

    Attributes:
        since: stopwatch that was started before any rank sent data.
        seen: commit that the coordinator found when the save began; None if that is not known.
        statement: facts about the save that must be the same on all ranks; None until `prepare_local_plan`.
        planned: DCP has begun to plan this save. The next save that DCP plans gets a new session.
    """

    url: str | None
    token: str = field(default_factory=new_token)
    state: SaveState = SaveState.OPEN
    rank: int = 0
    use_collectives: bool = True
    started: float = field(default_factory=time.monotonic)
    since: Stopwatch = field(default_factory=Stopwatch)
    seen: PriorCommit | None = None
    statement: Statement | None = None
    planned: bool = False

    def move(self, state: SaveState) -> None:
        """Move to another state. Raises BucketpointError on an illegal move: DCP's calls came out of order."""
        if state not in _MOVES[self.state]:
            raise BucketpointError(
                f"A save cannot change from the state {self.state.value} to {state.value}", url=self.url
            )
        self.state = state
