"""`TrainingState`, the state that a training program saves and resumes from, in any framework; its successive saves."""

from __future__ import annotations

import concurrent.futures
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import LoadPlan, Metadata

from bucketpoint.catalog.run import checkpoint_at_or_below
from bucketpoint.dcp.api import load
from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.planning.load_planner import LoadPlanner, url_of
from bucketpoint.dcp.planning.nested_state import put
from bucketpoint.dcp.planning.rank_state import saved_ranks
from bucketpoint.dcp.process_groups import is_initialized, this_rank
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError, MismatchError, first_of
from bucketpoint.integrations.parts import ModelState, OfThisRank, OptimizerState, model_of
from bucketpoint.location import Location
from bucketpoint.manager import CheckpointManager, Restored
from bucketpoint.manager.ranks import Ranks
from bucketpoint.manager.saving import begin_together

logger = logging.getLogger(__name__)

_ranks: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
"""The job's connected ranks, by torch's default group. All integrations share them."""


def job_ranks(what: str) -> Ranks:
    """Return all ranks of the job, connected. The first call is a collective.

    `what` names the call in messages, and is the same on all ranks.
    """
    if not is_initialized():
        return Ranks(what)
    world: Any = dist.group.WORLD
    if world not in _ranks:
        _ranks[world] = Ranks(what)
    return _ranks[world]


def checkpoint_at(url: str, storage_options: Mapping[str, Any] | None) -> str | None:
    """Return the result of `checkpoint_at_or_below`, which one rank calls for all. All ranks."""
    call = f"the load of {url}"
    return job_ranks(call).on_coordinator(lambda: checkpoint_at_or_below(Location.of(url, storage_options)), call)


class Saves:
    """Successive background saves. A given `writer` keeps its plans and its staging memory between them."""

    def __init__(self, writer: BucketWriter | None = None) -> None:
        self._writer = writer
        self._last: SaveHandle | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A program may pickle the object that holds this one, such as a strategy. The save under way is left out.
        return {"_writer": self._writer, "_last": None}

    @property
    def under_way(self) -> bool:
        """True while a save is not committed and has not failed."""
        return self._last is not None and not self._last.done()

    def save(
        self,
        url: str,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        storage_writer: BucketWriter | None = None,
        **options: Any,
    ) -> SaveHandle:
        """Wait for the previous save, and begin the next. All ranks.

        Args:
            state: the state, or a function that makes it.
            options: as for `async_save`.

        Raises:
            BucketpointError: the previous save failed, and no rank's program has received its error; or a rank's state
                cannot be made.
            StagingError: the state of a rank cannot be copied.
        """
        call = f"the save of {url}"
        ranks = job_ranks(call)
        self._settle(ranks, call)
        writer = storage_writer or self._writer
        self._last = begin_together(ranks, call, state, url, storage_writer=writer, **options)
        return self._last

    def wait(self) -> None:
        """Wait until the last save is committed. Raises its error, unless the program has received it before."""
        last = self._last
        if last is not None and not (last.done() and last._told):
            last.result()

    def _settle(self, ranks: Ranks, call: str) -> None:
        """Wait for the last save, and raise its error on all ranks, unless a rank's program has received the error."""
        last = self._last
        if last is not None:
            last.wait()
        error = last.failure() if last is not None else None
        told = last is not None and last._told
        failed, received = ranks.most([int(error is not None), int(error is not None and told)], call)
        self._last = None
        if not failed or told:
            return
        if last is not None:
            last._note_told()
        error = error or BucketpointError("The last save failed on another rank")
        if not received:
            raise error
        logger.warning("the last save has failed: %s", error)


class TrainingState:
    """A training program's state: models, optimizers, values that differ between ranks, and all other values.

    Models and optimizers are saved by parameter name, so that a run can resume on another number of ranks. A value that
    differs between ranks is an `OfThisRank`: a rank that the checkpoint lacks keeps its present value.

    Args:
        make: function that returns the state for DCP, made of `integrations.parts`. Called at each save and load.
        strict: refuse a checkpoint that lacks keys of the state, or has more keys for a model than the model has.
        unexpected: names of other parts whose additional keys a strict load refuses, too.
    """

    def __init__(
        self, make: Callable[[], dict[str, Any]], *, strict: bool = True, unexpected: Iterable[str] = ()
    ) -> None:
        self.to_save = make
        self._strict = strict
        self._unexpected = tuple(unexpected)

    def save(self, run: CheckpointManager | Saves, where: Any, **options: Any) -> SaveHandle | None:
        """Save in the background, once the previous save has ended. All ranks. Errors are those of `run.save`.

        `where` is a step of a manager's run, or for `Saves` the URL of the checkpoint. Return the save's handle once
        the state is copied and training may change it; None if the policy skips the save.
        """
        handle: SaveHandle | None = run.save(where, self.to_save, **options)
        if handle is not None:
            # If the copy fails, the save fails on all ranks, and the next wait raises the error.
            concurrent.futures.wait([handle.staged])
        return handle

    def restore(self, run: CheckpointManager, which: str | int = "latest", **options: Any) -> Restored | None:
        """Load a checkpoint of a manager's run. All ranks. Arguments, result and errors are those of `run.restore`."""
        state = job_ranks("restore()").together("restore()", self.to_load)
        return run.restore(state, which, planner=self._planner(state), **options)

    def load(self, url: str, **options: Any) -> dict[str, Any]:
        """Load the checkpoint at a URL. All ranks. Options and errors are those of `bucketpoint.load`.

        Return the loaded state, which also has the values that could not be changed in place.
        """
        call = f"the load of {url}"
        state = job_ranks(call).together(call, self.to_load)
        load(state, url, planner=self._planner(state), **options)
        return state

    def to_load(self) -> dict[str, Any]:
        given = self.to_save()
        return {name: value.to_load() if isinstance(value, OptimizerState) else value for name, value in given.items()}

    def _planner(self, state: Mapping[str, Any]) -> ResumePlanner:
        return ResumePlanner(state, strict=self._strict, unexpected=self._unexpected)


def with_parts(state: Mapping[str, Any], remedy: str, *, strict: bool = True) -> dict[str, Any]:
    """Return a copy of a state, with models as `ModelState` and optimizers as `OptimizerState`.

    Raises BucketpointError, with `remedy`, if no single model of the state holds all parameters of an optimizer.
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
    """Load planner for a state with models and optimizers.

    A parameter that never had a gradient has no optimizer state in the checkpoint. torch creates a state for each
    parameter before a load; such a parameter keeps this new state, at step 0. A strict load refuses a checkpoint with
    more parameters than a model has. `strict` and `unexpected` are those of `TrainingState`.
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
        # An optimizer without any state still saves its groups. A checkpoint without groups lacks the optimizer.
        there = [name for name in self._optimizers if any(key.startswith(f"{name}.param_groups.") for key in saved)]
        if len(there) < len(self._optimizers) and not self.allow_partial_load:
            raise MismatchError(
                f"The checkpoint has no {first_of(sorted({*self._optimizers} - {*there}), 5)}",
                url=url_of(metadata),
                remedy="The checkpoint was saved without its optimizer, as by save_only_model=True of "
                "transformers: begin another run with its model",
            )
        prefixes = tuple(f"{name}.state." for name in there)
        with_state = {_parameter_of(key) for key in saved if key.startswith(prefixes)}
        new = [key for key in self.state_dict if key.startswith(prefixes) and _parameter_of(key) not in with_state]
        for key, value in zip(new, self._leave_out(new), strict=True):
            # torch takes a step to create a state: set the count back to 0.
            if key.endswith(".step") and isinstance(value, torch.Tensor):
                value.zero_()
            elif key.endswith(".step"):
                put(self.original_state_dict, self.mappings[key], type(value)())

    def _leave_out(self, keys: Iterable[str]) -> list[Any]:
        """Remove keys from the load, and return their values."""
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
