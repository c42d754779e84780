"""Strategies of `Fabric` whose checkpoints are URLs, saved sharded and in the background."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from bucketpoint.dcp import BucketWriter, load
from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.lightning.state import Pickled, newest_of
from bucketpoint.integrations.resume_planner import ResumePlanner
from bucketpoint.integrations.saves import Saves
from bucketpoint.integrations.training_state import with_state

_ONE_MODEL = "Save an optimizer together with its model: fabric.save(url, {'model': model, 'optimizer': optimizer})"

_REST = "fabric"


class FabricBucketStrategy:
    """Saves and loads of Fabric's strategy, which comes next in the order of the bases.

    `fabric.save(url, state)` returns once the state is copied; the next save, `wait` and the end of the program wait
    for the upload. `fabric.load(url, state)` loads the checkpoint at the URL, or the newest whole one below it, on any
    number of ranks. Values that are no models and no optimizers are those of rank 0.

    Args:
        storage_options: as for `BucketWriter`.
        trusted: load values of all types. Otherwise those that are no tensors are loaded by
            `torch.load(weights_only=True)`.
    """

    def __init__(
        self, *args: Any, storage_options: Mapping[str, Any] | None = None, trusted: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._storage_options = storage_options
        self._trusted = trusted
        self._saves = Saves(BucketWriter(storage_options=storage_options))

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            BucketpointError: it failed.
        """
        self._saves.wait()

    def save_checkpoint(
        self: Any,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 (Fabric's name)
    ) -> None:
        if storage_options is not None:
            raise BucketpointError(
                "A save takes no storage_options",
                remedy=f"Give them to the strategy: {type(self).__name__}(storage_options=...)",
            )

        def made() -> dict[str, Any]:
            _refuse_reserved(state)
            tensors = with_state(state, _ONE_MODEL)
            saved: dict[str, Any] = {name: value.state_dict() for name, value in tensors.items()}
            rest = {name: value for name, value in state.items() if name not in tensors}
            values = {name: value.state_dict() if _has_state(value) else value for name, value in rest.items()}
            for name, wanted in (filter or {}).items():
                of = saved if name in saved else values
                if isinstance(of[name], dict):
                    of[name] = {key: value for key, value in of[name].items() if wanted(key, value)}
            if self.is_global_zero:
                saved[_REST] = Pickled(values)
            return saved

        self._saves.save(os.fspath(self.broadcast(path)), made)

    def load_checkpoint(
        self: Any,
        path: Any,
        state: dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        url = os.fspath(self.broadcast(path))
        if not isinstance(state, dict) or not state:
            raise BucketpointError(
                "fabric.load needs the objects to load into",
                url=url,
                remedy="Call fabric.load(url, {'model': model, ...}); bucketpoint.load(url) returns a whole checkpoint",
            )
        _refuse_reserved(state)
        tensors = with_state(state, _ONE_MODEL, loading=True, strict=strict)
        rest = {name: value for name, value in state.items() if name not in tensors}
        pickled = Pickled(trusted=self._trusted if weights_only is None else not weights_only)
        found = newest_of(url, self._storage_options)
        load(
            {**tensors, _REST: pickled},
            found,
            storage_options=self._storage_options,
            planner=ResumePlanner(tensors, strict=strict),
            trusted=self._trusted,
        )
        values: dict[str, Any] = pickled.value or {}
        lacking = [name for name in rest if name not in values]
        if strict and lacking:
            raise BucketpointError(
                f"The checkpoint has no {lacking[0]!r}; it has {sorted(values)}",
                url=found,
                remedy="Leave it out of the state, or pass strict=False",
            )
        for name, value in rest.items():
            if name in values and _has_state(value):
                value.load_state_dict(values.pop(name))
            elif name in values:
                state[name] = values.pop(name)
        return values


def _refuse_reserved(state: Mapping[str, Any]) -> None:
    if _REST in state:
        raise BucketpointError(
            f"{_REST!r} in the state is the name under which the checkpoint keeps values that are no models",
            remedy=f"Give it another name: fabric.save(url, {{'my_{_REST}': ...}})",
        )


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class FabricBucketDDPStrategy(FabricBucketStrategy, DDPStrategy):
    """Fabric's `DDPStrategy` with checkpoints at URLs: `Fabric(strategy=FabricBucketDDPStrategy())`."""


class FabricBucketModelParallelStrategy(FabricBucketStrategy, ModelParallelStrategy):
    """Fabric's `ModelParallelStrategy` (FSDP2, tensor parallelism) with checkpoints at URLs."""


class FabricBucketFSDPStrategy(FabricBucketStrategy, FSDPStrategy):
    """Fabric's `FSDPStrategy` (FSDP1) with checkpoints at URLs, which are always sharded."""


class FabricBucketSingleDeviceStrategy(FabricBucketStrategy, SingleDeviceStrategy):
    """Fabric's `SingleDeviceStrategy` with checkpoints at URLs."""
