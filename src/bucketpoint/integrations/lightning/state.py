"""State that is no tensor of a model or an optimizer, as one pickled item, and saves of one strategy, in turn."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, Metadata

from bucketpoint.catalog import latest_checkpoint
from bucketpoint.dcp import BucketWriter, LoadPlanner, SaveHandle, async_save
from bucketpoint.dcp.planning.load_planner import url_of
from bucketpoint.errors import BucketpointError, MismatchError, UnsafeDataError, first_of
from bucketpoint.stores import open_store


class Pickled:
    """Values of a trainer, pickled by `torch.save` as one item of the checkpoint.

    Lightning does not say which values a checkpoint will hold, so that they cannot be loaded one by one in place.

    Attributes:
        value: what was loaded; None before.
    """

    def __init__(self, value: Any = None, *, trusted: bool = False) -> None:
        self.value = value
        self._trusted = trusted

    def state_dict(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        try:
            torch.save(self.value, buffer)
        except Exception as error:
            raise BucketpointError(
                f"The trainer's state cannot be pickled: {error}",
                remedy="Leave the value out of what a `state_dict`, a callback, `on_save_checkpoint` or the "
                "hyperparameters give to a checkpoint",
            ) from error
        return {"pickled": buffer.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.value = torch.load(io.BytesIO(state["pickled"]), map_location="cpu", weights_only=not self._trusted)
        except Exception as error:
            if self._trusted:
                raise
            raise UnsafeDataError(
                f"The trainer's state in the checkpoint has types that torch.load refuses: {error}",
                remedy="If you trust the checkpoint, give the strategy trusted=True, or load with weights_only=False; "
                "or add the types with torch.serialization.add_safe_globals",
            ) from error


class ResumePlanner(LoadPlanner):
    """Load planner for checkpoints in which some parameters have no state of the optimizer.

    torch makes a state for each parameter before a load, but at the save parameters that have never got a gradient had
    none. They keep the new state, as of no step.

    Args:
        optimizers: names of optimizers in the state.
        complete: names in the state of which the checkpoint may have no other keys than are loaded.
        strict: refuse checkpoints that lack other keys, or have more of `complete`.
    """

    def __init__(self, optimizers: Iterable[str], complete: Iterable[str], *, strict: bool) -> None:
        super().__init__(allow_partial_load=not strict)
        self._complete = tuple(f"{name}." for name in complete) if strict else ()
        self._prefixes = tuple(f"{name}.state." for name in optimizers)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        saved = {_parameter_of(key) for key in metadata.state_dict_metadata if key.startswith(self._prefixes)}
        # A checkpoint without any state of an optimizer is another thing.
        prefixes = tuple(prefix for prefix in self._prefixes if any(name.startswith(prefix) for name in saved))
        for key in list(self.state_dict):
            if prefixes and key.startswith(prefixes) and _parameter_of(key) not in saved:
                value = self.state_dict.pop(key)
                if key.endswith(".step") and isinstance(value, torch.Tensor):
                    value.zero_()

    def create_local_plan(self) -> LoadPlan:
        # With FSDP1 a rank may have no part of a parameter. torch takes it for a checkpoint of before torch 2.4, and
        # asks for the keys of that time.
        self.flatten_state_dict = False
        try:
            return super().create_local_plan()
        finally:
            self.flatten_state_dict = True

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert self.metadata is not None
        wanted = {item.dest_index.fqn for plan in global_plan for item in plan.items}.union(self.state_dict)
        saved = self.metadata.state_dict_metadata
        more = [key for key in saved if self._complete and key.startswith(self._complete) and key not in wanted]
        if more:
            raise MismatchError(
                f"The checkpoint has what the model or its optimizers do not have: {first_of(more, 5)}",
                url=url_of(self.metadata),
                remedy="Build the model and the optimizers as they were saved, or load with strict=False "
                "(LightningModule.strict_loading = False)",
            )
        return super().create_global_plan(global_plan)


def _parameter_of(key: str) -> str:
    return key.rpartition(".")[0]


class Saves:
    """Saves in the background with one writer, one after another."""

    def __init__(self, storage_options: Mapping[str, Any] | None) -> None:
        self._writer = BucketWriter(storage_options=storage_options)
        self._last: SaveHandle | None = None

    def save(self, url: str, state: dict[str, Any]) -> None:
        """Wait for the save before, and begin the next. Return once training may change the state.

        Raises:
            BucketpointError: the save before this one failed, or the state cannot be copied.
        """
        self.wait()
        handle = async_save(state, checkpoint_id=url, storage_writer=self._writer)
        handle.staged.result()
        self._last = handle

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            BucketpointError: it failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()


def newest_of(url: str, storage_options: Mapping[str, Any] | None, broadcast: Any, rank: int) -> str:
    """Return the newest whole checkpoint below a URL; the URL itself if there is none. All ranks."""
    failure: BucketpointError | None = None
    newest = None
    if rank == 0:
        try:
            newest = latest_checkpoint(url, storage_options=storage_options)
            if newest is None:
                _refuse_one_object(url, storage_options)
        except BucketpointError as error:
            # The other ranks wait for an answer.
            failure = error
    newest, failure = broadcast((newest, failure))
    if failure is not None:
        raise failure
    return newest or url


def _refuse_one_object(url: str, storage_options: Mapping[str, Any] | None) -> None:
    folder, _, name = url.rstrip("/").rpartition("/")
    try:
        store, key = open_store(folder, storage_options=storage_options)
        info = store.head(f"{key}/{name}" if key else name)
    except BucketpointError:
        # The load says what is wrong.
        return
    raise BucketpointError(
        f"There is one object of {info.size} bytes at this URL, and no checkpoint of several",
        url=url,
        remedy="A plain checkpoint of Lightning is loaded by Lightning's own strategies, with "
        "Trainer(plugins=[BucketCheckpointIO()]) from a bucket",
    )
