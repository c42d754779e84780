"""Files of torch.save in its zip format: position of pickle and storages, and a check by their checksums."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import BinaryIO

from bucketpoint.format.pickles.vocabulary import ObjectionError, UnreadableError

MAGIC = b"PK\x03\x04"  # torch.load itself recognises an archive by it
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_END, _END_BYTES = b"PK\x05\x06", 22
_LOCATOR, _LOCATOR_BYTES, _END64_BYTES = b"PK\x06\x07", 20, 56
_PIECE = 1 << 20
DAMAGED = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, EOFError)
"""Exceptions that `zipfile` raises for a damaged directory."""


def records(data: bytes) -> dict[str, tuple[int, int]]:
    """Return start and stop of each record of an archive, by the record's name without the folder.

    Raises:
        ObjectionError: a record is compressed, as torch never does and as a small one could expand to any memory; or
            two readers of zip files may find different records, so that other records may be loaded than are checked.
        UnreadableError: the directory of the archive is malformed.
    """
    found = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if archive.start_dir != _stated_directory(data) or not _told_apart(archive.infolist()):
                raise ObjectionError("an archive in which another reader may find other records")
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data):
                    raise ObjectionError("a compressed archive")
                head = LOCAL_HEADER.unpack_from(data, entry.header_offset)
                start = entry.header_offset + LOCAL_HEADER.size + head[-2] + head[-1]
                stop = start + entry.file_size
                if head[0] != MAGIC or stop > len(data):
                    raise UnreadableError("a record does not lie within the archive")
                found[entry.filename.partition("/")[2]] = start, stop
    except DAMAGED as error:
        raise UnreadableError(f"the directory of the archive cannot be read: {error}") from None
    return found


def _stated_directory(data: bytes) -> int:
    """Return the position of the central directory that the end record states. Torch reads the directory there.

    `zipfile` reads right before the end record, whatever position that states.
    """
    end = data.rfind(_END, 0, len(data) - _END_BYTES + len(_END))
    (start,) = struct.unpack_from("<I", data, end + 16)
    locator = end - _LOCATOR_BYTES
    if locator >= 0 and data.startswith(_LOCATOR, locator):
        (end64,) = struct.unpack_from("<Q", data, locator + 8)
        if end64 != locator - _END64_BYTES:
            return -1
        (start,) = struct.unpack_from("<Q", data, end64 + 48)
    return int(start)


def _told_apart(entries: Sequence[zipfile.ZipInfo]) -> bool:
    """Return True if all records lie in one folder under different names. torch ignores the case of a name."""
    names = {entry.filename.lower() for entry in entries}
    folders = {entry.filename.partition("/")[0] for entry in entries}
    raw = all(entry.orig_filename == entry.filename for entry in entries)
    return raw and len(names) == len(entries) and len(folders) == 1


def may_be_archive(data: bytes) -> bool:
    """Return True if any zip reader could find the pickle of a torch.save file in these bytes."""
    return data[: len(MAGIC)] == MAGIC and b"data.pkl" in data


def check_archive(file: BinaryIO) -> str | None:
    """Read every record of a file and compare it with its CRC32. Holds 1 MiB at a time, and unpickles nothing.

    torch writes a zero for the CRC32 of every record once `torch.serialization.set_crc32_options(False)` was called.

    Returns:
        The damage; an empty text if there is none. None if the file is no archive, or has no checksums.
    """
    if file.read(len(MAGIC)) != MAGIC:
        return None
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            # Only if all are zero: a single zero may be the damage.
            if not any(entry.CRC for entry in entries):
                return None
            for entry in entries:
                with archive.open(entry) as content:
                    while content.read(_PIECE):
                        pass
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError, RuntimeError) as error:
        # Damaged headers make zipfile raise all of these; a wrong checksum is a BadZipFile.
        return str(error) or type(error).__name__
    return ""
