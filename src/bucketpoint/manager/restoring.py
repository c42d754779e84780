"""Restoring a run: load the newest whole checkpoint, or the one that was asked for. All ranks agree on it.

Only this module tries one checkpoint after another; its caller supplies the function that loads one. It passes to the
pruner the checkpoints that the restore gives up: damaged ones, and those newer than a rollback's target.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from bucketpoint.catalog import notes
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.remove import Discard, among, damaged, rolled_back, united
from bucketpoint.catalog.deletion.wholeness import inspect
from bucketpoint.catalog.deletion.worker import PruneWorker
from bucketpoint.catalog.restore_candidates import restore_candidates
from bucketpoint.catalog.snapshot import Checkpoint
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, IncompleteCheckpointError
from bucketpoint.manager.loading import LoadOutcome
from bucketpoint.manager.ranks import Ranks
from bucketpoint.retention import RetentionPolicy

logger = logging.getLogger(__name__)

_CALL = "restore()"


@dataclass(frozen=True)
class Restored:
    """The checkpoint that `restore` loaded.

    Attributes:
        passed: steps that were tried first and could not be loaded, each with the reason.
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
    """Load the requested checkpoint; return None if the run begins from scratch. All ranks.

    The coordinator lists the checkpoints, and records which one was restored. A checkpoint damaged on one rank is
    skipped on all.

    Args:
        load: loads the checkpoint of a step from its URL, on all ranks, with the same outcome on all of them.
        pruner: on the coordinator, receives the checkpoints that are given up. They are set aside once another
            checkpoint is committed.
        which, metric, fresh, rollback: as for `CheckpointManager.restore`.
        fresh_by: the setting by which the user asks for `fresh`, for messages.

    Raises as `CheckpointManager.restore`.
    """
    named = isinstance(which, int)
    # A damaged checkpoint that was given up is tried again: it may have been replaced.
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
                # A rollback holds until the next commit, unless the run resumes from a checkpoint that it has given up.
                kept = [] if among(gone_back)(checkpoint) else gone_back
                pruner.give_up_only(united([*kept, *given_up]))
            return Restored(step, url, tuple(passed))
        if named or not outcome.damaged:
            raise outcome.error
        # Metadata that is not understood counts as damage only if it was altered: one that may be whole is never given
        # up.
        may_be_whole = functools.partial(_may_be_whole, catalog, checkpoint, outcome.refused)
        whole = outcome.doubtful and ranks.on_coordinator(may_be_whole, _CALL)
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
    """Return True if a checkpoint that is not understood may be what was saved.

    The record tells. Without a record, True if it was refused, by the allow-list or for its newer format.
    """
    return refused if checkpoint.key is None else inspect(catalog, checkpoint).problem is None


def _set_aside(catalog: Catalog, checkpoint: Checkpoint, error: BaseException) -> list[Discard]:
    """Give up a checkpoint that could not be loaded. Empty if another one has replaced it, or that is unknown."""
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
        # A load writes into the tensors of the state, and checks what it has written.
        logger.warning("the state may hold values of a checkpoint that could not be loaded: initialise it again")


def _note(catalog: Catalog, step: int) -> None:
    try:
        notes.note_restored(catalog, step)
    except BucketpointError as error:
        logger.warning(
            "step %d was restored, but the note of it was not written, so a prune may delete the step: %s", step, error
        )
