"""Frames that make a tensor's bytes a file of torch.save, built without reading those bytes, and a parser of frames.

A frame is a zip archive: header, raw payload, trailer. The header and the trailer are built here; the payload is any
contiguous memory of the writer. The parser finds the raw payload in the first bytes of an untrusted frame, without
executing anything. It supports a simple frame: one dense tensor (or Parameter) over one storage in an uncompressed zip.
For anything else the result is None, and the reader fetches the whole item.
"""

from __future__ import annotations

import pickle
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from bucketpoint.format.pickles.items import LOCAL_HEADER, MAGIC, interpreter
from bucketpoint.format.pickles.vocabulary import STORAGE_TYPE_NAMES, RefusedError, UnreadableError
from bucketpoint.format.tensor_bytes import contiguous_strides

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


ALIGNMENT = 64
"""Alignment of storages in torch.save's files (torch.utils.serialization.config.save.storage_alignment)."""

_CACHED_FRAMES = 4096
_ARCHIVE = b"archive/"
VERSION_RECORD = b"3\n"
"""PyTorchFileWriter's kProducedFileFormatVersion, as text."""

_ZIP16_LIMIT = 0xFFFF
_ZIP32_LIMIT = 0xFFFFFFFF  # APPNOTE.TXT 4.4.8: a field with this value refers to the zip64 extra field

_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_END64_LOCATOR = struct.Struct("<4sIQI")
_ZIP64_SIZES = struct.Struct("<2H2Q")
_PADDING_HEAD = struct.Struct("<2s1H")

_CRC = struct.Struct("<I")
_CRC_AT = 16  # APPNOTE.TXT 4.3.12: offset of the CRC32 in an entry of the central directory

_VERSION_PLAIN = 20
_VERSION_ZIP64 = 45
_UTF8_NAMES = 0x0800


@dataclass(frozen=True)
class Frame:
    """Header and trailer around `payload_nbytes` raw bytes. torch.load reads the three together as a tensor."""

    header: bytes
    trailer: bytes
    payload_nbytes: int

    @property
    def payload_offset(self) -> int:
        """Offset of the payload within the frame, a multiple of `ALIGNMENT`."""
        return len(self.header)

    @property
    def nbytes(self) -> int:
        """Length of the frame, a multiple of `ALIGNMENT`, so that consecutive frames keep payloads aligned."""
        return len(self.header) + self.payload_nbytes + len(self.trailer)


def frameable(tensor: torch.Tensor) -> bool:
    """Return True if `tensor_frame` supports this tensor, once it is contiguous. Other tensors need torch.save."""
    return (
        sys.byteorder == "little"
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.dtype in _REBUILDERS
        and not tensor.is_nested
        and not tensor.is_meta
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


@lru_cache(maxsize=_CACHED_FRAMES)
def tensor_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Return the frame of a C-contiguous tensor of this dtype and shape.

    Raises:
        TypeError: the dtype is quantised; such tensors have no frame.
    """
    payload_nbytes = prod(shape) * dtype.itemsize
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape} has a negative size")
    archive = ArchiveWriter()
    # Only the records that torch.load needs, which halves the frame: no .format_version, no .data/serialization_id, no
    # .storage_alignment (without it, torch.load looks the payload's position up in the archive). All records precede
    # the payload, so that a reader needs only the first bytes to find it.
    archive.add(b"data.pkl", _rebuild_pickle(dtype, shape))
    archive.add(b"byteorder", b"little")
    archive.add(b"version", VERSION_RECORD)
    header = archive.add_payload(b"data/0", payload_nbytes)
    return Frame(header, archive.trailer(), payload_nbytes)


class ArchiveWriter:
    """Builder of a zip archive of uncompressed records, which makes all bytes except the payloads."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._position = 0
        self._directory = bytearray()
        self._payloads: list[int] = []
        self._count = 0

    def add(self, name: bytes, body: bytes) -> None:
        """Add a record with its body."""
        self._local_header(name, zlib.crc32(body), len(body), align=False)
        self._pending += body
        self._position += len(body)

    def add_payload(self, name: bytes, nbytes: int) -> bytes:
        """Add a record without its payload. Returns the bytes between the previous payload and this one."""
        # CRC32 stays 0 unless `trailer` gets it. Item frames leave it 0: torch's reader does not check it, loads check
        # the CRC32C of each block in the metadata, and a CRC32 would cost a second pass over every byte.
        self._payloads.append(len(self._directory) + _CRC_AT)
        self._local_header(name, 0, nbytes, align=True)
        head = bytes(self._pending)
        self._pending.clear()
        self._position += nbytes
        return head

    def _local_header(self, name: bytes, crc: int, nbytes: int, *, align: bool) -> None:
        path = _ARCHIVE + name
        offset = self._position
        needs_zip64 = nbytes >= _ZIP32_LIMIT
        far = offset >= _ZIP32_LIMIT
        version = _VERSION_ZIP64 if needs_zip64 or far else _VERSION_PLAIN
        zip64 = _ZIP64_SIZES.pack(1, 16, nbytes, nbytes) if needs_zip64 else b""
        short = _ZIP32_LIMIT if needs_zip64 else nbytes
        extra = zip64
        if align:
            unpadded = offset + LOCAL_HEADER.size + len(path) + len(zip64) + _PADDING_HEAD.size
            padding = -unpadded % ALIGNMENT
            # PyTorch's own writer also pads in an extra field "FB".
            extra += _PADDING_HEAD.pack(b"FB", padding) + b"Z" * padding
        header = LOCAL_HEADER.pack(MAGIC, version, _UTF8_NAMES, 0, 0, 0, crc, short, short, len(path), len(extra))
        header += path + extra
        self._pending += header
        self._position += len(header)
        if far:
            sizes = (nbytes, nbytes) if needs_zip64 else ()
            zip64 = struct.pack(f"<2H{len(sizes) + 1}Q", 1, 8 * (len(sizes) + 1), *sizes, offset)
        self._directory += _CENTRAL.pack(
            b"PK\x01\x02", version, version, _UTF8_NAMES, 0, 0, 0, crc, short, short,
            len(path), len(zip64), 0, 0, 0, 0, _ZIP32_LIMIT if far else offset,
        )  # fmt: skip
        self._directory += path + zip64
        self._count += 1

    def trailer(self, crcs: Sequence[int] = ()) -> bytes:
        """Return the bytes after the last payload.

        Args:
            crcs: CRC32 of each payload, in order, for readers that check it; empty to leave them zero.
        """
        directory = bytearray(self._directory)
        for at, crc in zip(self._payloads, crcs, strict=bool(crcs)):
            _CRC.pack_into(directory, at, crc)
        body, end_of_body = bytes(self._pending), self._position
        # zip64 end records are needed for a high offset of the directory, but their size moves that offset, through the
        # padding. Deciding by the highest possible offset avoids the circle: zip64 records are always valid.
        needs_zip64 = end_of_body + ALIGNMENT >= _ZIP32_LIMIT or self._count >= _ZIP16_LIMIT
        end_size = _END.size + (_END64.size + _END64_LOCATOR.size if needs_zip64 else 0)
        gap = -(end_of_body + len(self._directory) + end_size) % ALIGNMENT
        directory_offset = end_of_body + gap
        directory_end = directory_offset + len(self._directory)
        end = b""
        if needs_zip64:
            end += _END64.pack(
                b"PK\x06\x06", _END64.size - 12, _VERSION_ZIP64, _VERSION_ZIP64, 0, 0,
                self._count, self._count, len(self._directory), directory_offset,
            )  # fmt: skip
            end += _END64_LOCATOR.pack(b"PK\x06\x07", 0, directory_end, 1)
        short_offset = _ZIP32_LIMIT if needs_zip64 else directory_offset
        count = min(self._count, _ZIP16_LIMIT)
        end += _END.pack(b"PK\x05\x06", 0, 0, count, count, len(self._directory), short_offset, 0)
        return body + b"\0" * gap + bytes(directory) + end


def _rebuild_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    try:
        function, storage, unit, tail = _REBUILDERS[dtype]
    except KeyError:
        raise TypeError(f"{dtype} tensors cannot be framed; let torch.save write them") from None
    return b"".join((
        b"\x80\x02ctorch._utils\n", function, b"\n((", _text("storage"), storage, _text("0"), _text("cpu"),
        number_opcode(prod(shape) * unit), b"tQK\0", _integers(shape), _integers(contiguous_strides(shape)),
        b"\x89ccollections\nOrderedDict\n)R", tail, b"tR.",
    ))  # fmt: skip


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode("ascii")


def _integers(numbers: Sequence[int]) -> bytes:
    if not numbers:
        return b")"
    body = b"".join(map(number_opcode, numbers))
    return b"(" + body + b"t" if len(numbers) > 3 else body + b"\x85\x86\x87"[len(numbers) - 1 : len(numbers)]


def number_opcode(number: int) -> bytes:
    """Return the pickle opcode that pushes `number`, 0 or more."""
    if number < 1 << 8:
        return b"K%c" % number
    if number < 1 << 16:
        return pickle.BININT2 + number.to_bytes(2, "little")
    if number < 1 << 31:
        return pickle.BININT + number.to_bytes(4, "little")
    content = pickle.encode_long(number)
    return pickle.LONG1 + bytes((len(content),)) + content


def _rebuilders() -> dict[torch.dtype, tuple[bytes, bytes, int, bytes]]:
    """Map each dtype to its rebuild function, storage class, storage units per element, and last argument."""
    table = {}
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        storage = STORAGE_NAMES.get(dtype)
        if storage is not None:
            table[dtype] = (b"_rebuild_tensor_v2", b"ctorch\n" + storage.encode() + b"\n", 1, b"")
        elif not name.startswith(("qint", "quint")):
            tail = b"ctorch\n" + name.encode() + b"\n"
            table[dtype] = (b"_rebuild_tensor_v3", b"ctorch.storage\nUntypedStorage\n", dtype.itemsize, tail)
    return table


_REBUILDERS = _rebuilders()

FRAMEABLE = frozenset(_REBUILDERS)
"""Dtypes that `tensor_frame` supports."""
