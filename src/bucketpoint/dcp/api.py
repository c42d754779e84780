"""`save` and `load`: calls of DCP that succeed or fail on all ranks together, by a deadline.

A `load` without a state uses `KeysPlanner`, which creates the state from the keys of the checkpoint.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bucketpoint.dcp.collective_call import DEADLINE_S, CollectiveCall, collective_call
from bucketpoint.dcp.planning.load_planner import LoadPlanner, url_of
from bucketpoint.dcp.planning.nested_state import nested, noted_int_keys
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.dcp.reader import BucketReader
from bucketpoint.dcp.session import as_url, check_types, whole_step
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import DAMAGE, NOT_UNDERSTOOD, BucketpointError, CheckpointNotFoundError, MismatchError
from bucketpoint.format.item_names import matching
from bucketpoint.location import Location
from bucketpoint.staging import SavingRanks
from bucketpoint.transfer import ProgressCallback, TransferOptions

if TYPE_CHECKING:
    from bucketpoint.retention import RetentionPolicy

logger = logging.getLogger(__name__)


class KeysPlanner(LoadPlanner):
    """Load planner that creates a state for the requested keys of a checkpoint, and loads into it.

    Args:
        keys: `fnmatch` patterns on the flat names of the checkpoint, such as `"model.*"`; a pattern without wildcards
            also matches every name below it. None for all keys.
        device: device of the tensors.
    """

    def __init__(self, keys: str | Iterable[str] | None = None, device: Any = "cpu") -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._patterns = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
        self._device = _usable(device)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Fill the state, which must be empty, with tensors to load into."""
        assert metadata is not None
        for fqn in self._wanted_names(metadata):
            entry = metadata.state_dict_metadata[fqn]
            state_dict[fqn] = self._empty(fqn, entry) if isinstance(entry, TensorStorageMetadata) else None
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state, with its tensors on `device`."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location=self._device, weights_only=False)
        self._note(read_item)

    def loaded(self) -> dict[Any, Any]:
        """Return the nested state, once the load is complete."""
        assert self.metadata is not None
        url = url_of(self.metadata)
        return nested(self.state_dict, self.metadata, noted_int_keys(self.metadata, url=url), url=url)

    def _compare(self, plans: list[LoadPlan]) -> None:
        """Do nothing: the caller has selected the keys, so unused keys are expected."""

    def _wanted_names(self, metadata: Metadata) -> list[str]:
        names = list(metadata.state_dict_metadata)
        if self._patterns is None:
            return names
        wanted = matching(self._patterns, names, url=url_of(metadata))
        return [name for name in names if name in wanted]

    def _empty(self, fqn: str, entry: TensorStorageMetadata) -> torch.Tensor:
        properties = entry.properties
        try:
            if str(properties.dtype).startswith(("torch.qint", "torch.quint")):
                # The quantiser is a placeholder: the load replaces it by the saved tensor's.
                return torch._empty_affine_quantized(
                    entry.size, scale=1.0, zero_point=0, dtype=properties.dtype, device=self._device
                )
            return torch.empty(entry.size, dtype=properties.dtype, layout=properties.layout, device=self._device)
        except (RuntimeError, TypeError) as error:
            raise MismatchError(
                f"A {properties.dtype} tensor of {list(entry.size)} cannot be allocated on {self._device}: {error}",
                key=fqn,
                remedy="Exclude the tensor with keys=, or load into a state that you allocate",
            ) from error


def _usable(device: Any) -> torch.device:
    """Return the `torch.device`; raise BucketpointError if torch or this machine has no such device."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise BucketpointError(
            f"device={device!r} cannot be used: {reason}",
            remedy='Pass device="cpu", or another device of torch that this machine has',
        ) from error
    return found


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
    """Save a state, on all ranks or in a single process. Returns when the checkpoint is committed.

    If a rank fails, stalls or dies, every other rank raises: at once after a failure, at its next wait after a rank
    died, and by the deadline in any case. A stalled rank raises when it continues.

    Args:
        state: as for `dcp.save`.
        url: URL of the checkpoint, such as `"s3://bucket/run/step-500"`, or a `Path` of a local folder.
        deadline_s: seconds from the call until the last rank has raised. Requests to S3 and GCS are cancelled by then;
            calls of other filesystems, and look-ups of host names and credentials, may continue in the background.
        overwrite, storage_options, fs, transfer, progress, retention: as for `BucketWriter`.
        planner: a `SavePlanner` that you keep from save to save; by default a new planner for this save.
        process_group: the ranks that save, as a group of any backend; None for all ranks of the job. All saves and
            loads of these ranks share one gloo group, which the first call makes.

    Returns:
        As `dcp.save`: the metadata of the checkpoint on the coordinator; elsewhere an object with the URL.

    Raises:
        BucketpointError: on every rank, the error of the rank that failed, or an error that names the missing ranks;
            never DCP's `CheckpointException`. An error of a `state_dict()` method is raised unchanged on its rank.
    """
    check_types(state=state, url=url, transfer=transfer)
    where = str(as_url(url))
    with collective_call(f"The save of {where}", process_group, deadline_s, url=where) as call:
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


@overload
def load(
    state: dict[Any, Any],
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
    strict: bool | None = None,
) -> None: ...
@overload
def load(
    url: str | os.PathLike[str],
    /,
    *,
    step: str | int | None = None,
    keys: str | Iterable[str] | None = None,
    device: str | torch.device = "cpu",
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, Any] | None = None,
    fs: Any = None,
    transfer: TransferOptions | None = None,
    progress: ProgressCallback | bool | None = None,
    trusted: bool = False,
) -> dict[Any, Any]: ...
def load(
    state: dict[Any, Any] | str | os.PathLike[str],
    url: str | os.PathLike[str] | None = None,
    *,
    step: str | int | None = None,
    keys: str | Iterable[str] | None = None,
    device: str | torch.device = "cpu",
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, Any] | None = None,
    fs: Any = None,
    transfer: TransferOptions | None = None,
    planner: Any = None,
    process_group: Any = None,
    progress: ProgressCallback | bool | None = None,
    trusted: bool = False,
    strict: bool | None = None,
) -> dict[Any, Any] | None:
    """Load a checkpoint into a state, in place and on all ranks; or, given only a URL, return the saved state.

    `load(state, url)`: ranks that fail, stall or die are handled as in `save`. After an error the state may
    be partly loaded.

    `load(url)`: each calling process loads the state alone, with any number of ranks in the job that saved. Tensors are
    plain tensors on `device`, not shards.

    Args:
        state: as for `dcp.load`; for `load(url)` this is the URL.
        url: URL of the checkpoint, as for `save`.
        step: only for `load(url)` with the URL of a run: the checkpoint to load, as for `CheckpointManager.restore`:
            `"latest"`, `"best"` or a step number. If the latest or best checkpoint is damaged, the next one is tried.
            The best checkpoint is defined by the policy of the job that saved the newest checkpoint.
        keys: only for `load(url)`: patterns of the flat names to load, such as `"model.*"`; None for all keys.
        device: only for `load(url)`: device of the tensors.
        deadline_s, process_group: as for `save`.
        storage_options, fs, transfer, progress, trusted: as for `BucketReader`.
        planner: by default `LoadPlanner`.
        strict: as in torch. True refuses a checkpoint with keys that no rank requests, or without keys that a rank
            requests; False accepts both. By default only missing keys are refused.

    Returns:
        The nested state for `load(url)`, else None.

    Raises:
        BucketpointError: as `save`.
        MismatchError: the state and the checkpoint do not match, or one of the patterns in `keys` matches no key.
    """
    check_types(transfer=transfer)
    if isinstance(state, (str, os.PathLike)):
        if url is not None:
            raise BucketpointError(
                f"load got two URLs, or a state that is a {type(state).__name__}",
                remedy="Call load(state, url) to load into a state, or load(url) to get the saved state",
            )
        if planner is not None or process_group is not None or strict is not None:
            raise BucketpointError(
                "planner=, process_group= and strict= need a state to load into",
                remedy="Call load(state, url), or load(url, keys=...) to select keys",
            )
        if step is not None:
            options = {"storage_options": storage_options, "fs": fs, "transfer": transfer, "progress": progress}
            options |= {"keys": keys, "device": device, "deadline_s": deadline_s, "trusted": trusted}
            return _load_of_run(Location.of(state, storage_options, fs), step, options)
        where, target, alone = str(as_url(state)), {}, True
        planner = KeysPlanner(keys, device)
    else:
        if url is None or keys is not None or step is not None:
            raise BucketpointError(
                "keys= and step= cannot be combined with a state to load into"
                if url is not None
                else "load got no URL",
                remedy="Call load(state, url) to load into a state, or load(url, keys=...) to get the saved values",
            )
        check_types(state=state, url=url)
        where, target, alone = str(as_url(url)), state, False
        if planner is None:
            planner = LoadPlanner(allow_partial_load=strict is False, strict=strict is True)
        elif strict is not None:
            raise BucketpointError(
                "strict= cannot be combined with planner=", remedy="Pass planner=LoadPlanner(strict=True)"
            )
    with collective_call(f"The load of {where}", process_group, deadline_s, url=where, alone=alone) as call:
        reader = _DeadlineReader(
            where, storage_options=storage_options, fs=fs, transfer=transfer, progress=progress, trusted=trusted
        )
        reader.call = call
        reader.reset()
        with _watched(planner, call) as plans:
            dcp.load(
                target,
                storage_reader=reader,
                planner=plans,
                process_group=call.group,
                no_dist=call.group is None,
            )
        return planner.loaded() if isinstance(planner, KeysPlanner) else None


def _load_of_run(run: Location, which: str | int, options: dict[str, Any]) -> dict[Any, Any]:
    """Load the checkpoint of a step, or for "latest" and "best" the first checkpoint that is not damaged."""
    # Imported here: `save` and a load of one checkpoint need no catalog.
    from bucketpoint.catalog.catalog import open_catalog
    from bucketpoint.catalog.restore_candidates import restore_candidates
    from bucketpoint.checkpoint.open import recorded_best
    from bucketpoint.retention import Keep, RetentionPolicy

    catalog = open_catalog(run)
    which = which if isinstance(which, str) else whole_step(which)
    rule = recorded_best(run, catalog) if which == "best" else None
    policy = RetentionPolicy(Keep(latest=1, best=() if rule is None else (rule,)))
    found = restore_candidates(catalog, policy, which, None)
    if not found:
        raise CheckpointNotFoundError("The run has no checkpoint", url=catalog.url)
    for checkpoint in found[:-1]:
        try:
            return load(catalog.url_of_folder(checkpoint.folder), **options)
        except NOT_UNDERSTOOD:
            raise
        except DAMAGE as error:
            logger.error("step %d cannot be loaded, so another checkpoint is tried: %s", checkpoint.step, error)
    return load(catalog.url_of_folder(found[-1].folder), **options)


class _Writer(BucketWriter):
    """Writer that reports the stage of this rank, and any error without delay, to the other ranks of the call."""

    call: CollectiveCall

    def _ranks(self) -> SavingRanks:
        group = self.call.group
        return replace(super()._ranks(), together=1 if group is None else dist.get_world_size(group))

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        with self.call.doing("was uploading its items"):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self.call.doing("was committing"):
            super().finish(metadata, results)


class _DeadlineReader(BucketReader):
    """Reader that reports the stage of this rank, and any error without delay, to the other ranks of the call."""

    call: CollectiveCall

    def _wait_for_saves(self) -> None:
        # A process that loads alone makes no collectives, which could mix with the collectives of a save.
        if self.call.group is not None:
            super()._wait_for_saves()

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        with self.call.doing("was reading its items"):
            return super().read_data(plan, planner)


@contextmanager
def _watched(planner: Any, call: CollectiveCall) -> Iterator[Any]:
    """Wrap a planner of any class so that its errors are reported to the other ranks at once.

    DCP would report an error only after all ranks have reached the same step.
    """
    names = ("create_local_plan", "create_global_plan", "finish_plan")
    for name in names:
        setattr(planner, name, call.doing("was planning")(getattr(planner, name)))
    try:
        yield planner
    finally:
        for name in names:
            delattr(planner, name)
