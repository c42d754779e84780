"""A status line on standard error during a prune or a sweep: number of objects listed and deleted so far."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from bucketpoint.errors import BucketpointError

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.stores import DeleteFailure, Store

Tell = Callable[[int, int], None]
"""Callback for the numbers of objects listed and deleted so far."""


@contextmanager
def watched(catalog: Catalog, wanted: bool | None) -> Iterator[Catalog]:
    """Return the same catalog over a store that reports requests on a status line while the block runs.

    Raises:
        BucketpointError: `wanted` is True, and rich is not installed.
    """
    if wanted is False or sys.stderr is None or (wanted is None and not sys.stderr.isatty()):
        yield catalog
        return
    try:
        from rich.console import Console
    except ImportError:
        if wanted:
            raise BucketpointError(
                "--progress needs the package rich", remedy="pip install 'rich>=13', or leave out --progress"
            ) from None
        yield catalog
        return
    # Give rich the underlying stream: the program's own stream would escape rich's control characters.
    with Console(file=getattr(sys.stderr, "rich_proxied_file", sys.stderr)).status("reading the catalog") as line:

        def tell(listed: int, deleted: int) -> None:
            line.update(f"{listed:,} objects listed, {deleted:,} deleted")

        yield replace(catalog, store=cast("Store", WatchedStore(catalog.store, tell)))


class WatchedStore:
    """The same store, with a callback for each listed and deleted object."""

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
        # Imported on use: `--help` needs none of it.
        from bucketpoint.catalog.deletion.throttle import delete_in_pages

        return delete_in_pages(self._store, keys, self._count)

    def delete_if(self, key: str, etag: str) -> bool:
        gone = self._store.delete_if(key, etag)
        self._count(1)
        return gone

    def _count(self, deleted: int) -> None:
        self._deleted += deleted
        self._tell(self._listed, self._deleted)
