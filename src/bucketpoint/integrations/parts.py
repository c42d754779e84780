"""Parts of a training program's state: models, optimizers, random generators and other values."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map_only

from bucketpoint.dcp.planning.rank_state import rank_state
from bucketpoint.errors import BucketpointError, MismatchError, UnsafeDataError

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelState:
    """The state of a model, read at a save and set at a load. With `strict`, a load needs exactly the model's keys."""

    def __init__(self, model: torch.nn.Module, *, strict: bool = True) -> None:
        self._model = model
        self._strict = strict

    def state_dict(self) -> dict[str, Any]:
        return dict(get_model_state_dict(self._model))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_model_state_dict(self._model, dict(state), options=StateDictOptions(strict=self._strict))


class OptimizerState:
    """The state of a model's optimizer, read at a save and set at a load.

    Groups without parameters, which LoRA can leave behind, are omitted: torch does not load them.
    With `loading`, each parameter gets a new state to load into: torch creates none if gradients or states exist
    already, and the load would then change nothing.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, loading: bool = False) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loading = loading

    def to_load(self) -> OptimizerState:
        return OptimizerState(self._model, self._optimizer, loading=True)

    def state_dict(self) -> dict[str, Any]:
        with _without_empty_groups(self._optimizer):
            if not self._loading:
                return dict(get_optimizer_state_dict(self._model, self._optimizer, options=_BY_NAME))
            self._optimizer.state.clear()
            with _without_gradients(self._optimizer):
                return dict(get_optimizer_state_dict(self._model, self._optimizer, options=_BY_NAME))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with _without_empty_groups(self._optimizer):
            set_optimizer_state_dict(self._model, self._optimizer, dict(state), options=_BY_NAME)


@contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    whole = optimizer.param_groups
    optimizer.param_groups = [group for group in whole if group["params"]]
    try:
        yield
    finally:
        # A load replaces the groups: put the new ones back between the empty ones.
        filled = iter(optimizer.param_groups)
        optimizer.param_groups = [next(filled) if group["params"] else group for group in whole]


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    held = [(each, each.grad) for group in optimizer.param_groups for each in group["params"]]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def model_of(optimizer: Any, models: Iterable[torch.nn.Module], remedy: str) -> torch.nn.Module:
    """Return the model with all parameters of an optimizer. Without one, raise BucketpointError with `remedy`."""
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for model in models:
        if held <= {id(tensor) for tensor in model.parameters()}:
            return model
    raise BucketpointError("No single model has all parameters of an optimizer", remedy=remedy)


class OfThisRank:
    """An object with a separate state on each rank. A load leaves it unchanged if the checkpoint lacks this rank."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._saved = True

    def expect(self, saved: bool) -> None:
        """Record whether the checkpoint of the load under way has a state of this rank."""
        self._saved = saved

    def state_dict(self) -> dict[str, Any]:
        return rank_state(self._value.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._saved:
            (mine,) = (value for name, value in state.items() if name in rank_state(None))
            self._value.load_state_dict(mine)


class RandomState:
    """States of the random generators of Python, numpy and torch, on all devices of this process.

    Saved as one item of bytes. Saved as tensors, they would cause the warning about unchanged states whenever training
    uses no dropout.
    """

    def state_dict(self) -> dict[str, Any]:
        state = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = np.random.get_state(legacy=False)
        assert isinstance(numpy, dict)
        # `torch.load` reads numpy's arrays from trusted checkpoints only.
        numpy = tree_map_only(np.ndarray, torch.from_numpy, numpy)
        if numpy["bit_generator"] == "MT19937":
            # The form that bucketpoint 0.1 reads.
            state["numpy"] = [numpy["bit_generator"], numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]]
            state["numpy_keys"] = numpy["state"]["key"]
        else:
            state["numpy"] = numpy
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return {"pickled": buffer.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        held = torch.load(io.BytesIO(state["pickled"]), weights_only=True)
        random.setstate(held["python"])
        numpy = held["numpy"]
        if not isinstance(numpy, dict):
            kind, *rest = numpy
            numpy = (kind, held["numpy_keys"], *rest)
        try:
            np.random.set_state(tree_map_only(torch.Tensor, torch.Tensor.numpy, numpy))
        except ValueError as error:
            raise MismatchError(
                f"numpy refuses the state of its random generator: {error}",
                remedy="Call numpy.random.set_bit_generator before the load, as the saving program did",
            ) from error
        torch.set_rng_state(held["torch"])
        # The process that saved may have had more devices.
        torch.cuda.set_rng_state_all(held.get("cuda", [])[: torch.cuda.device_count()])


class Pickled:
    """Values saved as one pickled item, for trainers that cannot name their values before a load."""

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
                remedy="Remove the value from the `state_dict`, callback, `on_save_checkpoint` or hyperparameters that "
                "add it",
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
