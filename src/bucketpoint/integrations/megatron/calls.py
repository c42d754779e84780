"""`save` and `load`: megatron's functions of `dist_checkpointing`, for a checkpoint at a URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from megatron.core import dist_checkpointing

from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.megatron.loading import COMMON, BucketLoadStrategy
from bucketpoint.integrations.megatron.saving import BucketSaveStrategy
from bucketpoint.integrations.megatron.stand_in import stand_in, write_side_files


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
