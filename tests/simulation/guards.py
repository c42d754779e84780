"""The guards of the product, by name, and how each is switched off: then the simulation has to find a violation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Switch = Callable[[], AbstractContextManager[object]]

GUARDS: dict[str, Switch] = {}


@contextlib.contextmanager
def switched_off(name: str) -> Iterator[None]:
    """Without the guard of that name, if it is not empty."""
    if not name:
        yield
        return
    with GUARDS[name]():
        yield
