"""Target of a conversion: its objects, and the function that commits them once all are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bucketpoint.errors import ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import ObjectSource, Segment, Uploaded


@dataclass(frozen=True)
class TargetPlace:
    """Store, and prefix of the target's folder; for a single file, of the folder that contains the file."""

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
        objects: objects whose keys are paths below the target's prefix. Every segment has checksums, from which the
            checksum of a written object is computed: see `with_checksums`.
        commit: function that commits the objects, called with the store's answer for each once all are written.
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
    """Return the object with checksums for every segment: a segment without blocks becomes a single block."""
    segments = [replace(part, block_nbytes=part.block_nbytes or part.nbytes) for part in source.segments]
    return ObjectSource(source.key, segments)
