"""Common parts of commands about a run: its root, the names of its folders, its policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli.command import Access, CommandResult, store_options

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.retention import RetentionPolicy


def run_argument(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add the run as an argument. The function gets the run's catalog, named `catalog`."""

    @click.argument("root")
    @click.option(
        "--step-dir",
        default="step-{step}",
        show_default=True,
        help="Name of a checkpoint's folder in the run, with {step} for the step.",
    )
    @store_options
    @functools.wraps(function)
    def call(root: str, step_dir: str, access: Access, **arguments: Any) -> CommandResult:
        return function(catalog=_opened(root, step_dir, access), **arguments)

    return call


def policy_argument(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Add a policy's file as an argument. The function gets `policy`, and `catalog` for the policy's run."""

    @click.argument("policy_file", metavar="POLICY", type=click.Path(exists=True, dir_okay=False))
    @click.option("--root", help="URL of the run, if it is not the root in the policy.")
    @store_options
    @functools.wraps(function)
    def call(policy_file: str, root: str | None, access: Access, **arguments: Any) -> CommandResult:
        from bucketpoint.catalog.policy_file import read_policy
        from bucketpoint.catalog.run import open_run

        policy: RetentionPolicy = read_policy(policy_file)
        where = root or policy.root
        if where is None:
            raise click.UsageError("The policy does not name the URL of the run: pass --root")
        catalog = open_run(policy, where, storage_options=access.for_url(where))
        return function(policy=policy, catalog=catalog, **arguments)

    return call


def _opened(root: str, step_dir: str, access: Access) -> Catalog:
    from bucketpoint.catalog.catalog import open_catalog

    return open_catalog(root, template=step_dir, storage_options=access.for_url(root))
