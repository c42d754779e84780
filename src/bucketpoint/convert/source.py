"""What is converted, whoever wrote it: DCP's description of a state, and where the bytes of each of its items lie.

Data only. How a format is read is in the `from_` modules, how bytes are fetched in `reading`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.convert.reading import SourceBytes

BUCKETPOINT = "bucketpoint"
DCP = "dcp"
TORCH = "torch"
SAFETENSORS = "safetensors"

FORMATS = (BUCKETPOINT, DCP, TORCH, SAFETENSORS)


@dataclass(frozen=True)
class Checksum:
    """`kind` is `"crc32c"`, or `"crc32"` as archives have it."""

    kind: str
    value: int


@dataclass(frozen=True, eq=False)
class Stretch:
    """The bytes of an item as they lie in one object: of a tensor its elements in C order, else what torch.save made.

    Attributes:
        checksum: of all of them, where their writer recorded one.
        opaque: of a tensor, and all the same what torch.save made: of one that is sparse, quantised or of a class of
            its own. Only DCP has a place for it.
    """

    key: str
    start: int
    nbytes: int
    checksum: Checksum | None = None
    opaque: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """Sorts payloads in the order in which they lie in the source."""
        return self.key, self.start


@dataclass(frozen=True)
class Decoded:
    """A tensor whose elements do not lie in C order, or not as they are: it is taken whole, and decoded.

    Attributes:
        nbytes: of its elements.
        place: the object and the byte where it lies.
    """

    nbytes: int
    decode: Callable[[], torch.Tensor]
    place: tuple[str, int]
    opaque = False


@dataclass(frozen=True)
class Held:
    """Bytes that are in memory: what is no tensor, and was made anew of the source."""

    data: bytes = field(repr=False)
    opaque = False
    place = ("", 0)

    @property
    def nbytes(self) -> int:
        return len(self.data)


Payload = Stretch | Decoded | Held


@dataclass(frozen=True)
class Source:
    """A checkpoint to be converted.

    Attributes:
        format: one of `FORMATS`.
        metadata: as DCP has it, without storage data. Every chunk of its tensors, and everything else in it, has a
            payload.
        fingerprint: differs where the source does: of its objects' keys, sizes and ETags.
        kind, metrics: of the record, where the source has one.
    """

    format: str
    url: str
    bytes: SourceBytes
    metadata: Metadata = field(repr=False)
    payloads: Mapping[MetadataIndex, Payload] = field(repr=False)
    fingerprint: str
    kind: str = "full"
    metrics: Mapping[str, float] = field(default_factory=dict)
