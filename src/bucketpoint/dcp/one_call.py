"""`save` and `load`: DCP's, in one call, on all ranks or none, by a deadline. What makes them so is in `call`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bucketpoint.dcp.call import DEADLINE_S, Call, together
from bucketpoint.dcp.planner import LoadPlanner
from bucketpoint.dcp.reader import BucketReader
from bucketpoint.dcp.save_planner import SavePlanner
from bucketpoint.dcp.session import as_url
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.retention import RetentionPolicy
from bucketpoint.transfer import ProgressCallback, TransferOptions


def save(
    state: dict[str, Any],
    url: str | os.PathLike[str],
    *,
    deadline_s: float = DEADLINE_S,
    overwrite: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    fs: Any = None,
    transfer: TransferOptions | None = None,
    planner: Any = None,
    process_group: Any = None,
    progress: ProgressCallback | bool | None = None,
    retention: RetentionPolicy | str | os.PathLike[str] | None = None,
) -> Metadata:
    """Save a state, on all ranks or in a process alone. Returns when it is committed.

    Where a rank fails, stalls or dies, every other rank raises: at once where it fails, when they next wait for it
    where it dies, and by the deadline in any case. A rank that stalls raises when it goes on.

    Args:
        state: as for `dcp.save`.
        deadline_s: seconds from the call until the last rank has raised. Requests to S3 and GCS are broken off by then;
            through fsspec they end by its own timeouts.
        overwrite, storage_options, fs, transfer, progress, retention: as for `BucketWriter`.
        planner: a `SavePlanner` that is kept from save to save; by default one for this save alone.
        process_group: the ranks, of any backend; None for all of the job. A gloo group is made for each call.

    Returns:
        What `dcp.save` returns: the checkpoint's metadata, on the coordinator; elsewhere it says where to read it.

    Raises:
        BucketpointError: of the rank that failed, on every rank; or one that names the ranks that are missing. Never
            DCP's `CheckpointException`, which is at most its cause. What the state's own `state_dict()` raises is
            raised as it is where it was raised.
    """
    where = str(as_url(url))
    with together(f"The save of {where}", process_group, deadline_s, url=where) as call, _quietly(call):
        writer = _Writer(
            where,
            overwrite=overwrite,
            storage_options=storage_options,
            fs=fs,
            transfer=transfer,
            progress=progress,
            retention=retention,
        )
        writer.call = call
        with _watched(planner if planner is not None else SavePlanner(enable_plan_caching=False), call) as plans:
            metadata: Metadata = dcp.save(
                state,
                storage_writer=writer,
                planner=plans,
                process_group=call.group,
                no_dist=call.group is None,
            )
        return metadata


def load(
    state: dict[str, Any],
    url: str | os.PathLike[str],
    *,
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, Any] | None = None,
    fs: Any = None,
    transfer: TransferOptions | None = None,
    planner: Any = None,
    process_group: Any = None,
    progress: ProgressCallback | bool | None = None,
    trusted: bool = False,
) -> None:
    """Load a checkpoint into a state, in place, on all ranks or in a process alone.

    What `save` says of ranks that fail, stall or die holds here too. After an error the state is partly loaded.

    Args:
        state: as for `dcp.load`.
        deadline_s, process_group: as for `save`.
        storage_options, fs, transfer, progress, trusted: as for `BucketReader`.
        planner: by default `LoadPlanner`.

    Raises:
        BucketpointError: as `save`.
    """
    where = str(as_url(url))
    with together(f"The load of {where}", process_group, deadline_s, url=where) as call, _quietly(call):
        reader = _Reader(
            where, storage_options=storage_options, fs=fs, transfer=transfer, progress=progress, trusted=trusted
        )
        reader.call = call
        reader.reset()
        with _watched(planner if planner is not None else LoadPlanner(), call) as plans:
            dcp.load(
                state,
                storage_reader=reader,
                planner=plans,
                process_group=call.group,
                no_dist=call.group is None,
            )


class _Writer(BucketWriter):
    """Tells the other ranks what this one is doing, and at once what went wrong."""

    call: Call

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        with self.call.doing("was uploading its items"):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self.call.doing("was committing"):
            super().finish(metadata, results)


class _Reader(BucketReader):
    """The same for a load."""

    call: Call

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        with self.call.doing("was reading its items"):
            return super().read_data(plan, planner)


@contextmanager
def _watched(planner: Any, call: Call) -> Iterator[Any]:
    """The same for a planner, of whatever class: DCP tells the others of what it raises once all have come so far."""
    names = ("create_local_plan", "create_global_plan", "finish_plan")

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def plan(*args: Any, **kwargs: Any) -> Any:
            with call.doing("was planning"):
                return method(*args, **kwargs)

        return plan

    for name in names:
        setattr(planner, name, watched(getattr(planner, name)))
    try:
        yield planner
    finally:
        for name in names:
            delattr(planner, name)


@contextmanager
def _quietly(call: Call) -> Iterator[None]:
    """In a process alone DCP would warn of just that."""
    with warnings.catch_warnings():
        if call.group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
