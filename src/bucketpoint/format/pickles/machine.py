"""Interpreter of pickle opcodes that makes only values of a vocabulary, and stops at the first content that it refuses.

A `Vocabulary` defines the allowed names, and makes and changes the objects: nothing is imported or called because a
pickle names it. Each byte of the pickle may take 16 bytes of memory. Memory beyond that is charged to an allowance of
memory, and copies and hashes to an allowance of work, so that time and memory stay below a multiple of the pickle's
length. Memory has an absolute bound too. Opcodes that no writer of protocol 2 or later uses are refused.
"""

from __future__ import annotations

import _compat_pickle
import pickletools
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from bucketpoint.format.pickles.vocabulary import (
    MOST_TEXT,
    Deferred,
    ObjectionError,
    RefusedError,
    Registered,
    Shell,
    UnreadableError,
    Vocabulary,
    name_of,
)

_MAX_KEY_PARTS = 4096
_MAX_SAME_HASH = 16
_LONG_TEXT = 64
_HASHED_BYTES, _LISTED_BYTES = 16, 8
_FREE, _MULTIPLE = 1 << 20, 10
_FREE_MEMORY, _MEMORY_MULTIPLE, _UNCOUNTED_MULTIPLE = 16 << 20, 48, 16
_INSTANCE_BYTES, _PAIR_BYTES, _MEMO_BYTES, _STACK_BYTES, _MARK_BYTES = 160, 40, 100, 8, 40

MOST_BYTES = 16 << 30
"""Default bound on the memory for one pickle. An item of `.metadata` has 115 to 160 bytes and takes some 3 kB (22 to 25
times as much) while it is interpreted."""
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_APPENDABLE = frozenset({list, deque, Deferred})
_LEAVES = frozenset({str, bytes, float, bool, complex, type(None), type(Ellipsis), type})

MAX_INTEGER_BYTES = 2048
"""Limit on the bytes of an integer. Division, comparison and hashing of longer ones cost far more than is charged."""

_SLICE = range(4096)
_LONGEST_NAME = 1024
_OLD = "a pickle of protocol 0 or 1, or of Python 2: save it again with protocol 2 or later"

# Memory of a container without its members, on 64-bit CPython.
TUPLE_BYTES, LIST_BYTES, DICT_BYTES, SET_BYTES = 64, 72, 80, 232


class Machine:
    """Interpreter of one pickle.

    Args:
        paid: length of the item that contains the pickle, from which both allowances are computed.
        most: absolute bound on memory, in bytes.
        persistent: function that returns the object of a persistent id; None refuses such ids.

    Attributes:
        named: True once the pickle has used any name.
        position: first byte after the pickle, once `run` has returned.
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
        self.named = False
        self._persistent = persistent
        nbytes = len(data) if paid is None else paid
        self._left = _FREE + _MULTIPLE * nbytes
        self._memory = min(_FREE_MEMORY + _MEMORY_MULTIPLE * nbytes, most - _UNCOUNTED_MULTIPLE * nbytes)
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._hashes: dict[int, tuple[Any, Counter[int]]] = {}

    def run(self) -> Any:
        """Interpret the pickle and return its value.

        Raises:
            RefusedError: the pickle has content that is read only with `trusted=True`.
            UnreadableError: the data is not a pickle, or ends early.
        """
        try:
            while not self._ran_slice():
                # Stack, marks and memo grow with every opcode.
                held = _STACK_BYTES * len(self.stack) + _MARK_BYTES * len(self.marks) + _MEMO_BYTES * len(self.memo)
                if held > self._memory:
                    raise _overspent()
            return self.stack.pop()
        except (IndexError, struct.error):
            raise UnreadableError("the pickle ends early, or pops an empty stack") from None
        except UnicodeDecodeError:
            raise UnreadableError("a text in the pickle is not valid UTF-8") from None

    # -- for the functions of a vocabulary ----------------------------------------------------------------------------

    def pay(self, cost: int) -> None:
        """Charge the allowance of work. Raises ObjectionError once it is spent."""
        self._left -= cost
        if self._left < 0:
            raise _overspent()

    def hold(self, nbytes: int) -> None:
        """Charge the allowance of memory. Raises ObjectionError once it is spent."""
        self._memory -= nbytes
        if self._memory < 0:
            raise _overspent()

    def pay_for(self, values: Any, *, hashed: bool = False) -> None:
        """Charge the copying of a list, or, if `hashed`, of a set or dictionary."""
        self.pay(len(values) * (_HASHED_BYTES if hashed else _LISTED_BYTES))

    def check_key(self, key: Any, container: Any) -> None:
        """Charge the hashing and comparing of a key before it is put into a dictionary or a set.

        Raises:
            ObjectionError: the key has too many parts, too many keys of the container have the same hash, or hashing
                the key costs too much.
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
        # Keep the container alive, so that no other container gets its id.
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
        if kind is Deferred or isinstance(value, type):
            return ()
        raise ObjectionError(f"a {kind.__name__} as a dictionary key")

    # -- opcodes ------------------------------------------------------------------------------------------------------

    def take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise UnreadableError("the pickle ends early")
        return self.data[start : self.position]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise UnreadableError("the pickle ends early")
        taken = self.data[self.position : end]
        self.position = end + 1
        return taken

    def popped(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def discard(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def pop_mark(self) -> int:
        if not self.marks:
            raise UnreadableError("an opcode needs a mark, and the stack has none")
        return self.marks.pop()

    def make(self, value: Any, nbytes: int) -> None:
        """Push a new container, which takes `nbytes` without its members."""
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
            # The C unpickler's memo is an array as long as its largest number, which could exhaust memory.
            raise ObjectionError(f"memo number {place}, which is larger than the pickle")
        if type(value) is Shell:
            value.places.append(place)
        self.memo[place] = value

    def recall(self, place: int) -> Any:
        if place not in self.memo:
            raise UnreadableError("the pickle refers to a number that its memo lacks")
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
        raise RefusedError(f"{renamed[0][:MOST_TEXT]}.{renamed[1]}"[:MOST_TEXT])

    def call(self, function: Any, arguments: Any, *, new: bool = False) -> Any:
        """Return the object that a call makes, after checks, or the deferred call."""
        if type(arguments) is not tuple:
            raise ObjectionError("a call whose arguments are not a tuple")
        self.pay(1 + len(arguments))
        self.hold(_INSTANCE_BYTES)
        maker = self.vocabulary.makers.get(id(function))
        if maker is not None:
            return self._attempt(maker, *arguments)
        if type(function) is Registered and (new or function.called):
            return Deferred(function.value, arguments, new=new)
        raise ObjectionError(f"a call of {name_of(function)}")

    def change(self, target: Any, state: Any) -> Any:
        """Set the state of an object. Returns the object, or the object that replaces it."""
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
        if kind is not Deferred:
            raise _unchangeable(target)
        target.change = (state,)
        return target

    def set_items(self, target: Any, items: list[Any]) -> None:
        """Set items of a dictionary. In `items`, keys and values alternate."""
        if len(items) % 2:
            raise UnreadableError("a key has no value")
        self.hold(_PAIR_BYTES * (len(items) >> 1))
        if type(target) in _MAPPINGS:
            self._attempt(_set_items, target, items)
        elif type(target) is Deferred:
            target.pairs += zip(items[::2], items[1::2], strict=True)
        else:
            raise _unchangeable(target)

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in _APPENDABLE:
            raise _unchangeable(target)
        target.extend(items)

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise _unchangeable(target)
        self.fill(target, items)

    def fill(self, target: set[Any], items: Any) -> set[Any]:
        """Add items to a set, with checks, and return the set."""
        self._attempt(_add_items, target, items)
        return target

    def _attempt(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call `act` with this machine. Any error that `act` raises becomes an ObjectionError."""
        try:
            return act(self, *arguments)
        except (RefusedError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - constructors reject arguments with many kinds of errors
            raise ObjectionError(f"{type(error).__name__}: {error}") from None

    def persistent(self, pid: Any) -> Any:
        if self._persistent is None:
            raise UnreadableError("the pickle refers to an object outside of it")
        return self._persistent(pid)

    def _ran_slice(self) -> bool:
        """Run up to 4,096 opcodes. Returns True after STOP, which leaves the value on the stack."""
        # The frequent opcodes are inlined in one loop: metadata of 100,000 items has six million opcodes.
        data, stack, marks, memo, steps = self.data, self.stack, self.marks, self.memo, STEPS
        push, pop = stack.append, stack.pop
        u32 = struct.Struct("<I").unpack_from
        position = self.position
        for _ in _SLICE:
            code = data[position]
            position += 1
            if code == 0x6A:  # LONG_BINGET
                (i,) = u32(data, position)
                position += 4
                push(memo[i] if i in memo else self.recall(i))
            elif code == 0x94:  # MEMOIZE
                value = stack[-1]
                if type(value) is Shell:
                    value.places.append(len(memo))
                memo[len(memo)] = value
            elif code == 0x68:  # BINGET
                i = data[position]
                position += 1
                push(memo[i] if i in memo else self.recall(i))
            elif code == 0x4B:  # BININT1
                push(data[position])
                position += 1
            elif code == 0x28:  # MARK
                marks.append(len(stack))
            elif code == 0x29:  # EMPTY_TUPLE
                push(())
            elif code == 0x81:  # NEWOBJ
                arguments = pop()
                stack[-1] = self.call(stack[-1], arguments, new=True)
            elif code == 0x62:  # BUILD
                state = pop()
                stack[-1] = self.change(stack[-1], state)
            elif code == 0x75:  # SETITEMS
                at = self.pop_mark()
                items = stack[at:]
                del stack[at:]
                self.set_items(stack[-1], items)
            elif code == 0x7D:  # EMPTY_DICT
                self.hold(DICT_BYTES)
                push({})
            elif code == 0x85:  # TUPLE1
                self.hold(TUPLE_BYTES)
                stack[-1] = (stack[-1],)
            elif code == 0x86:  # TUPLE2
                self.hold(TUPLE_BYTES)
                value = pop()
                stack[-1] = (stack[-1], value)
            elif code == 0x52:  # REDUCE
                arguments = pop()
                stack[-1] = self.call(stack[-1], arguments)
            elif code == 0x4D:  # BININT2
                push(data[position] | data[position + 1] << 8)
                position += 2
            elif code == 0x4A:  # BININT
                push(int.from_bytes(data[position : position + 4], "little", signed=True))
                position += 4
            elif code == 0x8C:  # SHORT_BINUNICODE
                stop = position + 1 + data[position]
                push(str(data[position + 1 : stop], "utf-8", "surrogatepass"))
                position = stop
            elif code == 0x2E:  # STOP
                self.position = position
                return True
            else:
                step = steps.get(code)
                if step is None:
                    raise UnreadableError(f"byte {position - 1} is not an opcode: 0x{code:02x}")
                self.position = position
                step(self)
                position = self.position
        self.position = position
        return False


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


def _overspent() -> ObjectionError:
    return ObjectionError("more work or memory than its length allows")


def _unchangeable(target: Any) -> ObjectionError:
    return ObjectionError(f"a change of {name_of(target)}")


# The rarer opcodes

Step = Callable[[Machine], Any]


def _global(machine: Machine) -> Any:
    machine.named = True
    module = machine.line().decode("utf-8", "replace")
    ahead = machine.data[machine.position : machine.position + _LONGEST_NAME]
    if b"\n" not in ahead:
        # A name too long, or cut off by the end of the data, is refused like an unknown name.
        raise RefusedError(f"{module}.{ahead.decode('utf-8', 'replace')}"[:MOST_TEXT])
    return machine.find(module, machine.line().decode("utf-8", "replace"))


def _stack_global(machine: Machine) -> Any:
    module, name = machine.popped(2)
    if type(name) is not str or type(module) is not str:
        raise ObjectionError("a name that is not text")
    return machine.find(module, name)


def _extension(machine: Machine) -> None:
    raise ObjectionError("an extension of copyreg")


def _newobj_ex(machine: Machine) -> Any:
    function, arguments, named = machine.popped(3)
    if type(named) is not dict or named:
        raise ObjectionError("a call with named arguments")
    return machine.call(function, arguments, new=True)


def _set_item(machine: Machine) -> None:
    items = machine.popped(2)
    machine.set_items(machine.stack[-1], items)


def _pushing(value: Step) -> Step:
    """Return the step that pushes the result of `value`."""
    return lambda machine: machine.stack.append(value(machine))


def _sized(width: int, made: Callable[[bytes], Any]) -> Step:
    return _pushing(lambda machine: made(machine.take(machine.number(width))))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _integer(raw: bytes) -> int:
    if len(raw) > MAX_INTEGER_BYTES:
        raise ObjectionError(f"an integer of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _old(check: Step) -> Step:
    def step(machine: Machine) -> None:
        check(machine)  # fails for data that Python's unpickler cannot read either
        raise ObjectionError(_OLD)

    return step


_BY_NAME: dict[str, Step] = {
    "PROTO": lambda m: m.take(1),
    "FRAME": lambda m: m.take(8),
    "POP": lambda m: m.discard(),
    "POP_MARK": lambda m: m.to_mark(),
    "DUP": _pushing(lambda m: m.stack[-1]),
    "BINPUT": lambda m: m.memoize(m.number(1)),
    "LONG_BINPUT": lambda m: m.memoize(m.number(4)),
    "NONE": _pushing(lambda m: None),
    "NEWTRUE": _pushing(lambda m: True),
    "NEWFALSE": _pushing(lambda m: False),
    "LONG1": _sized(1, _integer),
    "LONG4": _sized(4, _integer),
    "BINFLOAT": _pushing(lambda m: struct.unpack(">d", m.take(8))[0]),
    "BINUNICODE": _sized(4, _text),
    "BINUNICODE8": _sized(8, _text),
    "SHORT_BINBYTES": _sized(1, bytes),
    "BINBYTES": _sized(4, bytes),
    "BINBYTES8": _sized(8, bytes),
    "BYTEARRAY8": _sized(8, bytearray),
    "EMPTY_LIST": lambda m: m.make([], LIST_BYTES),
    "EMPTY_SET": lambda m: m.make(set(), SET_BYTES),
    "TUPLE": lambda m: m.make(tuple(m.to_mark()), TUPLE_BYTES),
    "TUPLE3": lambda m: m.make(tuple(m.popped(3)), TUPLE_BYTES),
    "FROZENSET": lambda m: m.make(frozenset(m.fill(set(), m.to_mark())), SET_BYTES),
    "APPEND": lambda m: m.append(m.popped(1)),
    "APPENDS": lambda m: m.append(m.to_mark()),
    "ADDITEMS": lambda m: m.add(m.to_mark()),
    "SETITEM": _set_item,
    "GLOBAL": _pushing(_global),
    "STACK_GLOBAL": _pushing(_stack_global),
    "NEWOBJ_EX": _pushing(_newobj_ex),
    **dict.fromkeys(["EXT1", "EXT2", "EXT4"], _extension),
    "BINPERSID": _pushing(lambda m: m.persistent(m.stack.pop())),
    **dict.fromkeys(
        ["FLOAT", "GET", "INST", "INT", "LONG", "PERSID", "PUT", "STRING", "UNICODE"], _old(lambda m: m.line())
    ),
    **dict.fromkeys(["DICT", "LIST", "OBJ"], _old(lambda m: m.pop_mark())),
    "BINSTRING": _old(lambda m: m.take(m.number(4))),
    "SHORT_BINSTRING": _old(lambda m: m.take(m.number(1))),
}

STEPS: dict[int, Step] = {
    ord(opcode.code): _BY_NAME[opcode.name] for opcode in pickletools.opcodes if opcode.name in _BY_NAME
}
