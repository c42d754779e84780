"""Meaning of the names in a pickle, refusals, and stand-ins for objects while a pickle is interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class UnreadableError(Exception):
    """Raised for bytes that are neither a pickle nor a file of torch.save, or that break off: loading runs nothing."""


class RefusedError(Exception):
    """Raised at the first content that is read only if it is trusted. Its text is the name of a class or function."""


class ObjectionError(RefusedError):
    """Raised for a call, a change or a value that no writer makes, and that could do harm.

    Its text is in angle brackets, which no name has.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"<{what}>"[:MOST_TEXT])


MOST_TEXT = 300
"""Limit on the characters of a refusal's text: names in a pickle may be of any length."""


def unfit(what: str) -> ObjectionError:
    """Return the objection to a value that no writer produces."""
    return ObjectionError(f"{what} that no writer makes")


def only(what: str, *kinds: type) -> Callable[[Any], Any]:
    """Return a function that returns its argument if it is of one of these classes, and objects otherwise."""

    def checked(value: Any) -> Any:
        if type(value) not in kinds:
            raise unfit(what)
        return value

    return checked


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

    def extend(self, items: list[Any]) -> None:
        self.items += items


Make = Callable[..., Any]
"""Checks the arguments of a call, given as `(machine, *arguments)`, and returns the object that the call makes."""

Change = Callable[..., Any]
"""Checks a state, given as `(machine, target, state)`. Returns the target, or the object that replaces it."""

Parts = Callable[[Any], Any]
"""Returns the parts of a dictionary key that are hashed with it."""


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


class Vocabulary:
    """Meaning of the names that a pickle may use: the union of other vocabularies, and what is added to it.

    Attributes:
        names: object for each (module, name). Real classes only if a pickle cannot change their instances.
        makers: function that checks and makes a call, by the `id` of the called object.
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
        """Add a value, and the function that makes calls of it.

        Args:
            names: full names of the value. Empty: its one name in Python.
        """
        for name in names or (name_of(value),):
            module, _, last = name.rpartition(".")
            self.names[module, last] = value
        if make is not None:
            self.makers[id(value)] = make

    def makes(self, *kinds: type) -> Callable[[Make], Make]:
        """Decorate the function that makes calls of these classes."""

        def decorate(make: Make) -> Make:
            for kind in kinds:
                self.add(kind, make)
            return make

        return decorate

    def function(self, *names: str) -> Callable[[Make], Make]:
        """Decorate the maker for calls of a function with these full names."""

        def decorate(make: Make) -> Make:
            self.add(Function(names[0]), make, names)
            return make

        return decorate

    def changes(self, *kinds: type) -> Callable[[Change], Change]:
        """Decorate the function that gives instances of these classes their state."""

        def decorate(change: Change) -> Change:
            self.changers |= dict.fromkeys(kinds, change)
            return change

        return decorate


def whole(key: Any) -> tuple[Any, ...]:
    """Return no parts: the hash of the key takes no longer than that of a number."""
    return ()


def name_of(value: Any) -> str:
    if isinstance(value, Registered):
        return name_of(value.value)
    if isinstance(value, Function):
        return value.__name__
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return f"a {type(value).__name__}"
