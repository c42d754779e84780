"""Hugging Face Accelerate: the whole state of an `Accelerator`, saved to and loaded from a URL.

Models and optimizers are saved sharded under FSDP, and once for all ranks under DDP: a run can resume with more or
fewer processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.parts import ModelState, OfThisRank, OptimizerState, RandomState, model_of
from bucketpoint.integrations.training_state import Saves, TrainingState, checkpoint_at

try:
    from accelerate import Accelerator
    from accelerate.data_loader import SeedableRandomSampler
    from accelerate.utils import DistributedType
except ModuleNotFoundError as error:  # pragma: no cover
    raise ModuleNotFoundError(
        "bucketpoint.integrations.accelerate needs Accelerate: pip install 'accelerate>=1.10'", name=error.name
    ) from error

_ONE_MODEL = "Prepare models and optimizers with one accelerator, and give an optimizer one model's parameters"

_OTHER_FORMATS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)

_saves: weakref.WeakKeyDictionary[Accelerator, Saves] = weakref.WeakKeyDictionary()


def training_state(accelerator: Accelerator) -> TrainingState:
    """Return the state of an accelerator, as `accelerator.save_state` saves it.

    `training_state(accelerator).save(manager, step)` and `.restore(manager)` save and load it with a
    `CheckpointManager`; `.to_save()` returns it for `bucketpoint.async_save`.
    """
    return TrainingState(lambda: _parts(accelerator))


def save_state(
    accelerator: Accelerator, url: str, *, storage_writer: BucketWriter | None = None, **options: Any
) -> SaveHandle:
    """Save the state of an accelerator to a URL in the background. All ranks.

    Waits for the previous save, and returns once the state is copied and training may change it. Adds one to
    Accelerate's count of saves.

    Args:
        accelerator: the accelerator, after `prepare`.
        url: URL of the checkpoint.
        storage_writer: writer to save with. By default one writer for all saves of the accelerator.
        options: as for `bucketpoint.async_save`.

    Returns:
        a handle: the checkpoint can be loaded once `handle.result()` returns.

    Raises:
        BucketpointError: the save before this one failed, or the accelerator trains with DeepSpeed or Megatron-LM.
        StagingError: the state cannot be copied.
    """
    saves = _saves.setdefault(accelerator, Saves(BucketWriter()))
    handle = training_state(accelerator).save(saves, url, storage_writer=storage_writer, **options)
    assert handle is not None
    accelerator.project_configuration.iteration += 1
    return handle


def restore(accelerator: Accelerator, run: str, **options: Any) -> str | None:
    """Load the newest whole checkpoint of a run, as `load_state` does. All ranks.

    Args:
        accelerator: as for `load_state`.
        run: URL of the run, in which the name of each checkpoint's folder ends with a number.
        options: as for `load_state`.

    Returns:
        the URL of the checkpoint, or None if there is none: the run begins from scratch.
    """
    newest = checkpoint_at(run, options.get("storage_options"))
    if newest is not None:
        load_state(accelerator, newest, **options)
    return newest


def load_state(accelerator: Accelerator, url: str, **options: Any) -> None:
    """Load a checkpoint of `save_state` into an accelerator that was prepared in the same way. All ranks.

    The number of processes may differ. A rank that the checkpoint lacks keeps its random state and the state of its
    stateful dataloaders.

    Args:
        accelerator: the accelerator, after `prepare`.
        url: URL of the checkpoint.
        options: as for `bucketpoint.load`, such as `storage_options`.

    Raises:
        CheckpointNotFoundError: there is no whole checkpoint at the URL.
        MismatchError: the checkpoint does not match the state.
    """
    training_state(accelerator).load(url, **options)


def _parts(accelerator: Accelerator) -> dict[str, Any]:
    if accelerator.distributed_type in _OTHER_FORMATS:
        raise BucketpointError(
            f"An Accelerator with {accelerator.distributed_type} saves in its own format",
            remedy="Use accelerator.save_state, or train with FSDP",
        )
    models = accelerator._models
    state: dict[str, Any] = _numbered("model", [ModelState(model) for model in models])
    # Take the optimizers out of Accelerate's wrappers: the step() of a wrapper may do nothing.
    optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers]
    parts = [OptimizerState(model_of(each, models, _ONE_MODEL), each) for each in optimizers]
    state |= _numbered("optimizer", parts)
    state |= _numbered("scheduler", accelerator._schedulers)
    loaders = accelerator._dataloaders
    for name, loader in _numbered("dataloader", loaders).items():
        if getattr(loader, "use_stateful_dataloader", False):
            state[name] = OfThisRank(loader)
    state |= _numbered("epoch", [_Epoch(loader) for loader in loaders])
    state |= _numbered("custom", accelerator._custom_objects)
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    state["accelerator"] = _Counters(accelerator)
    state["generators"] = OfThisRank(RandomState())
    return state


def _numbered(kind: str, values: list[Any]) -> dict[str, Any]:
    return {kind if number == 0 else f"{kind}_{number}": value for number, value in enumerate(values)}


class _Epoch:
    """The epoch of a dataloader, and the seed of its order.

    A dataloader of Accelerate shuffles by its count of epochs, which begins at 0 in a new process: a resumed run would
    repeat the order of the first epoch.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        sampler = self._loader.get_sampler()
        seed = sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None
        return {"iteration": self._loader.iteration, "seed": seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.iteration = state["iteration"]
        sampler = self._loader.get_sampler()
        if state["seed"] is not None and isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = state["seed"]
            sampler.set_epoch(state["iteration"])


class _Counters:
    """The counters `step` and `iteration` of an Accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step, "iteration": self._accelerator.project_configuration.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["iteration"] + 1
