"""Target of a conversion: objects, and the function that commits them once all are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bucketpoint.errors import ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import ObjectSource, Segment, Uploaded

T = TypeVar("T")


@dataclass(frozen=True)
class TargetPlace:
    """Place of a checkpoint: the prefix of a folder, or for a single file the folder above it."""

    store: Store
    prefix: str
    url: str

    def key(self, path: str) -> str:
        return keys.join(self.prefix, path)

    def head(self, path: str) -> ObjectInfo | None:
        """Return the store's description of an object, or None if it does not exist."""
        try:
            return self.store.head(self.key(path))
        except ObjectNotFoundError:
            return None


@dataclass(frozen=True)
class TargetLayout:
    """All objects of a target.

    Attributes:
        objects: their keys are paths below the target's prefix. Every segment has a block length, so that the checksum
            of the object is known once it is written.
        commit: commits the objects, given the store's answer for each. Called only once all of them are written.
        left_out: keys of the source that the target's format cannot hold.
        tensors: number of tensors in the target.
    """

    objects: Sequence[ObjectSource]
    commit: Callable[[Sequence[Uploaded]], None]
    left_out: Sequence[str] = ()
    tensors: int = 0


def held(data: bytes) -> Segment:
    """Return bytes in memory as a segment."""
    return Segment(len(data), memoryview(data), block_nbytes=len(data))


def batched(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Cut a sequence into batches of at most `most` bytes, or of one larger item."""
    batches: list[list[T]] = []
    size = 0
    for item in items:
        if not batches or size + nbytes(item) > most:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += nbytes(item)
    return batches
