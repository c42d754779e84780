"""Restore of a run on all ranks: tries checkpoints in order until one can be loaded, with one outcome on all ranks.

The checkpoints that the restore gives up, which are damaged or newer than the target of a rollback, go to the pruner.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from bucketpoint.catalog import notes
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.remove import Discard, among, damaged, rolled_back, united
from bucketpoint.catalog.deletion.state import inspect
from bucketpoint.catalog.deletion.worker import PruneWorker
from bucketpoint.catalog.restore_candidates import restore_candidates
from bucketpoint.catalog.snapshot import Checkpoint
from bucketpoint.dcp.planning.load_planner import LoadPlanner
from bucketpoint.dcp.reader import BucketReader
from bucketpoint.errors import (
    DAMAGE,
    NOT_UNDERSTOOD,
    BucketpointError,
    CheckpointNotFoundError,
    CorruptDataError,
    IncompleteCheckpointError,
    MetadataError,
)
from bucketpoint.format.metadata.coverage import uncovered
from bucketpoint.format.metadata.facts import extra
from bucketpoint.manager.ranks import Ranks
from bucketpoint.retention import RetentionPolicy

logger = logging.getLogger(__name__)

_LOAD = "the load of restore()"

_LOADED, _UNREADABLE, _REFUSED, _DAMAGED, _FAILED = range(5)
"""Outcomes of an attempt to load: success; the metadata cannot be decoded; the allow-list refuses it, or it has the
format of a newer bucketpoint; the checkpoint is damaged; a rank failed for another reason."""


@dataclass(frozen=True)
class LoadOutcome:
    """Outcome of one attempt to load. `code` is the same on all ranks; `error` is None if the state was loaded."""

    code: int
    error: BaseException | None = None


class _WholeReader(BucketReader):
    """Reader that treats a checkpoint as damaged if it does not cover all of its tensors."""

    def _decode(self, data: bytes) -> Metadata:
        metadata = super()._decode(data)
        part = next(uncovered(metadata, extra(metadata)), None)
        if part is not None:
            raise CorruptDataError(f"The checkpoint is damaged: {part[0]} {part[1]}", url=self.url, key=part[0])
        return metadata


def with_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Call every `state_dict` before DCP's collectives, because it may fail, and return a state with the results.

    The order is that of the sorted keys, as in DCP: a `state_dict` may be a collective call.
    """
    values = {name: state[name] for name in sorted(state)}
    return {name: value.state_dict() if isinstance(value, Stateful) else value for name, value in values.items()}


def attempt(
    state: dict[str, Any], url: str | os.PathLike[str], ranks: Ranks, *, planner: Any = None, **reading: Any
) -> LoadOutcome:
    """Load the checkpoint at `url` into `state` on all ranks. A failed attempt may leave part of its data there."""

    def prepared() -> tuple[BucketReader, dict[str, Any]]:
        reader = _WholeReader(cooperative="node", process_group=ranks.group, **reading)
        return reader, with_states(state)

    own: list[Exception] = []

    def set_states() -> None:
        try:
            for name, values in held.items():
                if isinstance(state[name], Stateful):
                    state[name].load_state_dict(values)
        except Exception as error:
            own.append(error)
            raise

    try:
        # Before DCP's collectives, in which the other ranks would wait for a rank that has failed here.
        reader, held = ranks.together(_LOAD, prepared)
    except Exception as raised:  # noqa: BLE001 (raised by the caller)
        return LoadOutcome(_FAILED, raised)
    try:
        with ranks.calling_dcp(_LOAD, str(url), before=DAMAGE):
            dcp.load(
                held,
                checkpoint_id=url,
                storage_reader=reader,
                planner=planner or LoadPlanner(),
                process_group=ranks.group,
            )
    except Exception as raised:  # noqa: BLE001 (raised by the caller)
        return LoadOutcome(_code(raised), raised)
    try:
        ranks.together(_LOAD, set_states, limit_s=ranks.load_s)
    except Exception as raised:  # noqa: BLE001 (raised by the caller)
        # An error of `load_state_dict` is no damage. Its rank raises it unchanged.
        return LoadOutcome(_FAILED, own[0] if own else raised)
    state.update({name: value for name, value in held.items() if not isinstance(state[name], Stateful)})
    return LoadOutcome(_LOADED)


def _code(error: Exception) -> int:
    if isinstance(error, NOT_UNDERSTOOD):
        return _REFUSED
    if isinstance(error, MetadataError):
        return _UNREADABLE
    return _DAMAGED if isinstance(error, DAMAGE) else _FAILED


_CALL = "restore()"


@dataclass(frozen=True)
class Restored:
    """The checkpoint that `restore` loaded.

    Attributes:
        passed: steps that were tried before and could not be loaded, each with the reason.
    """

    step: int
    url: str
    passed: tuple[tuple[int, str], ...] = ()


def restored(
    catalog: Catalog,
    policy: RetentionPolicy,
    ranks: Ranks,
    load: Callable[[int, str], LoadOutcome],
    pruner: PruneWorker,
    which: str | int,
    *,
    metric: str | None = None,
    fresh: bool = False,
    fresh_by: str = "fresh=True",
    rollback: bool = False,
) -> Restored | None:
    """Load the requested checkpoint, and return it; None if the run begins from scratch. All ranks.

    The coordinator lists the checkpoints and records the resume. All ranks skip a checkpoint damaged on one rank.

    Args:
        load: loads the checkpoint of a step from its URL, with the same outcome on all ranks.
        pruner: receives, on the coordinator, the checkpoints that are given up, which get a tombstone after the next
            commit.
        which, metric, fresh, rollback: as for `CheckpointManager.restore`.
        fresh_by: name of the user's setting for `fresh`, for messages.

    Raises the errors of `CheckpointManager.restore`.
    """
    named = isinstance(which, int)
    # Given-up checkpoints that were damaged are tried again: they may have been replaced.
    gone_back = [discard for discard in pruner.given_up if not discard.damaged]
    try:
        checkpoints = ranks.on_coordinator(
            lambda: restore_candidates(catalog, policy, which, metric, given_up=among(gone_back)),
            _CALL,
        )
    except CheckpointNotFoundError as error:
        if fresh and not named:
            _from_scratch(catalog, ranks, tried=False)
            return None
        if isinstance(error, IncompleteCheckpointError):
            error.remedy = (
                f"Check these folders first: a checkpoint may have been damaged. {fresh_by} starts from scratch"
            )
        raise
    passed: list[tuple[int, str]] = []
    given_up: list[Discard] = []
    for checkpoint in checkpoints:
        step, url = checkpoint.step, catalog.url_of_folder(checkpoint.folder)
        outcome = load(step, url)
        if outcome.error is None:
            if rollback:
                given_up += ranks.on_coordinator(functools.partial(_newer, catalog, step), _CALL)
            if ranks.is_coordinator:
                _note(catalog, step)
                # An earlier rollback stays in effect, unless the run resumes from a checkpoint that it has given up.
                kept = [] if among(gone_back)(checkpoint) else gone_back
                pruner.give_up_only(united([*kept, *given_up]))
            return Restored(step, url, tuple(passed))
        if named or outcome.code == _FAILED:
            raise outcome.error
        # Metadata that cannot be decoded is damage only if it was altered since the save. Otherwise this version may
        # not support it, and the checkpoint is not given up.
        may_be_whole = functools.partial(_may_be_whole, catalog, checkpoint, outcome.code == _REFUSED)
        whole = outcome.code in (_UNREADABLE, _REFUSED) and ranks.on_coordinator(may_be_whole, _CALL)
        if whole and not fresh:
            raise outcome.error
        logger.error("step %d cannot be loaded, so an older checkpoint is tried: %s", step, outcome.error)
        passed.append((step, str(outcome.error)))
        if ranks.is_coordinator and not whole:
            given_up += _set_aside(catalog, checkpoint, outcome.error)
    if not passed or fresh:
        if ranks.is_coordinator:
            pruner.give_up_only(united(given_up))
        _from_scratch(catalog, ranks, tried=bool(passed))
        return None
    raise BucketpointError(
        f"None of {len(passed)} checkpoints can be loaded; the error of the newest: {passed[0][1]}",
        url=catalog.url,
        remedy=f"Check the checkpoints with `bucketpoint verify`; {fresh_by} starts from scratch",
    )


def _newer(catalog: Catalog, step: int) -> list[Discard]:
    return rolled_back(catalog, catalog.with_unrecorded(catalog.steps()), step)


def _may_be_whole(catalog: Catalog, checkpoint: Checkpoint, refused: bool) -> bool:
    """Return True if metadata that cannot be decoded may be unaltered.

    The metadata is compared with the record. Without a record: True if the allow-list or a newer format is the reason.
    """
    return refused if checkpoint.key is None else inspect(catalog, checkpoint).problem is None


def _set_aside(catalog: Catalog, checkpoint: Checkpoint, error: BaseException) -> list[Discard]:
    """Return the discard of a checkpoint that could not be loaded. Empty if it was replaced, or cannot be checked."""
    try:
        discard = damaged(catalog, checkpoint, f"it could not be loaded: {error}")
    except BucketpointError as failure:
        logger.warning("step %d could not be loaded, and could not be set aside: %s", checkpoint.step, failure)
        return []
    return [] if discard is None else [discard]


def _from_scratch(catalog: Catalog, ranks: Ranks, *, tried: bool) -> None:
    if not ranks.is_coordinator:
        return
    logger.info("training begins from scratch: %s has no checkpoint that can be loaded", catalog.url)
    if tried:
        # A load writes into the tensors of the state before it verifies the checksums.
        logger.warning("the state may hold values of a checkpoint that could not be loaded: initialise it again")


def _note(catalog: Catalog, step: int) -> None:
    try:
        notes.note_restored(catalog, step)
    except BucketpointError as error:
        logger.warning(
            "step %d was restored, but the note of it was not written, so a prune may delete the step: %s", step, error
        )
