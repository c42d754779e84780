"""State of an optimizer in which some parameters have no state, or some groups no parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from bucketpoint.integrations.training_state import OptimizerState

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class PartialOptimizerState(OptimizerState):
    """The state of an optimizer, without that of parameters which have none yet because they got no gradient.

    torch gives a new optimizer a state for each parameter before a load, which the checkpoint then lacks; it keeps no
    state at all if there are gradients; and it does not load groups without parameters, such as LoRA leaves behind.

    Args:
        saved: keys of the checkpoint to load from; None to save.
        name: name of this state in the checkpoint.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        saved: Iterable[str] | None = None,
        name: str = "optimizer",
    ) -> None:
        super().__init__(model, optimizer)
        self._saved = None if saved is None else {key.removeprefix(f"{name}.") for key in saved}

    def state_dict(self) -> dict[str, Any]:
        with _without_empty_groups(self._optimizer):
            if self._saved is None:
                return super().state_dict()
            with _without_gradients(self._optimizer):
                self._optimizer.state.clear()
                state = super().state_dict()
        parameters = _by_name(self._model)
        names = {key: _parameter_of(key, parameters) for key in state if key.startswith("state.")}
        lacking = set(names.values()) - {name for key, name in names.items() if key in self._saved}
        for name in lacking & parameters.keys():
            self._optimizer.state.pop(parameters[name], None)
        return {key: value for key, value in state.items() if names.get(key) not in lacking or key not in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._optimizer.state:
            # torch would make a state for each parameter again. The load replaces this one.
            self._optimizer.state[torch.empty(0)] = {}
        with _without_empty_groups(self._optimizer), _without_gradients(self._optimizer):
            super().load_state_dict(state)


def _by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by the names that torch gives them in states, without those of wrappers."""
    parameters = {}
    for name, parameter in model.named_parameters():
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        parameters[".".join(parts)] = parameter
        if parts[0] == "module":  # DistributedDataParallel
            parameters.setdefault(".".join(parts[1:]), parameter)
    return parameters


def _parameter_of(key: str, parameters: Mapping[str, Any]) -> str:
    """Return the name of the parameter whose state has this key."""
    name = key.removeprefix("state.")
    while name and name not in parameters:
        name = name.rpartition(".")[0]
    return name


@contextlib.contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    whole = optimizer.param_groups
    optimizer.param_groups = [group for group in whole if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)
        optimizer.param_groups = [next(filled) if group["params"] else group for group in whole]


@contextlib.contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    held = [(each, each.grad) for group in optimizer.param_groups for each in group["params"]]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
