"""The checkpoints that a restore tries, in order, and the rollback of a run to an earlier step."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable
from itertools import islice

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.remove import LOOKED_AT_MOST, Discarded, bury_discards, rolled_back
from bucketpoint.catalog.deletion.state import look_for_damage
from bucketpoint.catalog.notes import lease, release
from bucketpoint.catalog.records import adopt, reconcile
from bucketpoint.catalog.run import at_checkpoint
from bucketpoint.catalog.snapshot import Checkpoint
from bucketpoint.errors import (
    BucketpointError,
    CheckpointNotFoundError,
    CorruptDataError,
    IncompleteCheckpointError,
    StoreError,
    first_of,
)
from bucketpoint.retention import Best, RetentionPolicy
from bucketpoint.retention.rows import FULL

logger = logging.getLogger(__name__)

_BETTER = {"min": "loss|error|perplexity|ppl", "max": "acc|score|reward|bleu|f1"}
"""Parts of metric names that imply the mode: low values are better ("min"), or high values ("max")."""


def usual_mode(metric: str) -> str:
    """Return the mode that a metric's name implies: "min", "max", or "" if it implies none."""
    return next((mode for mode, words in _BETTER.items() if re.search(words, metric.lower())), "")


def metric_and_mode(text: str) -> tuple[str, str]:
    """Split `METRIC:min` or `METRIC:max`. For another text, return the text and an empty mode."""
    metric, _, mode = text.rpartition(":")
    return (metric, mode) if mode in ("min", "max") else (text, "")


def restore_candidates(
    catalog: Catalog,
    policy: RetentionPolicy,
    which: str | int,
    metric: str | None,
    *,
    given_up: Callable[[Checkpoint], bool] = lambda _: False,
) -> list[Checkpoint]:
    """Return the checkpoints to try, best first. Empty for a run that has only folders with an intent, or no folder.

    Args:
        given_up: returns True for a checkpoint that a rollback has given up. Such checkpoints come last.

    Raises:
        CheckpointNotFoundError: there is no checkpoint of the named step, or none with a value of the metric.
        IncompleteCheckpointError: there is no checkpoint, but there is a folder without an intent.
        BucketpointError: `which` is not "latest", "best" or a step, or the policy has no `best` rule for the metric.
    """
    if isinstance(which, int):
        return [_named(catalog, which)]
    if which == "best":
        return _first(_best(catalog, _rule(policy, metric)), given_up)
    if which != "latest":
        raise BucketpointError(f"{which!r} does not name a checkpoint", remedy='Pass "latest", "best" or a step')
    checkpoints = _first(catalog.candidates(), given_up)
    if not checkpoints:
        _refuse_traces(catalog)
    return checkpoints


def chosen(catalog: Catalog, which: str) -> Checkpoint:
    """Return the checkpoint named on a command line: a step, `latest`, `best`, or `best:METRIC:min` (or `max`).

    `best` without a metric needs a run with a single metric, whose name implies the mode.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        BucketpointError: the metric of `best`, or its mode, is not clear.
    """
    if which.isdecimal():
        return _named(catalog, int(which))
    best = which.partition(":")[2] if which != "latest" else None
    found = catalog.latest() if best is None else _best(catalog, _spoken(catalog, best))[0]
    if found is None:
        raise CheckpointNotFoundError("The run has no whole checkpoint", url=catalog.url, remedy="See `bucketpoint ls`")
    return found


def _spoken(catalog: Catalog, text: str) -> Best:
    """Return the rule for `METRIC:min`, a metric without a mode, or (for an empty text) the run's only metric."""
    metric, mode = metric_and_mode(text)
    if not metric or not mode:
        names = sorted(catalog.snapshot().metric_names())
        metric = text or (names[0] if len(names) == 1 else "")
        mode = usual_mode(metric)
        if not metric or not mode:
            raise BucketpointError(
                f"`best` needs a metric and its mode; the run has {', '.join(names) or 'no metric'}",
                url=catalog.url,
                remedy=f"Write best:{metric or next(iter(names), 'eval/loss')}:min, or max",
            )
    return Best(metric, "min" if mode == "min" else "max")


def _first(checkpoints: Iterable[Checkpoint], given_up: Callable[[Checkpoint], bool]) -> list[Checkpoint]:
    """Return at most `LOOKED_AT_MOST` checkpoints, the given-up ones at the end."""
    last: list[Checkpoint] = []

    def kept() -> Iterable[Checkpoint]:
        for one in checkpoints:
            if given_up(one):
                last.append(one)
            else:
                yield one

    return [*islice(kept(), LOOKED_AT_MOST), *last][:LOOKED_AT_MOST]


def _refuse_traces(catalog: Catalog) -> None:
    """Raise if a run without a checkpoint may have lost one: a folder without an intent may have held a `.metadata`.

    A folder with an intent is that of a dead save: a job that was killed in its first save starts from scratch.
    """
    attempts = catalog.steps().attempts
    begun = {attempt.folder for attempt in attempts}
    unexplained = [folder for folder in catalog.folders() if folder not in begun]
    if unexplained:
        raise IncompleteCheckpointError(
            f"The run has no checkpoint, but folders of saves that never committed ({len(unexplained)})",
            url=catalog.url,
            remedy="Check these folders first: a checkpoint may have been damaged",
        )
    if attempts:
        # A save that is killed during its first upload leaves an intent and no folder.
        steps = sorted({attempt.step for attempt in attempts})
        logger.warning(
            "%s has no checkpoint; the saves of these steps began and never committed: %s",
            catalog.url,
            first_of(steps, LOOKED_AT_MOST),
        )
    elif (mistake := at_checkpoint(catalog)) is not None:
        # Only a warning: a run may begin below a checkpoint.
        logger.warning("%s", mistake)


def _named(catalog: Catalog, step: int) -> Checkpoint:
    there = {checkpoint.step: checkpoint for checkpoint in catalog.steps().checkpoints}
    if step in there:
        return there[step]
    folder = catalog.template.folder(step)
    if unrecorded := catalog.unrecorded(folder):
        return unrecorded
    there = {checkpoint.step: checkpoint for checkpoint in catalog.with_unrecorded(catalog.steps()).checkpoints}
    if step in there:
        return there[step]
    raise CheckpointNotFoundError(
        f"There is no checkpoint of step {step}",
        url=catalog.url_of_folder(folder),
        remedy=f"The last steps are {', '.join(map(str, [*there][-10:]))}" if there else "The run has no checkpoint",
    )


def _rule(policy: RetentionPolicy, metric: str | None) -> Best:
    rules = [rule for rule in policy.keep.best if metric in (None, rule.metric)]
    if not rules:
        raise BucketpointError(
            f"The policy has no `best` rule for {metric}" if metric else "The policy has no `best` rule",
            remedy="Pass best=, or add one to the policy: keep: {best: [{metric: eval/loss, mode: min}]}",
        )
    return rules[0]


def _best(catalog: Catalog, rule: Best) -> list[Checkpoint]:
    snapshot = catalog.snapshot()
    known = {(checkpoint.step, checkpoint.id): checkpoint for checkpoint in snapshot.checkpoints}
    full = [row for row in snapshot.rows() if row.kind == FULL]
    rows = [full[position] for position in rule.ranked(full)]
    if not rows:
        names = ", ".join(sorted(snapshot.metric_names()))
        raise CheckpointNotFoundError(
            f"No checkpoint has a value of the metric {rule.metric}; the run has {names or 'no metric'}",
            url=catalog.url,
            remedy="Name one of these" if names else "Report values with report(step, {...}), or take the latest",
        )
    return [known[row.name] for row in rows]


def roll_back(catalog: Catalog, step: int, *, grace: float, dry_run: bool = False) -> Discarded:
    """Write tombstones for all checkpoints of higher steps, and withdraw those of `step`.

    Checkpoints of `step` and above that have no record get one. `grace`: seconds until the deletion.

    Raises:
        CheckpointNotFoundError: there is no full checkpoint of this step.
        CorruptDataError: the checkpoint of this step is not whole; the others get no tombstone.
        GoneError: the deletion of the checkpoint of this step has begun.
    """
    snapshot = catalog.with_unrecorded(catalog.snapshot() if dry_run else reconcile(catalog, catalog.snapshot()))
    unrecorded = [checkpoint.step for checkpoint in snapshot.unrecorded if checkpoint.step >= step]
    if unrecorded and not dry_run:
        adopt(catalog, unrecorded)
        snapshot = catalog.with_unrecorded(catalog.snapshot())
    target = next((checkpoint for checkpoint in snapshot.full if checkpoint.step == step), None)
    if target is None:
        there = ", ".join(str(checkpoint.step) for checkpoint in snapshot.full)
        raise CheckpointNotFoundError(
            f"There is no full checkpoint of step {step} in this run",
            url=catalog.url,
            remedy=f"These steps have full checkpoints: {there}"
            if there
            else "The run has no full checkpoint; see `bucketpoint ls`",
        )
    _refuse_damaged(catalog, target)
    discards = rolled_back(catalog, snapshot, step)
    if dry_run:
        return bury_discards(catalog, discards, due=catalog.due(grace), dry_run=True)
    # Without a lease, a prune that began before the rollback could delete the checkpoint after it was found whole.
    holder = f"rollback-{os.urandom(4).hex()}"
    lease(catalog, step, holder)
    try:
        _refuse_damaged(catalog, target)
        return bury_discards(catalog, discards, due=catalog.at_store_time().due(grace))
    finally:
        # Without permission to delete, the lease expires after ten minutes.
        with contextlib.suppress(StoreError):
            release(catalog, step, holder)


def _refuse_damaged(catalog: Catalog, target: Checkpoint) -> None:
    problem = look_for_damage(catalog, target)
    if problem is not None:
        raise CorruptDataError(
            f"Step {target.step} is not whole, so nothing was rolled back: {problem}",
            url=catalog.url_of_folder(target.folder),
            remedy="Roll back to another step; `bucketpoint verify` lists the damage of this one",
        )
