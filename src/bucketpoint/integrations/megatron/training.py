"""Saves and loads of megatron at URLs, and `let_stand_for`, which makes its training loop use them."""

from __future__ import annotations

import functools
import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from bucketpoint.catalog.catalog import latest_checkpoint
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.megatron.strategies import (
    COMMON,
    BucketLoadStrategy,
    BucketSaveStrategy,
    let_stand,
    stand_in,
    write_side_files,
)
from bucketpoint.integrations.training_state import job_ranks

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


def save(
    sharded_state_dict: dict[Any, Any],
    url: str | os.PathLike[str],
    *,
    sharded_strategy: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Save a state to a URL by megatron's `dist_checkpointing.save`. All ranks.

    Args:
        sharded_state_dict: as for megatron's function.
        url: URL of the checkpoint.
        sharded_strategy: a `BucketSaveStrategy`, alone or in megatron's `FullyParallelSaveStrategyWrapper`. One
            strategy for all saves reuses its memory and compares successive states.
        storage_options: as for `BucketWriter`, if there is no strategy.
        options: as for megatron's function.

    Returns:
        None once the checkpoint is committed. With `async_sharded_save=True` megatron's `AsyncRequest`: the checkpoint
        is committed once the request is finalized.

    Raises:
        BucketpointError: nothing was committed; or an option works in local folders only.
    """
    where = os.fspath(url)
    strategy = sharded_strategy or BucketSaveStrategy(storage_options=storage_options)
    _check(strategy, BucketSaveStrategy, where, options)
    with ExitStack() as stack:
        folder = stack.enter_context(stand_in(where))
        request = dist_checkpointing.save(sharded_state_dict, folder, strategy, **options)
        if request is not None:
            request.add_finalize_fn(stack.pop_all().close)
        return request


def load(
    sharded_state_dict: dict[Any, Any],
    url: str | os.PathLike[str],
    *,
    sharded_strategy: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Load a state from a URL by megatron's `dist_checkpointing.load`. All ranks, in any number.

    Args:
        sharded_state_dict: as for megatron's function.
        url: URL of the checkpoint.
        sharded_strategy: a `BucketLoadStrategy`, alone or in megatron's `FullyParallelLoadStrategyWrapper`.
        storage_options: as for `BucketReader`, if there is no strategy.
        options: as for megatron's function, such as `strict`.

    Returns:
        what megatron's function returns: the state, and with `strict="return_all"` the mismatches.

    Raises:
        CheckpointNotFoundError: there is no whole checkpoint at the URL.
        CommitConflictError, RanksDisagreeError: another checkpoint was committed at the URL during the load.
        BucketpointError: the checkpoint cannot be loaded; or an option works in local folders only.
    """
    where = os.fspath(url)
    strategy = sharded_strategy or BucketLoadStrategy(storage_options=storage_options)
    base = _check(strategy, BucketLoadStrategy, where, options)
    with stand_in(where) as folder, base.one_commit(where) as common:
        # megatron reads unsharded values from the folder, not through the strategy.
        write_side_files(folder, COMMON, common)
        return dist_checkpointing.load(sharded_state_dict, folder, strategy, **options)


def _check(strategy: Any, kind: type[Any], url: str, options: Mapping[str, Any]) -> Any:
    """Return the strategy, or the one inside megatron's wrapper. Refuse arguments that do not work with URLs."""
    base = getattr(strategy, "base_strategy", strategy)
    if not isinstance(base, kind):
        raise BucketpointError(
            f"{type(base).__name__} works in local folders only",
            url=url,
            remedy=f"Use {kind.__name__}(), alone or in megatron's wrapper",
        )
    if url.startswith("msc://"):
        raise BucketpointError(
            "URLs of multi-storage-client (msc://) are not supported",
            url=url,
            remedy="Give the URL of the bucket, such as s3://bucket/run/iter_0000500, and storage_options if needed",
        )
    if options.get("verify_integrity"):
        raise BucketpointError(
            "verify_integrity=True hashes the files of a local folder",
            url=url,
            remedy="Leave it out: each byte that is loaded is verified by its checksum",
        )
    return base
