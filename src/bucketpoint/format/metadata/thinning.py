"""Thinning of a `.metadata` pickle to the weights, in one pass over its opcodes.

Entries of the optimizer are left out, and all other opcodes are copied. The pickle must have the form that bucketpoint
writes. 100,000 items take 14 MB of memory; with a Python object per item they would take 220 MB.
"""

from __future__ import annotations

import functools
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bucketpoint.errors import MetadataError
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import OPTIM
from bucketpoint.format.index.ref import INDEX_ATTRIBUTE, index_path
from bucketpoint.format.metadata.facts import _EXTRA, check_whole, extra, make_record, not_metadata
from bucketpoint.format.metadata.plain import read_metadata
from bucketpoint.format.pickles.metadata_vocabulary import framed, recall, text_header, unframed, unshared
from bucketpoint.format.record import CommitRecord

WEIGHTS = "weights"
"""Kind of a checkpoint whose optimizer was deleted."""

_STATE, _PLANNER, _STORAGE, _ROOT = "state_dict_metadata", "planner_data", "storage_data", "metadata"
_NAME, _PATH, _CHUNKS = "fqn", "relative_path", "chunks"
_FIELDS = {_NAME, _PATH, _CHUNKS}

_Keep = Callable[[str, Any, Any], bool]
"""Function that decides whether a dictionary keeps a pair, by the dictionary's name, the key, and the value."""


class Outline:
    """Content of a `.metadata` pickle, except the items.

    Attributes:
        facts: facts that bucketpoint wrote beside DCP's fields.
        paths: paths of the objects that contain the items.
        items: number of items.

    Raises:
        UnsafeDataError, MetadataError, CheckpointDeletedError: as `decode_metadata`; MetadataError also if the pickle
            has another form than bucketpoint's.
    """

    def __init__(self, data: bytes) -> None:
        check_whole(data, None)
        self._data, self._recalled = data, _recalled(data)
        self.paths: set[str] = set()
        self.items = 0
        self._tensors: set[str] = set()
        self._names: dict[bool, set[str]] = {True: set(), False: set()}
        self._metadata = read_metadata(filtered(data, self._recalled, self._count))
        self.facts = extra(self._metadata)

    def _count(self, dictionary: str, key: Any, value: Any) -> bool:
        if dictionary == _STATE and _CHUNKS in (value or ()):
            self._tensors.add(key)
        elif dictionary == _STORAGE:
            name, path = key[_NAME], value[_PATH]
            self.items += 1
            self.paths.add(path)
            self._names[holds_optimizer(path)].add(name)
        return dictionary == _ROOT

    def record(self, *, metadata_etag: str | None) -> CommitRecord:
        """Make the record of the checkpoint, without `covers`, which cannot be computed without the items."""
        sizes = {path: int(fact["size"]) for path, fact in self.facts.get("objects", {}).items()}
        made = make_record(
            self._metadata, self.facts, self._data, sizes, items=self.items, metadata_etag=metadata_etag, covers=None
        )
        return replace(made, tensors=len(self._tensors))

    def thinned(self, etag: str | None = None) -> bytes:
        """Return the bytes of the metadata without the optimizer's entries.

        Args:
            etag: ETag of the metadata to be replaced. It is stored, so that a save that has read the old metadata may
                still overwrite the checkpoint.

        Raises:
            MetadataError: weights and optimizer share objects, as other writers store them; or there are no weights; or
                no object contains only optimizer state.
        """
        names, optimizer = self._names[False], self._names[True]
        goes = {path for path in self.paths if holds_optimizer(path)}
        if not goes:
            raise MetadataError("The checkpoint has no object that holds only optimizer state")
        if not names or names & optimizer:
            raise MetadataError("Weights and optimizer state share objects, or there are no weights")

        def keep(dictionary: str, key: Any, value: Any) -> bool:
            if dictionary == _STORAGE:
                return key[_NAME] in names
            return key not in (_EXTRA, INDEX_ATTRIBUTE) if dictionary == _ROOT else key in names

        objects = {path: fact for path, fact in self.facts.get("objects", {}).items() if path not in goes}
        token = self.facts.get("token")
        # The index has the metadata before thinning. The new metadata does not refer to it, so delete it too.
        index = {index_path(token)} if isinstance(token, str) and keys.is_token(token) else set()
        # The paths are stored because another pruner may have to finish the thinning.
        facts = {"kind": WEIGHTS, "objects": objects, "thinned_from": etag, "thinned_paths": sorted(goes | index)}
        added = text_header(len(_EXTRA)) + _EXTRA.encode() + (unframed(unshared({**self.facts, **facts})) or b"")
        hidden = vars(self._metadata).get(INDEX_ATTRIBUTE)
        return filtered(self._data, self._recalled, keep, added=added, hidden=hidden)


@functools.lru_cache(maxsize=1 << 12)
def holds_optimizer(path: str) -> bool:
    """Return True if the object at a data path contains optimizer state."""
    named = keys.parse_data_path(path)
    return named is not None and named[2] == OPTIM


def filtered(data: bytes, recalled: set[int], keep: _Keep, *, added: bytes = b"", hidden: str | None = None) -> bytes:
    """Copy a metadata pickle without the pairs that `keep` rejects.

    Args:
        recalled: memo entries to which the pickle refers.
        keep: called for each pair of the metadata's attributes (dictionary `metadata`), and of the dictionaries
            `state_dict_metadata`, `planner_data` and `storage_data`.
        added: opcodes of one more attribute.
        hidden: text that is replaced by an empty one.

    Raises:
        MetadataError: the pickle has another form than bucketpoint's.
    """
    try:
        return framed(_Filter(data, recalled, keep, added, hidden).run())
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise not_metadata(f"it is not in bucketpoint's own form: {error}", None) from None


def _recalled(data: bytes) -> set[int]:
    """Return the memo entries to which a pickle refers."""
    position, found = 0, set()
    try:
        while (code := data[position]) != _STOP:
            size = _SIZES[code]
            stop = position + 1 + size if size >= 0 else _after(data, position + 1, size)
            if code in _RECALLS:
                found.add(int.from_bytes(data[position + 1 : stop], "little"))
            position = stop
    except (IndexError, KeyError) as error:
        raise not_metadata(f"it is not in bucketpoint's own form: {error}", None) from None
    return found


_MARK, _POP, _STOP, _TUPLE, _MEMOIZE = (ord(c) for c in "(0.t\x94")
_EMPTY_DICT, _BUILD, _SETITEM = ord("}"), ord("b"), ord("s")

_SIZES: dict[int, int] = {
    **dict.fromkeys(b"N\x88\x89)}](0t\x85\x86\x87\x81Rb\x93aseu\x94.", 0),
    **dict.fromkeys(b"Kh\x80", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jj", 4),
    **dict.fromkeys(b"G\x95", 8),
    **dict.fromkeys(b"\x8c\x8a", -1),
    **dict.fromkeys(b"X", -4),
}
"""Size of an opcode's argument in bytes; if negative, size of the length field before the argument."""

_MAX_MARKS = 64
_MAX_BATCH = 4096  # Python's pickler pushes at most 2,001 values before it sets them in a dictionary

_TEXTS = set(b"\x8cX")
_RECALLS, _BATCHES = set(b"hj"), set(b"ue")
_UNFRAMED = set(b"\x80\x95")
_POPPED: dict[int, int] = {
    **dict.fromkeys(b"\x85", 1),  # TUPLE1
    **dict.fromkeys(b"\x86\x81Rb\x93a", 2),  # TUPLE2, NEWOBJ, REDUCE, BUILD, STACK_GLOBAL, APPEND
    **dict.fromkeys(b"\x87", 3),  # TUPLE3
}
"""Number of values on the stack that an opcode replaces by one."""


def _after(data: bytes, first: int, size: int) -> int:
    """Return the position after an argument that begins with its length."""
    return first - size + int.from_bytes(data[first : first - size], "little")


class _Filter:
    """One pass over a pickle, which decodes only texts and the fields by which `keep` decides.

    A pair that is left out may contain the first occurrence of a value to which later opcodes refer. Such a value is
    kept: it is pushed, memoized, and popped again.
    """

    def __init__(self, data: bytes, recalled: set[int], keep: _Keep, added: bytes, hidden: str | None) -> None:
        self._data, self._recalled, self._keep = data, recalled, keep
        self._added, self._hidden = added, hidden
        self._out = bytearray()
        # For each value on the stack: the position of its first opcode in the output, and its decoded value.
        self._places: list[int] = []
        self._values: list[Any] = []
        # For each mark: height of the stack, position in the output, and name of the dictionary whose pairs follow.
        self._marks: list[tuple[int, int, str | None]] = []
        # Begin and end, in the output, of the memoized values in the pairs.
        self._numbered: list[tuple[int, int]] = []

    def run(self) -> bytearray:
        """Return the opcodes that are kept."""
        data, out, places, values = self._data, self._out, self._places, self._values
        marks, recalled = self._marks, self._recalled
        memo: dict[int, Any] = {}
        numbers: dict[int, int] = {}
        position = count = 0
        # Shared names may all lie on the stack at once. Each takes four bytes or more of the pickle.
        most = _MAX_BATCH + len(data) // 4
        while True:
            begin, code, place = position, data[position], len(out)
            size = _SIZES[code]
            position = begin + 1 + size if size >= 0 else _after(data, begin + 1, size)
            if len(values) > most or len(marks) > _MAX_MARKS:
                raise ValueError("its stack is too high")
            if code == _MEMOIZE:
                if count in recalled:
                    memo[count] = values[-1] if type(values[-1]) is str else None
                    numbers[count] = len(numbers)
                    out.append(code)
                    self._number()
                count += 1
                continue
            if code in _RECALLS:
                number = int.from_bytes(data[begin + 1 : position], "little")
                out += recall(numbers[number])
                places.append(place)
                values.append(memo[number])
                continue
            if code in _UNFRAMED:
                continue
            out += data[begin:position]
            value, popped = None, _POPPED.get(code)
            if popped is not None:
                place = places[-popped]
                if code == _BUILD:
                    value = values[-1]
                del places[-popped:], values[-popped:]
            elif code == _MARK:
                marks.append((len(values), place, self._dictionary(len(values) - 1)))
                continue
            elif code == _TUPLE:
                height, place, _ = marks.pop()
                del places[height:], values[height:]
            elif code in _BATCHES:
                del out[place:]
                height, _, name = marks.pop()
                self._set(height, name)
                if name == _ROOT:
                    out += self._added
                    self._added = b""
                out.append(code)
                continue
            elif code == _SETITEM:
                del out[place:]
                height = len(values) - 2
                if self._set(height, self._dictionary(height - 1)):
                    out.append(code)
                continue
            elif code == _POP:
                places.pop(), values.pop()
                continue
            elif code in _TEXTS:
                value = data[begin + 1 - size : position].decode("utf-8", "surrogatepass")
                if value == self._hidden:
                    out[place:] = text_header(0)
            elif code == _EMPTY_DICT:
                value = {}
            elif code == _STOP:
                if len(values) != 1 or marks or self._added:
                    raise ValueError("its stack is not one value")
                return out
            places.append(place)
            values.append(value)
            if code == _BUILD and marks and marks[-1][2] in (_STATE, _STORAGE):
                height = marks[-1][0]
                if not (len(values) - height) % 2:
                    self._set(height, marks[-1][2])

    def _dictionary(self, at: int) -> str | None:
        """Return the name of the dictionary at this position of the stack, if `keep` decides on its pairs."""
        if at < 0 or type(self._values[at]) is not dict:
            return None
        marks = self._marks
        if not marks:
            return _ROOT if at == 1 else None
        if len(marks) > 1:
            return None
        if marks[0][2] == _ROOT:
            name = self._values[at - 1]
            return name if at % 2 and name in (_STATE, _PLANNER, _STORAGE) else None
        # `planner_data` may precede the metadata, among the shared values.
        return _PLANNER if marks[0][0] == 0 else None

    def _number(self) -> None:
        """Record that the top value of the stack is memoized."""
        place, numbered = self._places[-1], self._numbered
        while numbered and numbered[-1][0] >= place:
            numbered.pop()
        numbered.append((place, len(self._out)))

    def _set(self, height: int, name: str | None) -> bool:
        """Pop the pairs above this height of the stack. Returns True if all of them are kept."""
        places, values, out = self._places, self._values, self._out
        pairs = list(zip(values[height::2], values[height + 1 :: 2], strict=name is not None))
        stays = True
        if name is None:
            if height and type(values[height - 1]) is dict:
                values[height - 1].update((key, value) for key, value in pairs if type(key) is str and key in _FIELDS)
        elif pairs:
            begins = places[height::2]
            numbered = []
            while self._numbered and self._numbered[-1][0] >= begins[0]:
                numbered.append(self._numbered.pop())
            parts: list[bytes | bytearray] = []
            for (key, value), begin, end in zip(pairs, begins, [*begins[1:], len(out)], strict=True):
                if kept := self._keep(name, key, value):
                    parts.append(out[begin:end])
                while numbered and numbered[-1][0] < end:
                    first, last = numbered.pop()
                    parts += [] if kept else [out[first:last], pickle.POP]
                stays = stays and kept
            if not stays:
                out[begins[0] :] = b"".join(parts)
        del places[height:], values[height:]
        return stays
