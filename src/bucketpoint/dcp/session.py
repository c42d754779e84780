"""State of a running save, the base class of writer and reader, and checks of arguments."""

from __future__ import annotations

import inspect
import numbers
import operator
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

from torch.distributed.checkpoint import LoadPlan, Metadata

from bucketpoint.dcp.planning.agreement import CommitRead, Statement
from bucketpoint.dcp.stats import SaveTimes
from bucketpoint.errors import BucketpointError, InvalidURLError, RanksDisagreeError, first_of
from bucketpoint.format.catalog_keys import MAX_STEP
from bucketpoint.format.keys import new_token
from bucketpoint.staging import SavingRanks
from bucketpoint.stopwatch import Stopwatch
from bucketpoint.stores import Store, accepts_url, open_store, retry
from bucketpoint.stores import as_url as as_url
from bucketpoint.transfer import TransferOptions


class Located:
    """Base class of writer and reader: the URL of the checkpoint, and access to its store.

    Holds no connection, so that it can be pickled.
    """

    schemes: tuple[str, ...] = ()
    """URL schemes that are accepted; empty for any."""

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        # Refuse keywords that `FsspecWriter` and `FsspecReader` pass to fsspec's filesystem: name `storage_options`.
        parameters = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            unknown = [name for name in keywords if name not in parameters]
            if "serialization_format" in unknown:
                raise BucketpointError(
                    f"{cls.__name__} takes no serialization_format: it writes the format of torch.save",
                    remedy="Leave it out; `bucketpoint convert --to safetensors` writes safetensors",
                )
            if unknown:
                options = ", ".join(f'"{name}": ...' for name in unknown)
                raise BucketpointError(
                    f"{cls.__name__} has no argument {first_of(unknown, 5)}",
                    remedy=f"Pass options of the store as storage_options={{{options}}}",
                )
        return super().__new__(cls)

    def __init__(self, path: str | os.PathLike[str] | None, storage_options: Mapping[str, Any] | None, fs: Any) -> None:
        self._storage_options = dict(storage_options or {})
        self._fs = fs
        self._url = as_url(path)
        if self._url is not None:
            self._open(self._url)

    def _open(self, url: str | None) -> tuple[Store, str]:
        """Return the store and the key prefix of a checkpoint URL. Opens no connection."""
        if url is None:
            raise InvalidURLError(
                "No checkpoint URL was given", remedy="Pass checkpoint_id= to DCP, or the path to the constructor"
            )
        return open_store(url, storage_options=self._storage_options, fs=self._fs, schemes=self.schemes)

    @property
    def url(self) -> str | None:
        return self._url

    @property
    def checkpoint_id(self) -> str:
        """The `url` as DCP requires it: an empty string instead of None."""
        return self.url or ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if this class serves the URL's scheme.

        `BucketWriter` and `BucketReader` serve paths, and all schemes that fsspec knows, even without their libraries
        installed.
        """
        return accepts_url(checkpoint_id, cls.schemes)


@dataclass(frozen=True)
class PriorCommit:
    """The commit that a URL had when an attempt began.

    Attributes:
        there: True if the URL had a checkpoint.
        etag: ETag of the checkpoint's metadata; None without a checkpoint, or if the store has no ETags.
    """

    there: bool
    etag: str | None = None


@dataclass
class SaveSession:
    """The state of one save on this rank, kept on the thread on which DCP runs the save.

    Attributes:
        since: stopwatch that was started before any rank sent data.
        seen: commit that the coordinator found when the save began; None if unknown.
        statement: facts about the save that must be the same on all ranks; None until `prepare_local_plan`.
        times: times of the steps of the save, and counts of its requests.
        planned: True if DCP has begun to plan this save. The next save gets a new session.
        rank: rank in DCP's group, used in the names of this rank's objects; 0 before `set_up_storage_writer`.
        ranks: the ranks that save, as far as known.
    """

    url: str | None
    token: str = field(default_factory=new_token)
    use_collectives: bool = True
    times: SaveTimes = field(default_factory=SaveTimes)
    since: Stopwatch = field(default_factory=Stopwatch)
    seen: PriorCommit | None = None
    statement: Statement | None = None
    planned: bool = False
    rank: int = 0
    ranks: SavingRanks = field(default_factory=SavingRanks.of_job)

    def count_ranks(self, count: int) -> None:
        """Check, on the coordinator, the number of ranks that have planned or written.

        Raises:
            RanksDisagreeError: the number is not that of the ranks that made the call.
        """
        if self.use_collectives and self.ranks.together not in (None, count):
            raise RanksDisagreeError(
                f"The call was made by {self.ranks.together} ranks, but {count} of them save",
                url=self.url,
                remedy="Keep the group until the save has ended; DCP's checkpoint process saves for one group only",
            )
        self.ranks = replace(self.ranks, together=count)


class SaveSessions(threading.local):
    """The running save of each thread: DCP runs each save on one thread, and two saves must not share token or URL."""

    current: SaveSession | None = None
    _next: str | None = None

    def next_token(self) -> str:
        """Return the token that the next save of this thread will have."""
        self._next = self._next or new_token()
        return self._next

    def begin(self, url: str | None) -> SaveSession:
        self.current, self._next = SaveSession(url, self.next_token()), None
        retry.count_into(self.current.times.counts)
        return self.current


class LoadSession(threading.local):
    """The load of each thread: DCP runs each load on one thread, and two loads must not share URL or metadata.

    Attributes:
        url: URL of the thread's latest load, if DCP passed one.
        in_load: True from `reset` to `read_metadata`.
    """

    url: str | None = None
    metadata: Metadata | None = None
    commit: CommitRead | None = None
    plans: Sequence[LoadPlan] = ()
    failure: Exception | None = None
    in_load = False
    begun = read_metadata_at = 0.0
    former_counts: Counter[str] | None = None

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


# -- checks of arguments, whose errors name the wrong argument --------------------------------------------------------

MOST_SECONDS = 100_000_000
"""The longest wait, about 3 years. Python and gloo count nanoseconds, and overflow at 292 years."""

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "state": ((Mapping,), 'a dict, such as {"model": model.state_dict()}'),
    "url": ((str, os.PathLike), "a URL or a path"),
    "transfer": ((TransferOptions, NoneType), "a TransferOptions"),
}


def check_types(**given: Any) -> None:
    """Check the types of arguments by name.

    Raises:
        BucketpointError: an argument has a wrong type.
    """
    for name, value in given.items():
        types, wanted = _TYPES[name]
        if not isinstance(value, types):
            raise BucketpointError(f"The argument {name} must be {wanted}, not {type(value).__name__}")


def checked_seconds(name: str, value: Any) -> float:
    """Return an argument in seconds.

    Raises:
        BucketpointError: the value is not a number above 0 and up to `MOST_SECONDS`.
    """
    if not isinstance(value, numbers.Real) or not 0 < float(value) <= MOST_SECONDS:
        raise BucketpointError(f"{name} must be a number of seconds above 0 and up to {MOST_SECONDS}, not {value!r}")
    return float(value)


def whole_step(step: Any) -> int:
    """Return a step as Python's int: integers of numpy and of torch are steps too.

    Raises:
        BucketpointError: the step is not an integer, or is out of range.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise BucketpointError(f"A step must be an integer from 0 to {MAX_STEP}, not {step!r}")
    return number
