"""Successive saves of one training program, each begun by all ranks together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from bucketpoint.catalog.run import checkpoint_at_or_below
from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.process_groups import is_initialized
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError
from bucketpoint.location import Location
from bucketpoint.manager.ranks import Ranks
from bucketpoint.manager.running import begin_together

logger = logging.getLogger(__name__)

_ranks: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
"""The job's connected ranks, by torch's default group. All integrations share them."""


def job_ranks(what: str) -> Ranks:
    """Return all ranks of the job, connected. The first call is a collective.

    `what` names the call in messages, and is the same on all ranks.
    """
    if not is_initialized():
        return Ranks(what)
    world: Any = dist.group.WORLD
    if world not in _ranks:
        ranks = Ranks(what)
        ranks.connect(what)
        _ranks[world] = ranks
    return _ranks[world]


def checkpoint_at(url: str, storage_options: Mapping[str, Any] | None) -> str | None:
    """Return the result of `checkpoint_at_or_below`, which one rank calls for all. All ranks."""
    call = f"the load of {url}"
    return job_ranks(call).on_coordinator(lambda: checkpoint_at_or_below(Location.of(url, storage_options)), call)


class Saves:
    """Successive background saves. The default `writer` keeps its plans and its staging memory between them."""

    def __init__(self, writer: BucketWriter | None = None) -> None:
        self._writer = writer
        self._last: SaveHandle | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A program may pickle the object that holds this one, such as a strategy. The save under way is left out.
        return {"_writer": self._writer, "_last": None}

    @property
    def under_way(self) -> bool:
        """True while a save is not committed and has not failed."""
        return self._last is not None and not self._last.done()

    def save(
        self,
        url: str,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        storage_writer: BucketWriter | None = None,
        **options: Any,
    ) -> SaveHandle:
        """Wait for the previous save, and begin the next. All ranks.

        Args:
            state: the state, or a function that makes it.
            options: as for `async_save`.

        Raises:
            BucketpointError: the previous save failed, and no rank's program has received its error; or a rank's state
                cannot be made.
            StagingError: the state of a rank cannot be copied.
        """
        call = f"the save of {url}"
        ranks = job_ranks(call)
        self._settle(ranks, call)
        writer = storage_writer or self._writer
        self._last = begin_together(ranks, call, state, url, storage_writer=writer, **options)
        return self._last

    def wait(self) -> None:
        """Wait until the last save is committed. Raises its error, unless the program has received it before."""
        last = self._last
        if last is not None and not (last.done() and last._told):
            last.result()

    def _settle(self, ranks: Ranks, call: str) -> None:
        """Wait for the last save, and raise its error on all ranks, unless a rank's program has received the error."""
        last = self._last
        if last is not None:
            last.wait()
        error = last.failure() if last is not None else None
        told = last is not None and last._told
        failed, received = ranks.most([int(error is not None), int(error is not None and told)], call)
        self._last = None
        if not failed or told:
            return
        if last is not None:
            last._note_told()
        error = error or BucketpointError("The last save failed on another rank")
        if not received:
            raise error
        logger.warning("the last save has failed: %s", error)
