"""Saves and loads of a `Fabric`'s strategy at URLs, and `bucket_strategy`, for a `Fabric` or a `Trainer`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.strategies import Strategy as TrainerStrategy

from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.lightning.trainer import TrainerSaves, UrlStrategy
from bucketpoint.integrations.parts import ModelState, OptimizerState, Pickled
from bucketpoint.integrations.training_state import TrainingState, with_parts

_ONE_MODEL = "Save an optimizer together with its model: fabric.save(url, {'model': model, 'optimizer': optimizer})"

_REST = "fabric"


class FabricSaves(UrlStrategy):
    """Base of Fabric's strategies with checkpoints at URLs.

    `fabric.save(url, state)` returns once the state is copied; the next save, `wait` and the end of the program wait
    for the upload. `fabric.load(url, state)` loads the checkpoint at the URL, or the newest whole one below it. Rank
    0 saves the values other than models and optimizers.
    """

    def save_checkpoint(
        self: Any,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 (Fabric's name)
    ) -> None:
        def made() -> dict[str, Any]:
            parts, rest = _split(state)
            saved: dict[str, Any] = {name: value.state_dict() for name, value in parts.items()}
            values = {name: value.state_dict() if _has_state(value) else value for name, value in rest.items()}
            for name, wanted in (filter or {}).items():
                held = saved if name in saved else values
                if isinstance(held[name], dict):
                    held[name] = {key: value for key, value in held[name].items() if wanted(key, value)}
            if self.is_global_zero:
                saved[_REST] = Pickled(values)
            return saved

        TrainingState(made).save(self._saves, self._url_to_save(path, storage_options))

    def load_checkpoint(
        self: Any,
        path: Any,
        state: dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        url = self._url_to_load(path)
        if not isinstance(state, dict) or not state:
            raise BucketpointError(
                "fabric.load needs the objects to load into",
                url=url,
                remedy="Call fabric.load(url, {'model': model, ...}); bucketpoint.load(url) returns a whole checkpoint",
            )
        parts, rest = _split(state, strict=strict)
        pickled = self._pickled(weights_only)
        TrainingState(lambda: {**parts, _REST: pickled}, strict=strict).load(url, **self._reading)
        values: dict[str, Any] = pickled.value or {}
        lacking = [name for name in rest if name not in values]
        if strict and lacking:
            raise BucketpointError(
                f"The checkpoint has no {lacking[0]!r}; it has {sorted(values)}",
                url=url,
                remedy="Leave it out of the state, or pass strict=False",
            )
        for name, value in rest.items():
            if name in values and _has_state(value):
                value.load_state_dict(values.pop(name))
            elif name in values:
                state[name] = values.pop(name)
        return values


def _split(state: Mapping[str, Any], *, strict: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the models and optimizers of a state, and its other values."""
    if _REST in state:
        raise BucketpointError(
            f"{_REST!r} in the state is the name under which the checkpoint keeps values that are not models",
            remedy=f"Give it another name: fabric.save(url, {{'my_{_REST}': ...}})",
        )
    whole = with_parts(state, _ONE_MODEL, strict=strict)
    parts = {name: value for name, value in whole.items() if isinstance(value, (ModelState, OptimizerState))}
    return parts, {name: value for name, value in state.items() if name not in parts}


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def bucket_strategy(kind: Any, *args: Any, **options: Any) -> Any:
    """Make a strategy whose checkpoints are URLs: `Trainer(strategy=bucket_strategy(DDPStrategy))`.

    Saves return once the state is copied, and models and optimizers are saved sharded if the strategy shards them. Any
    strategy made like this can load the checkpoint of any other, on any number of ranks.

    Args:
        kind: `DDPStrategy`, `FSDPStrategy`, `ModelParallelStrategy`, `SingleDeviceStrategy` or a subclass of them: from
            `lightning.pytorch.strategies` for a `Trainer`, from `lightning.fabric.strategies` for a `Fabric`.
        args, options: arguments of `kind`, and two more: `storage_options`, as for `BucketWriter`; and `trusted=True`
            to load values of all types. Otherwise `torch.load(weights_only=True)` loads values other than tensors.

    Raises:
        BucketpointError: `kind` is not a class of strategies of Lightning or Fabric.
    """
    if not (isinstance(kind, type) and issubclass(kind, (TrainerStrategy, FabricStrategy))):
        raise BucketpointError(
            f"bucket_strategy takes the class of a strategy, not {kind!r}",
            remedy="Call bucket_strategy(DDPStrategy) with a class of lightning.pytorch.strategies, or of "
            "lightning.fabric.strategies for a Fabric",
        )
    return _class_of(kind)(*args, **options)


@functools.cache
def _class_of(kind: Any) -> Any:
    saves = TrainerSaves if issubclass(kind, TrainerStrategy) else FabricSaves
    # Launchers that spawn processes pickle the strategy, whose generated class is in no module.
    pickled = {"__reduce__": lambda strategy: (_without_init, (kind,), vars(strategy))}
    return type(f"Bucket{kind.__name__}", (saves, kind), pickled)


def _without_init(kind: Any) -> Any:
    made = _class_of(kind)
    return made.__new__(made)
