"""Local folders that represent URLs in calls of megatron.

megatron makes a `Path` of its folder argument, which would turn `s3://bucket` into the local `s3:/bucket`, and reads
and writes side files in that folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint import FileSystemWriter

_urls: dict[str, str] = {}
"""URL of each folder that represents a URL in this process. Its subfolders represent URLs below that URL."""


def let_stand(folder: str | os.PathLike[str], url: str) -> None:
    """Make a folder and its subfolders represent a URL for the rest of this process."""
    _urls[os.path.realpath(folder)] = url.rstrip("/")


@contextmanager
def stand_in(url: str) -> Iterator[str]:
    """Make an empty folder that represents a URL, and delete the folder at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="bucketpoint-") as folder:
        let_stand(folder, url)
        try:
            yield folder
        finally:
            del _urls[os.path.realpath(folder)]


def url_of(checkpoint_dir: Any) -> str:
    """Return the URL that a folder represents; the folder itself if it represents none."""
    folder: str = os.fspath(checkpoint_dir)
    if "://" in folder:
        return folder
    # megatron may spell the path of the folder in another way, and uses subfolders at several levels.
    whole = Path(os.path.realpath(folder))
    for each in (whole, *whole.parents):
        if str(each) in _urls:
            return "/".join((_urls[str(each)], *whole.relative_to(each).parts))
    return folder


def write_side_files(folder: str | os.PathLike[str], name: str, item: Any) -> None:
    """Write a checkpoint with one item into a folder, because megatron reads that item without a strategy."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save({name: item}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    save_config(CheckpointingConfig("torch_dist"), os.fspath(folder))
