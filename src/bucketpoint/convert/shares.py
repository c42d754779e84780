"""Division of a conversion to safetensors among workers, and the copy of small files beside the weights."""

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
