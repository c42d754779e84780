"""States of models and optimizers, by the names of the parameters, which hold for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from bucketpoint.errors import BucketpointError

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelState:
    """The state of a model, read when it is saved and set when it is loaded.

    Args:
        strict: refuse a state that lacks keys of the model, or has others.
    """

    def __init__(self, model: torch.nn.Module, *, strict: bool = True) -> None:
        self._model = model
        self._strict = strict

    def state_dict(self) -> dict[str, Any]:
        return dict(get_model_state_dict(self._model))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_model_state_dict(self._model, dict(state), options=StateDictOptions(strict=self._strict))


class OptimizerState:
    """The state of an optimizer of a model, read when it is saved and set when it is loaded."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self._model, self._optimizer, options=_BY_NAME))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_optimizer_state_dict(self._model, self._optimizer, dict(state), options=_BY_NAME)


def model_of(optimizer: Any, models: Iterable[torch.nn.Module], remedy: str) -> torch.nn.Module:
    """Return the model that holds the parameters of an optimizer.

    Raises:
        BucketpointError: no model holds all of them. The error has the given remedy.
    """
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for model in models:
        if held <= {id(tensor) for tensor in model.parameters()}:
            return model
    raise BucketpointError("An optimizer has parameters of no prepared model, or of several", remedy=remedy)
