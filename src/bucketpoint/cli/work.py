"""A line on standard error while a prune or a sweep is at work: how much has been listed and deleted. No decisions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import click

from bucketpoint.errors import BucketpointError

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.stores import DeleteFailure, Store

Tell = Callable[[int, int], None]
"""Gets the objects listed so far, and those deleted."""

progress_option = click.option(
    "--progress/--no-progress", default=None, help="Say on stderr how far it is. Default: on a terminal."
)


@contextmanager
def watched(catalog: Catalog, wanted: bool | None) -> Iterator[Catalog]:
    """The same catalogue, whose requests are told of while the block runs.

    Raises:
        BucketpointError: `wanted` is True, and rich is not installed.
    """
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield catalog
        return
    try:
        from rich.console import Console
    except ImportError:
        if wanted:
            raise BucketpointError(
                "--progress needs rich", remedy="pip install 'bucketpoint[cli]', or leave it out"
            ) from None
        yield catalog
        return
    # The program's own stream would show what rich draws with.
    with Console(file=getattr(sys.stderr, "rich_proxied_file", sys.stderr)).status("looking at the catalogue") as line:

        def tell(listed: int, deleted: int) -> None:
            line.update(f"{listed:,} objects listed, {deleted:,} deleted")

        yield replace(catalog, store=told(catalog.store, tell))


def told(store: Store, tell: Tell) -> Store:
    """The same store, which tells what it lists and deletes."""
    return cast("Store", _Told(store, tell))


class _Told:
    def __init__(self, store: Store, tell: Tell) -> None:
        self._store = store
        self._tell = tell
        self._listed = self._deleted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str, **options: Any) -> Iterator[Any]:
        for info in self._store.list(prefix, **options):
            self._listed += 1
            self._tell(self._listed, self._deleted)
            yield info

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        # Not imported with the module: `--help` needs none of it.
        from bucketpoint.catalog.pace import delete_in_pages

        return delete_in_pages(self._store, keys, self._count)

    def delete_if(self, key: str, etag: str) -> bool:
        gone = self._store.delete_if(key, etag)
        self._count(1)
        return gone

    def _count(self, deleted: int) -> None:
        self._deleted += deleted
        self._tell(self._listed, self._deleted)
