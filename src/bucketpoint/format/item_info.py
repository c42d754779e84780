"""The checked fields of an item in `.metadata`: position of its bytes, and their checksums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bucketpoint.errors import MetadataError

# Metadata that claims more blocks would make a reader allocate a huge table before any read.
_MOST_BLOCKS = 16 << 20

_MAX_NUMBER = 1 << 62
_MAX_PATH = 4096

_PAYLOAD_OFFSET = "bp_po"
_PAYLOAD_NBYTES = "bp_pn"
_CRC32C = "bp_crc"
_TABLE_BLOCK_NBYTES = "bp_tn"
_TABLE_OFFSET = "bp_to"
_OBJECT = "bp_obj"


@dataclass(frozen=True)
class ItemInfo:
    """Position and checksums of an item. None means that the writer recorded no value.

    Attributes:
        payload_offset: start of the raw tensor bytes, from the item's first byte. None for tensors without a frame of
            bucketpoint, and for non-tensors.
        crc32c: CRC32C of the payload; without `payload_offset`, of all stored bytes of the item.
        block_nbytes: length of the blocks of the bytes that `crc32c` covers; the last block may be shorter.
        block_crcs: CRC32C of each block; None until the table of block checksums has been read.
        table_offset: start of the table of block checksums in the item's object, 4 bytes per block, little-endian.
            `crc32c` protects the table too: combined, the block checksums must give `crc32c`.
    """

    path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None = None
    payload_offset: int | None = None
    payload_nbytes: int | None = None
    crc32c: int | None = None
    block_nbytes: int | None = None
    block_crcs: tuple[int, ...] | None = None
    table_offset: int | None = None

    @property
    def table_nbytes(self) -> int:
        """Size of the item's table of block checksums; 0 without a table."""
        return 0 if self.table_offset is None else 4 * -(-self.checked_nbytes // (self.block_nbytes or 1))

    @property
    def checked_nbytes(self) -> int:
        """Number of bytes that the checksums cover."""
        return self.length if self.payload_nbytes is None else self.payload_nbytes


def data_paths(metadata: Any) -> set[str]:
    """Return the paths of the objects that contain the checkpoint's items.

    Raises:
        MetadataError: as in `read_item`.
    """
    return {read_item(info).path for info in (metadata.storage_data or {}).values()}


def read_item(info: Any, *, url: str | None = None) -> ItemInfo:
    """Return the checked content of an untrusted `_StorageInfo`, DCP's or that of `metadata.plain`.

    Raises:
        MetadataError: `info` is of another type, or its values have wrong types or contradict each other.
    """
    if type(info).__name__ != "_StorageInfo":
        raise MetadataError(f"The storage data of an item is a {type(info).__name__}, not DCP's _StorageInfo", url=url)
    reader = _Fields(vars(info), url)
    path = reader.text("relative_path")
    offset, length = reader.number("offset"), reader.number("length")
    descriptors = reader.descriptors()
    payload_offset, payload_nbytes = reader.optional(_PAYLOAD_OFFSET), reader.optional(_PAYLOAD_NBYTES)
    reader.require(
        (payload_offset is None) == (payload_nbytes is None), "one of payload offset and payload size is missing"
    )
    if payload_offset is not None and payload_nbytes is not None:
        reader.require(payload_offset + payload_nbytes <= length, "its payload does not lie within it")
    checked = length if payload_nbytes is None else payload_nbytes
    crc32c = reader.optional(_CRC32C, limit=1 << 32)
    block_crcs: tuple[int, ...] | None = None
    block_nbytes, table_offset = reader.optional(_TABLE_BLOCK_NBYTES), reader.optional(_TABLE_OFFSET)
    reader.require((block_nbytes is None) == (table_offset is None), "one of block size and table offset is missing")
    if block_nbytes is not None:
        reader.require(
            block_nbytes > 0 and crc32c is not None,
            "its block size is 0, or its table has no checksum",
        )
        reader.require(checked > block_nbytes, "it has a table of block checksums for a single block")
        reader.require(
            checked <= block_nbytes * _MOST_BLOCKS, f"its table of block checksums has more than {_MOST_BLOCKS} blocks"
        )
    elif crc32c is not None:
        block_nbytes, block_crcs = checked, (crc32c,) if checked else ()
    return ItemInfo(
        path, offset, length, descriptors, payload_offset, payload_nbytes, crc32c, block_nbytes, block_crcs,
        table_offset,
    )  # fmt: skip


class _Fields:
    """Checked access to the fields of an untrusted attribute dictionary."""

    def __init__(self, values: dict[str, Any], url: str | None) -> None:
        self._values = values
        self._url = url

    def require(self, condition: bool, complaint: str) -> None:
        if not condition:
            path = self._values.get("relative_path")
            key = path[:200] if type(path) is str else None
            raise MetadataError(f"The metadata of an item is damaged: {complaint}", url=self._url, key=key)

    def text(self, name: str) -> str:
        value = self._values.get(name)
        self.require(type(value) is str and 0 < len(value) <= _MAX_PATH, f"{name} is not a path")
        return str(value)

    def number(self, name: str, *, limit: int = _MAX_NUMBER) -> int:
        value = self._values.get(name)
        self.require(type(value) is int and 0 <= value < limit, f"{name} is not a number of bytes")
        return int(value)  # type: ignore[arg-type]

    def optional(self, name: str, *, limit: int = _MAX_NUMBER) -> int | None:
        return None if self._values.get(name) is None else self.number(name, limit=limit)

    def descriptors(self) -> tuple[str, ...] | None:
        value = self._values.get("transform_descriptors")
        if not value:
            return None
        sound = type(value) in (list, tuple) and all(type(descriptor) is str for descriptor in value)
        self.require(sound, "its transform descriptors are not a list of names")
        return tuple(value)
