"""Options that several commands share: the run, its policy, two stores, progress; sizes and lengths of time."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli.command import Access, CommandResult, parse_options
from bucketpoint.errors import PolicyError

if TYPE_CHECKING:
    from bucketpoint.retention import RetentionPolicy

_POWERS = "KMGT"

_LONGEST_AGE_S = 100 * 365 * 86_400
"""Longest duration that a command accepts: times of the catalog end in the year 2286, those of Python in 9999."""

trusted_option = click.option(
    "--trusted", is_flag=True, help="Unpickle classes outside the allow-list, too. This can run any code."
)
progress_option = click.option(
    "--progress/--no-progress", default=None, help="Show progress on stderr. Default: only on a terminal."
)


def run_argument(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add the run as an argument. The function gets the run's catalog, named `catalog`."""

    @click.argument("root")
    @click.option(
        "--step-dir",
        default="step-{step}",
        show_default=True,
        help="Name of a checkpoint's folder in the run, with {step} for the step.",
    )
    @functools.wraps(function)
    def call(root: str, step_dir: str, access: Access, **arguments: Any) -> CommandResult:
        from bucketpoint.catalog.catalog import open_catalog

        catalog = open_catalog(access.at(root), template=step_dir)
        return function(catalog=catalog, **arguments)

    return call


def run_and_policy(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add the run as an argument, and the file of its policy as an option.

    The function gets the run's `catalog`, the `policy` (None without the option), and `access`.
    """

    @click.argument("root")
    @click.option(
        "--policy",
        "policy_file",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Policy file of the run: shows by which rule each checkpoint is kept, and what the next prune does.",
    )
    @click.option(
        "--step-dir",
        help="Name of a checkpoint's folder in the run, with {step} for the step.  [default: the policy's, or "
        "step-{step}]",
    )
    @functools.wraps(function)
    def call(
        root: str, policy_file: str | None, step_dir: str | None, access: Access, **arguments: Any
    ) -> CommandResult:
        from bucketpoint.catalog.catalog import open_catalog
        from bucketpoint.catalog.policy_file import read_policy

        policy = read_policy(policy_file) if policy_file is not None else None
        template = step_dir or (policy.layout.step_dir if policy is not None else "step-{step}")
        catalog = open_catalog(access.at(root), template=template)
        return function(catalog=catalog, policy=policy, access=access, **arguments)

    return call


def policy_argument(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add a policy's file as an argument. The function gets `policy`, and `catalog` for the policy's run."""

    @click.argument("policy_file", metavar="POLICY", type=click.Path(exists=True, dir_okay=False))
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
    @functools.wraps(function)
    def call(
        source: str, target: str, from_option: Sequence[str], to_option: Sequence[str], access: Access, **arguments: Any
    ) -> CommandResult:
        here = access.at(source, parse_options(from_option, "--from-option"))
        there = access.at(target, parse_options(to_option, "--to-option"))
        return function(source=here, target=there, **arguments)

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


class Step(click.IntRange):
    """The number of a training step."""

    name = "step number"

    def __init__(self) -> None:
        super().__init__(min=0)


class Age(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A duration as policies write it: `20m`, `48h`, `7d`. Converted to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from bucketpoint.retention.setting_types import Duration

        if isinstance(value, float):
            return value
        try:
            seconds = Duration(zero=True).check(str(value)).total_seconds()
        except PolicyError:
            self.fail(f"{value!r} is not a duration: write 20m, 48h or 7d", param, ctx)
        if seconds > _LONGEST_AGE_S:
            self.fail(f"{value!r} is longer than 100 years", param, ctx)
        return seconds
