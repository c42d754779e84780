"""The options of commands that read at one URL and write at another. What such a command does is its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click

from bucketpoint.cli.frame import Access, Answer, parse_options, store_options


def between_stores(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """The function gets `storage_options` for its arguments `source` and `target`, as `here` and `there`."""

    @click.option("--from-option", multiple=True, metavar="NAME=VALUE", help="A --storage-option of the source alone.")
    @click.option("--to-option", multiple=True, metavar="NAME=VALUE", help="A --storage-option of the target alone.")
    @click.option("--progress/--no-progress", default=None, help="A bar on stderr. Default: on a terminal.")
    @store_options
    @functools.wraps(function)
    def call(
        source: str,
        target: str,
        from_option: Sequence[str],
        to_option: Sequence[str],
        access: Access,
        **arguments: Any,
    ) -> Answer:
        here = access.for_url(source, parse_options(from_option))
        there = access.for_url(target, parse_options(to_option))
        return function(source=source, target=target, here=here, there=there, **arguments)

    return call
