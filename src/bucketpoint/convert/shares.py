"""Parts of a conversion to safetensors: the files of each worker, and the small files that travel along."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bucketpoint.convert.target import TargetPlace
from bucketpoint.errors import AccessDeniedError, BucketpointError
from bucketpoint.format import keys
from bucketpoint.stores import Store
from bucketpoint.transfer import Meter, ObjectSource, TransferOptions
from bucketpoint.transfer.copy import CopyJob, copy_objects

Worker = tuple[int, int]
"""Number of a worker, from 0, and the number of workers."""

_SMALL = re.compile(r"[^./][^/]*\.(json|txt|model|jinja|tiktoken|py)")
_MOST_BYTES = 256 << 20
_FILE = re.compile(r"model-[0-9a-f]{12}-\d{5,}-of-\d{5,}\.safetensors", re.ASCII)


def file_name(digest: str, number: int, count: int) -> str:
    """Return the name of one of several files. It has the conversion's digest: no other one writes over the file."""
    return f"model-{digest[:12]}-{number:05d}-of-{count:05d}.safetensors"


def is_of_conversion(path: str) -> bool:
    """Return True for a path of `file_name`, or of a checkpoint's data: only one conversion writes to it."""
    return keys.parse_data_path(path) is not None or _FILE.fullmatch(path) is not None


def check_worker(worker: Worker) -> None:
    """Raise BucketpointError for a number beyond the number of workers."""
    if not 0 <= worker[0] < worker[1]:
        raise BucketpointError(
            f"There is no worker {worker[0]} of {worker[1]}", remedy="Number the workers from 0: --workers 0/4 to 3/4"
        )


def share_of(objects: Sequence[ObjectSource], worker: Worker) -> list[ObjectSource]:
    """Return the objects that a worker writes: the largest first, each to the worker with the fewest bytes so far."""
    loads = [0] * worker[1]
    share = set()
    for entry in sorted(objects, key=lambda entry: (-entry.nbytes, entry.key)):
        least = loads.index(min(loads))
        loads[least] += max(entry.nbytes, 1)
        if least == worker[0]:
            share.add(entry.key)
    return [entry for entry in objects if entry.key in share]


def copy_beside(store: Store, folder: str, place: TargetPlace, options: TransferOptions) -> None:
    """Copy the configuration and the tokenizer's files that lie in a folder. Files at the target stay."""
    above = f"{folder}/" if folder else ""
    try:
        # Their names may come after those of thousands of objects of a checkpoint, so the first LIST is not enough.
        found = [info for info in store.list(above) if _SMALL.fullmatch(info.key, len(above))]
        jobs = []
        for info in found:
            name = info.key[len(above) :]
            if info.size <= _MOST_BYTES and not name.endswith(".index.json") and place.head(name) is None:
                jobs.append(CopyJob(info, keys.join(place.prefix, name)))
    except AccessDeniedError:
        # Whoever may not list knows the files' names.
        return
    copy_objects(store, place.store, jobs, options, meter=Meter("convert", place.url, 0, None))
