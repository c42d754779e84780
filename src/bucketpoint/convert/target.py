"""Target of a conversion: objects, and the function that commits them once all are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bucketpoint.errors import ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import ObjectSource, Segment, Uploaded


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
        objects: their keys are paths below the target's prefix. Every segment has checksums, so that the checksum of
            the object is known once it is written: see `with_checksums`.
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
    return Segment(len(data), memoryview(data))


def with_checksums(source: ObjectSource) -> ObjectSource:
    """Return the object with a checksum of each segment; a segment divided into blocks keeps them."""
    segments = [replace(part, block_nbytes=part.block_nbytes or part.nbytes) for part in source.segments]
    return ObjectSource(source.key, segments)
