"""One attempt to load a checkpoint, with the same outcome on all ranks: loaded, damaged, or an error to raise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from bucketpoint.dcp.planning.load_planner import LoadPlanner
from bucketpoint.dcp.reader import BucketReader
from bucketpoint.errors import DAMAGE, NOT_UNDERSTOOD, CorruptDataError, MetadataError
from bucketpoint.format.metadata.coverage import uncovered
from bucketpoint.format.metadata.facts import extra
from bucketpoint.manager.ranks import Ranks

_CALL = "the load of restore()"
_RANKS = 1 << 24
"""Upper bound of ranks. `code * _RANKS + place` is one number, whose maximum over all ranks decides the outcome."""

_LOADED, _UNREADABLE, _REFUSED, _DAMAGED, _FAILED = range(5)


@dataclass(frozen=True)
class LoadOutcome:
    """Outcome of one attempt to load, the same on all ranks except for `error`.

    Attributes:
        error: the error of this rank, or else of the rank that decided the outcome; None if the state was loaded.
        damaged: True if the checkpoint is damaged, and no rank failed for another reason.
        doubtful: True if the metadata cannot be decoded: it is damaged, or not supported.
        refused: True if the allow-list refuses the metadata, or it has the format of a newer bucketpoint.
    """

    error: BaseException | None = None
    damaged: bool = False
    doubtful: bool = False
    refused: bool = False

    @property
    def loaded(self) -> bool:
        return self.error is None


class _WholeReader(BucketReader):
    """Reader that treats a checkpoint as damaged if it does not cover all of its tensors."""

    def _decode(self, data: bytes) -> Metadata:
        metadata = super()._decode(data)
        part = next(uncovered(metadata, extra(metadata)), None)
        if part is not None:
            raise CorruptDataError(f"The checkpoint is damaged: {part[0]} {part[1]}", url=self.url, key=part[0])
        return metadata


class _WithState:
    """Stateful object with a `state_dict` made before any collective. Errors of its `load_state_dict` are no damage."""

    failed = False

    def __init__(self, of: Stateful) -> None:
        self._of = of
        self._state = of.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.failed = True
        self._of.load_state_dict(state)
        self.failed = False


def with_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Call every `state_dict` before DCP's collectives, because it may fail, and return a state with the results.

    The order is that of the sorted keys, as in DCP: a `state_dict` may be a collective call.
    """
    values = {name: state[name] for name in sorted(state)}
    return {name: _WithState(value) if isinstance(value, Stateful) else value for name, value in values.items()}


def attempt(
    state: dict[str, Any], url: str | os.PathLike[str], ranks: Ranks, *, planner: Any = None, **reading: Any
) -> LoadOutcome:
    """Load the checkpoint at `url` into `state` on all ranks. A failed attempt may leave part of its data there."""

    def prepared() -> tuple[BucketReader, dict[str, Any]]:
        reader = _WholeReader(cooperative="node", process_group=ranks.group, **reading)
        return reader, with_states(state)

    error: BaseException | None = None
    try:
        # Before DCP's collectives, in which the other ranks would wait for a rank that has failed here.
        reader, held = ranks.together(_CALL, prepared)
    except Exception as raised:  # noqa: BLE001 (raised by the caller)
        return LoadOutcome(raised)
    try:
        with ranks.calling_dcp(_CALL, str(url), before=DAMAGE):
            dcp.load(
                held,
                checkpoint_id=url,
                storage_reader=reader,
                planner=planner or LoadPlanner(),
                process_group=ranks.group,
            )
    except BaseException as raised:
        if not isinstance(raised, Exception) and ranks.group is None:
            raise
        error = raised
    failed = any(isinstance(value, _WithState) and value.failed for value in held.values())
    worst = (_FAILED if failed else _code(error)) * _RANKS + (ranks.world - ranks.rank if error is not None else 0)
    # The timeout is long, because some ranks read more than others.
    (worst,) = ranks.most([worst], _CALL, limit_s=ranks.load_s)
    code, place = divmod(worst, _RANKS)
    if code == _LOADED:
        state.update({name: value for name, value in held.items() if not isinstance(value, _WithState)})
        return LoadOutcome()
    failure = ranks.failure_of(ranks.world - place, error, _CALL)
    if error is not None and not isinstance(error, Exception):
        raise error
    return LoadOutcome(
        error or failure, damaged=code != _FAILED, doubtful=code in (_UNREADABLE, _REFUSED), refused=code == _REFUSED
    )


def _code(error: BaseException | None) -> int:
    if error is None:
        return _LOADED
    if isinstance(error, NOT_UNDERSTOOD):
        return _REFUSED
    if isinstance(error, MetadataError):
        return _UNREADABLE
    return _DAMAGED if isinstance(error, DAMAGE) else _FAILED
