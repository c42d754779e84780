"""Target of a conversion: its objects, their division among workers, and the function that commits them all."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bucketpoint.errors import AccessDeniedError, BucketpointError, ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import Meter, ObjectSource, Segment, TransferOptions, Uploaded
from bucketpoint.transfer.copy import CopyJob, copy_objects


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


Worker = tuple[int, int]
"""Number of a worker, from 0, and the number of workers."""

_SMALL = re.compile(r"[^./][^/]*\.(json|txt|model|jinja|tiktoken|py)")
_MOST_BYTES = 256 << 20
_FILE = re.compile(r"model-[0-9a-f]{12}-\d{5,}-of-\d{5,}\.safetensors", re.ASCII)


def file_name(digest: str, number: int, count: int) -> str:
    """Return the name of one of several files, with a digest so that no other conversion overwrites the file."""
    return f"model-{digest[:12]}-{number:05d}-of-{count:05d}.safetensors"


def is_of_conversion(path: str) -> bool:
    """Return True for a path that `file_name` or `data_path` made, to which only one conversion writes."""
    return keys.parse_data_path(path) is not None or _FILE.fullmatch(path) is not None


def check_worker(worker: Worker) -> None:
    """Raise BucketpointError for a number beyond the number of workers."""
    if not 0 <= worker[0] < worker[1]:
        raise BucketpointError(
            f"There is no worker {worker[0]} of {worker[1]}", remedy="Number the workers from 0: --workers 0/4 to 3/4"
        )


def share_of(objects: Sequence[ObjectSource], worker: Worker) -> list[ObjectSource]:
    """Return the objects that a worker writes. Each object, the largest first, goes to the least loaded worker."""
    loads = [0] * worker[1]
    share = set()
    for entry in sorted(objects, key=lambda entry: (-entry.nbytes, entry.key)):
        least = loads.index(min(loads))
        loads[least] += max(entry.nbytes, 1)
        if least == worker[0]:
            share.add(entry.key)
    return [entry for entry in objects if entry.key in share]


def copy_beside(store: Store, folder: str, place: TargetPlace, options: TransferOptions) -> None:
    """Copy the configuration and the tokenizer's files from a folder. Files at the target are not replaced."""
    above = f"{folder}/" if folder else ""
    try:
        # Names of thousands of a checkpoint's objects may precede these files, so one LIST request is not enough.
        found = [info for info in store.list(above) if _SMALL.fullmatch(info.key, len(above))]
        jobs = []
        for info in found:
            name = info.key[len(above) :]
            if info.size <= _MOST_BYTES and not name.endswith(".index.json") and place.head(name) is None:
                jobs.append(CopyJob(info, keys.join(place.prefix, name)))
    except AccessDeniedError:
        # A caller without the right to list has to copy these files separately.
        return
    copy_objects(store, place.store, jobs, options, meter=Meter("convert", place.url, 0, None))
