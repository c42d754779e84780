"""Files of torch.save in memory: where the pickle and the storages lie, in the zip format and in the one before it."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

MAGIC = b"PK\x03\x04"  # what torch.load itself goes by
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
DAMAGED = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, EOFError)
"""Exceptions that `zipfile` raises at a damaged directory."""


class ArchiveError(ValueError):
    """The bytes begin as an archive, and are none of torch.save's. The message tells a person why."""


class CompressedError(ArchiveError):
    """A record is compressed: torch compresses none, and a small one could become any amount of memory."""


def records(data: bytes) -> dict[str, tuple[int, int]]:
    """Start and stop of each record of an archive, by its name without the folder.

    Raises:
        ArchiveError: its directory is malformed.
    """
    found = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data):
                    raise CompressedError("a compressed archive")
                head = LOCAL_HEADER.unpack_from(data, entry.header_offset)
                start = entry.header_offset + LOCAL_HEADER.size + head[-2] + head[-1]
                stop = start + entry.file_size
                if head[0] != MAGIC or stop > len(data):
                    raise ArchiveError("a record does not lie within it")
                found[entry.filename.partition("/")[2]] = start, stop
    except ArchiveError:
        raise
    except DAMAGED as error:
        raise ArchiveError(f"its directory cannot be read: {error}") from None
    return found


def legacy_storages(data: bytes, position: int, keys: Any, sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Start and stop of each storage behind the pickles of torch.save's format before 1.6.

    Args:
        keys: as the last pickle has them.
        sizes: bytes of each storage, as the pickle before has them.

    Raises:
        ArchiveError: it is malformed.
    """
    if type(keys) is not list or any(type(key) is not str or key not in sizes for key in keys):
        raise ArchiveError("its keys of storages are none")
    found = {}
    for key in keys:
        # Before the elements stands their number.
        found[key] = position + 8, position + 8 + sizes[key]
        position = found[key][1]
        if position > len(data):
            raise ArchiveError("it breaks off")
    return found


def may_be_archive(data: bytes) -> bool:
    """True if some reader of zip files could find the pickle of a file of torch.save in these bytes."""
    return data[: len(MAGIC)] == MAGIC and b"data.pkl" in data
