"""The boundary at which errors leave for other ranks: only BucketpointErrors pass.

DCP pickles them. Where this package sends them, they are plain values, because other processes may write there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed.checkpoint import CheckpointException

from bucketpoint.dcp import process_groups, program_end
from bucketpoint.errors import BucketpointError, PeerFailedError

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

KINDS = {
    kind.__name__: kind
    for kind in vars(sys.modules[BucketpointError.__module__]).values()
    if isinstance(kind, type) and issubclass(kind, BucketpointError)
}
"""The classes of errors that one rank receives from another, by name."""

MOST_BYTES = 256 << 10
"""Limit on the bytes of a message that is decoded. Results of `to_plain` are shorter."""

_DYING_S = 1.0
"""Seconds to wait for a checkpoint process to be reported dead: its pipe closes, and the save ends, before that."""

_MOST_LETTERS = 4096
_TEXTS = ("url", "key", "remedy")


def to_plain(error: BucketpointError) -> list[Any]:
    """Return an error as the name of its class, or of the nearest of `KINDS`, and its message and fields: for JSON."""
    name = next(kind.__name__ for kind in type(error).__mro__ if KINDS.get(kind.__name__) is kind)
    # An error with further fields, such as the faults of a policy, has them in its text.
    own = error.fields().keys() != BucketpointError("").fields().keys()
    fields = {"rank": error.rank, **{field: _clipped(getattr(error, field)) for field in _TEXTS}}
    return [name, _clipped(str(error) if own else error.message), fields]


def from_plain(value: Any) -> BucketpointError:
    """Rebuild an error from what `to_plain` returned.

    Raises:
        ValueError: it is anything else.
    """
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and isinstance(value[2], dict):
        (name, message, fields), rank = value, value[2].get("rank")
        texts = {field: fields.get(field) for field in _TEXTS}
        if (
            name in KINDS
            and isinstance(message, str)
            and all(text is None or isinstance(text, str) for text in texts.values())
            and (rank is None or type(rank) is int)
        ):
            return KINDS[name](message, rank=rank, **texts)
    raise ValueError("no error of bucketpoint's")


def as_failure(error: BaseException, rank: int, url: str | None = None, what: str = "") -> BucketpointError:
    """Convert any error to the one that all ranks raise. One of ours gets the rank and the URL that it lacks.

    Args:
        rank: the rank of the job on which it happened.
        what: name of what has failed; by default the rank.
    """
    failure = error
    if not isinstance(failure, BucketpointError):
        failure = BucketpointError(f"{what or f'Rank {rank}'} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
    failure.rank = rank if failure.rank is None else failure.rank
    failure.url = failure.url or url
    return failure


@contextlib.contextmanager
def errors_of_dcp(
    url: str | None,
    what: str = "The save",
    ranks: Sequence[int] = (),
    *,
    before: tuple[type[BucketpointError], ...] = (),
) -> Iterator[None]:
    """Raise the error of a call of DCP as ours, and an interruption of this rank unchanged. Arguments as `as_ours`."""
    try:
        yield
    except CheckpointException as raised:
        error = interrupt_in(raised, ranks) or as_ours(raised, url, what, ranks, before=before)
    else:
        return
    raise error


def interrupt_in(error: CheckpointException, ranks: Sequence[int] = ()) -> BaseException | None:
    """Return the interruption of this rank, such as Ctrl-C; DCP raises it on all ranks as this rank's failure."""
    own, _ = error.failures.get(ranks.index(process_groups.this_rank()) if ranks else 0, (None, None))
    return None if isinstance(own, Exception | CheckpointException) else own


def as_ours(
    error: BaseException,
    url: str | None,
    what: str = "The save",
    ranks: Sequence[int] = (),
    *,
    before: tuple[type[BucketpointError], ...] = (),
) -> BucketpointError:
    """Turn an error of DCP into a BucketpointError.

    Of the errors of all ranks, take the first BucketpointError; another one only if there is none, and a
    `PeerFailedError` last. If the checkpoint process has died, return an error that says so.

    Args:
        ranks: the ranks of the call by their numbers in the job; DCP uses the group's. Empty for this rank alone.
        before: classes of errors that are preferred to all others.
    """
    ranks = ranks or (process_groups.this_rank(),)
    if isinstance(error, CheckpointException):
        failed = {ranks[place]: failure for place, (failure, _) in sorted(error.failures.items())}

        def order(rank: int) -> tuple[bool, ...]:
            consequence, ours = (isinstance(failed[rank], kind) for kind in (PeerFailedError, BucketpointError))
            return not isinstance(failed[rank], before), consequence, not ours

        rank = min(failed, key=order)
        ours = as_failure(failed[rank], rank, url)
    else:
        from bucketpoint.staging.process import dead_checkpoint_process

        dead = None if isinstance(error, BucketpointError) else dead_checkpoint_process(_DYING_S)
        ours = as_failure(dead or error, process_groups.this_rank(), url, what)
    if ours is not error and ours.__cause__ is None:
        # It says all that DCP's error says, in 20 to 60 lines with the traceback of each rank.
        ours.__suppress_context__ = True
        ours.__traceback__ = None
    return ours


def decoded(data: bytes) -> Any:
    """Decode JSON that another process may have written in place of a rank.

    Raises:
        ValueError: it is too long, nested too deeply, or no JSON.
    """
    if len(data) > MOST_BYTES:
        raise ValueError("too long")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _clipped(text: object) -> str | None:
    return None if text is None else str(text)[:_MOST_LETTERS].encode("utf-8", "replace").decode()


def dcp_call(method: F) -> F:
    """Wrap a method that DCP calls on an object with a `url` attribute.

    An exception that cannot be unpickled on the other ranks hangs the job instead of failing it. So a foreign exception
    is turned into a BucketpointError with its text; a BucketpointError gets the rank and the URL if it lacks them. If
    the object's attribute `unwatched` is true, the error is logged too.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 (raised as ours)
            ours = as_failure(error, process_groups.this_rank(), self.url, method.__name__)
            if getattr(self, "unwatched", False):
                if program_end.has_come():
                    program_end.lose(self.url, ours)
                logger.error("rank %s: the asynchronous save of %s failed: %s", ours.rank, self.url, ours)
            # The cause is unchanged.
            raise ours from ours.__cause__

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
