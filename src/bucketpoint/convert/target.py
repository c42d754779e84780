"""Target of a conversion: objects, and the function that commits them once all are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bucketpoint.stores import Store
from bucketpoint.transfer import Segment, Uploaded


@dataclass(frozen=True)
class TargetPlace:
    """Place of a checkpoint: the prefix of a folder, or for a single file the folder above it."""

    store: Store
    prefix: str
    url: str


@dataclass(frozen=True)
class TargetObject:
    """An object to write: its path below the target's prefix, and its bytes.

    Every segment has a block length, so that the checksum of the object is known once it is written.
    """

    path: str
    segments: Sequence[Segment] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


@dataclass(frozen=True)
class TargetLayout:
    """All objects of a target.

    Attributes:
        commit: commits the objects, given the store's answer for each. Called only once all of them are written.
        left_out: keys of the source that the target's format cannot hold.
        tensors: number of tensors in the target.
    """

    objects: Sequence[TargetObject]
    commit: Callable[[Sequence[Uploaded]], None]
    left_out: Sequence[str] = ()
    tensors: int = 0


def held(data: bytes) -> Segment:
    """Return bytes in memory as a segment."""
    return Segment(len(data), memoryview(data), block_nbytes=len(data))
