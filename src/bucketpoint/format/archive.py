"""Checking a torch.save zip by the CRC32 that its own records carry: for frames of writers that keep no other checksum.

Nothing is unpickled.
"""

from __future__ import annotations

import enum
import zipfile
import zlib
from typing import BinaryIO

_MAGIC = b"PK\x03\x04"
_PIECE = 1 << 20


class Verdict(enum.Enum):
    """What an archive's own checksums say of it."""

    SOUND = "sound"
    DAMAGED = "damaged"
    NO_ARCHIVE = "not a torch.save archive"
    NO_CHECKSUMS = "an archive without checksums"


def check_archive(file: BinaryIO) -> tuple[Verdict, str]:
    """Read every record of an archive and compare it with its CRC32. Holds 1 MiB at a time.

    torch writes a zero for the CRC32 of every record once `torch.serialization.set_crc32_options(False)` was called.

    Returns:
        the verdict, and the reason for it where it is damaged.
    """
    if file.read(len(_MAGIC)) != _MAGIC:
        return Verdict.NO_ARCHIVE, ""
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            # Only all of them: a single zero may be what is damaged.
            if not any(record.CRC for record in records):
                return Verdict.NO_CHECKSUMS, ""
            for record in records:
                with archive.open(record) as content:
                    while content.read(_PIECE):
                        pass
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError, RuntimeError) as error:
        # Damaged headers make zipfile raise all of these; a wrong checksum is a BadZipFile.
        return Verdict.DAMAGED, str(error)
    return Verdict.SOUND, ""
