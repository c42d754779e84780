"""Mappings of tensor names, such as from a trainer's names to those of Hugging Face."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from bucketpoint.errors import BucketpointError

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
