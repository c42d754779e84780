"""How `.metadata` names the index beside it, so that its first bytes tell and no pickle need be run for it. No I/O.

The name is the first attribute in the pickle, as plain text of fixed length. `.metadata` stays the truth: whatever is
wrong with an index, or with its name, a reader takes `.metadata` instead.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from bucketpoint.format import keys

INDEX_ATTRIBUTE = "bucketpoint_index"
"""Of the pickled metadata. Stock readers ignore it."""

INDEX_ITEMS = 768
"""From so many items on a save writes an index. Below, all of `.metadata` comes with a reader's first request."""

HEAD_BYTES = 128 << 10
"""What a reader asks for first. 768 items of ours take about 100 kB."""

INDEX_GROUP = "index"
_SEARCHED = 512  # the name lies behind the names of two classes
_PATTERN = re.compile(
    rb"\x8c\x11bucketpoint_index\x94\x8c.bucketpoint-index/[12] "
    rb"(?P<path>data/[0-9a-f]{2}/[0-9a-f]{12}-0-index-0\.distcp) (?P<size>[0-9]{16}) (?P<digest>[0-9a-f]{64})\x94",
    re.DOTALL,
)


@dataclass(frozen=True)
class IndexRef:
    """Which object is the index of a checkpoint.

    Attributes:
        path: below the checkpoint's prefix, beside the data objects of the same attempt.
        size: in bytes.
        digest: SHA-256, in hexadecimal digits.
    """

    path: str
    size: int
    digest: str

    @property
    def text(self) -> str:
        """What `.metadata` says; as long for every index. Readers from before there were tables of checksums look for
        another number, and take `.metadata` itself."""
        return f"bucketpoint-index/2 {self.path} {self.size:016d} {self.digest}"

    def fits(self, data: bytes) -> bool:
        """Whether these bytes are the index that is meant."""
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.digest


TEXT_LENGTH = len(IndexRef(keys.data_path("0" * 12, 0, INDEX_GROUP, 0), 0, "0" * 64).text)


def index_path(token: str) -> str:
    """Where an attempt puts its index."""
    return keys.data_path(token, 0, INDEX_GROUP, 0)


def make_ref(token: str, data: bytes) -> IndexRef:
    """The name of an index that is written by this attempt."""
    return IndexRef(index_path(token), len(data), hashlib.sha256(data).hexdigest())


def find_ref(head: bytes) -> IndexRef | None:
    """The index that a `.metadata` names which begins with `head`; None for all that name none in this way."""
    found = _PATTERN.search(head[:_SEARCHED])
    if found is None or keys.parse_data_path(found["path"].decode()) is None:
        return None
    return IndexRef(found["path"].decode(), int(found["size"]), found["digest"].decode())


def ref_of(metadata: Any) -> IndexRef | None:
    """The same of metadata that was decoded from such a pickle."""
    text = vars(metadata).get(INDEX_ATTRIBUTE)
    if type(text) is not str:
        return None
    name = INDEX_ATTRIBUTE.encode()
    return find_ref(b"\x8c\x11" + name + b"\x94\x8c\xff" + text.encode("utf-8", "surrogatepass")[:256] + b"\x94")
