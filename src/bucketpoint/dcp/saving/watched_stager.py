"""Stager of one save, which reports the end of the copy to the save's handle, and a failure to all ranks.

If a rank raised before DCP's first collective, the other ranks would wait there until the group's timeout. So the state
of this rank is replaced by a state that makes the collective fail on all ranks, with the error of this rank.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
from concurrent.futures import Future
from typing import Any, NoReturn

from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.stateful import Stateful

from bucketpoint.dcp.error_boundary import as_failure
from bucketpoint.dcp.process_groups import this_rank
from bucketpoint.errors import BucketpointError
from bucketpoint.staging import Lease, SavingRanks, StagedState, staged_for


class WatchedStager(AsyncStager):
    """Wrapper of a stager for one save, which reports to the handle that the copy is complete or has failed.

    Args:
        handle: the `SaveHandle` of the save.
        alone: raise a failure at once; otherwise DCP's first collective reports the failure to all ranks.
        ranks: the ranks that save together.

    Attributes:
        refused: error of the state or the stager during the call; None if the copy has begun.
    """

    def __init__(self, stager: Any, handle: Any, alone: bool, ranks: SavingRanks) -> None:
        self._ranks = ranks
        self._stager = stager
        self._handle = handle
        self._alone = alone
        self.refused: BaseException | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self.refused is None and bool(self._stager.should_synchronize_after_execute)

    def state_of(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state with each stateful object replaced by its `state_dict()`, as DCP would do next."""
        try:
            return {
                name: value.state_dict() if isinstance(value, Stateful) else value for name, value in state_dict.items()
            }
        except BaseException as error:
            if self._alone:
                raise
            self.refused = error
            return {}

    def stage(self, state_dict: dict[str, Any]) -> Any:
        with staged_for(self._ranks):
            try:
                if self.refused is not None:
                    raise self.refused
                staged = self._stager.stage(state_dict)
            except BaseException as error:
                if self._alone:
                    raise
                self.refused = error
                return self._failed(error, _turn())
            if not isinstance(staged, Future):
                self._handle._copied(staged)
                return staged
            # The copy may still fail. Beside other ranks, a failed save needs a place in the order of saves.
            place, copied = None if self._alone else _turn(), Future[Any]()
            staged.add_done_callback(functools.partial(self._pass_on, place, copied))
            return copied

    def synchronize_staging(self) -> None:
        self._stager.synchronize_staging()

    def close(self) -> None:
        """Do nothing: the owner of the wrapped stager closes it."""

    def _pass_on(self, place: Lease | None, copied: Future[Any], staging: Future[Any]) -> None:
        error = concurrent.futures.CancelledError() if staging.cancelled() else staging.exception()
        if error is None:
            if place is not None:
                place.end()
            self._handle._copied(staging.result())
            copied.set_result(staging.result())
        elif place is None:
            self._handle.staged.set_exception(error)
            copied.set_exception(error)
        else:
            copied.set_result(self._failed(error, place))

    def _failed(self, error: BaseException, place: Lease) -> StagedState:
        self._handle.staged.set_exception(error)
        self._handle._lease = place
        place.copied()
        # DCP pickles the failure for every rank, where unpickling an error of another library might fail.
        return StagedState({"bucketpoint_failed": _Failed(as_failure(error, this_rank()))}, place)


class _Failed:
    """A value that raises the failure of its rank as soon as any planner reads the value."""

    def __init__(self, error: BucketpointError) -> None:
        self._error = error

    def __create_write_items__(self, name: str, value: Any) -> NoReturn:
        raise self._error


def _turn() -> Lease:
    """Take a place in the order of this thread's saves, for a save that may have no staged state."""
    return Lease(unread_timeout_s=math.inf)
