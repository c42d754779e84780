"""`ResumePlanner`, the load planner of trainers' states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, Metadata

from bucketpoint.dcp import LoadPlanner
from bucketpoint.dcp.planning.load_planner import url_of
from bucketpoint.dcp.planning.nested_state import put
from bucketpoint.errors import MismatchError, first_of
from bucketpoint.integrations.training_state import ModelState, OptimizerState


class ResumePlanner(LoadPlanner):
    """Load planner for a state with models and optimizers, some of whose parameters may have no state.

    torch makes a state for each parameter before a load, but at the save parameters that had never got a gradient had
    none. They keep the new state, as of no step. A checkpoint with more parameters than a model has is refused.

    Args:
        state: the state to load into, with values of `ModelState` and `OptimizerState(loading=True)`.
        strict: refuse checkpoints that lack keys, or have more keys of a model.
        unexpected: names of which a strict load refuses all keys that it does not ask for.
    """

    def __init__(self, state: Mapping[str, Any], *, strict: bool = True, unexpected: Iterable[str] = ()) -> None:
        super().__init__(allow_partial_load=not strict)
        models = [name for name, value in state.items() if isinstance(value, ModelState)]
        self._complete = tuple(f"{name}." for name in (*models, *unexpected)) if strict else ()
        self._optimizers = [name for name, value in state.items() if isinstance(value, OptimizerState)]

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        saved = metadata.state_dict_metadata
        # A checkpoint without the optimizer is another thing than one whose optimizer had no state yet.
        there = [name for name in self._optimizers if any(key.startswith(f"{name}.param_groups.") for key in saved)]
        prefixes = tuple(f"{name}.state." for name in there)
        with_state = {_parameter_of(key) for key in saved if key.startswith(prefixes)} if prefixes else set()
        for key in list(self.state_dict):
            if prefixes and key.startswith(prefixes) and _parameter_of(key) not in with_state:
                value = self.state_dict.pop(key)
                # torch has made a step to get a state.
                if key.endswith(".step") and isinstance(value, torch.Tensor):
                    value.zero_()
                elif key.endswith(".step"):
                    put(self.original_state_dict, self.mappings[key], type(value)())

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert self.metadata is not None
        wanted = {item.dest_index.fqn for plan in global_plan for item in plan.items}.union(self.state_dict)
        saved = self.metadata.state_dict_metadata
        more = [key for key in saved if self._complete and key.startswith(self._complete) and key not in wanted]
        if more:
            raise MismatchError(
                f"The checkpoint has what the model or its optimizers do not have: {first_of(more, 5)}",
                url=url_of(self.metadata),
                remedy="Build the model and the optimizers as they were saved, or load with strict=False where the "
                "framework has it (LightningModule.strict_loading = False)",
            )
        return super().create_global_plan(global_plan)


def _parameter_of(key: str) -> str:
    return key.rpartition(".")[0]
