"""Common parts of commands about a run: its root, the names of its folders, its policy."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli.command import Access, CommandResult, store_options

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.retention import RetentionPolicy

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def run_argument(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add the run as an argument. The function gets the run's catalog, named `catalog`."""

    @click.argument("root")
    @click.option(
        "--step-dir",
        default="step-{step}",
        show_default=True,
        help="Name of a checkpoint folder, with {step} for the step.",
    )
    @store_options
    @functools.wraps(function)
    def call(root: str, step_dir: str, access: Access, **arguments: Any) -> CommandResult:
        return function(catalog=_opened(root, step_dir, access), **arguments)

    return call


def policy_argument(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add a policy's file as an argument. The function gets `policy`, and `catalog` for the policy's run."""

    @click.argument("policy_file", metavar="POLICY", type=click.Path(exists=True, dir_okay=False))
    @click.option("--root", help="URL of the run, if the policy names none or another one.")
    @store_options
    @functools.wraps(function)
    def call(policy_file: str, root: str | None, access: Access, **arguments: Any) -> CommandResult:
        from bucketpoint.catalog.policy_file import read_policy
        from bucketpoint.catalog.run import open_run

        policy: RetentionPolicy = read_policy(policy_file)
        where = root or policy.root
        if where is None:
            raise click.UsageError("The policy names no root: pass --root")
        catalog = open_run(policy, where, storage_options=access.for_url(where))
        return function(policy=policy, catalog=catalog, **arguments)

    return call


def _opened(root: str, step_dir: str, access: Access) -> Catalog:
    from bucketpoint.catalog.catalog import open_catalog

    return open_catalog(root, template=step_dir, storage_options=access.for_url(root))


class Age(click.ParamType):  # type: ignore[type-arg]  # generic in its types, and not at run time
    """A duration as policies write it: `20m`, `48h`, `7d`. Converted to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", str(value))
        if match is None:
            self.fail(f"{value!r} is no length of time: write 20m, 48h or 7d", param, ctx)
        return float(match[1]) * _UNITS[match[2]]
