"""End of a program that has not closed its manager."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from bucketpoint.dcp import program_end

logger = logging.getLogger(__name__)


def close_at_exit(manager: weakref.ref[Any]) -> None:
    """Close the manager of a program that ends without `close`: wait for its last save, and report an error."""
    alive = manager()
    if alive is None or alive._closed:
        return
    try:
        alive.close()
    except Exception as error:  # noqa: BLE001 (the interpreter exits, and nobody is there to catch it)
        logger.error("the last save failed: %s", error)
        program_end.lose(alive.catalog.url, error)
