"""Conversion of errors that are sent to other ranks, and the exit status of a program that loses its last save.

DCP sends errors as pickles; this package uses JSON, because any process may write into the job's TCP store.

The interpreter waits for threads that save, but their errors do not change the exit status, so a job whose last save
failed would look complete. Python documents one way to change it so late: it is 120 if output cannot be flushed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch.distributed.checkpoint import CheckpointException

from bucketpoint.dcp import process_groups
from bucketpoint.errors import BucketpointError, PeerFailedError
from bucketpoint.forks import renew_in_child

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

KINDS = {
    kind.__name__: kind
    for kind in vars(sys.modules[BucketpointError.__module__]).values()
    if isinstance(kind, type) and issubclass(kind, BucketpointError)
}
"""The classes of errors that a rank may receive from another rank, by name."""

MOST_BYTES = 256 << 10
"""Limit on the bytes of a message to decode. Results of `to_plain` are shorter."""

_DYING_S = 1.0
"""Seconds to wait for the death of a checkpoint process: its pipe closes, which ends the save, a little earlier."""

_MOST_LETTERS = 4096
_TEXTS = ("url", "key", "remedy")


def to_plain(error: BucketpointError) -> list[Any]:
    """Return an error as JSON values: the name of its class, or of its nearest base in `KINDS`, message and fields."""
    name = next(kind.__name__ for kind in type(error).__mro__ if KINDS.get(kind.__name__) is kind)
    # Further fields, such as the faults of a policy, are sent in the text.
    own = error.fields().keys() != BucketpointError("").fields().keys()
    fields = {"rank": error.rank, **{field: _clipped(getattr(error, field)) for field in _TEXTS}}
    return [name, _clipped(str(error) if own else error.message), fields]


def from_plain(value: Any) -> BucketpointError:
    """Rebuild an error from the result of `to_plain`.

    Raises:
        ValueError: `value` is not such a result.
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
    """Convert any error to a BucketpointError with rank and URL, which all ranks raise.

    Args:
        rank: global rank on which the error happened.
        what: name of the failed call; by default the rank is named.
    """
    failure = error
    if not isinstance(failure, BucketpointError):
        failure = BucketpointError(f"{what or f'Rank {rank}'} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
    failure.rank = rank if failure.rank is None else failure.rank
    failure.url = failure.url or url
    return failure


def expect_one_process() -> None:
    """Filter DCP's warning of a call without a process group, where bucketpoint raises if other ranks are missing."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@contextlib.contextmanager
def errors_of_dcp(
    url: str | None,
    what: str = "The save",
    ranks: Sequence[int] = (),
    *,
    before: tuple[type[BucketpointError], ...] = (),
) -> Iterator[None]:
    """Convert errors of DCP in the block by `as_ours`; an interruption of this rank is raised unchanged."""
    try:
        with warnings.catch_warnings():
            expect_one_process()
            yield
    except CheckpointException as raised:
        error = interrupt_in(raised, ranks) or as_ours(raised, url, what, ranks, before=before)
    else:
        return
    raise error


def interrupt_in(error: CheckpointException, ranks: Sequence[int] = ()) -> BaseException | None:
    """Return the interruption of this rank, such as Ctrl-C, which DCP raises as a failure on all ranks; else None."""
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
    """Convert an error of DCP to a BucketpointError.

    Of the errors of all ranks, the first BucketpointError is preferred, then other errors, then a `PeerFailedError`. If
    the checkpoint process has died, the error reports its death.

    Args:
        ranks: global ranks of the call, because DCP's errors have ranks of the group; empty for this rank alone.
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
        # The new error contains all facts of DCP's error, which has 20 to 60 lines with a traceback of each rank.
        ours.__suppress_context__ = True
        ours.__traceback__ = None
    return ours


def decoded(data: bytes) -> Any:
    """Decode JSON from the job's TCP store, into which any process may write.

    Raises:
        ValueError: the data is too long, nested too deeply, or not JSON.
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

    An exception that cannot be unpickled on other ranks hangs the job instead of failing it. So all exceptions are
    converted to BucketpointErrors, and the rank and the URL are added if missing. If the object's attribute
    `unwatched` is true, the error is logged too.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 (raised as a BucketpointError)
            ours = as_failure(error, process_groups.this_rank(), self.url, method.__name__)
            if getattr(self, "unwatched", False):
                # Set once the main program has ended, and the interpreter waits for threads.
                if getattr(threading, "_SHUTTING_DOWN", False):
                    lose(self.url, ours)
                logger.error("rank %s: the asynchronous save of %s failed: %s", ours.rank, self.url, ours)
            raise ours from ours.__cause__

    return call  # type: ignore[return-value]


class LastSave:
    """Outcome of one save, without the error, which would keep its frames and their memory alive.

    Attributes:
        failure: text of the error; empty while the save runs; None once the save has committed, or the program has
            received the error.
    """

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.failure: str | None = ""
        # A fork must not report the outcome of this save.
        renew_in_child(self, lambda inherited: vars(inherited).update(failure=None))


_last: LastSave | None = None


def begin(url: str | None) -> LastSave:
    """Record that a save has begun, whose outcome then decides the exit status."""
    global _last
    _last = LastSave(url)
    return _last


def lose(url: str | None, error: BaseException) -> None:
    """Record the failure of a save after the main program has ended, and can no longer receive the error."""
    begin(url).failure = str(error)


class _Unflushable:
    """Wrapper of standard output that forwards all calls, but whose flush fails when the interpreter ends."""

    def __init__(self, stream: Any, error: BucketpointError) -> None:
        self._stream = stream
        self._error = error
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        # The interpreter flushes twice, and one error is enough.
        if not self.closed:
            self.closed = True
            raise self._error


@atexit.register
def _tell() -> None:
    # atexit calls functions in reverse order. This function is registered at import, so it runs after the managers have
    # waited for their saves.
    if _last is None or _last.failure is None:
        return
    why = _last.failure or "the program ended before the commit"
    message = f"The last save was lost: {why}. The program exits with an error status"
    sys.stdout = _Unflushable(sys.stdout, BucketpointError(message, url=_last.url))
