"""Opcodes of pickles, and the loop that runs them on a `Machine`.

Opcodes that no writer of protocol 2 or later uses are refused.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any

from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.vocabulary import MalformedPickleError, Shell

MAX_INTEGER_BYTES = 2048
"""Limit on the bytes of an integer. Divisions, comparisons and hashes of longer ones cost far more than is charged."""

_SLICE = range(4096)
_LONGEST_NAME = 1024
_OLD = "<a pickle of protocol 0 or 1, or of Python 2: save it again with protocol 2 or later>"

# Memory that a container takes beside its members, on 64-bit CPython.
TUPLE_BYTES, LIST_BYTES, DICT_BYTES, SET_BYTES = 64, 72, 80, 232

Step = Callable[[Machine], Any]


def _global(machine: Machine) -> Any:
    machine.named = True
    module = machine.line().decode("utf-8", "replace")
    ahead = machine.data[machine.position : machine.position + _LONGEST_NAME]
    if b"\n" not in ahead:
        # A name that is cut off by the end of the file still counts as named.
        machine.refuse(f"{module}.{ahead.decode('utf-8', 'replace')}")
        raise MalformedPickleError("the pickle ends early")
    return machine.find(module, machine.line().decode("utf-8", "replace"))


def _stack_global(machine: Machine) -> None:
    module, name = machine.popped(2)
    if type(name) is str and type(module) is str:
        machine.push(machine.find(module, name))
    else:
        machine.named = True
        machine.push(machine.refuse("<a name that is not text>"))


def _extension(size: int) -> Step:
    def step(machine: Machine) -> None:
        machine.named = True
        machine.push(machine.refuse(f"<copyreg extension {machine.number(size)}>"))

    return step


def _newobj_ex(machine: Machine) -> None:
    function, arguments, named = machine.popped(3)
    if type(named) is not dict or named:
        machine.push(machine.refuse("<a call with named arguments>"))
    else:
        machine.push(machine.call(function, arguments, new=True))


def _set_item(machine: Machine) -> None:
    items = machine.popped(2)
    machine.set_items(machine.top(), items)


def _sized(width: int, made: Callable[[bytes], Any]) -> Step:
    return lambda machine: machine.push(made(machine.take(machine.number(width))))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _long(width: int) -> Step:
    def step(machine: Machine) -> None:
        raw = machine.take(machine.number(width))
        machine.push(
            int.from_bytes(raw, "little", signed=True)
            if len(raw) <= MAX_INTEGER_BYTES
            else machine.refuse(f"<an integer of {len(raw)} bytes>")
        )

    return step


def _old(check: Step) -> Step:
    def step(machine: Machine) -> None:
        check(machine)  # where it fails, so does Python's unpickler
        machine.refuse(_OLD)
        raise MalformedPickleError(_OLD)

    return step


_BY_NAME: dict[str, Step] = {
    "PROTO": lambda m: m.take(1),
    "FRAME": lambda m: m.take(8),
    "POP": lambda m: m.discard(),
    "POP_MARK": lambda m: m.to_mark(),
    "DUP": lambda m: m.push(m.top()),
    "BINPUT": lambda m: m.memoize(m.number(1)),
    "LONG_BINPUT": lambda m: m.memoize(m.number(4)),
    "NONE": lambda m: m.push(None),
    "NEWTRUE": lambda m: m.push(True),
    "NEWFALSE": lambda m: m.push(False),
    "LONG1": _long(1),
    "LONG4": _long(4),
    "BINFLOAT": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
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
    "GLOBAL": lambda m: m.push(_global(m)),
    "STACK_GLOBAL": _stack_global,
    "NEWOBJ_EX": _newobj_ex,
    "EXT1": _extension(1),
    "EXT2": _extension(2),
    "EXT4": _extension(4),
    "BINPERSID": lambda m: m.persistent(m.popped(1)[0]),
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


def run(machine: Machine) -> Any:
    """Run the pickle and return the value of it.

    Raises:
        MalformedPickleError: the data is not a pickle, or it breaks off.
        OverspentError: the pickle needs more work or memory than allowed.
    """
    try:
        while not _ran_slice(machine):
            machine.weigh()
        return machine.stack.pop()
    except (IndexError, struct.error):
        raise MalformedPickleError("the pickle ends early, or takes more from its stack than there is") from None
    except UnicodeDecodeError:
        raise MalformedPickleError("a text in the pickle is not valid UTF-8") from None


def _ran_slice(machine: Machine) -> bool:
    """Run some thousand opcodes. Return True if the last one was STOP, which leaves the value on the stack."""
    # The frequent opcodes are inlined in one loop: metadata of 100,000 items has six million opcodes.
    data, stack, marks, memo, steps = machine.data, machine.stack, machine.marks, machine.memo, STEPS
    push, pop = stack.append, stack.pop
    u32 = struct.Struct("<I").unpack_from
    position = machine.position
    for _ in _SLICE:
        code = data[position]
        position += 1
        if code == 0x6A:  # LONG_BINGET
            (i,) = u32(data, position)
            position += 4
            push(memo[i] if i in memo else machine.recall(i))
        elif code == 0x94:  # MEMOIZE
            value = stack[-1]
            if type(value) is Shell:
                value.places.append(len(memo))
            memo[len(memo)] = value
        elif code == 0x68:  # BINGET
            i = data[position]
            position += 1
            push(memo[i] if i in memo else machine.recall(i))
        elif code == 0x4B:  # BININT1
            push(data[position])
            position += 1
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code == 0x29:  # EMPTY_TUPLE
            push(())
        elif code == 0x81:  # NEWOBJ
            arguments = pop()
            stack[-1] = machine.call(stack[-1], arguments, new=True)
        elif code == 0x62:  # BUILD
            state = pop()
            stack[-1] = machine.change(stack[-1], state)
        elif code == 0x75:  # SETITEMS
            at = machine.pop_mark()
            items = stack[at:]
            del stack[at:]
            machine.set_items(stack[-1], items)
        elif code == 0x7D:  # EMPTY_DICT
            machine.hold(DICT_BYTES)
            push({})
        elif code == 0x85:  # TUPLE1
            machine.hold(TUPLE_BYTES)
            stack[-1] = (stack[-1],)
        elif code == 0x86:  # TUPLE2
            machine.hold(TUPLE_BYTES)
            value = pop()
            stack[-1] = (stack[-1], value)
        elif code == 0x52:  # REDUCE
            arguments = pop()
            stack[-1] = machine.call(stack[-1], arguments)
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
            machine.position = position
            return True
        else:
            step = steps.get(code)
            if step is None:
                raise MalformedPickleError(f"byte {position - 1} is not an opcode: 0x{code:02x}")
            machine.position = position
            step(machine)
            position = machine.position
    machine.position = position
    return False
