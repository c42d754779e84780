"""Classes of a policy: rules that keep checkpoints, triggers of saves, settings of pruning.

The YAML form takes its keys, defaults and checks from these classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Literal

from bucketpoint.retention.rules import Best, EveryHours, EverySteps, Latest, Match, RetentionRule, Steps, Within
from bucketpoint.retention.setting_types import Checked, Duration, Fraction, Several, Text, WholeNumber

POLICY_VERSION = 1

_DOTTED = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"


@dataclass(frozen=True)
class Keep(Checked):
    """Union of the rules: a checkpoint is kept if any rule keeps it, or if it is in the safety set."""

    latest: Annotated[int, WholeNumber(1), "number of full checkpoints with the highest steps"]
    best: Annotated[Sequence[Best], "checkpoints with the best values of a metric"] = ()
    every: Annotated[Sequence[EverySteps | EveryHours], "the earliest checkpoint in each cell of a fixed grid"] = ()
    within: Annotated[timedelta | None, "checkpoints at most this much older than the newest one"] = None
    steps: Annotated[Sequence[int], Several(WholeNumber(0)), "named steps, forever"] = ()
    match: Annotated[
        str | None,
        Text("an import path such as my_pkg.policies:keep", f"{_DOTTED}:{_DOTTED}"),
        "a function of one row that returns True to keep it",
    ] = None

    def rules(self) -> tuple[RetentionRule, ...]:
        """Return the rules in the order of the policy, `latest` first."""
        rules: list[RetentionRule] = [Latest(self.latest), *self.best, *self.every]
        if self.within is not None:
            rules.append(Within(self.within))
        if self.steps:
            rules.append(Steps(tuple(self.steps)))
        if self.match is not None:
            rules.append(Match(self.match))
        return tuple(rules)


@dataclass(frozen=True)
class SaveEvery(Checked):
    """Save whenever a step is a multiple of `steps`."""

    steps: Annotated[int, WholeNumber(1), "a save is due at each multiple of this number"]


@dataclass(frozen=True)
class SaveEveryMinutes(Checked):
    """Save when this many minutes have passed since the last save began, by the coordinator's clock."""

    minutes: Annotated[int, WholeNumber(1), "a save is due this many minutes after the last one began"]


@dataclass(frozen=True)
class InFlight(Checked):
    """Behaviour of a save while an earlier one is still under way."""

    max: Annotated[int, WholeNumber(1, 1), "saves under way at once; only one is supported"] = 1
    when_busy: Annotated[Literal["wait", "skip", "error"], "wait for it, skip this save, or raise"] = "wait"
    timeout: Annotated[timedelta, "longest wait, after which the save raises"] = timedelta(minutes=20)


Occasion = Literal["first_step", "last_step", "sigterm", "sigusr1", "sigusr2"]


@dataclass(frozen=True)
class Save(Checked):
    """Triggers of saves: a save is made whenever one of them is due."""

    every: Annotated[Sequence[SaveEvery | SaveEveryMinutes], "regular saves"] = ()
    on: Annotated[Sequence[Occasion], "saves on occasions"] = ()
    in_flight: Annotated[InFlight, "behaviour while an earlier save is under way"] = field(default_factory=InFlight)
    on_failure: Annotated[
        Literal["raise", "warn"], "a failed save raises; or is logged and counted, and training continues"
    ] = "raise"


@dataclass(frozen=True)
class MaxDelete(Checked):
    """The circuit breaker: of a plan that exceeds either limit, an unconfirmed prune makes only a few deletions."""

    count: Annotated[int, WholeNumber(1), "deletions and thinnings by one prune, plus one for each new commit"] = 20
    fraction: Annotated[float, Fraction(), "share of the existing checkpoints, checked above 5 deletions"] = 0.5


LEAST_DEBRIS_AGE = (timedelta(hours=1), "a sweep could delete the data of a running save")


@dataclass(frozen=True)
class Prune(Checked):
    """Settings of pruning: when and how checkpoints that are not kept are deleted."""

    when: Annotated[Literal["after_commit", "manual"], "after each commit, or only on demand"] = "after_commit"
    grace: Annotated[timedelta, Duration(zero=True), "from tombstone to deletion of the bytes"] = timedelta(hours=24)
    debris_after: Annotated[
        timedelta, Duration(least=LEAST_DEBRIS_AGE), "age at which data that was never committed is swept"
    ] = timedelta(hours=48)
    max_delete: Annotated[MaxDelete, "the circuit breaker"] = field(default_factory=MaxDelete)


@dataclass(frozen=True)
class Layout(Checked):
    """Place of a step's checkpoint below the root."""

    step_dir: Annotated[
        str,
        Text("a folder's name with {step} or {step:08d} in it", r"[^{}/]*\{step(:0([1-9]|1[0-6])d)?\}[^{}/]*"),
        "a folder's name; {step:08d} pads the number with zeros",
    ] = "step-{step}"


@dataclass(frozen=True)
class RetentionPolicy(Checked):
    """A policy, with a field for each key of the policy file."""

    keep: Annotated[Keep, "union of the rules"]
    root: Annotated[
        str | None,
        Text("a URL such as s3://bucket/run", r"\S(.*\S)?"),
        "the URL above the steps' folders; ${VAR} and ${VAR:-default} are taken from the environment, $$ is a $",
    ] = None
    run: Annotated[
        str | None,
        Text("a name of letters, digits, dots, dashes and underscores", r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}"),
        "the run's name: jobs with another name, or none, may not use its folders",
    ] = None
    layout: Annotated[Layout, "folders of the steps"] = field(default_factory=Layout)
    save: Annotated[Save, "when saves are made"] = field(default_factory=Save)
    prune: Annotated[Prune, "when and how other checkpoints are deleted"] = field(default_factory=Prune)
