"""What a run goes on from: the newest checkpoint that is whole, or the one that was asked for. All ranks agree on it.

The one place that tries one checkpoint after another; how one is loaded is the caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from bucketpoint.catalog import notes
from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.choose import choices
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
    """

    which: str | int = "latest"
    metric: str | None = None
    fresh: bool = False
    fresh_by: str = "fresh=True"


def restored(
    catalog: Catalog, policy: RetentionPolicy, ranks: Ranks, wanted: Wanted, load: Callable[[int, str], Outcome]
) -> Restored | None:
    """Load what is wanted; None if the run begins from scratch. All ranks.

    The coordinator lists, and notes what was restored. One that is damaged on any rank is passed over on all.

    Args:
        load: loads the checkpoint of a step from its URL, on all ranks, and answers alike on all of them.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: as `choices`.
        BucketpointError: all checkpoints are damaged, or what `load` says of the one that was named.
    """
    named = isinstance(wanted.which, int)
    try:
        found = ranks.told(lambda: choices(catalog, policy, wanted.which, wanted.metric))
    except IncompleteCheckpointError as error:
        if wanted.fresh:
            return None
        error.remedy = f"Look at them first; {wanted.fresh_by} starts from scratch beside them"
        raise
    except CheckpointNotFoundError:
        if wanted.fresh and not named:
            return None
        raise
    passed: list[tuple[int, str]] = []
    for one in found:
        url = catalog.url_of_folder(one.folder)
        outcome = load(one.step, url)
        if outcome.error is None:
            if ranks.is_coordinator:
                _note(catalog, one.step)
            return Restored(one.step, url, tuple(passed))
        if named or not outcome.damaged:
            raise outcome.error
        logger.error("step %d cannot be loaded, and an older one is tried: %s", one.step, outcome.error)
        passed.append((one.step, str(outcome.error)))
    if not passed or wanted.fresh:
        return None
    raise BucketpointError(
        f"None of {len(passed)} checkpoints can be loaded, the first because: {passed[0][1]}",
        url=catalog.url,
        remedy=f"Look at them with `bucketpoint verify`; {wanted.fresh_by} starts from scratch",
    )


def _note(catalog: Catalog, step: int) -> None:
    try:
        notes.note_restored(catalog, step)
    except BucketpointError as error:
        logger.warning("that step %d was restored is not noted, so it may be pruned: %s", step, error)
