"""Finding committed checkpoints under a root. Only a `.metadata` makes one; folders without are ignored."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from bucketpoint.errors import InvalidURLError, ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.stores import open_store

_STEP = re.compile(r"(?:.*\D)?(\d+)")


def latest_checkpoint(
    root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, fs: Any = None
) -> str | None:
    """URL of the newest whole checkpoint in a folder below `root`, or None if there is none.

    Newest is the highest number at the end of the folder's name (`step-500`, `step-00000500`, `epoch=3-step=500`);
    folders without a number are passed over. Costs one LIST per 1,000 folders, and one HEAD for each folder, from the
    newest on, until one is whole. Call it on one rank and broadcast the answer.
    """
    text = os.fspath(root).rstrip("/")
    if not text:
        raise InvalidURLError("No root URL was given")
    store, prefix = open_store(text, storage_options=dict(storage_options or {}), fs=fs)
    folders = []
    for folder in store.list_folders(prefix + "/" if prefix else ""):
        name = folder.rstrip("/").rsplit("/", 1)[-1]
        match = _STEP.fullmatch(name)
        if match:
            folders.append((int(match.group(1)), name))
    for _, name in sorted(folders, reverse=True):
        try:
            store.head(keys.join(keys.join(prefix, name), keys.METADATA))
        except ObjectNotFoundError:
            continue
        return f"{text}/{name}"
    return None
