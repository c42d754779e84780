"""What commands about a run have in common: its root, its folders' names, its policy. No output."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli.frame import Access, Answer, store_options

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.retention import RetentionPolicy

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def run_argument(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """The run as an argument. The function gets its catalogue, named `catalog`."""

    @click.argument("root")
    @click.option(
        "--step-dir",
        default="step-{step}",
        show_default=True,
        help="How the folders of the run's checkpoints are named.",
    )
    @store_options
    @functools.wraps(function)
    def call(root: str, step_dir: str, access: Access, **arguments: Any) -> Answer:
        return function(catalog=_opened(root, step_dir, access), **arguments)

    return call


def policy_argument(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """A policy's file as an argument. The function gets `policy`, and the `catalog` of the run that it is for."""

    @click.argument("policy_file", metavar="POLICY", type=click.Path(exists=True, dir_okay=False))
    @click.option("--root", help="The run, where the policy does not name it or another one is meant.")
    @store_options
    @functools.wraps(function)
    def call(policy_file: str, root: str | None, access: Access, **arguments: Any) -> Answer:
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
    """A length of time as policies write it: `20m`, `48h`, `7d`. In seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", str(value))
        if match is None:
            self.fail(f"{value!r} is no length of time: write 20m, 48h or 7d", param, ctx)
        return float(match[1]) * _UNITS[match[2]]
