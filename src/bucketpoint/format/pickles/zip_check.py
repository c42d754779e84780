"""Check of a torch.save zip by the CRC32 of each record, for frames of writers that store no other checksum.

Nothing is unpickled.
"""

from __future__ import annotations

import enum
import zipfile
import zlib
from typing import BinaryIO

from bucketpoint.format.pickles.archive import MAGIC

_PIECE = 1 << 20


class ZipVerdict(enum.Enum):
    """Result of checking an archive by its own checksums."""

    SOUND = "sound"
    DAMAGED = "damaged"
    NO_ARCHIVE = "not a torch.save archive"
    NO_CHECKSUMS = "an archive without checksums"


def check_archive(file: BinaryIO) -> tuple[ZipVerdict, str]:
    """Read every record of an archive and compare it with its CRC32. Holds 1 MiB at a time.

    torch writes a zero for the CRC32 of every record once `torch.serialization.set_crc32_options(False)` was called.

    Returns:
        The verdict, and the reason if the archive is damaged.
    """
    if file.read(len(MAGIC)) != MAGIC:
        return ZipVerdict.NO_ARCHIVE, ""
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            # Only if all are zero: a single zero may be the damage.
            if not any(record.CRC for record in records):
                return ZipVerdict.NO_CHECKSUMS, ""
            for record in records:
                with archive.open(record) as content:
                    while content.read(_PIECE):
                        pass
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError, RuntimeError) as error:
        # Damaged headers make zipfile raise all of these; a wrong checksum is a BadZipFile.
        return ZipVerdict.DAMAGED, str(error)
    return ZipVerdict.SOUND, ""
