"""Retention policies and metrics of runs that a framework's trainer saves."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from bucketpoint.catalog import notes
from bucketpoint.catalog.policy_file import policy_of
from bucketpoint.errors import BucketpointError
from bucketpoint.manager.triggers import SIGNALS
from bucketpoint.retention import Best, Keep, Prune, RetentionPolicy
from bucketpoint.retention.rows import CheckpointSet, RuleDecision
from bucketpoint.retention.rules import Latest, RetentionRule

logger = logging.getLogger(__name__)

_ALL = 10**9
"""Number of checkpoints to keep without `save_total_limit`: all."""


@dataclass(frozen=True)
class _LatestBeside(Latest):
    """Rule for the latest checkpoints: one fewer if the best is older, because transformers counts the best, too."""

    best: Best

    def decide(self, universe: CheckpointSet) -> RuleDecision:
        latest, best = super().decide(universe), self.best.ranked(universe.rows)[:1]
        return latest if latest.kept >= set(best) else Latest(max(1, self.count - 1)).decide(universe)


class _Limit(Keep):
    """Rules that keep `save_total_limit` checkpoints, the best one among them."""

    def rules(self) -> tuple[RetentionRule, ...]:
        return (*(_LatestBeside(self.latest, rule) for rule in self.best), *super().rules()[len(self.best) :])


def policy_for(
    policy: RetentionPolicy | str | os.PathLike[str] | None, arguments: Any, url: str | os.PathLike[str]
) -> RetentionPolicy:
    """Return the policy of a run of transformers' `Trainer`: the given one, or one made from the trainer's arguments.

    Of the policy's `save:` only the signals are used: the trainer's arguments decide all other saves.

    Raises:
        BucketpointError: the arguments ask for the best checkpoint, which the policy does not keep.
        PolicyError: the policy's file is invalid.
    """
    best = [best_of(arguments)] if arguments.load_best_model_at_end and arguments.metric_for_best_model else []
    limit = arguments.save_total_limit or 0
    if policy is None:
        # transformers deletes without a grace period.
        prune = Prune(grace=timedelta()) if limit > 0 else Prune()
        policy = RetentionPolicy(_Limit(latest=limit if limit > 0 else _ALL, best=best), prune=prune)
    made = policy_of(policy)
    kept = {(rule.metric, rule.mode) for rule in made.keep.best}
    for rule in best:
        if (rule.metric, rule.mode) not in kept:
            raise BucketpointError(
                f"load_best_model_at_end needs a policy that keeps the best checkpoint by {rule.metric}, {rule.mode}",
                url=os.fspath(url),
                remedy="Add the metric with this mode to `best` of the policy's `keep`, or pass no `policy`",
            )
    save = dataclasses.replace(made.save, every=(), on=[name for name in made.save.on if name in SIGNALS])
    return dataclasses.replace(made, save=save)


def best_of(arguments: Any) -> Best:
    """Return the rule that keeps the best checkpoint by `metric_for_best_model`."""
    metric = arguments.metric_for_best_model
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    return Best(name, "max" if arguments.greater_is_better else "min")


def fitting_metrics(metrics: Mapping[str, float], policy: RetentionPolicy, left_out: set[str]) -> dict[str, float]:
    """Return the metrics without those that a manager refuses, such as names made of a dataset's long name.

    A metric that the policy ranks by is always kept: the manager then raises the error.
    `left_out` has the names of the metrics left out so far, each logged once; new ones are added.
    """
    ranked = {rule.metric for rule in policy.keep.best}
    fitting: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            notes.checked_metrics({name: value})
        except BucketpointError as error:
            if name not in ranked:
                if name not in left_out:
                    left_out.add(name)
                    logger.warning("checkpoints are saved without a metric: %s", error)
                continue
        fitting[name] = value
    return fitting
