"""Parser that finds the raw payload in the first bytes of an untrusted torch.save frame, without executing anything.

It supports a simple frame: one dense tensor (or Parameter) over one storage in an uncompressed zip. For anything else
the result is None, and the reader fetches the whole item.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bucketpoint.format.pickles.archive import LOCAL_HEADER, MAGIC
from bucketpoint.format.pickles.items import interpreter
from bucketpoint.format.pickles.torch_names import STORAGE_TYPE_NAMES
from bucketpoint.format.pickles.vocabulary import RefusedError, UnreadableError

PROBE_BYTES = 4096
"""Number of first bytes that suffice to probe a frame. The headers of torch.save take about 700 for any tensor."""

STORAGE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, dtype): name for name, dtype in STORAGE_TYPE_NAMES.items() if not dtype.startswith("q")
}
"""Typed storage class with which each dtype is pickled. Quantised dtypes are left out, as they have no frame. Newer
dtypes are pickled with an untyped storage and the dtype's name."""

_DESCRIPTORS = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
_ENCRYPTED = 0x1
_SIZES_FOLLOW = 0x8
_ZIP32_LIMIT = 0xFFFFFFFF


@dataclass(frozen=True)
class ProbedFrame:
    """Position of a frame's payload, and layout of the tensor in it. Stride and storage offset are in elements."""

    payload_offset: int
    payload_nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


def probe_frame(head: bytes | bytearray | memoryview) -> ProbedFrame | None:
    """Locate the payload in the first bytes of a frame; None if the frame is not a simple one.

    A frame without a byteorder record before its payload is read as little-endian, as torch.load does.

    Args:
        head: the first `PROBE_BYTES` of the frame, or all of a shorter one. Further bytes are ignored.
    """
    try:
        return _probe(bytes(memoryview(head)[:PROBE_BYTES]))
    except (_NotSimpleError, RefusedError, UnreadableError):
        return None


class _NotSimpleError(Exception):
    """Raised for bytes that are not a simple frame."""


def _probe(head: bytes) -> ProbedFrame | None:
    found: tuple[torch.Tensor, str, int] | None = None
    archive = ""
    position = 0
    while True:
        entry = _local_entry(head, position)
        folder, _, name = entry.name.partition("/")
        archive = archive or folder
        if folder != archive:
            return None
        if found is not None and name == f"data/{found[1]}":
            tensor, _, nbytes = found
            if entry.nbytes not in (None, nbytes):
                return None
            shape, stride = tuple(tensor.shape), tensor.stride()
            return ProbedFrame(entry.start, nbytes, tensor.dtype, shape, stride, int(tensor.storage_offset()))
        end, position = _end(entry, head)
        body = head[entry.start : end]
        if name == "data.pkl":
            found = _tensor(body)
        elif (name == "byteorder" and body != b"little") or name.startswith("data/"):
            return None


def _tensor(body: bytes) -> tuple[torch.Tensor, str, int]:
    """Interpret a data.pkl. Returns its tensor on the meta device, and the key and length of the tensor's storage."""
    storages: dict[tuple[str, int], torch.UntypedStorage] = {}

    def storage(key: str, nbytes: int, location: str) -> torch.UntypedStorage:
        return storages.setdefault((key, nbytes), torch.UntypedStorage(nbytes, device="meta"))  # type: ignore[no-untyped-call]

    value = interpreter(body, paid=len(body), storage=storage, distributed=False).run()
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or vars(value) or value.layout is not torch.strided:
        raise _NotSimpleError
    # The stored bytes of a tensor with a conj or neg bit are not its values.
    if len(storages) != 1 or value.is_conj() or value.is_neg() or value.is_quantized or value.is_nested:
        raise _NotSimpleError
    ((place, untyped),) = storages.items()
    # A tensor outside of the frame's storage, such as a meta tensor, was not checked against the storage's bounds.
    if value.untyped_storage()._cdata != untyped._cdata:
        raise _NotSimpleError
    return value, *place


class _Entry(NamedTuple):
    """A local file header: name, start of the record's bytes, and their number if the header states it."""

    name: str
    start: int
    nbytes: int | None


def _end(entry: _Entry, head: bytes) -> tuple[int, int]:
    """Return the end of a record, and the start of the next one."""
    if entry.nbytes is not None:
        end = entry.start + entry.nbytes
        if end > len(head):
            raise _NotSimpleError
        return end, end
    # The size of this record is only in the data descriptor that follows it.
    position = head.find(b"PK\x07\x08", entry.start)
    while position >= 0:
        for layout in _DESCRIPTORS:
            if position + layout.size <= len(head):
                _, _, packed, plain = layout.unpack_from(head, position)
                if packed == plain == position - entry.start:
                    return position, position + layout.size
        position = head.find(b"PK\x07\x08", position + 1)
    raise _NotSimpleError


def _local_entry(head: bytes, position: int) -> _Entry:
    if position + LOCAL_HEADER.size > len(head):
        raise _NotSimpleError
    signature, _, flags, method, _, _, _, packed, plain, name_size, extra_size = LOCAL_HEADER.unpack_from(
        head, position
    )
    name_at = position + LOCAL_HEADER.size
    if signature != MAGIC or method != 0 or flags & _ENCRYPTED or name_at + name_size > len(head):
        raise _NotSimpleError
    name = head[name_at : name_at + name_size].decode("utf-8", "replace")
    start = name_at + name_size + extra_size
    if flags & _SIZES_FOLLOW:
        return _Entry(name, start, None)
    if packed == plain == _ZIP32_LIMIT:
        return _Entry(name, start, _zip64_nbytes(head, name_at + name_size, extra_size))
    if packed != plain:
        raise _NotSimpleError
    return _Entry(name, start, plain)


def _zip64_nbytes(head: bytes, position: int, extra_size: int) -> int:
    end = min(position + extra_size, len(head))
    while position + 4 <= end:
        kind, size = struct.unpack_from("<2H", head, position)
        if kind == 1 and size >= 16 and position + 20 <= end:
            return int(struct.unpack_from("<Q", head, position + 4)[0])
        position += 4 + size
    raise _NotSimpleError
