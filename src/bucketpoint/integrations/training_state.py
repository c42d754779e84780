"""`TrainingState`: what a training program saves and resumes from, whichever framework trains."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, Metadata

from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.deadline.api import load
from bucketpoint.dcp.planning.load_planner import LoadPlanner, url_of
from bucketpoint.dcp.planning.nested_state import put
from bucketpoint.dcp.planning.rank_state import saved_ranks
from bucketpoint.dcp.process_groups import this_rank
from bucketpoint.errors import MismatchError, first_of
from bucketpoint.integrations.parts import ModelState, OfThisRank, OptimizerState, model_of
from bucketpoint.integrations.saves import Saves, job_ranks
from bucketpoint.manager import CheckpointManager, Restored


class TrainingState:
    """A training program's state: models, optimizers, values of each rank, and the rest.

    Models and optimizers are saved by the names of the parameters, so that a run can resume on another number of ranks.
    A value that differs between ranks is an `OfThisRank`, and a rank that is not in the checkpoint keeps its own.

    Args:
        make: makes the state for DCP, with values of `integrations.parts`. It is called at each save and load.
        strict: refuse checkpoints that lack keys, or have more keys of a model.
        unexpected: names below which a strict load refuses keys that it does not ask for.
    """

    def __init__(
        self, make: Callable[[], dict[str, Any]], *, strict: bool = True, unexpected: Iterable[str] = ()
    ) -> None:
        self.to_save = make
        self._strict = strict
        self._unexpected = tuple(unexpected)

    def save(self, run: CheckpointManager | Saves, where: Any, **options: Any) -> SaveHandle | None:
        """Save beside training, once the previous save has ended. Return when training may change the state. All ranks.

        Args:
            run: the run of a manager, or saves to any URL.
            where: step of the run, or URL of the checkpoint.
            options: as for `run.save`.

        Returns:
            the handle of the save; None if the manager's policy skips it.

        Raises as `run.save`.
        """
        handle: SaveHandle | None = run.save(where, self.to_save, **options)
        if handle is not None:
            # A copy that fails beside training is raised by the next wait, as the save then fails on all ranks.
            concurrent.futures.wait([handle.staged])
        return handle

    def restore(self, run: CheckpointManager, which: str | int = "latest", **options: Any) -> Restored | None:
        """Load a checkpoint of a manager's run. All ranks. Arguments, result and errors are those of `run.restore`."""
        state = job_ranks("restore()").together("restore()", self.to_load)
        return run.restore(state, which, planner=self._planner(state), **options)

    def load(self, url: str, **options: Any) -> dict[str, Any]:
        """Load the checkpoint at a URL. All ranks.

        Args:
            options: as for `bucketpoint.load`.

        Returns:
            the state that was loaded into, with values that could not be changed in place.

        Raises:
            MismatchError: the state and the checkpoint do not fit.
        """
        call = f"the load of {url}"
        state = job_ranks(call).together(call, self.to_load)
        load(state, url, planner=self._planner(state), **options)
        return state

    def to_load(self) -> dict[str, Any]:
        """Return the state to load into."""
        given = self.to_save()
        return {name: value.to_load() if isinstance(value, OptimizerState) else value for name, value in given.items()}

    def _planner(self, state: Mapping[str, Any]) -> ResumePlanner:
        return ResumePlanner(state, strict=self._strict, unexpected=self._unexpected)


def with_parts(state: Mapping[str, Any], remedy: str, *, strict: bool = True) -> dict[str, Any]:
    """Return a state whose models and optimizers are saved by the names of their parameters.

    Args:
        state: models, optimizers and other values, which are unchanged.
        remedy: what to do about an optimizer without its model.
        strict: as for `ModelState`.

    Raises:
        BucketpointError: an optimizer has parameters of no model of the state, or of several.
    """
    models = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    parts = dict(state)
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            parts[name] = ModelState(value, strict=strict)
        elif isinstance(value, torch.optim.Optimizer):
            parts[name] = OptimizerState(model_of(value, models, remedy), value)
    return parts


class ResumePlanner(LoadPlanner):
    """Load planner for a state with models and optimizers, some of whose parameters may have no state.

    torch makes a state for each parameter before a load, but at the save, parameters that never had a gradient had
    none. They keep the new state of step 0. A checkpoint with more parameters than a model has is refused.

    Args:
        state: the state to load into, with values of `integrations.parts`.
        strict, unexpected: as for `TrainingState`.
    """

    def __init__(self, state: Mapping[str, Any], *, strict: bool = True, unexpected: Iterable[str] = ()) -> None:
        super().__init__(allow_partial_load=not strict)
        models = [name for name, value in state.items() if isinstance(value, ModelState)]
        self._complete = tuple(f"{name}." for name in (*models, *unexpected)) if strict else ()
        self._optimizers = [name for name, value in state.items() if isinstance(value, OptimizerState)]
        self._of_this_rank = {name: value for name, value in state.items() if isinstance(value, OfThisRank)}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        for name, value in self._of_this_rank.items():
            saved_here = this_rank() in saved_ranks(metadata, name)
            value.expect(saved_here)
            if not saved_here:
                self._leave_out([key for key in self.state_dict if key.startswith(f"{name}.rank-")])
        saved = metadata.state_dict_metadata
        # A checkpoint without the optimizer differs from one whose optimizer had no state yet.
        there = [name for name in self._optimizers if any(key.startswith(f"{name}.param_groups.") for key in saved)]
        if len(there) < len(self._optimizers) and not self.allow_partial_load:
            raise MismatchError(
                f"The checkpoint has no {first_of(sorted({*self._optimizers} - {*there}), 5)}",
                url=url_of(metadata),
                remedy="It was saved without its optimizer, as by save_only_model=True of transformers: begin another "
                "run with its model",
            )
        prefixes = tuple(f"{name}.state." for name in there)
        with_state = {_parameter_of(key) for key in saved if key.startswith(prefixes)}
        new = [key for key in self.state_dict if key.startswith(prefixes) and _parameter_of(key) not in with_state]
        for key, value in zip(new, self._leave_out(new), strict=True):
            # torch makes a step to create a state.
            if key.endswith(".step") and isinstance(value, torch.Tensor):
                value.zero_()
            elif key.endswith(".step"):
                put(self.original_state_dict, self.mappings[key], type(value)())

    def _leave_out(self, keys: Iterable[str]) -> list[Any]:
        """Load nothing under these keys. Return their values."""
        return [self.state_dict.pop(key) for key in keys]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert self.metadata is not None
        wanted = {item.dest_index.fqn for plan in global_plan for item in plan.items}.union(self.state_dict)
        saved = self.metadata.state_dict_metadata
        more = [key for key in saved if self._complete and key.startswith(self._complete) and key not in wanted]
        if more:
            raise MismatchError(
                f"The checkpoint has values that the model or its optimizers lack: {first_of(more, 5)}",
                url=url_of(self.metadata),
                remedy="Build the model and the optimizers as they were saved, or load with strict=False where the "
                "framework has it (LightningModule.strict_loading = False)",
            )
        return super().create_global_plan(global_plan)


def _parameter_of(key: str) -> str:
    return key.rpartition(".")[0]
