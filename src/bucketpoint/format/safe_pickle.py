"""Reading pickles that anybody may have written: the allow-list unpickler, and what a safe load would refuse. No I/O.

The lists themselves are in `allow_list`. Nothing in here imports a module or calls an object that a pickle names.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from bucketpoint.errors import UnsafeDataError
from bucketpoint.format.allow_list import ITEM_GLOBALS
from bucketpoint.format.pickle_survey import MalformedPickleError, survey

__all__ = [
    "AllowListUnpickler",
    "MalformedPickleError",
    "check_stream",
    "has_bounded_records",
    "refused_globals",
    "registered_globals",
]

_ZIP_MAGIC = b"PK\x03\x04"  # what torch.load itself goes by
_LEGACY_PICKLES = 5  # magic number, protocol, system, object, storage keys: torch.save's format before 1.6


class AllowListUnpickler(pickle.Unpickler):
    """An unpickler for which the world consists of the names in a table.

    Args:
        data: one pickle that `check_stream` has passed.
        table: what to give for each (module, name). Python classes must not be in it: a pickle can set attributes on
            whatever it can name, so the table holds stand-ins made for this one load, or immutable built-in objects.
        url: where the pickle came from, for messages.
    """

    def __init__(self, data: bytes, table: Mapping[tuple[str, str], Any], *, url: str | None = None) -> None:
        # Extension codes that some import resolved earlier would come from this cache without asking `find_class`.
        copyreg.clear_extension_cache()
        super().__init__(io.BytesIO(data))
        self._table = table
        self._url = url

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return self._table[module, name]
        except KeyError:
            raise UnsafeDataError(
                f"The pickle names {module}.{name}, which is not on the allow-list", url=self._url
            ) from None


def refused_globals(data: bytes | bytearray | memoryview) -> list[str] | None:
    """The names that keep a bytes item from being loaded safely, each once, or an empty list if nothing does.

    An item is torch.save's output in any of its formats, or a bare pickle. Besides names that are not on the
    allow-list, the list holds constructs that no writer produces and that could do harm, in angle brackets. Classes
    that the user registered with `torch.serialization.add_safe_globals` count as allowed.

    Returns:
        None if this is neither a pickle nor torch.save's zip, so that loading it as one runs nothing.
    """
    raw = bytes(data)
    allowed = ITEM_GLOBALS | registered_globals()
    if raw[:4] == _ZIP_MAGIC:
        return _refused_in_zip(raw, allowed)
    refused: dict[str, None] = {}
    position = 0
    for number in range(_LEGACY_PICKLES):
        found = survey(raw, position, allowed)
        refused.update(dict.fromkeys(found.refused))
        if found.end is None:
            # Whatever names came before the pickle broke off have been judged; a load stops here as well.
            return list(refused) if refused or number or found.named else None
        position = found.end
        if position == len(raw):
            break
    return list(refused)


def _refused_in_zip(raw: bytes, allowed: frozenset[tuple[str, str]]) -> list[str] | None:
    if not _is_stored(io.BytesIO(raw), len(raw)):
        return ["<a compressed archive>"]
    # torch's own reader, so that a zip with two directories cannot show one data.pkl here and another one there.
    try:
        reader = torch._C.PyTorchFileReader(io.BytesIO(raw))
        records = reader.get_all_records()
        if "constants.pkl" in records:
            return ["torch.jit.load"]
        if "data.pkl" not in records:
            return None
        body = reader.get_record("data.pkl")
    except (RuntimeError, ValueError):
        # Of a directory that points before the file's beginning, and of names that are no text: ValueError.
        return None
    return list(dict.fromkeys(survey(body, 0, allowed).refused))


def has_bounded_records(file: io.BytesIO) -> bool:
    """Whether this is torch.save's zip, and no record of it becomes more than there is of it. Rewinds the file.

    torch's older formats, which DCP has never written, take memory by sizes in them before they are compared with it.
    """
    nbytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    bounded = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC and _is_stored(file, nbytes)
    file.seek(0)
    return bounded


def _is_stored(file: io.BytesIO, nbytes: int) -> bool:
    """Whether no record is compressed: torch compresses none, and a small one could become any amount of memory."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError):
        return True  # torch reads no more of it than its own bounds allow, or refuses it
    return all(one.compress_type == zipfile.ZIP_STORED and one.file_size <= nbytes for one in entries)


def registered_globals() -> frozenset[tuple[str, str]]:
    """What the user added with `torch.serialization.add_safe_globals`."""
    names = []
    for item in torch.serialization.get_safe_globals():
        full = item[1] if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}"
        module, _, name = full.rpartition(".")
        names.append((module, name))
    return frozenset(names)


_NO_ARGUMENT = rb"()N}\]tRbaesu012\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94"
_RUN = re.compile(
    rb"(?:["
    + _NO_ARGUMENT
    + rb"]+|[Khq\x80].|M..|[Jj].{4}|\x8a\x05.{5}|[G\x95].{8}|\x8c(?:"
    # Attribute names of the dataclasses are short; longer strings leave the pattern, as a branch costs time for all.
    + b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(24))
    + rb")){1,512}",
    re.DOTALL,
)
_SIZED = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x8A: 1, 0x43: 1, 0x42: 4, 0x8E: 8, 0x55: 1, 0x54: 4}
_LINES = {0x63: 2}  # GLOBAL, which protocols 0 to 3 use
_STOP, _LONG_BINPUT = 0x2E, 0x72


def check_stream(data: bytes) -> None:
    """Walk over a pickle's opcodes so that unpickling it cannot allocate more than some multiple of its own length.

    An unpickler believes lengths and memo numbers before it has seen that many bytes. Opcodes that DCP's metadata
    never has (protocol 0's text, persistent ids, extension codes, INST and OBJ) are refused as well.

    Raises:
        MalformedPickleError: it is no pickle, it breaks off, or it has such an opcode.
    """
    size, position = len(data), 0
    while True:
        run = _RUN.match(data, position)
        if run is not None:
            position = run.end()
            continue
        if position >= size:
            raise MalformedPickleError("it breaks off")
        code = data[position]
        position += 1
        if code == _STOP:
            return
        if code in _SIZED:
            width = _SIZED[code]
            position += width + int.from_bytes(data[position : position + width], "little")
        elif code in _LINES:
            for _ in range(_LINES[code]):
                position = data.find(b"\n", position) + 1
                if not position:
                    raise MalformedPickleError("it breaks off")
        elif code == _LONG_BINPUT:
            if int.from_bytes(data[position : position + 4], "little") > size:
                raise MalformedPickleError("it numbers more objects than it can hold")
            position += 4
        else:
            raise MalformedPickleError(f"it has the opcode 0x{code:02x} at byte {position - 1}")
        if position > size:
            raise MalformedPickleError("it breaks off")
