"""Options of commands that read at one URL and write at another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click

from bucketpoint.cli.command import Access, CommandResult, parse_options, store_options


def between_stores(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
    """Pass `storage_options` for the arguments `source` and `target` to the function, as `here` and `there`."""

    @click.option("--from-option", multiple=True, metavar="NAME=VALUE", help="Storage option for the source only.")
    @click.option("--to-option", multiple=True, metavar="NAME=VALUE", help="Storage option for the target only.")
    @click.option(
        "--progress/--no-progress", default=None, help="Show a progress bar on stderr. Default: only on a terminal."
    )
    @store_options
    @functools.wraps(function)
    def call(
        source: str,
        target: str,
        from_option: Sequence[str],
        to_option: Sequence[str],
        access: Access,
        **arguments: Any,
    ) -> CommandResult:
        here = access.for_url(source, parse_options(from_option))
        there = access.for_url(target, parse_options(to_option))
        return function(source=source, target=target, here=here, there=there, **arguments)

    return call
