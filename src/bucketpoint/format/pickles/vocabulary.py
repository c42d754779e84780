"""Vocabulary of the names in a pickle, torch's names, errors for refused content, and stand-ins for objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any


class UnreadableError(Exception):
    """Raised for bytes that are not a complete pickle or file of torch.save. Loading them would execute nothing."""


class RefusedError(Exception):
    """Raised at the first content that is read only with `trusted=True`. The text is a class's or function's name."""


class ObjectionError(RefusedError):
    """Raised for a call, a change or a value that no writer makes, and that could do harm.

    The text is in angle brackets, which no name has.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"<{what}>"[:MOST_TEXT])


MOST_TEXT = 300
"""Limit on the characters of a refusal's text: names in a pickle may be of any length."""


def unfit(what: str) -> ObjectionError:
    """Return the error for a value that no writer makes."""
    return ObjectionError(f"{what} that no writer makes")


def only(what: str, *kinds: type) -> Callable[[Any], Any]:
    """Return a function that returns its argument if its class is in `kinds`, and raises ObjectionError otherwise."""

    def checked(value: Any) -> Any:
        if type(value) not in kinds:
            raise unfit(what)
        return value

    return checked


class Shell:
    """Stand-in for an object that is made only when its state is read: an array, a data type or an identifier.

    Attributes:
        build: function that makes the object from the shell and the state.
        value: result of the pickled call, for `build`.
        places: memo numbers of the shell, under which the object will replace the shell.
    """

    def __init__(self, build: Change, value: Any = None) -> None:
        self.build = build
        self.value = value
        self.places: list[int] = []


class Deferred:
    """A call that is checked now and executed later, by `settled` or by the loader of the rewritten item.

    It calls a class or function that the user registered, or one of DTensor's.

    Attributes:
        new: True if `function` is a class whose `__new__` is called.
        change: the instance's state, in a tuple; None without a state.
    """

    def __init__(self, function: Any, arguments: tuple[Any, ...], *, new: bool = False) -> None:
        self.function, self.arguments, self.new = function, arguments, new
        self.change: tuple[Any] | None = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []

    def extend(self, items: list[Any]) -> None:
        self.items += items


Make = Callable[..., Any]
"""Function of `(machine, *arguments)` that checks the arguments of a call, and returns the object that it makes."""

Change = Callable[..., Any]
"""Function of `(machine, target, state)` that checks a state, and returns the target or the object that replaces it."""

Parts = Callable[[Any], Any]
"""Function that returns the parts of a dictionary key that are hashed with the key."""


class Function:
    """A function that a pickle may call. As a value, it is refused."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


class Registered:
    """A class or function whose calls are deferred, see `Deferred`.

    Attributes:
        called: False for a class of which a pickle may make instances by `__new__` only.
    """

    def __init__(self, value: Any, *, called: bool) -> None:
        self.value, self.called = value, called


class Vocabulary:
    """Names that a pickle may use, with the functions that make and change their objects.

    Attributes:
        names: object by (module, name).
        makers: function that checks and executes a call, by the `id` of the called object.
        changers: function that checks and applies a state (BUILD), by the type of the object to change.
        parts: function that returns the hashed parts of a dictionary key, by the type of the key.
    """

    def __init__(self, *others: Vocabulary) -> None:
        self.names: dict[tuple[str, str], Any] = {}
        self.makers: dict[int, Make] = {}
        self.changers: dict[type, Change] = {}
        self.parts: dict[type, Parts] = {}
        for other in others:
            self.names |= other.names
            self.makers |= other.makers
            self.changers |= other.changers
            self.parts |= other.parts

    def add(self, value: Any, make: Make | None = None, names: Iterable[str] = ()) -> None:
        """Add a value under its full names (if none are given, its name in Python), and the function that calls it."""
        for name in names or (name_of(value),):
            module, _, last = name.rpartition(".")
            self.names[module, last] = value
        if make is not None:
            self.makers[id(value)] = make

    def makes(self, *kinds: type) -> Callable[[Make], Make]:
        """Decorate the function that makes instances of these classes."""

        def decorate(make: Make) -> Make:
            for kind in kinds:
                self.add(kind, make)
            return make

        return decorate

    def function(self, *names: str) -> Callable[[Make], Make]:
        """Decorate the function that executes calls of a function with these full names."""

        def decorate(make: Make) -> Make:
            self.add(Function(names[0]), make, names)
            return make

        return decorate

    def changes(self, *kinds: type) -> Callable[[Change], Change]:
        """Decorate the function that sets the state of instances of these classes."""

        def decorate(change: Change) -> Change:
            self.changers |= dict.fromkeys(kinds, change)
            return change

        return decorate


def whole(key: Any) -> tuple[Any, ...]:
    """Return no parts, for keys that are hashed as fast as a number."""
    return ()


def name_of(value: Any) -> str:
    if isinstance(value, Registered):
        return name_of(value.value)
    if isinstance(value, Function):
        return value.__name__
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return f"a {type(value).__name__}"


DTYPE_NAMES = (
    *("bfloat16", "bool", "complex32", "complex64", "complex128", "bcomplex32", "float16", "float32", "float64"),
    *("float4_e2m1fn_x2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
)

STORAGE_TYPE_NAMES: Mapping[str, str] = MappingProxyType({
    f"{name}Storage": dtype
    for name, dtype in {
        "BFloat16": "bfloat16", "Half": "float16", "Float": "float32", "Double": "float64",
        "ComplexFloat": "complex64", "ComplexDouble": "complex128", "Bool": "bool", "Byte": "uint8",
        "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "QInt8": "qint8", "QInt32": "qint32",
        "QUInt8": "quint8", "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4",
    }.items()
})  # fmt: skip
"""Data types by the names of their storage classes in pickles."""
