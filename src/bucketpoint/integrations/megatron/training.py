"""`let_stand_for`, which makes Megatron's training loop save to and load from a URL."""

from __future__ import annotations

import functools
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bucketpoint.catalog.catalog import latest_checkpoint
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.megatron.loading import COMMON, BucketLoadStrategy
from bucketpoint.integrations.megatron.saving import BucketSaveStrategy
from bucketpoint.integrations.megatron.stand_in import let_stand, write_side_files
from bucketpoint.integrations.saves import job_ranks

logger = logging.getLogger(__name__)

_MARK = "bucketpoint-url.txt"
"""File in a folder, with the URL that the folder represents."""

_TRACKER = "latest_checkpointed_iteration.txt"


def let_stand_for(
    folder: str | os.PathLike[str],
    url: str,
    *,
    storage_writer: BucketWriter | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trusted: bool = False,
) -> None:
    """Make a local folder represent the URL of a run in Megatron's training loop. All processes, before `pretrain`.

    With `--save` and `--load` set to the folder, checkpoints are saved to `url/iter_0000500` and so on, and training
    resumes from the newest whole checkpoint. The folder contains side files only. This call rebuilds them from the
    bucket, so that no tracker file names a missing checkpoint. For the rest of the process, bucketpoint's strategies
    replace megatron's two strategies in `megatron.training.checkpointing`.

    Args:
        folder: folder on each node, or one folder that the nodes share; empty at the first call.
        url: URL of the run.
        storage_writer, storage_options, trusted: as for `BucketSaveStrategy` and `BucketLoadStrategy`.

    Raises:
        BucketpointError: the folder holds other files; or Megatron's training loop is not installed.
    """
    try:
        from megatron.training import checkpointing
    except ImportError as error:
        raise BucketpointError(
            f"Megatron's training loop cannot be imported: {error}",
            url=url,
            remedy="Install megatron-core with its extra mlm",
        ) from error

    def prepare() -> None:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            strategy = BucketLoadStrategy(storage_options=storage_options, trusted=trusted)
            _prepare(Path(folder), url, strategy, storage_options)

    if dist.is_initialized():
        call = f"let_stand_for(..., {url!r})"
        job_ranks(call).together(call, prepare)
    else:
        # The ranks wait for each other when `pretrain` makes the process group.
        prepare()
    let_stand(os.fspath(folder).rstrip("/"), url)
    saving: dict[str, Any] = {"storage_writer": storage_writer, "storage_options": storage_options}
    loading: dict[str, Any] = {"storage_options": storage_options, "trusted": trusted}
    checkpointing.TorchDistSaveShardedStrategy = functools.partial(BucketSaveStrategy, **saving)
    checkpointing.TorchDistLoadShardedStrategy = functools.partial(BucketLoadStrategy, **loading)


def _prepare(root: Path, url: str, strategy: BucketLoadStrategy, storage_options: Mapping[str, Any] | None) -> None:
    """Make the side files of the newest checkpoint, on one process of each node."""
    root.mkdir(parents=True, exist_ok=True)
    mark = root / _MARK
    # List the folder before the mark is read: another node that shares the folder writes the mark first.
    used = any(not path.name.startswith(_MARK) for path in root.iterdir())
    told = mark.read_text(encoding="utf-8").rstrip("/") if mark.exists() else None
    if told != url.rstrip("/"):
        if told is not None or used:
            raise BucketpointError(
                f"The folder {root} belongs to {told}" if told else f"The folder {root} has other files",
                url=url,
                remedy="Give an empty folder that only this run uses",
            )
        # Renamed into place, so that another node never reads half a file.
        part = root / f"{_MARK}.{uuid.uuid4().hex}"
        part.write_text(url, encoding="utf-8")
        part.replace(mark)
    newest = latest_checkpoint(url, storage_options=storage_options)
    tracker = root / _TRACKER
    tracker.unlink(missing_ok=True)
    if newest is None:
        logger.info("%s holds no checkpoint yet: training begins from scratch", url)
        return
    name = newest.rpartition("/")[2]
    iteration = name.removeprefix("iter_")
    if name != f"iter_{iteration:0>7}" or not iteration.isdigit():
        raise BucketpointError(
            f"Megatron's training loop cannot load {name}",
            url=newest,
            remedy="Megatron's folders are named like iter_0000500",
        )
    write_side_files(root / name, COMMON, strategy.load_common_item(newest))
    tracker.write_text(str(int(iteration)), encoding="utf-8")
