"""A walk through nested containers that a hostile file cannot make endless."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

_FREE_VALUES = 1 << 16


class RepetitionError(ValueError):
    """The same containers occur in so many places that a walk would take far too long."""


def nested_values(root: Any, parts: Callable[[Any], Collection[Any] | None]) -> Iterator[tuple[Any, int]]:
    """Yield the root and all values in it with their depth, each as often as it occurs.

    A container may occur in several places. But 40 lists, each of which holds the next one twice, have 2^40 places.

    Args:
        parts: returns the parts of a container, and None for any other value. Called after the value was yielded.

    Raises:
        RepetitionError: see there.
    """
    known: set[int] = set()
    visited, most = 0, _FREE_VALUES
    waiting = [(root, 0)]
    while waiting:
        value, depth = waiting.pop()
        visited += 1
        yield value, depth
        inner = parts(value)
        if inner is None:
            continue
        if id(value) not in known:
            known.add(id(value))
            most += 2 * len(inner)
        if visited > most:
            raise RepetitionError
        waiting += [(part, depth + 1) for part in inner]
