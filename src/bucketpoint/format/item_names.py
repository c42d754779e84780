"""Selection of items by patterns on their flat names, and mappings of names, such as to those of Hugging Face."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path

from bucketpoint.errors import BucketpointError, MismatchError

Renaming = Callable[[str], str | None]
"""Function that returns the new name of a tensor, or None to leave the tensor out."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def renaming(names: Renaming | Mapping[str, str | None] | str | os.PathLike[str] | None) -> Renaming:
    """Return a renaming function for `names`: a function, a mapping, the path of a JSON file with a mapping, or None.

    A key may have `{}` in place of each number between dots: `layers.{}.wq` becomes `model.layers.{}.q_proj`. Names
    without an entry stay as they are.

    Raises:
        BucketpointError: the file cannot be read, or holds no JSON object. The returned function raises it for a new
            name that is not text, or that has more `{}` than the old name has numbers.
    """
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    table = names if isinstance(names, Mapping) else _read(names)

    def mapped(name: str) -> str | None:
        numbers, pattern = _NUMBER.findall(name), _NUMBER.sub("{}", name)
        new = table[name] if name in table else table.get(pattern, name)
        try:
            if new is None or name in table or pattern not in table:
                return None if new is None else new + ""
            return new.format(*numbers)
        except (AttributeError, TypeError, LookupError, ValueError):
            raise BucketpointError(
                f"The new name of {name} is not text, or has more {{}} than the name has numbers: {str(new)[:200]!r}",
                remedy="Correct the mapping of names: {} matches a number between dots",
            ) from None

    return mapped


def _read(file: str | os.PathLike[str]) -> Mapping[str, str | None]:
    try:
        table = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BucketpointError(f"The file of names cannot be read: {error}", key=os.fspath(file)) from error
    if not isinstance(table, dict):
        raise BucketpointError("The file of names does not contain a JSON object", key=os.fspath(file))
    return table


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
