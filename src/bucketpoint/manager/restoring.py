"""What a run goes on from: the newest checkpoint that is whole, or the one that was asked for. All ranks agree on it.

The one place that tries one checkpoint after another; how one is loaded is the caller's. What the run gives up by it,
damaged or behind a rollback, its pruner is told.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from bucketpoint.catalog import notes
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.choose import Choice, choices
from bucketpoint.catalog.discards import Discard, damaged, is_as_written, rolled_back, united
from bucketpoint.catalog.pruning import PruneWorker
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, IncompleteCheckpointError
from bucketpoint.manager.loading import Outcome
from bucketpoint.manager.ranks import Ranks
from bucketpoint.retention import RetentionPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What `restore` loaded.

    Attributes:
        passed: steps that were tried first and could not be loaded, with the reason.
    """

    step: int
    url: str
    passed: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Wanted:
    """What is to be restored.

    Attributes:
        which: `"latest"`, `"best"`, or a step.
        metric: for `"best"`: which of the policy's; None for its first.
        fresh: begin from scratch although there are traces of checkpoints and none can be loaded.
        fresh_by: how the caller's user says that, for messages.
        rollback: give up what is newer than the checkpoint that is restored.
    """

    which: str | int = "latest"
    metric: str | None = None
    fresh: bool = False
    fresh_by: str = "fresh=True"
    rollback: bool = False


def restored(
    catalog: Catalog,
    policy: RetentionPolicy,
    ranks: Ranks,
    wanted: Wanted,
    load: Callable[[int, str], Outcome],
    pruner: PruneWorker,
) -> Restored | None:
    """Load what is wanted; None if the run begins from scratch. All ranks.

    The coordinator lists, and notes what was restored. One that is damaged on any rank is passed over on all.

    Args:
        load: loads the checkpoint of a step from its URL, on all ranks, and answers alike on all of them.
        pruner: gets what is given up, on the coordinator: it is set aside once another checkpoint is committed.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: as `choices`.
        UnsafeDataError: the next one to try was saved with what the allow-list refuses, and nothing is wrong with it.
        BucketpointError: all checkpoints are damaged, or what `load` says of the one that was named.
    """
    named = isinstance(wanted.which, int)
    try:
        found = ranks.told(lambda: choices(catalog, policy, wanted.which, wanted.metric))
    except IncompleteCheckpointError as error:
        if wanted.fresh:
            _from_scratch(catalog, ranks)
            return None
        error.remedy = f"Look at them first; {wanted.fresh_by} starts from scratch beside them"
        raise
    except CheckpointNotFoundError:
        if wanted.fresh and not named:
            _from_scratch(catalog, ranks)
            return None
        raise
    passed: list[tuple[int, str]] = []
    given_up: list[Discard] = []
    for one in found:
        url = catalog.url_of_folder(one.folder)
        outcome = load(one.step, url)
        if outcome.error is None:
            if wanted.rollback:
                given_up += ranks.told(functools.partial(_newer, catalog, one.step))
            if ranks.is_coordinator:
                _note(catalog, one.step)
                pruner.give_up_only(united(given_up))
            return Restored(one.step, url, tuple(passed))
        if named or not outcome.damaged:
            raise outcome.error
        # What is not understood is damage only where it is not what was saved. Nothing that may be whole is given up.
        whole = outcome.doubtful and ranks.told(functools.partial(_may_be_whole, catalog, one, outcome.refused))
        if whole and not wanted.fresh:
            raise outcome.error
        logger.error("step %d cannot be loaded, and an older one is tried: %s", one.step, outcome.error)
        passed.append((one.step, str(outcome.error)))
        if ranks.is_coordinator and not whole:
            given_up += _set_aside(catalog, one, outcome.error)
    if not passed or wanted.fresh:
        if ranks.is_coordinator:
            pruner.give_up_only(united(given_up))
        _from_scratch(catalog, ranks)
        return None
    raise BucketpointError(
        f"None of {len(passed)} checkpoints can be loaded, the first because: {passed[0][1]}",
        url=catalog.url,
        remedy=f"Look at them with `bucketpoint verify`; {wanted.fresh_by} starts from scratch",
    )


def _newer(catalog: Catalog, step: int) -> list[Discard]:
    return rolled_back(catalog, catalog.with_unrecorded(catalog.steps()), step)


def _may_be_whole(catalog: Catalog, one: Choice, refused: bool) -> bool:
    """Whether a checkpoint that is not understood may be what was saved. Where no record tells, a refusal says so."""
    if one.checkpoint is None or one.checkpoint.key is None:
        return refused
    return is_as_written(catalog, one.checkpoint)


def _set_aside(catalog: Catalog, one: Choice, error: BaseException) -> list[Discard]:
    """A checkpoint that could not be loaded, as given up; nothing where the store does not say what is there."""
    if one.checkpoint is None:
        return []
    try:
        found = damaged(catalog, one.checkpoint, f"it could not be loaded: {error}")
    except BucketpointError as failure:
        logger.warning("step %d is not set aside: %s", one.step, failure)
        return []
    return [] if found is None else [found]


def _from_scratch(catalog: Catalog, ranks: Ranks) -> None:
    if ranks.is_coordinator:
        logger.info("training begins from scratch: there is no checkpoint to go on from at %s", catalog.url)


def _note(catalog: Catalog, step: int) -> None:
    try:
        notes.note_restored(catalog, step)
    except BucketpointError as error:
        logger.warning("that step %d was restored is not noted, so it may be pruned: %s", step, error)
