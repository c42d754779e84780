"""One save under way as a state machine, and the configuration that writer and reader share. Makes no requests."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from bucketpoint.catalog.fence import Stopwatch
from bucketpoint.dcp.agreement import Statement
from bucketpoint.errors import BucketpointError, InvalidURLError
from bucketpoint.format.keys import new_token
from bucketpoint.stores import Store, open_store
from bucketpoint.stores import as_url as as_url


@dataclass(frozen=True)
class Location:
    """Where checkpoints live and how to get there: configuration only, so that it pickles without a connection.

    Attributes:
        schemes: URL schemes that are accepted; empty for any.
        fs: a filesystem of the user's own, which then serves every URL.
    """

    schemes: tuple[str, ...] = ()
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    fs: Any = field(default=None, repr=False)

    def open(self, url: str | None) -> tuple[Store, str]:
        """The store and the key prefix of a checkpoint URL. Opens no connection."""
        if url is None:
            raise InvalidURLError(
                "No checkpoint URL was given", remedy="Pass checkpoint_id= to DCP, or the path to the constructor"
            )
        return open_store(url, storage_options=self.storage_options, fs=self.fs, schemes=self.schemes)


def world_size() -> int:
    """Ranks of this job, for saves and loads in which they do not talk to each other."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class SaveState(enum.Enum):
    """`OPEN -> UPLOADING -> UPLOADED -> COMMITTED`, or `ABORTED` from any but the last."""

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
class Seen:
    """What was committed at a URL when an attempt began.

    Attributes:
        etag: of the checkpoint's metadata; None where there was none, and where the store has no ETags.
    """

    there: bool
    etag: str | None = None


@dataclass
class SaveSession:
    """What one save of this rank needs to know. Lives on the thread that DCP runs the save on.

    Attributes:
        since: started before any rank sent data.
        seen: by the coordinator, when the save began; None if that is not known.
        statement: what must be the same on all ranks, once it is known.
        planned: DCP has begun to plan it. The next save that DCP plans is another one.
    """

    url: str | None
    token: str = field(default_factory=new_token)
    state: SaveState = SaveState.OPEN
    rank: int = 0
    use_collectives: bool = True
    started: float = field(default_factory=time.monotonic)
    since: Stopwatch = field(default_factory=Stopwatch)
    seen: Seen | None = None
    statement: Statement | None = None
    planned: bool = False

    def move(self, state: SaveState) -> None:
        """Raises BucketpointError on an illegal move: DCP's calls came out of order."""
        if state not in _MOVES[self.state]:
            raise BucketpointError(f"A save cannot go from {self.state.value} to {state.value}", url=self.url)
        self.state = state
