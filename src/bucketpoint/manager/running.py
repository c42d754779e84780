"""The save under way of a manager, as one rank sees it, and the effect of its failure on training."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from bucketpoint.catalog import notes
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.dcp.async_save import SaveHandle, begin_save
from bucketpoint.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    BucketpointError,
    CheckpointExistsError,
    CommitConflictError,
    CredentialsError,
    InvalidURLError,
    OtherRunError,
    PolicyError,
    RanksDisagreeError,
    WrongRegionError,
)
from bucketpoint.manager.ranks import Ranks

_NEVER_WARNED = (
    RanksDisagreeError,
    CommitConflictError,
    CheckpointExistsError,
    OtherRunError,
    InvalidURLError,
    BucketNotFoundError,
    WrongRegionError,
    PolicyError,
)
"""Errors that every later save would have: of the program, of its configuration, or of a second job in the run."""

_OUTAGES_ONCE_COMMITTED = (AccessDeniedError, CredentialsError)
"""Errors of a configuration that never worked; after a commit they count as outages, such as an expired token."""

logger = logging.getLogger(__name__)


@dataclass
class Running:
    """The save under way, as this rank sees it.

    Attributes:
        full: True if a job can resume from the checkpoint.
        settled: set when the follow-up work of the save is done. A future wakes waiting threads before it runs its
            callbacks, so its end alone is not enough.
    """

    step: int
    handle: SaveHandle
    full: bool = True
    settled: threading.Event = field(default_factory=threading.Event)
    _metrics: list[Mapping[str, float]] | None = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def none(cls) -> Running:
        """Return an ended save, as a stand-in for none."""
        none = cls(-1, SaveHandle(None))
        none.handle.set_result(Metadata({}))
        none.settled.set()
        return none

    @property
    def failed(self) -> bool:
        """True if the save is known to have failed on this rank."""
        return self.handle.failure() is not None

    @property
    def received(self) -> bool:
        """True if the program has received the save's error on this rank."""
        return self.failed and self.handle._told

    @property
    def error(self) -> BaseException:
        """The error of the save, of this rank or of another."""
        error = self.handle.failure()
        return error or BucketpointError(f"The save of step {self.step} failed on another rank", url=self.handle.url)

    def receive(self) -> BaseException:
        """Return the error to raise, and record that the program has received it: it is raised once."""
        self.handle._note_told()
        return self.error

    def hold_back(self, metrics: Mapping[str, float]) -> bool:
        """Keep metrics until the commit, whose token they get. Return False if the save has ended."""
        with self._lock:
            if self._metrics is None:
                return False
            self._metrics.append(metrics)
            return True

    def held_back(self) -> list[Mapping[str, float]]:
        """Return the metrics that were kept. No more are."""
        with self._lock:
            metrics, self._metrics = self._metrics or [], None
            return metrics

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save and for its follow-up work, at most `timeout` seconds each. True if both have ended."""
        return self.handle.wait(timeout) and self.settled.wait(timeout)


def begin_together(
    ranks: Ranks,
    what: str,
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    url: str,
    *,
    begun: Callable[[SaveHandle], None] = lambda handle: None,
    **options: Any,
) -> SaveHandle:
    """Begin a save on all ranks, or raise on all of them the error of the one that could not make or copy its state.

    Args:
        what: the call, as a program spells it.
        state: the state, or a function that makes it.
        begun: called with the handle as soon as the save is under way on this rank, whatever happens on the others.
        options: as for `async_save`.

    Raises:
        BucketpointError: a rank could not make or copy its state, and no save is under way on any rank; or a rank was
            missing at the timeout, or was interrupted.
    """

    def made() -> dict[str, Any]:
        given = state() if callable(state) else state
        return {name: value.state_dict() if isinstance(value, Stateful) else value for name, value in given.items()}

    plain = ranks.together(what, made)
    try:
        handle = begin_save(plain, checkpoint_id=url, process_group=ranks.members, **options)
        begun(handle)
    except BaseException as error:
        ranks.leave_others(what, error)
        raise
    (failed,) = ranks.most([int(handle._unstaged() is not None)], what)
    if not failed:
        return handle
    # The save fails as soon as the ranks meet in it.
    handle.wait(ranks.limit_s)
    handle._note_told()
    raise handle._unstaged() or handle.failure() or BucketpointError("The state of a rank could not be copied", url=url)


def may_be_warned(error: BaseException, *, committed: bool) -> bool:
    """Return True for an error of a save after which training can continue under `on_failure: warn`.

    Args:
        committed: the run's saves have worked before in this process.
    """
    never = _NEVER_WARNED if committed else (*_NEVER_WARNED, *_OUTAGES_ONCE_COMMITTED)
    return isinstance(error, Exception) and not isinstance(error, never)


def note_end(manager: weakref.ref[Any], catalog: Catalog, running: Running, handle: SaveHandle) -> None:
    """Report the metrics of a save, and its outcome to the manager, if that still exists."""
    for metrics in running.held_back():
        try:
            notes.report(catalog, running.step, metrics)
        except BucketpointError as lost:
            logger.warning("the metrics of step %d were not reported: %s", running.step, lost)
    alive, error = manager(), handle.failure()
    if alive is not None and error is None:
        alive._standing.saved(running.step, handle.begun_s, full=running.full)
        alive._replacing.committed(running.step)
    elif alive is not None:
        alive._standing.lost()
        alive._replacing.failed()
        alive._warn(running.step, error)
    running.settled.set()
