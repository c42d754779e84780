"""Conversion from DCP's flat names back to the nested state that was saved, with integer keys.

DCP flattens a state into dotted names, and turns every key in its paths into text. So a save records which dicts had
integer keys, and a load restores these keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

from torch.distributed.checkpoint import Metadata

from bucketpoint.errors import BucketpointError, MetadataError
from bucketpoint.format.metadata.facts import extra

Path: TypeAlias = tuple[str | int, ...]
"""Path of a value in a state: text for the key of a dict, a number for the place in a list."""

IntKeys: TypeAlias = tuple[Path, tuple[str, ...] | None]
"""Path of a dict with integer keys, and these keys as text, or None if all decimal keys are integers."""

INT_KEYS = "int_keys"
"""Name of the list of `IntKeys` in bucketpoint's part of the metadata."""

_DECIMAL = re.compile(r"0|-?[1-9][0-9]{0,18}")
"""A key that is an integer where no keys are listed. A listed key may have more digits."""

_ANY_DECIMAL = re.compile(r"0|-?[1-9][0-9]*")
_MOST_DEPTH = 200
_FREE_PLACES = 1 << 16
"""Limit on the length of all lists together, plus 16 for each value: paths in damaged metadata may claim any length."""


def int_keys_of(state: Mapping[Any, Any]) -> tuple[IntKeys, ...]:
    """Return the paths of the dicts with integer keys in a state, and those keys.

    Raises:
        BucketpointError: two keys of a dict have the same text, so that one path would name two values.
    """
    int_keys: list[IntKeys] = []
    waiting: list[tuple[Path, Any]] = [((), state)]
    while waiting:
        path, value = waiting.pop()
        parts: Iterable[tuple[Any, Any]] = enumerate(value)
        if isinstance(value, Mapping):
            texts = {str(key): part for key, part in value.items()}
            if len(texts) < len(value):
                twice = next(key for key in value if type(key) is not str and list(map(str, value)).count(str(key)) > 1)
                raise BucketpointError(
                    "Two keys of a dict in the state have the same text, and a checkpoint has keys as text",
                    key=".".join(map(str, (*path, twice))),
                    remedy="Rename one of the keys",
                )
            parts = texts.items()
            if any(type(key) is int for key in value):
                integers = tuple(str(key) for key in value if type(key) is int)
                alike = any(type(key) is str and _DECIMAL.fullmatch(key) for key in value)
                listed = alike or not all(map(_DECIMAL.fullmatch, integers))
                int_keys.append((path, integers if listed else None))
        waiting += [((*path, key), part) for key, part in parts if isinstance(part, (Mapping, list))]
    return tuple(sorted(int_keys, key=str))


def plain_int_keys(int_keys: Iterable[IntKeys]) -> list[Any]:
    return [[list(path), keys if keys is None else list(keys)] for path, keys in int_keys]


def noted_int_keys(metadata: Metadata, *, url: str | None = None) -> tuple[IntKeys, ...]:
    """Return the dicts with integer keys that bucketpoint recorded in metadata; empty for other writers' metadata.

    Raises:
        MetadataError: the record is malformed.
    """
    try:
        listed = extra(metadata).get(INT_KEYS, [])
        # Text sorts, and what cannot be a key is refused. A path occurs several times if ranks have different keys.
        return tuple(
            dict.fromkeys((tuple(path), keys if keys is None else tuple(sorted(keys))) for path, keys in listed)
        )
    except (TypeError, ValueError):
        raise MetadataError("The metadata has a malformed list of integer keys", url=url) from None


def merged_int_keys(int_keys: Iterable[IntKeys]) -> dict[Path, set[str | None]]:
    """Merge the records of all ranks. None is in the set if a rank lists no keys of the dict."""
    merged: dict[Path, set[str | None]] = {}
    for path, keys in int_keys:
        merged.setdefault(path, set()).update((None,) if keys is None else keys)
    return merged


def integers_of(keys: Iterable[str], listed: Collection[str | None]) -> set[str]:
    """Return which keys of a dict become integers in a load. `listed`: the dict's entry in `merged_int_keys`."""
    return {
        key
        for key in keys
        if (key in listed and _ANY_DECIMAL.fullmatch(key)) or (None in listed and _DECIMAL.fullmatch(key))
    }


def integer_like(metadata: Metadata) -> set[Path]:
    """Return the paths of the dicts that have a key of decimal digits."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return {
        tuple(path[:depth])
        for path in paths.values()
        if type(path) in (tuple, list)
        for depth, part in enumerate(path)
        if type(part) is str and _DECIMAL.fullmatch(part)
    }


def put(state: Any, path: Path, value: Any) -> None:
    """Replace the value of a state at a path of DCP. Dict keys in the path are text, whatever their type in the state.

    Raises:
        KeyError: the state has no such path.
    """
    for part in path[:-1]:
        state = state[_key_of(state, part)]
    state[_key_of(state, path[-1])] = value


def _key_of(container: Any, part: str | int) -> Any:
    if not isinstance(container, Mapping) or part in container:
        return part
    # Nearly all keys that are not text are integers. Try an integer first, because a scan for each key would be slow.
    if isinstance(part, str) and _DECIMAL.fullmatch(part) and int(part) in container:
        return int(part)
    for key in container:
        if str(key) == part:
            return key
    raise KeyError(part)


def nested(
    values: Mapping[str, Any], metadata: Metadata, int_keys: Iterable[IntKeys] = (), *, url: str | None = None
) -> dict[Any, Any]:
    """Build the nested state from values by flat name. Missing elements of a list are None.

    Raises:
        MetadataError: paths in the metadata contradict each other, or claim lists far longer than the number of values.
    """
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    ints = merged_int_keys(int_keys)
    root: dict[Any, Any] = {}
    for fqn, value in values.items():
        path = paths.get(fqn, (fqn,))
        plain = type(path) in (tuple, list) and all(type(part) in (str, int) for part in path)
        if not plain or not 0 < len(path) <= _MOST_DEPTH:
            raise MetadataError("The metadata has no path in the state for this item", url=url, key=fqn)
        node = root
        for part in path[:-1]:
            if isinstance(node.get(part), _NestedLeaf) and node[part].is_empty:
                del node[part]
            node = node.setdefault(part, {})
            if isinstance(node, _NestedLeaf):
                raise _two_values(fqn, url)
        leaf = _NestedLeaf(value)
        if path[-1] not in node:
            node[path[-1]] = leaf
        elif isinstance(node[path[-1]], _NestedLeaf) or not leaf.is_empty:
            raise _two_values(fqn, url)
    free_places = _FREE_PLACES + 16 * len(values)

    def converted(node: Any, path: Path) -> Any:
        """Convert a dict of nodes and leaves to a dict or list of the state, and a leaf to its value."""
        nonlocal free_places
        if isinstance(node, _NestedLeaf):
            return node.value
        kinds = {type(key) for key in node}
        parts = {key: converted(part, (*path, key)) for key, part in node.items()}
        if kinds <= {str}:
            integers = integers_of(parts, ints.get(path, ()))
            try:
                return {int(key) if key in integers else key: part for key, part in parts.items()}
            except ValueError:
                raise MetadataError(
                    "The metadata has an integer key with more digits than Python converts",
                    url=url,
                    key=".".join(map(str, path)),
                    remedy="If you saved this key, call sys.set_int_max_str_digits first",
                ) from None
        name = ".".join(map(str, path))
        if not path or (kinds == {int} and min(parts) < 0):
            raise MetadataError("The metadata has no path in the state for this item", url=url, key=name)
        if kinds != {int}:
            raise _two_values(name, url)
        free_places -= max(parts) + 1
        if free_places < 0:
            raise MetadataError(
                "The metadata claims lists with many more elements than there are items", url=url, key=name
            )
        return [parts.get(place) for place in range(max(parts) + 1)]

    state: dict[Any, Any] = converted(root, ())
    return state


class _NestedLeaf:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def is_empty(self) -> bool:
        """True for what a rank may have in place of another rank's dict or list."""
        return self.value is None or (type(self.value) is list and not self.value)


def _two_values(name: str, url: str | None) -> MetadataError:
    return MetadataError("The metadata has two values for one path in the state", url=url, key=name)
