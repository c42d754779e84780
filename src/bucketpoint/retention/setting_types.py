"""Shapes of a policy's settings: descriptions of the values that a setting may have.

A dataclass gets its checks and YAML form from the shapes in its fields' annotations, and `tools/` its JSON Schema.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from decimal import Decimal
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from bucketpoint.errors import PolicyError, PolicyFault

Path: TypeAlias = tuple[str | int, ...]

_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}

LONGEST = timedelta(days=36_500)
"""Limit on durations. Times in catalog keys can be at most in 2286; timeouts of Python and gloo at most 292 years."""

DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")

LISTED_AT_MOST = 100
"""Limit on the members of a list. All pairs of rules are compared: a policy with 1,800 rules took 30 seconds."""


class Shape:
    """Base of the shapes. A shape describes the values that one setting may have."""

    def check(self, value: Any) -> Any:
        """Return the stored form of a value from YAML or Python.

        Raises:
            PolicyError: the value is not valid for this shape.
        """
        raise NotImplementedError

    def read(self, value: Any, path: Path, faults: list[PolicyFault]) -> Any:
        """Return the stored form of a value. Add its faults to `faults`: the result is then None, or a partial list."""
        try:
            if value is None:
                raise wrong("The value is missing", "Write a value, or leave the key out")
            return self.convert(value, path, faults)
        except PolicyError as error:
            faults += [fault.under(*path) for fault in error.faults]
            return None

    def convert(self, value: Any, path: Path, faults: list[PolicyFault]) -> Any:
        """Return the stored form of a value other than None. Raises the value's faults, records those of its parts."""
        return self.check(value)

    def plain(self, value: Any) -> Any:
        """Return the YAML form of a stored value."""
        return value


def wrong(message: str, remedy: str) -> PolicyError:
    return PolicyError.of(PolicyFault(message, remedy))


def shown(value: Any) -> str:
    """Format a value for a message, at most 60 letters long."""
    if isinstance(value, (dict, list)):
        return "A mapping" if isinstance(value, dict) else "A list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class WholeNumber(Shape):
    """A whole number from `minimum` to `maximum`, inclusive."""

    minimum: int
    maximum: int | None = None

    def check(self, value: Any) -> int:
        bounds = f"at least {self.minimum}" + ("" if self.maximum is None else f" and at most {self.maximum}")
        if type(value) is not int:
            raise wrong(f"{shown(value)} is not a whole number", f"Write a whole number, {bounds}")
        if value < self.minimum or (self.maximum is not None and value > self.maximum):
            raise wrong(f"{value} is out of bounds", f"Write a whole number, {bounds}")
        return value


@dataclass(frozen=True)
class Fraction(Shape):
    """A number above 0 and up to 1."""

    def check(self, value: Any) -> float:
        if type(value) not in (int, float) or not 0 < value <= 1:
            raise wrong(f"{shown(value)} is not a fraction", "Write a number above 0 and up to 1, such as 0.5")
        return float(value)


@dataclass(frozen=True)
class Duration(Shape):
    """A `timedelta`; in YAML a number with a unit: `90s`, `20m`, `12h`, `7d`, `2w`.

    Attributes:
        zero: True if 0 is allowed.
        least: the shortest allowed duration, and the reason for it.
    """

    zero: bool = False
    least: tuple[timedelta, str] | None = None

    def check(self, value: Any) -> timedelta:
        if isinstance(value, str):
            value = self._parsed(value)
        if not isinstance(value, timedelta):
            raise wrong(f"{shown(value)} is not a duration", 'Write a number with a unit: "90s", "20m", "12h", "7d"')
        if value < timedelta(0) or (not value and not self.zero):
            raise wrong(f"{written(value)} is too short", "Write a duration above 0")
        if value > LONGEST:
            raise wrong(f"{written(value)} is too long", f"Write {written(LONGEST)} or less")
        if self.least is not None and value < self.least[0]:
            raise wrong(f"{written(value)} is too short: {self.least[1]}", f"Write {written(self.least[0])} or more")
        return value

    def _parsed(self, text: str) -> timedelta:
        match = DURATION.fullmatch(text)
        if match is None:
            raise wrong(
                f"{shown(text)} is not a duration", "Write one number with one of the units s, m, h, d, w, such as 12h"
            )
        seconds = Decimal(match[1]) * _UNITS[match[2]]
        if seconds > LONGEST.total_seconds():
            raise wrong(f"{shown(text)} is too long", f"Write {written(LONGEST)} or less")
        return timedelta(microseconds=int(seconds * 1_000_000))

    def plain(self, value: timedelta) -> str:
        return written(value)


def written(value: timedelta) -> str:
    """Format a duration for `Duration`, in the largest unit up to days that divides it."""
    micros = (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
    for unit, seconds in _UNITS.items():
        if micros and unit != "w" and micros % (seconds * 1_000_000) == 0:
            return f"{micros // (seconds * 1_000_000)}{unit}"
    return f"{Decimal(micros) / 1_000_000:f}s"


@dataclass(frozen=True)
class OneOf(Shape):
    """One of several texts."""

    words: tuple[str, ...]

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise wrong(f"{shown(value)} is not a valid value", f"Choose one of {', '.join(self.words)}")
        return value


@dataclass(frozen=True)
class Text(Shape):
    """Text that fully matches `pattern`, a regular expression for Python and JSON Schema. `what` is for messages."""

    what: str
    pattern: str

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong(f"{shown(value)} is not text", f"Write {self.what}, in quotes where YAML takes it for a number")
        if re.fullmatch(self.pattern, value) is None:
            raise wrong(f"{shown(value)} is not {self.what}", f"Write {self.what}")
        return value


@dataclass(frozen=True)
class Several(Shape):
    """A non-empty list without duplicates, stored as a tuple."""

    of: Shape

    def convert(self, value: Any, path: Path, faults: list[PolicyFault]) -> Any:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise wrong(f"{shown(value)} is not a list", "Write a list, even for a single value")
        if len(value := list(value)) > LISTED_AT_MOST:
            raise wrong(f"The list has {len(value)} values", f"Write at most {LISTED_AT_MOST}")
        items = [self.of.read(item, (*path, position), faults) for position, item in enumerate(value)]
        if not items:
            raise wrong("The list is empty", "Write at least one, or leave the key out")
        faults += [
            PolicyFault(f"{self.of.plain(item)!r:.60} is listed twice", "Remove one of the two", (*path, position))
            for position, item in enumerate(items)
            if item is not None and item in items[:position]
        ]
        return tuple(items)

    def plain(self, value: tuple[Any, ...]) -> list[Any]:
        return [self.of.plain(item) for item in value]


class Checked:
    """Base of the dataclasses of settings: each field is checked by the shape in its annotation."""

    def __post_init__(self) -> None:
        faults: list[PolicyFault] = []
        for setting in settings_of(type(self)):
            value = getattr(self, setting.name)
            if (value is None and setting.default is None) or (value in ([], ()) and setting.default == ()):
                stored = setting.default
            else:
                stored = setting.shape.read(value, (setting.key,), faults)
            object.__setattr__(self, setting.name, stored)
        if faults:
            raise PolicyError.of(*faults)


@dataclass(frozen=True)
class Fields(Shape):
    """A mapping in YAML, stored as an object of class `kind`.

    Attributes:
        besides: further settings of the mapping, which are checked and dropped.
    """

    kind: type[Checked]
    besides: tuple[Setting, ...] = ()

    @property
    def settings(self) -> tuple[Setting, ...]:
        return (*self.besides, *settings_of(self.kind))

    def convert(self, value: Any, path: Path, faults: list[PolicyFault]) -> Any:
        if isinstance(value, self.kind):
            return value
        if not isinstance(value, dict):
            raise wrong(
                f"{shown(value)} is not a mapping", f"Write keys with values; in Python, a {self.kind.__name__}"
            )
        known = {setting.key: setting for setting in self.settings}
        values, meant, before = {}, set(), len(faults)
        for key, content in value.items():
            if key in known:
                values[known[key].name] = known[key].shape.read(content, (*path, key), faults)
                continue
            near = difflib.get_close_matches(str(key), known, n=1)
            meant.update(near)
            remedy = f"Did you mean `{near[0]}`?" if near else f"The known keys are: {', '.join(known)}"
            faults.append(
                PolicyFault(f"The key `{key}` is not known", remedy, (*path, key), *getattr(key, "place", ()))
            )
        for setting in known.values():
            if setting.required and setting.key not in value and setting.key not in meant:
                faults.append(PolicyFault(f"`{setting.key}` is missing", f"Add `{setting.key}:`", path))
        for setting in self.besides:
            values.pop(setting.name, None)
        return self.kind(**values) if len(faults) == before else None

    def plain(self, value: Any) -> dict[str, Any]:
        """Return the settings that differ from their default or have no default."""
        kept = ((setting, getattr(value, setting.name)) for setting in settings_of(self.kind))
        return {
            setting.key: setting.shape.plain(content)
            for setting, content in kept
            if setting.required or content != setting.default
        }


@dataclass(frozen=True)
class Either(Shape):
    """A mapping of one of several classes, distinguished by the key of the class's first field."""

    kinds: tuple[type[Checked], ...]

    def convert(self, value: Any, path: Path, faults: list[PolicyFault]) -> Any:
        if isinstance(value, self.kinds):
            return value
        kinds = {settings_of(kind)[0].key: kind for kind in self.kinds}
        names = [f"`{key}`" for key in kinds]
        if not isinstance(value, dict):
            raise wrong(f"{shown(value)} is not a mapping", f"Write a mapping with {' or '.join(names)}")
        given = (key for key in value if key in kinds)
        meant = (near[0] for key in value if (near := difflib.get_close_matches(str(key), kinds, n=1)))
        key = next(given, None) or next(meant, None)
        if key is None:
            raise wrong(f"Neither {' nor '.join(names)} is given", f"Add {' or '.join(names)}")
        return Fields(kinds[key]).convert(value, path, faults)

    def plain(self, value: Any) -> dict[str, Any]:
        return Fields(type(value)).plain(value)


@dataclass(frozen=True)
class Key:
    """Key of a setting in YAML that differs from the name of the field."""

    name: str


@dataclass(frozen=True)
class Setting:
    """A field of a `Checked` dataclass."""

    name: str
    key: str
    shape: Shape
    doc: str
    default: Any

    @property
    def required(self) -> bool:
        return self.default is MISSING


def settings_of(kind: type[Checked]) -> tuple[Setting, ...]:
    hashable: Any = kind  # every class is hashable, but mypy looks at the hash of its instances
    return _settings_of(hashable)


@functools.cache
def _settings_of(kind: Any) -> tuple[Setting, ...]:
    hints = get_type_hints(kind, include_extras=True)
    settings = []
    for field in fields(kind):
        kind_of_value, *extras = get_args(hints[field.name])
        key = next((extra.name for extra in extras if isinstance(extra, Key)), field.name)
        doc = next(extra for extra in extras if isinstance(extra, str))
        shape = next((extra for extra in extras if isinstance(extra, Shape)), None) or _shape_of(kind_of_value)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        settings.append(Setting(field.name, key, shape, doc, default))
    return tuple(settings)


def _shape_of(hint: Any) -> Shape:
    """Return the shape of a type annotation: `OneOf`, `Several`, `Either`, `Duration` or `Fields`."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is Literal:
        return OneOf(tuple(parts))
    if get_origin(hint) is Sequence:
        return Several(_shape_of(parts[0]))
    if parts:
        return Either(tuple(parts)) if len(parts) > 1 else _shape_of(parts[0])
    return Duration() if hint is timedelta else Fields(hint)
