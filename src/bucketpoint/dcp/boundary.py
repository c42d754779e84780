"""What crosses from us into DCP: only errors of our own kinds, since DCP pickles them to every rank. No I/O."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from bucketpoint.errors import BucketpointError

F = TypeVar("F", bound=Callable[..., Any])


def dcp_call(method: F) -> F:
    """Wrap a method that DCP calls on an object with `rank` and `url` attributes.

    An exception that cannot be unpickled on the other ranks hangs the job instead of failing it, so anything foreign is
    turned into a BucketpointError that carries its text; ours are told the rank on their way out.
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
            raise
        except Exception as error:
            raise BucketpointError(
                f"{method.__name__} failed with {type(error).__name__}: {error}", url=self.url, rank=self.rank
            ) from error

    return call  # type: ignore[return-value]
