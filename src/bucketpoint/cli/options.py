"""Options that several commands share: the run, its policy, two stores, progress; sizes and lengths of time."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import Access, CommandResult, parse_options
from bucketpoint.errors import PolicyError

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.catalog.snapshot import Checkpoint, Snapshot
    from bucketpoint.location import Location
    from bucketpoint.retention import RetentionPolicy

_POWERS = "KMGT"

_WHICH = re.compile(r"[0-9]{1,16}|latest|best(:.+)?", re.ASCII)
"""Arguments that name a checkpoint of a run."""


class PolicyFile(click.Path):
    """Path of a policy's file. Refuses a URL or a folder, which would be that of a run."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in str(value) or os.path.isdir(value):
            self.fail(f"{value} is not a file: pass the policy's file, in which `root:` names the run", param, ctx)
        return super().convert(value, param, ctx)


trusted_option = click.option(
    "--trusted", is_flag=True, help="Unpickle classes outside the allow-list, too. This can run any code."
)
progress_option = click.option(
    "--progress/--no-progress", default=None, help="Show progress on stderr. Default: only on a terminal."
)


def run_arguments(catalog: Catalog) -> str:
    """Return the run as arguments of another command, with the endpoint that this command was given."""
    context = click.get_current_context(silent=True)
    from bucketpoint.stores.redact import without_credentials

    endpoint = context.params.get("endpoint_url") if context is not None else None
    return catalog.arguments + (f" --endpoint-url {shlex.quote(without_credentials(endpoint))}" if endpoint else "")


def checkpoint_argument(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add a checkpoint as an argument: its URL, or its run's URL and a step. The function gets the location `place`."""

    @click.argument("words", nargs=-1, required=True, metavar="URL [STEP]")
    @functools.wraps(function)
    def call(words: Sequence[str], access: Access, **arguments: Any) -> CommandResult:
        (place,) = places(words, access, [{}])
        return function(place=place, **arguments)

    return call


def places(words: Sequence[str], access: Access, extras: Sequence[Mapping[str, Any]]) -> list[Location]:
    """Return the locations of checkpoints, named by URLs, or by a run's URL and one or more steps.

    `extras` has the storage options of each location.
    """
    named: list[tuple[str, str]] = []
    for word in words:
        if not named or not _WHICH.fullmatch(word):
            named.append((word, ""))
        elif named[-1][1]:
            named.append((named[-1][0], word))
        else:
            named[-1] = named[-1][0], word
    if len(named) != len(extras):
        how_many = text.count(len(extras), "checkpoint")
        unknown = f"{named[-1][0]!r} is not a step, latest or best. " if len(named) > len(extras) else ""
        raise click.UsageError(f"{unknown}Name {how_many}, each by its URL, or by its run and step")
    return [_checkpoint(access.at(url, extra), which) for extra, (url, which) in zip(extras, named, strict=True)]


def _checkpoint(place: Location, which: str) -> Location:
    if not which:
        return place
    catalog = _fitted_run(place)
    return place.at(catalog.url_of_folder(_chosen(place, catalog, which).folder))


def _chosen(place: Location, catalog: Catalog, which: str) -> Checkpoint:
    """Return the result of `chosen`. `best` alone uses the rule of the newest checkpoint's job, if recorded."""
    from bucketpoint.catalog.restore_candidates import chosen
    from bucketpoint.checkpoint.open import recorded_best

    rule = recorded_best(place, catalog) if which == "best" else None
    return chosen(catalog, which if rule is None else f"best:{rule.metric}:{rule.mode}")


def whole_run(place: Location) -> tuple[Catalog, Snapshot]:
    """Return a run's catalog, fitted to the names of its folders, and its snapshot, unrecorded checkpoints included."""
    catalog = _fitted_run(place)
    return catalog, catalog.with_unrecorded(catalog.snapshot())


def _fitted_run(place: Location) -> Catalog:
    from bucketpoint.catalog.catalog import open_catalog
    from bucketpoint.catalog.run import fitted

    return fitted(open_catalog(place))


def _step_dir_option(default: str) -> Callable[[Callable[..., CommandResult]], Callable[..., CommandResult]]:
    """Return the option for the names of a run's folders. `default` describes them, for the help."""
    about = "Name of a checkpoint's folder in the run, with {step} for the step."
    return click.option("--step-dir", help=f"{about}  [default: {default}]")


def run_argument(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add the run as an argument. The function gets the run's catalog, named `catalog`."""

    @click.argument("root")
    @_step_dir_option("step-{step}")
    @functools.wraps(function)
    def call(root: str, step_dir: str | None, access: Access, **arguments: Any) -> CommandResult:
        from bucketpoint.catalog.catalog import open_catalog

        catalog = open_catalog(access.at(root), template=step_dir)
        return function(catalog=catalog, **arguments)

    return call


def run_and_steps(
    metavar: str = "ROOT STEP", *, most: int | None = 1, behind: int | None = 0
) -> Callable[[Callable[..., CommandResult]], Callable[..., CommandResult]]:
    """Add a run and its steps as arguments: `ROOT STEP`, or the URL of a checkpoint.

    The function gets the run's `catalog`, the `steps`, and the arguments after them as `words`.
    `most` and `behind` limit the numbers of steps and of these arguments; None for no limit.
    """

    def wrap(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
        @click.argument("words", nargs=-1, required=True, metavar=metavar)
        @_step_dir_option("by the folders")
        @functools.wraps(function)
        def call(words: Sequence[str], step_dir: str | None, access: Access, **arguments: Any) -> CommandResult:
            place, which = access.at(words[0]), [*itertools.takewhile(_WHICH.fullmatch, words[1:][:most])]
            rest = words[1 + len(which) :]
            catalog, steps = _run_and_steps(place, which, step_dir, rest)
            if behind is not None and len(rest) > behind:
                raise click.UsageError(f"Got an unexpected argument: {rest[behind]}")
            behind_them = {} if behind == 0 else {"words": rest}
            return function(catalog=catalog, steps=steps, **behind_them, **arguments)

        return call

    return wrap


def _run_and_steps(
    place: Location, which: Sequence[str], step_dir: str | None, behind: Sequence[str]
) -> tuple[Catalog, list[int]]:
    from bucketpoint.catalog.catalog import open_catalog
    from bucketpoint.catalog.run import OneFolder, catalog_above, run_of
    from bucketpoint.format.catalog_keys import StepTemplate

    if which:
        catalog = open_catalog(place, template=step_dir) if step_dir else _fitted_run(place)
        return catalog, [int(word) if word.isdecimal() else _chosen(place, catalog, word).step for word in which]
    known = catalog_above(place)
    catalog, folder = known or run_of(place)
    if step_dir:
        catalog = replace(catalog, template=StepTemplate(step_dir))
    step = catalog.template.step_of(folder)
    # A run's own folder may have a number in its name, too.
    if step is None or isinstance(catalog.template, OneFolder) or not (known or catalog.metadata_info(folder)):
        what = f"{behind[0]!r} is not a step" if behind else "The step is missing"
        raise click.UsageError(f"{what}: write ROOT STEP, or the URL of a checkpoint")
    return catalog, [step]


def run_and_policy(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add the run as an argument, and the file of its policy as an option.

    The function gets the run's `catalog`, the `policy` (None without the option), and `access`.
    """

    @click.argument("root")
    @click.option(
        "--policy",
        "policy_file",
        type=PolicyFile(exists=True, dir_okay=False),
        metavar="FILE",
        help="Policy file of the run: shows by which rule each checkpoint is kept, and what the next prune does.",
    )
    @_step_dir_option("the policy's, or step-{step}")
    @functools.wraps(function)
    def call(
        root: str, policy_file: str | None, step_dir: str | None, access: Access, **arguments: Any
    ) -> CommandResult:
        from bucketpoint.catalog.catalog import open_catalog
        from bucketpoint.catalog.policy_file import read_policy

        policy = read_policy(policy_file) if policy_file is not None else None
        template = step_dir or (policy.layout.step_dir if policy is not None else None)
        catalog = open_catalog(access.at(root), template=template)
        return function(catalog=catalog, policy=policy, access=access, **arguments)

    return call


def policy_argument(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add a policy's file as an argument. The function gets `policy`, and `catalog` for the policy's run."""

    @click.argument("policy_file", metavar="POLICY", type=PolicyFile(exists=True, dir_okay=False))
    @click.option("--root", help="URL of the run, if it is not the root in the policy.")
    @functools.wraps(function)
    def call(policy_file: str, root: str | None, access: Access, **arguments: Any) -> CommandResult:
        from bucketpoint.catalog.policy_file import read_policy
        from bucketpoint.catalog.run import open_run

        policy: RetentionPolicy = read_policy(policy_file)
        url = root or policy.root
        if url is None:
            raise click.UsageError("The policy does not name the URL of the run: pass --root")
        return function(policy=policy, catalog=open_run(policy, access.at(url)), **arguments)

    return call


def between_stores(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Pass the arguments `source` and `target` to the function as locations, each with its storage options."""

    @click.option("--from-option", multiple=True, metavar="NAME=VALUE", help="Storage option for the source only.")
    @click.option("--to-option", multiple=True, metavar="NAME=VALUE", help="Storage option for the target only.")
    @click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
    @trusted_option
    @progress_option
    @click.argument("words", nargs=-1, required=True, metavar="SOURCE [STEP] TARGET")
    @functools.wraps(function)
    def call(
        words: Sequence[str], from_option: Sequence[str], to_option: Sequence[str], access: Access, **arguments: Any
    ) -> CommandResult:
        *sources, target = words
        if not sources:
            raise click.UsageError("The target is missing")
        extra = parse_options(from_option, "--from-option"), parse_options(to_option, "--to-option")
        (here,) = places(sources, access, extra[:1])
        return function(source=here, target=access.at(target, extra[1]), **arguments)

    return call


class ByteCount(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic from click 8.2 on
    """A number of bytes: `5GB` and `500MB` count in powers of 1000, `128MiB` and `1G` in powers of 1024."""

    name = "size"

    def __init__(self, *, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9]+)\s*(?:([KMGT])(I?B)?|B)?", str(value).strip().upper())
        if match is None or int(match[1]) < self._least:
            self.fail(f"{value!r} is not a size: write 5GB, 128MiB or a number of bytes", param, ctx)
        base = 1000 if match[3] == "B" else 1024
        return int(match[1]) * (base ** (_POWERS.index(match[2]) + 1) if match[2] else 1)


class Age(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A duration as policies write it: `20m`, `48h`, `7d`. Converted to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from bucketpoint.retention.setting_types import Duration

        if isinstance(value, float):
            return value
        try:
            return Duration(zero=True).check(str(value)).total_seconds()
        except PolicyError as error:
            self.fail(f"{error.faults[0].message}. {error.faults[0].remedy}", param, ctx)
