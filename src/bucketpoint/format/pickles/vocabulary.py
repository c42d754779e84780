"""Meaning of the names in a pickle, and stand-ins for objects while a pickle is interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketpoint.format.pickles.machine import Machine


class MalformedPickleError(ValueError):
    """The bytes are not a pickle, or not one that is read here.

    Attributes:
        named: True if the pickle had used a name before it broke off.
    """

    named = False


class ObjectionError(Exception):
    """Raised for a call or a change that no writer makes, and that could do harm."""


def unfit(what: str) -> ObjectionError:
    """Return the objection to a value that no writer makes."""
    return ObjectionError(f"{what} that no writer makes")


class OverspentError(Exception):
    """Raised for a pickle that asks for more work or memory than its length pays for."""


class Refused:
    """Stand-in for a refused object: the interpreter continues, in order to name everything that is refused."""


REFUSED = Refused()


class Shell:
    """A value that still lacks its state: an array, a data type or an identifier, none of which can be changed later.

    Attributes:
        build: makes the object from its state.
        value: result of the call, for `build`.
        places: memo numbers of the shell, at which the object will replace it.
    """

    def __init__(self, build: Change, value: Any = None) -> None:
        self.build = build
        self.value = value
        self.places: list[int] = []


class Deferred:
    """A call that only the final load makes: of a class or function that the user registered, or of DTensor's.

    Attributes:
        new: True if `function` is a class of which `__new__` makes an instance.
        change: the state for the instance, as a tuple of one.
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
        names: object for each (module, name). Real classes only if a pickle cannot change their instances.
        makers: function that checks and makes a call, by the `id` of the called object.
        changers: function that checks and applies a state (BUILD), by the type of the object to change.
        parts: function that returns the hashed parts of a dictionary key, by the type of the key.
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
    """A function of the vocabulary. It can be called by a pickle, but is refused as a value."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


class Registered:
    """A class or function that only the final load calls.

    Attributes:
        called: False for a class whose instances only `__new__` makes.
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
