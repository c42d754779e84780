"""The arguments of commands that look at a run, and that may be told its policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from bucketpoint.cli.command import Access, CommandResult


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
        catalog = open_catalog(root, template=template, storage_options=access.for_url(root))
        return function(catalog=catalog, policy=policy, access=access, **arguments)

    return call
