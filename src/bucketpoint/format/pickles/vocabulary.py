"""Meaning of the names in a pickle, and what stands for objects while a pickle is interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketpoint.format.pickles.machine import Machine


class MalformedPickleError(ValueError):
    """The bytes are not a pickle, or not one that is read here.

    Attributes:
        named: the pickle had named something before it broke off.
    """

    named = False


class ObjectionError(Exception):
    """A call or a change that no writer makes, and that could do harm."""


def unfit(what: str) -> ObjectionError:
    """An objection to a value that no writer makes."""
    return ObjectionError(f"{what} that no writer makes")


class OverspentError(Exception):
    """The pickle asks for more work or memory than its length pays for."""


class Refused:
    """Stands for an object that was refused; the interpreter goes on, to name all that is refused."""


REFUSED = Refused()


class Shell:
    """An object that has yet to be given its state: an array, a data type or an identifier, which cannot be changed.

    Attributes:
        build: makes the object of its state.
        value: what the call gave, for `build`.
        places: memo numbers under which the shell is known, and the object will be.
    """

    def __init__(self, build: Change, value: Any = None) -> None:
        self.build = build
        self.value = value
        self.places: list[int] = []


class Deferred:
    """A call of a class or function that only the final load makes: one that the user registered, or of DTensor's.

    Attributes:
        new: `function` is a class of which an instance is made by `__new__`.
        change: the state that the instance is to be given, as a tuple of one.
    """

    def __init__(self, function: Any, arguments: tuple[Any, ...], *, new: bool) -> None:
        self.function, self.arguments, self.new = function, arguments, new
        self.change: tuple[Any] | None = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []


Make = Callable[["Machine", Any], Any]
Change = Callable[["Machine", Any, Any], Any]


class Vocabulary:
    """Meaning of the names that a pickle may use.

    Attributes:
        names: object for each (module, name). Real classes only where an instance cannot be changed by a pickle.
        makers: function that checks and makes a call, by the `id` of the object that is called.
        changers: function that checks and applies a state (BUILD), by the type of the object to change.
        parts: by a type of dictionary keys, the parts that are hashed with it.
    """

    def __init__(
        self,
        names: dict[tuple[str, str], Any],
        makers: dict[int, Make],
        changers: dict[type, Change],
        parts: dict[type, Callable[[Any], tuple[Any, ...]]],
    ) -> None:
        self.names, self.makers, self.changers, self.parts = names, makers, changers, parts


class Function:
    """A function of the vocabulary, which is no value by itself."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


class Registered:
    """A class or function that only the final load calls.

    Attributes:
        called: False for a class whose instances are made by `__new__` alone.
    """

    def __init__(self, value: Any, *, called: bool) -> None:
        self.value, self.called = value, called


def name_of(value: Any) -> str:
    if isinstance(value, Registered):
        return name_of(value.value)
    if isinstance(value, Function):
        return value.__name__
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return f"a {type(value).__name__}"
