"""Bounded walk through the nested containers of an untrusted file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

_FREE_VALUES = 1 << 16


class RepetitionError(ValueError):
    """The same containers occur in too many places to visit all of them."""


def nested_values(root: Any, parts: Callable[[Any], Collection[Any] | None]) -> Iterator[tuple[Any, int]]:
    """Yield the root and all values in it with their depth. A value that occurs twice is yielded twice.

    The number of visits is limited: if 40 lists each hold the next list twice, the last one occurs 2^40 times.

    Args:
        parts: returns the parts of a container, and None for any other value. Called after the value was yielded.

    Raises:
        RepetitionError: the limit is exceeded.
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
