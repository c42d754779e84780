"""What a conversion writes: objects, and what makes them a checkpoint once they are all there. Data only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bucketpoint.stores import Store
from bucketpoint.transfer import Segment, Uploaded


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is to be: a folder's prefix, or for a single file the folder above it."""

    store: Store
    prefix: str
    url: str


@dataclass(frozen=True)
class TargetObject:
    """An object to write: its path below the target's prefix, and its bytes.

    Every stretch has a length of blocks, so that the checksum of the object is known once it is written.
    """

    path: str
    segments: Sequence[Segment] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


@dataclass(frozen=True)
class Layout:
    """All objects of a target.

    Attributes:
        commit: makes them a checkpoint, given what the store said of each. Not called before all of them are there.
        left_out: keys of the source that the target's format has no place for.
        tensors: how many tensors it holds.
    """

    objects: Sequence[TargetObject]
    commit: Callable[[Sequence[Uploaded]], None]
    left_out: Sequence[str] = ()
    tensors: int = 0


def held(data: bytes) -> Segment:
    """Bytes that are in memory, as a stretch."""
    return Segment(len(data), memoryview(data), block_nbytes=len(data))
