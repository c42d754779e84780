"""Selection of items by patterns on their flat names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable
from itertools import islice

from bucketpoint.errors import MismatchError

_WILD = re.compile(r"[*?\[]")


def matching(patterns: str | Iterable[str], names: Collection[str], *, url: str | None) -> set[str]:
    """Return the names that match at least one pattern.

    Args:
        patterns: `fnmatch` patterns, such as `model.*`; `model`, without wildcards, matches itself and `model.*`.

    Raises:
        MismatchError: a pattern matches no name.
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        exact = rf"{re.escape(pattern)}(\..*)?\Z"
        regex = re.compile(fnmatch.translate(pattern) if _WILD.search(pattern) else exact, re.DOTALL)
        members = set(filter(regex.match, names))
        if not members:
            there = ", ".join(dict.fromkeys(name.split(".")[0] for name in islice(names, 1 << 16)))
            raise MismatchError(
                f"The checkpoint has no key that matches {pattern!r}",
                url=url,
                remedy=f"Its keys begin with: {there[:200]}; for DCP `bucketpoint show URL --tensors` lists them",
            )
        found |= members
    return found


def escaped(name: str) -> str:
    """Return `name` as a pattern, with its wildcard characters escaped."""
    return _WILD.sub(r"[\g<0>]", name)
