"""State of an interpreter of pickle opcodes that builds values of a closed set: `opcodes.run` runs it.

A `Vocabulary` defines the names, and makes or changes the objects that the pickle asks for; nothing is imported or
called because a pickle names it. Every opcode takes at least one byte and makes at most 16 bytes for each; what an
opcode makes beyond that counts against an allowance of memory, and work such as copies and hashes against an allowance
of work. So time and memory stay below a multiple of the pickle's length, and memory below an absolute bound.
"""

from __future__ import annotations

import _compat_pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from bucketpoint.format.pickles.vocabulary import (
    REFUSED,
    Deferred,
    MalformedPickleError,
    ObjectionError,
    OverspentError,
    Refused,
    Registered,
    Shell,
    Vocabulary,
    name_of,
)

_MAX_KEY_PARTS = 4096
_MAX_SAME_HASH = 16
_LONG_TEXT = 64
_NAMED = 300
_HASHED_BYTES, _LISTED_BYTES = 16, 8
_FREE, _MULTIPLE = 1 << 20, 10
_FREE_MEMORY, _MEMORY_MULTIPLE, _UNCOUNTED_MULTIPLE = 16 << 20, 48, 16
_INSTANCE_BYTES, _PAIR_BYTES, _MEMO_BYTES, _STACK_BYTES, _MARK_BYTES = 160, 40, 100, 8, 40

MOST_BYTES = 16 << 30
"""Default bound on the memory that one pickle may take. An item of `.metadata` takes some 3 kB: 115 to 160 bytes, and
22 to 25 times as much while they are interpreted."""
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_LEAVES = frozenset({str, bytes, float, bool, complex, type(None), type(Ellipsis), type})


class Machine:
    """Interprets one pickle.

    Args:
        paid: length of the item that contains the pickle, by which work is limited.
        most: limit on the memory of the value in bytes, whatever the pickle's length.
        persistent: returns the object for a persistent id. None: there can be no such ids.

    Attributes:
        refused: names outside the vocabulary, and objections in angle brackets, each once.
        faults: errors of allowed calls.
        named: True once the pickle has used any name.
        deferred: True once a call was left to the final load.
        position: first byte after the pickle, once it has been run.
    """

    def __init__(
        self,
        data: bytes,
        vocabulary: Vocabulary,
        *,
        position: int = 0,
        paid: int | None = None,
        most: int = MOST_BYTES,
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self.data, self.vocabulary, self.position = data, vocabulary, position
        self.refused: dict[str, None] = {}
        self.faults: dict[str, None] = {}
        self.named = self.deferred = False
        self._persistent = persistent
        nbytes = len(data) if paid is None else paid
        self._left = _FREE + _MULTIPLE * nbytes
        self._memory = min(_FREE_MEMORY + _MEMORY_MULTIPLE * nbytes, most - _UNCOUNTED_MULTIPLE * nbytes)
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._hashes: dict[int, tuple[Any, Counter[int]]] = {}

    def weigh(self) -> None:
        """Raise OverspentError if stack, marks and memo, which grow with every opcode, take more than they may."""
        if _MEMO_BYTES * len(self.memo) + _STACK_BYTES * len(self.stack) + _MARK_BYTES * len(self.marks) > self._memory:
            raise OverspentError

    # -- what calls and changes may use -------------------------------------------------------------------------------

    def pay(self, cost: int) -> None:
        """Take from the allowance.

        Raises:
            OverspentError: nothing is left.
        """
        self._left -= cost
        if self._left < 0:
            raise OverspentError

    def hold(self, nbytes: int) -> None:
        """Count memory that an opcode takes beyond 16 bytes for each of its own.

        Raises:
            OverspentError: the value takes more memory than it may.
        """
        self._memory -= nbytes
        if self._memory < 0:
            raise OverspentError

    def pay_for(self, values: Any, *, hashed: bool = False) -> None:
        """Take the cost of a copy of a list, or of a set, from the allowance."""
        self.pay(len(values) * (_HASHED_BYTES if hashed else _LISTED_BYTES))

    def check_key(self, key: Any, container: Any) -> None:
        """Charge the hashing and comparing of a key before it is put into a dictionary or a set.

        Raises:
            ObjectionError: the key has too many parts, or too many keys of the container have the same hash.
            OverspentError: hashing the key costs too much.
        """
        kind = type(key)
        if kind is str or kind is bytes:
            self.pay(len(key) >> 6)
            return
        parts, waiting = 0, [key]
        self.pay(1)
        while waiting:
            one = waiting.pop()
            parts += 1
            kind = type(one)
            if kind is int:
                parts += one.bit_length() >> 6
            elif kind is str or kind is bytes:
                parts += len(one) >> 6
            elif kind not in _LEAVES:
                waiting += self._parts_of(one)
            if parts + len(waiting) > _MAX_KEY_PARTS:
                self.pay(_MAX_KEY_PARTS)
                raise ObjectionError(f"a dictionary key of more than {_MAX_KEY_PARTS} parts")
        self.pay(parts)
        if len(container) < _MAX_SAME_HASH:
            return
        # The container is kept alive, so that no other one gets its id.
        _, same = self._hashes.setdefault(id(container), (container, Counter()))
        digest = hash(key)
        same[digest] += 1
        if same[digest] > _MAX_SAME_HASH:
            raise ObjectionError(f"more than {_MAX_SAME_HASH} keys with the same hash")

    def _parts_of(self, value: Any) -> Any:
        kind = type(value)
        if kind is tuple or kind is frozenset:
            if len(value) > _MAX_KEY_PARTS:
                raise ObjectionError(f"a dictionary key of more than {_MAX_KEY_PARTS} parts")
            return value
        known = self.vocabulary.parts.get(kind)
        if known is not None:
            return known(value)
        if kind in (Deferred, Refused) or isinstance(value, type):
            return ()
        raise ObjectionError(f"a {kind.__name__} as a dictionary key")

    def defer(self, function: Any, arguments: tuple[Any, ...], *, new: bool = False) -> Deferred:
        """Leave a call to the final load."""
        self.deferred = True
        return Deferred(function, arguments, new=new)

    def refuse(self, what: str) -> Refused:
        """Record a refusal, and return the stand-in for the refused object."""
        if len(self.refused) < 100:
            self.refused[what[:_NAMED]] = None
        return REFUSED

    # -- opcodes ------------------------------------------------------------------------------------------------------

    def take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise MalformedPickleError("the pickle ends early")
        return self.data[start : self.position]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise MalformedPickleError("the pickle ends early")
        taken = self.data[self.position : end]
        self.position = end + 1
        return taken

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def popped(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def top(self) -> Any:
        return self.stack[-1]

    def discard(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def pop_mark(self) -> int:
        if not self.marks:
            raise MalformedPickleError("an opcode needs a mark, and the stack has none")
        return self.marks.pop()

    def make(self, value: Any, nbytes: int) -> None:
        """Push a new container, which takes `nbytes` beside what is in it."""
        self.hold(nbytes)
        self.stack.append(value)

    def to_mark(self) -> list[Any]:
        at = self.pop_mark()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def memoize(self, place: int) -> None:
        value = self.stack[-1]
        if place > len(self.data):
            # The C unpickler keeps its memo in an array of that length, so such a number could exhaust memory.
            self.refuse(f"<memo number {place}>")
            raise MalformedPickleError(f"the memo number {place} is larger than the pickle")
        if type(value) is Shell:
            value.places.append(place)
        self.memo[place] = value

    def recall(self, place: int) -> Any:
        if place not in self.memo:
            raise MalformedPickleError("the pickle refers to an object that it has not numbered")
        return self.memo[place]

    def find(self, module: str, name: str) -> Any:
        self.named = True
        # Protocols below 3 use the names of Python 2.
        renamed = _compat_pickle.NAME_MAPPING.get((module, name))
        if renamed is None:
            renamed = (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        names = self.vocabulary.names
        for known in ((module, name), renamed):
            if known in names:
                return names[known]
        return self.refuse(f"{renamed[0][:_NAMED]}.{renamed[1][:_NAMED]}")

    def call(self, function: Any, arguments: Any, *, new: bool = False) -> Any:
        """Make the object that a call returns, or record why the call is refused."""
        if type(arguments) is not tuple:
            return self.refuse("<a call whose arguments are not a tuple>")
        self.pay(1 + len(arguments))
        self.hold(_INSTANCE_BYTES)
        maker = self.vocabulary.makers.get(id(function))
        if maker is not None:
            return self._attempt(maker, *arguments)
        if type(function) is Registered and (new or function.called):
            return self.defer(function.value, arguments, new=new)
        return REFUSED if function is REFUSED else self.refuse(f"<a call of {name_of(function)}>")

    def change(self, target: Any, state: Any) -> Any:
        """Give an object its state. Returns the object itself, or the one that replaces it."""
        kind = type(target)
        self.pay(1 + (len(state) if isinstance(state, (tuple, list, dict)) else 0))
        changer = target.build if kind is Shell else self.vocabulary.changers.get(kind)
        if changer is not None:
            changed = self._attempt(changer, target, state)
            if kind is Shell:
                self.pay(len(target.places))
                for place in target.places:
                    self.memo[place] = changed
            return changed
        if kind is Deferred:
            target.change = (state,)
        else:
            self._refuse_change(target)
        return target

    def set_items(self, target: Any, items: list[Any]) -> None:
        """Set items of a dictionary: keys and values by turns."""
        if len(items) % 2:
            raise MalformedPickleError("a key has no value")
        self.hold(_PAIR_BYTES * (len(items) >> 1))
        if type(target) in _MAPPINGS:
            self._attempt(_set_items, target, items)
        elif type(target) is Deferred:
            target.pairs += zip(items[::2], items[1::2], strict=True)
        else:
            self._refuse_change(target)

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list or type(target) is deque:
            target.extend(items)
        elif type(target) is Deferred:
            target.items += items
        else:
            self._refuse_change(target)

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is set:
            self.fill(target, items)
        else:
            self._refuse_change(target)

    def fill(self, target: set[Any], items: Any) -> set[Any]:
        """Add items to a set, with checks, and return the set."""
        self._attempt(_add_items, target, items)
        return target

    def _attempt(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the vocabulary. Its objections and errors are noted."""
        try:
            return act(self, *arguments)
        except ObjectionError as error:
            return self.refuse(f"<{error}>")
        except (OverspentError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - constructors reject arguments with many kinds of errors
            if len(self.faults) < 100:
                self.faults[f"{type(error).__name__}: {error}"[:300]] = None
            return REFUSED

    def _refuse_change(self, target: Any) -> None:
        if target is not REFUSED:
            self.refuse(f"<a change of {name_of(target)}>")

    def persistent(self, pid: Any) -> None:
        if self._persistent is None:
            raise MalformedPickleError("the pickle refers to an object outside of it")
        try:
            self.push(self._persistent(pid))
        except ObjectionError as error:
            self.push(self.refuse(f"<{error}>"))


def _set_items(machine: Machine, target: Any, items: list[Any]) -> None:
    pairs = iter(items)
    for key, value in zip(pairs, pairs, strict=True):
        if type(key) is not str or len(key) > _LONG_TEXT:
            machine.check_key(key, target)
        target[key] = value


def _add_items(machine: Machine, target: set[Any], items: Any) -> None:
    for item in items:
        machine.check_key(item, target)
        target.add(item)
