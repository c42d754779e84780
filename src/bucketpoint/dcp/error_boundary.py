"""The boundary at which errors leave for DCP: only BucketpointErrors pass, as DCP pickles them to every rank."""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bucketpoint.dcp import program_end
from bucketpoint.errors import BucketpointError

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def dcp_call(method: F) -> F:
    """Wrap a method that DCP calls on an object with `rank` and `url` attributes.

    An exception that cannot be unpickled on the other ranks hangs the job instead of failing it. So a foreign exception
    is turned into a BucketpointError with its text; a BucketpointError gets the rank and the URL if it lacks them. If
    the object has a true attribute `unwatched`, the error is logged too.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BucketpointError as error:
            if error.rank is None:
                error.rank = self.rank
            if error.url is None:
                error.url = self.url
            _report_if_unwatched(self, error)
            raise
        except Exception as error:
            ours = BucketpointError(
                f"{method.__name__} failed with {type(error).__name__}: {error}", url=self.url, rank=self.rank
            )
            _report_if_unwatched(self, ours)
            raise ours from error

    return call  # type: ignore[return-value]


def refuse_unpicklable(arguments: Mapping[str, Any]) -> None:
    """Check the caller's callables before an object that holds them is sent to another process.

    Raises:
        BucketpointError: one of them cannot be pickled, with its name, which the error of pickle does not have.
    """
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise BucketpointError(
                f"{name} cannot be sent to DCP's checkpoint process: {error}",
                remedy=f"Give {name} a function of a module, or save on a thread",
            ) from error


def _report_if_unwatched(self: Any, error: BucketpointError) -> None:
    if getattr(self, "unwatched", False):
        if program_end.has_come():
            program_end.lose(self.url, error)
        logger.error("rank %s: the asynchronous save of %s failed: %s", self.rank, self.url, error)
