"""Files of torch.save in memory: position of pickle and storages, in its zip format."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence

from bucketpoint.format.pickles.vocabulary import ObjectionError, UnreadableError

MAGIC = b"PK\x03\x04"  # torch.load itself recognises an archive by it
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_END, _END_BYTES = b"PK\x05\x06", 22
_LOCATOR, _LOCATOR_BYTES, _END64_BYTES = b"PK\x06\x07", 20, 56
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
    """Return the position of the directory that the end of the archive states: torch reads there.

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
