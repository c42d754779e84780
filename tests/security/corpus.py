"""Malicious pickles, by hand or by `__reduce__`: each would run something, or take far more memory than it has."""

from __future__ import annotations

import builtins
import codecs
import collections
import copyreg
import ctypes
import functools
import importlib
import io
import itertools
import logging.config
import marshal
import operator
import os
import pdb
import pickle
import pty
import runpy
import shutil
import struct
import subprocess
import timeit
import webbrowser
from typing import Any

import numpy as np
import torch

from bucketpoint.format.pickles.items import read_item
from bucketpoint.format.pickles.vocabulary import RefusedError, UnreadableError


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def short(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def stack_global(module: str, name: str) -> bytes:
    return short(module) + short(name) + b"\x93"


def refusal(data: bytes) -> str | None:
    """What an item is refused for; nothing if it is read, and None if it is no item."""
    try:
        read_item(data)
    except RefusedError as error:
        return str(error)
    except UnreadableError:
        return None
    return ""


P4 = b"\x80\x04"
ORDERED = global_("collections", "OrderedDict")


def programs(canary: str) -> dict[str, bytes]:
    """Pickles that create the file `canary` when they are loaded, or at least try to run something."""
    touch = f"touch {canary}"
    code = f"open({canary!r}, 'w')"
    arg = text(touch) + b"\x85R"
    memo = short("os") + b"\x940" + short("system") + b"\x940"
    calls: dict[str, Any] = {
        "os.system": Call(os.system, touch),
        "os.popen": Call(os.popen, touch),
        "os.execvp": Call(os.execvp, "touch", ["touch", canary]),
        "os.open": Call(os.open, canary, os.O_CREAT),
        "os.mkdir": Call(os.mkdir, canary),
        "os.remove": Call(os.remove, "/nonexistent"),
        "os.kill": Call(os.kill, 0, 0),
        "os._exit": Call(os._exit, 0),
        "subprocess.Popen": Call(subprocess.Popen, ["touch", canary]),
        "subprocess.check_output": Call(subprocess.check_output, ["touch", canary]),
        "pty.spawn": Call(pty.spawn, ["touch", canary]),
        "eval": Call(builtins.eval, code),
        "exec": Call(builtins.exec, code),
        "compile": Call(builtins.compile, code, "x", "eval"),
        "__import__": Call(builtins.__import__, "antigravity"),
        "open": Call(io.open, canary, "w"),
        "getattr": Call(builtins.getattr, Call(importlib.import_module, "os"), "system"),
        "setattr": Call(builtins.setattr, subprocess.Popen, "x", 1),
        "type": Call(type, "X", (), {}),
        "map": Call(map, os.system, [touch]),
        "filter": Call(filter, os.system, [touch]),
        "importlib.import_module": Call(importlib.import_module, "antigravity"),
        "importlib.reload": Call(importlib.reload, "os"),
        "runpy.run_path": Call(runpy.run_path, canary),
        "runpy.run_module": Call(runpy.run_module, "antigravity"),
        "timeit.timeit": Call(timeit.timeit, code, "pass"),
        "pdb.run": Call(pdb.run, code),
        "webbrowser.open": Call(webbrowser.open, "http://127.0.0.1:1"),
        "shutil.rmtree": Call(shutil.rmtree, canary),
        "shutil.move": Call(shutil.move, "/nonexistent", canary),
        "ctypes.CDLL": Call(ctypes.CDLL, "libc.so.6"),
        "logging.config": Call(logging.config.dictConfig, {"version": 1}),
        "operator.attrgetter": Call(operator.attrgetter("system"), os.getcwd),
        "operator.methodcaller": Call(operator.methodcaller("system", touch), 0),
        "functools.partial": functools.partial(os.system, touch),
        "functools.reduce": Call(functools.reduce, os.system, [touch]),
        "itertools.starmap": Call(itertools.starmap, os.system, [(touch,)]),
        "marshal.loads": Call(marshal.loads, b"N"),
        "pickle.loads": Call(pickle.loads, pickle.dumps(Call(os.system, touch))),
        "codecs.open": Call(codecs.open, canary, "w"),
        "copyreg.add_extension": Call(copyreg.add_extension, "os", "system", 77),
        "torch.load": Call(torch.load, canary),
        "torch.hub.load": Call(torch.hub.load, "owner/name", "model"),
        "torch.hub.download": Call(torch.hub.download_url_to_file, "http://127.0.0.1:1", canary),
        "torch.jit.load": Call(torch.jit.load, canary),
        "torch.storage": Call(torch.storage._load_from_bytes, b""),
        "torch.package": Call(importlib.import_module("torch.package").PackageImporter, canary),
        "a state that is set": Call(collections.OrderedDict, state=Call(os.system, touch)),
        "in a list": [1, [2, [Call(os.system, touch)]]],
        "in a key": {Call(os.getcwd): 1},
        "in a dictionary": {"model": {"layers": [{"w": Call(os.system, touch)}]}},
        "in a set": {Call(os.getcwd)},
        "as a default factory": collections.defaultdict(os.getcwd),
        "a bound method": [].append,
        "a class": subprocess.Popen,
        "a module's function": os.system,
        "numpy.load": Call(np.load, canary),
        "in a numpy array": np.array([Call(os.system, touch)], dtype=object),
    }
    found = {name: pickle.dumps(value, 4) for name, value in calls.items()}
    found |= {f"{name}, protocol 2": pickle.dumps(calls[name], 2) for name in ("os.system", "eval", "getattr")}
    found |= {f"{name}, protocol 0": pickle.dumps(calls[name], 0) for name in ("os.system", "exec", "in a list")}
    found |= {
        "GLOBAL, REDUCE": b"\x80\x02" + global_("os", "system") + arg + b".",
        "GLOBAL of posix": b"\x80\x02" + global_("posix", "system") + arg + b".",
        "GLOBAL with a dotted name": P4 + global_("os", "path.os.system") + arg + b".",
        "STACK_GLOBAL with a dotted name": P4 + stack_global("torch", "os.system") + arg + b".",
        "STACK_GLOBAL through an allowed module": P4 + stack_global("torch._utils", "sys.modules") + b".",
        "STACK_GLOBAL through an allowed class": P4 + stack_global("collections", "OrderedDict.__class__") + b".",
        "STACK_GLOBAL, dunder": P4 + stack_global("builtins", "list.__class__.__subclasses__") + b")R.",
        "STACK_GLOBAL out of the memo": P4 + memo + b"h\x00h\x01\x93" + arg + b".",
        "STACK_GLOBAL duplicated": P4 + short("os") + b"2\x93" + b".",
        "STACK_GLOBAL of names that are computed": P4 + global_("builtins", "str") + b")R" + short("system") + b"\x93.",
        "STACK_GLOBAL of bytes": P4 + b"C\x02os" + b"C\x06system" + b"\x93.",
        "torch.utils.cpp_extension": P4 + stack_global("torch.utils.cpp_extension", "load") + arg + b".",
        "types.FunctionType": P4 + stack_global("types", "FunctionType") + arg + b".",
        "types.CodeType": P4 + stack_global("types", "CodeType") + arg + b".",
        "torch.ops": P4 + stack_global("torch._ops", "_Ops.load_library") + arg + b".",
        "torch.compile": P4 + stack_global("torch", "compile") + arg + b".",
        "numpy.f2py": P4 + stack_global("numpy.f2py", "compile") + arg + b".",
        "a rebuild of another function": P4
        + stack_global("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + stack_global("builtins", "bytearray")
        + global_("torch", "Tensor")
        + b"J\xff\xff\xff\x0f\x85}t"
        + b"R.",
        "INST": b"(" + b"S'" + touch.encode() + b"'\n" + b"ios\nsystem\n.",
        "OBJ": b"(" + global_("os", "system") + text(touch) + b"o.",
        "NEWOBJ": P4 + global_("subprocess", "Popen") + b"(" + text(touch) + b"t\x81.",
        "NEWOBJ_EX": P4 + global_("subprocess", "Popen") + b"(" + text(touch) + b"t}\x92.",
        "BUILD of an allowed class": P4 + ORDERED + b"}" + text("__reduce__") + text("x") + b"sb.",
        "BUILD with slots": P4 + ORDERED + b"N}" + text("items") + text("x") + b"s\x86b.",
        "SETITEM on a class": P4 + ORDERED + text("a") + text("b") + b"s.",
        "APPEND to a class": P4 + global_("builtins", "list") + text("a") + b"a.",
        "a call of a string": P4 + text("os.system") + arg + b".",
        "a call of what a call returned": P4 + ORDERED + b")R)R.",
        "EXT1": P4 + b"\x82\x01)R.",
        "EXT2": P4 + b"\x83\x01\x01)R.",
        "EXT4": P4 + b"\x84\x01\x01\x01\x01)R.",
        "names of Python 2": b"\x80\x02" + global_("__builtin__", "eval") + text(code) + b"\x85R.",
        "exec of Python 2": b"\x80\x02" + global_("__builtin__", "execfile") + text(canary) + b"\x85R.",
        "commands of Python 2": b"\x80\x02" + global_("commands", "getoutput") + arg + b".",
        "a module with a trailing space": P4 + global_("os ", "system") + arg + b".",
        "a name that ends the file": P4 + b"cos\nsystem",
        "popped before anyone sees it": P4 + global_("os", "system") + arg + b"0N.",
        "behind a STOP that is not reached": P4 + b"(" + global_("os", "system") + arg + b"1N.",
        "in a frame": P4 + b"\x95" + struct.pack("<Q", 400) + global_("os", "system") + arg + b".",
        "in a list, by opcodes": P4 + b"]" + global_("os", "system") + arg + b"a.",
        "a name under a mark": P4 + b"(" + stack_global("os", "system") + b"1.",
        "BUILD on a function": P4 + global_("torch._utils", "_rebuild_tensor_v2") + b"}" + text("x") + b"K\x01sb.",
        "BUILD on a class, with slots": P4 + global_("argparse", "Namespace") + b"N}" + text("x") + b"K\x01s\x86b.",
    }
    return found


def _array(shape: bytes, code: str, raw: bytes) -> bytes:
    """An array whose state says `shape` and holds `raw`, both as opcodes."""
    core = "numpy._core.multiarray"
    dtype = (
        global_("numpy", "dtype")
        + text(code)
        + b"\x89\x88\x87R(K\x03"
        + text("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
    )
    shell = global_(core, "_reconstruct") + global_("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
    return P4 + shell + b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb."


def crashes() -> dict[str, bytes]:
    """Pickles of allowed names that ended the process, or never ended, in 0.1.0."""
    doubled = P4 + b")\x94" + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(64))
    lists = P4 + b"]\x94" + b"".join(b"]\x94(h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(60))
    escape = global_("builtins", "str") + global_("_codecs", "encode")
    same_hash = b"".join(b"\x8a\x0a" + (n * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for n in range(1, 2000))
    million = b"J" + struct.pack("<i", 1 << 20)
    seconds = global_("numpy", "dtype") + text("M8") + b"\x89\x88\x87R"
    formats = global_("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
    copies = P4 + b"]\x94(" + b"K\x01" * 5000 + b"e0" + global_("builtins", "tuple") + b"\x94("
    return {
        "an array of objects that are not there": _array(million + b"\x85", "O8", b"]NaNa"),
        "an array of numbers that are not there": _array(
            million + b"\x85", "f8", b"C\x08\x00\x00\x00\x00\x00\x00\x00\x00"
        ),
        "a scalar of two gigabytes": P4
        + global_("numpy._core.multiarray", "scalar")
        + global_("numpy", "dtype")
        + text("V2000000000")
        + b"\x89\x88\x87RC\x00\x86R.",
        "text of shared lists": lists + global_("builtins", "str") + b"h\x3c\x85R.",
        "text escaped again and again": P4
        + escape * 28
        + text("\\" * 8)
        + (text("unicode_escape") + b"\x86R\x85R") * 28
        + b".",
        "a doubled tuple as a key": doubled + b"}h\x40Ns.",
        "a doubled tuple in a set": doubled + b"\x8f(h\x40\x90.",
        "a doubled tuple as a layout": doubled + global_("torch.serialization", "_get_layout") + b"h\x40\x85R.",
        "a doubled tuple as a unit of time": doubled
        + seconds
        + (b"(K\x04" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00}(h\x40K\x01K\x01K\x01t\x86tb."),
        "a doubled tuple as a memory format": doubled + formats + b"h\x40\x85R.",
        "a doubled tuple as the name of a memory format": doubled
        + (global_("builtins", "getattr") + formats + b"h\x40\x86R."),
        "a storage beyond all addresses": P4
        + (b"(" + text("storage") + global_("torch", "DoubleStorage") + text("0") + text("meta"))
        + (b"\x8a\x08" + struct.pack("<q", (1 << 62) - 1) + b"tQ."),
        "a deep tuple as a key": P4 + b"})" + b"\x85" * 200_000 + b"Ns.",
        "keys of one hash": P4 + b"}(" + same_hash + b"u.",
        "copies of one list": copies + b"h\x01h\x00\x85R" * 2000 + b"t.",
    }


def archive(body: bytes, storage: bytes = bytes(4)) -> bytes:
    """A file of torch.save with this pickle, and this storage as `0`."""
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    for name, record in (("data.pkl", body), ("byteorder", b"little"), ("data/0", storage)):
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    return stream.getvalue()


def repeated(count: int = 1 << 30) -> bytes:
    """Opcodes of a tensor that repeats one element."""
    pid = b"(" + text("storage") + global_("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x01tQ"
    size = b"\x8a\x08" + struct.pack("<q", count) + b"\x85K\x00\x85"
    return global_("torch._utils", "_rebuild_tensor_v2") + b"(" + pid + b"K\x00" + size + b"\x89" + ORDERED + b")RtR"


def expanding_archives() -> dict[str, bytes]:
    """Files of torch.save of a kilobyte that take gigabytes once something is made of their tensor."""
    device = global_("torch._utils", "_rebuild_device_tensor_from_cpu_tensor")
    found = {
        f"{name} of a tensor": P4 + global_(module, name) + repeated() + b"\x85R."
        for module, name in [
            ("builtins", "list"),
            ("builtins", "tuple"),
            ("collections", "Counter"),
            ("collections", "deque"),
        ]
    }
    found["a tensor of a device"] = (
        P4 + device + b"(" + repeated() + global_("torch", "float64") + text("cpu") + b"\x89tR."
    )
    return {name: archive(body) for name, body in found.items()}


HUGE32 = struct.pack("<I", 0x7FFFFFF0)
HUGE64 = struct.pack("<Q", 1 << 40)
ANY_SIZE = b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85R"


def builtin(name: str) -> bytes:
    return global_("builtins", name)


def bombs() -> dict[str, bytes]:
    """Short pickles that claim, or become, something very large."""
    deep = 200_000
    doubling = b"\x80\x02]q\x00" + b"".join(
        b"]q" + bytes([n + 1]) + b"(" + (b"h" + bytes([n])) * 10 + b"e" for n in range(30)
    )
    number = builtin("int") + text("1099511627776") + b"\x85R\x85R"
    shell = global_("numpy.core.multiarray", "_reconstruct") + global_("numpy", "ndarray")
    return {
        "BINUNICODE": P4 + b"X" + HUGE32 + b"x.",
        "BINUNICODE8": P4 + b"\x8d" + HUGE64 + b"x.",
        "BINBYTES": P4 + b"B" + HUGE32 + b"x.",
        "BINBYTES8": P4 + b"\x8e" + HUGE64 + b"x.",
        "BYTEARRAY8": b"\x80\x05\x96" + HUGE64 + b"x.",
        "BINSTRING": b"T" + HUGE32 + b"x.",
        "LONG4": b"\x80\x02\x8b" + HUGE32 + b"x.",
        "FRAME": P4 + b"\x95" + HUGE64 + b"N.",
        "LONG_BINPUT": P4 + b"Nr" + HUGE32 + b".",
        "deep lists": P4 + b"]" * deep + b"a" * (deep - 1) + b".",
        "deep tuples": P4 + b")" + b"\x85" * deep + b".",
        "deep marks": P4 + b"(" * deep + b".",
        "billion laughs": doubling + b".",
        "a bytearray of any size": P4 + builtin("bytearray") + ANY_SIZE + b".",
        "bytes of any size": P4 + builtin("bytes") + ANY_SIZE + b".",
        "a list of a range": P4 + builtin("list") + builtin("range") + ANY_SIZE + b"\x85R.",
        "a tensor of any size": P4 + global_("torch", "Tensor") + b"J\xff\xff\xff\x7f\x85R.",
        "an array of any size": P4 + shell + b"J\xff\xff\xff\x7f\x85C\x01b\x87R.",
        "a size that is computed": P4 + builtin("bytearray") + number + b".",
        "an untyped storage": P4 + global_("torch.storage", "UntypedStorage") + ANY_SIZE + b".",
    }
