"""The encodings that examples/independent_reader.py meets: pickles, archives of torch.save, and the index.

No pickle runs code. The names in it stand for the few things below, nothing is imported, and other names are refused.
Memory is not limited: a hostile checkpoint of a few bytes can ask for all that the machine has.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

DCP = "torch.distributed.checkpoint"
DTYPE_OF_STORAGE = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
                    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
                    "ComplexFloat": "complex64", "ComplexDouble": "complex128"}  # fmt: skip
HEAD_BYTES = 120  # of an index
CONSTANT, DELTAS = 0, 2  # kinds of columns


def in_numpy(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for the elements of a dtype of torch, or for their bits if numpy has no such elements."""
    if re.fullmatch(r"bool|float(16|32|64)|complex(64|128)|u?int(8|16|32|64)", dtype):
        return np.dtype(dtype)
    return np.dtype({"bfloat16": "u2", "bits16": "u2", "complex32": "u4", "bcomplex32": "u4"}.get(dtype, "u1"))


# -- pickles ----------------------------------------------------------------------------------------------------------


class Plain:
    """Stand-in for the classes of DCP: it has the attributes that a pickle gives it, and None for all others."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})

    def __getattr__(self, name: str) -> Any:
        return None


def rebuilt(storage: Any, start: int, shape: Any, stride: Any, _grad: Any, _hooks: Any, *rest: Any) -> Any:
    """Return (dtype, elements) of a dense tensor. numpy checks that it lies within the storage."""
    dtype, data = storage
    dtype, *more = rest if dtype is None else (dtype, *rest)
    bits = more[0] if more else {}  # torch computes the conjugate, or the negation, only when it is needed
    kind = in_numpy(dtype)
    array = np.ndarray(shape, kind, data, start * kind.itemsize, [step * kind.itemsize for step in stride])
    array = array.conj() if bits.get("conj") else array
    return dtype, -array if bits.get("neg") else array


NAMES: dict[str, Any] = {
    f"{DCP}.metadata._MEM_FORMAT_ENCODING": int,
    "builtins.getattr": lambda kind, name: name,  # of a memory format, in Python 3.11.0 to 3.11.3
    "torch.serialization._get_layout": str,
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor_v2": rebuilt,
    "torch._utils._rebuild_tensor_v3": rebuilt,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch.storage.UntypedStorage": "UntypedStorage",
    "collections.OrderedDict": OrderedDict,
    "pathlib.PosixPath": lambda *parts: "/".join(parts),  # a checkpoint_id of torch's own writer
    "pathlib._local.PosixPath": lambda *parts: "/".join(parts),  # the same, in Python 3.13
    "_codecs.encode": lambda text, _: text.encode("latin-1"),  # bytes, in protocol 2
    "__builtin__.set": set,
    "__builtin__.complex": complex,
}


class Unpickler(pickle.Unpickler):
    """Unpickler of `.metadata`; and of values, with a function that returns the bytes of a storage."""

    storage: Any = None

    def find_class(self, module: str, name: str) -> Any:
        if module in (f"{DCP}.metadata", f"{DCP}.filesystem") and re.fullmatch(r"_?[A-Z][A-Za-z]+", name):
            return Plain
        if f"{module}.{name}" in NAMES:
            return NAMES[f"{module}.{name}"]
        if module == "torch":
            return name  # a dtype, or the class of a storage
        raise pickle.UnpicklingError(f"the pickle names {module}.{name}")

    def persistent_load(self, reference: Any) -> Any:
        _, kind, key, _, _ = reference
        return DTYPE_OF_STORAGE.get(kind.removesuffix("Storage")), self.storage(key)


def unarchived(data: bytes) -> Any:
    """Return the value in a file of torch.save, with (dtype, elements) for each tensor."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}

    def record(name: str) -> bytes:
        # Not archive.read(), which compares a CRC32: the frames of bucketpoint have none.
        entry = entries[name]
        start = entry.header_offset + 30 + sum(struct.unpack_from("<2H", data, entry.header_offset + 26))
        return data[start : start + entry.file_size]

    unpickler = Unpickler(io.BytesIO(record("data.pkl")))
    unpickler.storage = lambda key: record(f"data/{key}")
    return unpickler.load()


# -- the index --------------------------------------------------------------------------------------------------------


def items_of_index(data: bytes) -> Iterator[tuple[Any, ...]]:
    """Yield name, dtype, shape, offset, sizes and place of each item. The dtype of a pickled value is None."""
    magic, _, *lengths = struct.unpack_from("<8sQ8x10Q", data)
    ends = list(itertools.accumulate(lengths[::2], initial=HEAD_BYTES))
    parts = [data[start:end] for start, end in itertools.pairwise(ends)]
    structure, facts = (json.loads(zlib.decompress(parts[number])) for number in (0, 3))
    if magic != b"BPINDEX2" or facts["bucketpoint"]["format"] > 1:
        raise NotImplementedError("a newer version of bucketpoint wrote the checkpoint, in another format")
    names, stream = structure["names"], io.BytesIO(zlib.decompress(parts[2]))
    kinds, dims, counts = (column(stream, len(names)) for _ in range(3))
    shapes, axes = column(stream, int(dims.sum())), counts.repeat(dims)
    offsets, sizes = segmented(stream, axes), segmented(stream, axes)
    if column(stream, 1)[0]:  # sizes are stored relative to the distance to the next chunk
        until = np.roll(offsets, -1)
        until[axes.cumsum()[axes > 0] - 1] = shapes[axes > 0]
        sizes = sizes + until - offsets
    _, objects, payloads, rests, starts, _, gaps = (segmented(stream, counts) for _ in range(7))
    crcs, reached = np.frombuffer(parts[4], "<u4"), [0] * facts["paths"]
    slot = box = axis = 0
    for name, kind, dim, count in zip(names, kinds, dims, counts, strict=True):
        dtype = structure["properties"][kind - 1][0] if kind else None
        shape = tuple(shapes[axis : axis + dim].tolist())
        places, extents = (each[box : box + dim * count].reshape(dim, count).T.tolist() for each in (offsets, sizes))
        for place, extent in zip(places, extents, strict=True):
            payload = payloads[slot] + (math.prod(extent) * in_numpy(dtype).itemsize if dtype else -1)
            length = rests[slot] + max(payload, 0)
            item: Any = Plain()
            number = objects[slot]
            item.relative_path, item.length = facts["objects"][number][0], length
            item.offset = reached[number] + gaps[slot]
            reached[number] = item.offset + length
            if starts[slot] >= 0:
                item.bp_po, item.bp_pn = starts[slot], payload
            item.bp_crc, item.transform_descriptors = crcs[slot], structure["transforms"]
            yield name, dtype, shape, tuple(place), tuple(extent), item
            slot += 1
        box, axis = box + dim * count, axis + dim


def column(stream: io.BytesIO, count: int) -> Any:
    """Read one column of integers: a constant, or planes of bytes over a least value, perhaps of differences."""
    kind, least = struct.unpack("<Bq", stream.read(9))
    if kind == CONSTANT:
        return np.full(count, least)
    width = stream.read(1)[0]
    planes = np.zeros((count, 8), np.uint8)
    planes[:, :width] = np.frombuffer(stream.read(width * count), np.uint8).reshape(width, count).T
    values = planes.view("<i8").ravel() + least
    return values.cumsum() if kind == DELTAS else values


def segmented(stream: io.BytesIO, counts: Any) -> Any:
    """Read a column in segments of the given lengths: progressions with another last value, or values as they are."""
    if stream.read(1)[0] == CONSTANT:
        stream.seek(-1, io.SEEK_CUR)
        return column(stream, counts.sum())
    starts, steps, lasts, odd = (column(stream, len(counts)) for _ in range(4))
    ends, some = counts.cumsum(), counts > 0
    values = starts.repeat(counts) + steps.repeat(counts) * (np.arange(counts.sum()) - (ends - counts).repeat(counts))
    values[ends[some] - 1] += lasts[some]
    values[(odd != 0).repeat(counts)] = column(stream, counts[odd != 0].sum())
    return values
