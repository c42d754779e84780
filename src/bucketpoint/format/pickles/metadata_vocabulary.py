"""Names in a `.metadata` pickle: DCP's dataclasses and their contents, as classes of DCP's or plain ones."""

from __future__ import annotations

import enum
import functools
import os
import pathlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bucketpoint.format.pickles import plain
from bucketpoint.format.pickles.allow_list import METADATA_GLOBALS
from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.vocabulary import Change, Function, Make, ObjectionError, Vocabulary

_DCP, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_BEFORE_TORCH_2_2 = "torch.distributed._shard.sharded_tensor.metadata"
_PROPERTIES = "TensorProperties"
_FIELD_BYTES = 16

_ENCODING = Function(f"{_DCP}._MEM_FORMAT_ENCODING")
_GETATTR = Function("builtins.getattr")
_FOREIGN_PATH = Function("multistorageclient.pathlib.MultiStoragePath")


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes that stand for the names in a pickle.

    Attributes:
        kinds: DCP's dataclasses, by their names.
        set_properties: gives a `TensorProperties` its state.
        encoding: enumeration of memory formats.
        size: the class of shapes.
        names, makers: torch's own names: data types, layouts and sizes.
    """

    kinds: Mapping[str, type]
    set_properties: Change
    encoding: type[enum.Enum]
    size: type
    names: Mapping[tuple[str, str], Any]
    makers: Mapping[Any, Make]


class ForeignPath(os.PathLike[str]):
    """Stand-in for multi-storage-client's path class, which would look for its own configuration when unpickled."""

    _text: str

    def __fspath__(self) -> str:
        return self._text


@functools.cache
def vocabulary(classes: Classes) -> Vocabulary:
    """Return the vocabulary of a `.metadata` pickle."""
    kinds = {name: kind for name, kind in classes.kinds.items() if name != _PROPERTIES}
    calls = {name: Function(f"{_module(name)}.{name}") for name in classes.kinds}
    names: dict[tuple[str, str], Any] = {
        **{key: value for key, value in (plain.names() | {**classes.names}).items() if key in METADATA_GLOBALS},
        **{(_module(name), name): called for name, called in calls.items()},
        (_BEFORE_TORCH_2_2, _PROPERTIES): calls[_PROPERTIES],
        **{(module, "getattr"): _GETATTR for module in ("builtins", "__builtin__")},
        (_DCP, "_MEM_FORMAT_ENCODING"): _ENCODING,
        (_BEFORE_TORCH_2_2, "MEM_FORMAT_ENCODING"): _ENCODING,
        ("multistorageclient.pathlib", "MultiStoragePath"): _FOREIGN_PATH,
    }

    def member(machine: Machine, arguments: Any) -> Any:
        (value,) = arguments
        return classes.encoding(value)

    def named_member(machine: Machine, arguments: Any) -> Any:
        # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as a getattr.
        kind, name = arguments
        if kind is not _ENCODING:
            raise ObjectionError("getattr of something else than a memory format")
        return classes.encoding[name]

    made: dict[Any, Make] = {
        **{called: _empty(classes.kinds[name]) for name, called in calls.items()},
        _FOREIGN_PATH: _empty(ForeignPath),
        _ENCODING: member,
        _GETATTR: named_member,
    }
    checked = plain.makers() | {**classes.makers}
    made |= {called: make for called, make in checked.items() if any(called is value for value in names.values())}
    return Vocabulary(
        names,
        {id(called): make for called, make in made.items()},
        {
            **dict.fromkeys(kinds.values(), _set_fields),
            classes.kinds[_PROPERTIES]: classes.set_properties,
            ForeignPath: _set_path,
            OrderedDict: plain.set_attributes,
        },
        {classes.kinds["MetadataIndex"]: _hashed, classes.size: tuple, pathlib.PurePosixPath: lambda key: ()},
    )


def _module(name: str) -> str:
    return _FILES if name.startswith("_") else _DCP


def _empty(kind: type) -> Make:
    def make(machine: Machine, arguments: Any) -> Any:
        if arguments:
            raise ObjectionError(f"a call of {kind.__name__} with arguments")
        return object.__new__(kind)

    return make


def _set_fields(machine: Machine, target: Any, state: Any) -> Any:
    if type(state) is not dict:
        raise ObjectionError(f"a state of {type(target).__name__} that is none")
    machine.pay(_FIELD_BYTES * len(state))
    # Most of these classes are frozen, and none has a `__setstate__`.
    target.__dict__.update(state)
    return target


def _set_path(machine: Machine, target: ForeignPath, state: Any) -> ForeignPath:
    if type(state) is not dict or type(state.get("_path")) is not str:
        raise ObjectionError("a path without a text")
    target._text = state["_path"]
    return target


def _hashed(key: Any) -> tuple[Any, ...]:
    return key.fqn, key.offset, key.index
