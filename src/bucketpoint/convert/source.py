"""A source of a conversion, in whatever format: DCP's description of a state, and the position of each item's bytes.

The modules in `readers` read a format; `source_reader` and `payload_reader` fetch bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.convert.source_reader import SourceBytes

BUCKETPOINT = "bucketpoint"
DCP = "dcp"
TORCH = "torch"
SAFETENSORS = "safetensors"

FORMATS = (BUCKETPOINT, DCP, TORCH, SAFETENSORS)


@dataclass(frozen=True)
class Checksum:
    """A checksum. `kind` is `"crc32c"`, or `"crc32"` as in zip archives."""

    kind: str
    value: int


@dataclass(frozen=True, eq=False)
class Stretch:
    """Bytes of an item within one object: a tensor's elements in C order, or a torch.save archive.

    Attributes:
        checksum: of all the bytes, if their writer recorded one.
        opaque: True if the item is a tensor that is stored as a torch.save archive (sparse, quantised, subclass), not
        as raw elements. Only DCP formats can hold it.
    """

    key: str
    start: int
    nbytes: int
    checksum: Checksum | None = None
    opaque: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """Sort key that orders payloads by their position in the source."""
        return self.key, self.start


@dataclass(frozen=True)
class Decoded:
    """A tensor that has to be decoded whole, because its elements are not stored in C order or not as raw values.

    Attributes:
        nbytes: of the elements.
        place: key of the object, and offset of the stored tensor in it.
    """

    nbytes: int
    decode: Callable[[], torch.Tensor]
    place: tuple[str, int]
    opaque = False


@dataclass(frozen=True)
class Held:
    """Bytes held in memory: an item other than a tensor, serialized anew from the source."""

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
        metadata: as DCP has it, without storage data. Every chunk of every tensor, and every other item, has a payload.
        fingerprint: of the keys, sizes and ETags of the source's objects; differs if the source differs.
        kind, metrics: of the record, if the source has one.
    """

    format: str
    url: str
    bytes: SourceBytes
    metadata: Metadata = field(repr=False)
    payloads: Mapping[MetadataIndex, Payload] = field(repr=False)
    fingerprint: str
    kind: str = "full"
    metrics: Mapping[str, float] = field(default_factory=dict)
