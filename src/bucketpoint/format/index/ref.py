"""Reference from `.metadata` to its index, which a reader finds in the first bytes without running the pickle.

The reference is the first attribute in the pickle, a text of fixed length. `.metadata` is authoritative: if the index
or the reference is wrong in any way, a reader uses `.metadata` instead.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from bucketpoint.format import keys

MAGIC = b"BPINDEX2"

INDEX_ATTRIBUTE = "bucketpoint_index"
"""Attribute of the pickled metadata. Stock readers ignore it."""

INDEX_ITEMS = 768
"""Least number of items for which a save writes an index. With fewer, a reader's first request gets all metadata."""

HEAD_BYTES = 128 << 10
"""Bytes of a reader's first request for a `.metadata`; one with 768 items has about 100 kB."""

INDEX_GROUP = "index"
_SEARCHED = 512  # only the names of two classes precede the reference
_PATTERN = re.compile(
    rb"\x8c\x11bucketpoint_index\x94\x8c.bucketpoint-index/2 "
    rb"(?P<path>data/[0-9a-f]{2}/[0-9a-f]{12}-0-index-0\.distcp) (?P<size>[0-9]{16}) (?P<digest>[0-9a-f]{64})\x94",
    re.DOTALL,
)


def is_index(data: bytes) -> bool:
    """Return True if these bytes begin with an index's `MAGIC`, with which no pickle begins."""
    return data[: len(MAGIC)] == MAGIC


@dataclass(frozen=True)
class IndexRef:
    """Reference to the index of a checkpoint.

    Attributes:
        path: path of the index below the checkpoint's prefix.
        size: size in bytes.
        digest: SHA-256 in hexadecimal digits.
    """

    path: str
    size: int
    digest: str

    @property
    def text(self) -> str:
        """The text in `.metadata`, of length `TEXT_LENGTH`.

        Format 2 added the tables of block checksums. Readers of format 1 do not find this text and read `.metadata`.
        """
        return f"bucketpoint-index/2 {self.path} {self.size:016d} {self.digest}"

    def fits(self, data: bytes) -> bool:
        """Return True if `data` has this size and digest."""
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.digest


TEXT_LENGTH = len(IndexRef(keys.data_path("0" * 12, 0, INDEX_GROUP, 0), 0, "0" * 64).text)


def index_path(token: str) -> str:
    """Return the path of the index of an attempt."""
    return keys.data_path(token, 0, INDEX_GROUP, 0)


def make_ref(token: str, data: bytes) -> IndexRef:
    """Make the reference to the index `data` of an attempt."""
    return IndexRef(index_path(token), len(data), hashlib.sha256(data).hexdigest())


def find_ref(head: bytes) -> IndexRef | None:
    """Return the reference to an index in the first bytes of a `.metadata`, or None."""
    match = _PATTERN.search(head[:_SEARCHED])
    if match is None or keys.parse_data_path(match["path"].decode()) is None:
        return None
    return IndexRef(match["path"].decode(), int(match["size"]), match["digest"].decode())


def ref_of(metadata: Any) -> IndexRef | None:
    """Return the index reference of decoded metadata, under the same checks as `find_ref`."""
    text = vars(metadata).get(INDEX_ATTRIBUTE)
    if type(text) is not str:
        return None
    name = INDEX_ATTRIBUTE.encode()
    return find_ref(b"\x8c\x11" + name + b"\x94\x8c\xff" + text.encode("utf-8", "surrogatepass")[:256] + b"\x94")
