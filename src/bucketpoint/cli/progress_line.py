"""A status line on standard error during a prune or a sweep: number of objects listed and deleted so far."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from bucketpoint.errors import BucketpointError

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog


@contextmanager
def watched(catalog: Catalog, wanted: bool | None) -> Iterator[Catalog]:
    """Yield the catalog, over a store whose listed and deleted objects are counted on a status line.

    Raises BucketpointError if `wanted` is True and rich is not installed.
    """
    if wanted is False or sys.stderr is None or (wanted is None and not sys.stderr.isatty()):
        yield catalog
        return
    # Imported on use: `--help` needs none of it.
    from bucketpoint.catalog.deletion.worker import counted

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
        listed = deleted = 0

        def tell(more_listed: int, more_deleted: int) -> None:
            nonlocal listed, deleted
            listed, deleted = listed + more_listed, deleted + more_deleted
            line.update(f"{listed:,} objects listed, {deleted:,} deleted")

        yield replace(catalog, store=counted(catalog.store, tell))
