"""Zip archives of torch.save: positions of their records, and a check of the records' checksums."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import BinaryIO

from bucketpoint.format.pickles.vocabulary import ObjectionError, UnreadableError

MAGIC = b"PK\x03\x04"  # torch.load recognises an archive by these bytes
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_END, _END_BYTES = b"PK\x05\x06", 22
_LOCATOR, _LOCATOR_BYTES, _END64_BYTES = b"PK\x06\x07", 20, 56
_PIECE = 1 << 20
DAMAGED = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, EOFError)
"""Exceptions that `zipfile` raises for a damaged directory."""


def records(data: bytes) -> dict[str, tuple[int, int]]:
    """Return start and stop of each record of an archive, by the record's name without the folder.

    Raises:
        ObjectionError: a record is compressed, which torch never does, and which could expand to any size; or two zip
            readers may find different records, so that torch may load records that were not checked.
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
    """Return the position of the central directory that the end record states, at which torch reads the directory.

    `zipfile` reads it directly before the end record instead.
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
    """Return True if all records are in one folder, with different names. torch ignores the case of a name."""
    names = {entry.filename.lower() for entry in entries}
    folders = {entry.filename.partition("/")[0] for entry in entries}
    raw = all(entry.orig_filename == entry.filename for entry in entries)
    return raw and len(names) == len(entries) and len(folders) == 1


def may_be_archive(data: bytes) -> bool:
    """Return True if a zip reader could find the pickle of a torch.save file in these bytes."""
    return data[: len(MAGIC)] == MAGIC and b"data.pkl" in data


def check_archive(file: BinaryIO) -> str | None:
    """Compare every record of a file with its CRC32. Reads 1 MiB at a time, and unpickles nothing.

    After `torch.serialization.set_crc32_options(False)`, torch writes 0 as the CRC32 of every record.

    Returns:
        Description of the damage, or an empty text; None if the file is not an archive, or has no checksums.
    """
    if file.read(len(MAGIC)) != MAGIC:
        return None
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            # A single zero may be damage, so only an archive of zeros has no checksums.
            if not any(entry.CRC for entry in entries):
                return None
            for entry in entries:
                with archive.open(entry) as content:
                    while content.read(_PIECE):
                        pass
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError, RuntimeError) as error:
        # zipfile raises BadZipFile for a wrong checksum, and any of these errors for damaged headers.
        return str(error) or type(error).__name__
    return ""
