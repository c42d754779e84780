"""Target of a conversion: its objects, their division among workers, and checks for other checkpoints at its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME
from bucketpoint.convert.source import BUCKETPOINT, SAFETENSORS, TORCH, Source
from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CheckpointExistsError,
    CommitConflictError,
    CorruptDataError,
    InvalidURLError,
    MetadataError,
    ObjectNotFoundError,
)
from bucketpoint.format import keys
from bucketpoint.format.safetensors_header import decode_json
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import Meter, ObjectSource, Segment, TransferOptions, Uploaded
from bucketpoint.transfer.copy import CopyJob, copy_objects
from bucketpoint.transfer.pieces import MAX_READ_BYTES, for_each


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


# Other content at the target

_WEIGHTS = re.compile(r"model((-[0-9a-f]{12})?-\d{5,}-of-\d{5,})?\.safetensors", re.ASCII)

DIGEST = "bucketpoint"
"""Field for the digest of the conversion, in the index and the headers of the files that it writes."""


def will_replace(place: TargetPlace, wanted: str, name: str, overwrite: bool, *, removes: bool = False) -> bool:
    """Return True if the conversion replaces a checkpoint or file at the target.

    Args:
        name: name of the file to write; empty for a folder.
        removes: True if the commit deletes former weights.

    Raises:
        CheckpointExistsError: the target has content that must not be replaced, or cannot be replaced safely.
    """
    safely = removes or wanted in (BUCKETPOINT, TORCH)
    allowed = overwrite and safely
    remedy = "Name another target, or delete the weights at this one first"
    if safely:
        remedy = "Name another target, or pass --overwrite"
    in_folder = (INDEX_NAME, SINGLE_NAME) if wanted == SAFETENSORS else (keys.METADATA,)
    for path in (name,) if name else in_folder:
        try:
            info = place.head(path)
        except AccessDeniedError:
            if wanted != BUCKETPOINT and not allowed:
                raise
            # S3 answers 403 instead of 404 to callers that may not list. The commit will detect an existing key.
            continue
        if info is not None:
            if allowed:
                return True
            message = f"Checkpoint already exists at this URL: it has a {path}"
            raise CheckpointExistsError(message, url=place.url, remedy=remedy)
    return False


def former_weights(place: TargetPlace, files: Sequence[str]) -> list[str]:
    """Return the keys of the weights in a folder of Hugging Face's layout, except those of `files`."""
    above, kept = place.key("x")[:-1], {place.key(name) for name in files}
    found = [info.key for info in place.store.list(f"{above}model")]
    return [key for key in found if _WEIGHTS.fullmatch(key, len(above)) and key not in kept]


def refuse_own_source(source: Source, place: TargetPlace) -> None:
    """Raise InvalidURLError if the export would delete its source. Not every other name of a place is recognised."""
    above = place.key("x")[:-1]
    read = source.bytes.keys() if source.bytes.store.identity == place.store.identity else []
    if any(key.startswith(above) and _WEIGHTS.fullmatch(key, len(above)) for key in read):
        raise InvalidURLError(
            "The weights at the target are the source, which the export would delete",
            url=place.url,
            remedy="Name another target",
        )


def watch_files(place: TargetPlace, names: Sequence[str], digest: str = "") -> Callable[[], None]:
    """Return a function that checks that files at the target have not changed since this call.

    The function raises CommitConflictError if a file was replaced or has appeared, unless a worker of the conversion
    with this digest has committed.
    """

    def look(name: str) -> ObjectInfo | None:
        try:
            return place.head(name)
        except AccessDeniedError:
            return None

    def look_again() -> None:
        if [look(name) for name in names] != before and not (digest and indexed_by(place) == digest):
            raise CommitConflictError(
                "Another process wrote to the target during the conversion; its file is kept, and this one is deleted",
                url=place.url,
                remedy="Name another target, or convert again",
            )

    before = [look(name) for name in names]
    return look_again


def is_exported(place: TargetPlace, objects: Sequence[ObjectSource], digest: str, options: TransferOptions) -> bool:
    """Return True if all files of this conversion to safetensors are at the target, with an index if needed."""
    return indexed_by(place) == (digest if len(objects) > 1 else None) and has_files(place, objects, options)


def has_files(place: TargetPlace, objects: Sequence[ObjectSource], options: TransferOptions) -> bool:
    """Return True if all files of this conversion to safetensors are at the target."""
    lost: list[str] = []

    def look(entry: ObjectSource) -> None:
        # The header has the digest of the conversion.
        header, key = entry.segments[0], place.key(entry.key)
        try:
            head, info = retry_transient(
                lambda: place.store.get(key, first=header.nbytes), attempts=options.read_attempts
            )
        except (ObjectNotFoundError, AccessDeniedError):
            head, info = b"", None
        if info is None or info.size != entry.nbytes or header.data != memoryview(head):
            lost.append(entry.key)

    for_each(objects, look, options)
    return not lost


def indexed_by(place: TargetPlace) -> str | None:
    """Return the digest in the index at a target: empty if another writer wrote the index, None if there is none."""
    try:
        data, _ = place.store.get(place.key(INDEX_NAME), max_bytes=MAX_READ_BYTES)
        noted = decode_json(data, key=INDEX_NAME).get("metadata")
    except (ObjectNotFoundError, AccessDeniedError):
        # S3 answers 403 instead of 404 to callers that may not list.
        return None
    except (CorruptDataError, MetadataError):
        return ""
    return str(noted.get(DIGEST, "")) if type(noted) is dict else ""
