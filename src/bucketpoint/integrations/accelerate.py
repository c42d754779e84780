"""Hugging Face Accelerate: the whole state of an `Accelerator`, saved to and loaded from a URL.

Models and optimizers are saved sharded under FSDP, and once for all ranks under DDP, so that a run goes on with another
number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed.checkpoint as dcp

from bucketpoint.catalog import latest_checkpoint
from bucketpoint.dcp import BucketReader, BucketWriter, SaveHandle, saved_ranks
from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.resume_planner import ResumePlanner
from bucketpoint.integrations.saves import Saves, job_ranks
from bucketpoint.integrations.training_state import ModelState, OfThisRank, OptimizerState, RandomState, model_of
from bucketpoint.manager.loading import with_states

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


def accelerator_state(accelerator: Accelerator) -> dict[str, Any]:
    """Return all that `accelerator.save_state` would save, as a state for DCP, a `CheckpointManager` or `async_save`.

    Its values are read when the state is saved, and set when it is loaded.

    Raises:
        BucketpointError: the accelerator trains with DeepSpeed or Megatron-LM, which have formats of their own.
    """
    return _state_of(accelerator, loading=False)


def _state_of(accelerator: Accelerator, *, loading: bool) -> dict[str, Any]:
    if accelerator.distributed_type in _OTHER_FORMATS:
        raise BucketpointError(
            f"An Accelerator with {accelerator.distributed_type} saves in a format of its own",
            remedy="Use accelerator.save_state, or train with FSDP",
        )
    models = accelerator._models
    state: dict[str, Any] = {}
    for number, model in enumerate(models):
        state[_name("model", number)] = ModelState(model)
    for number, optimizer in enumerate(accelerator._optimizers):
        # Accelerate wraps optimizers; the wrapper's step() skips.
        wrapped = getattr(optimizer, "optimizer", optimizer)
        model = model_of(optimizer, models, _ONE_MODEL)
        state[_name("optimizer", number)] = OptimizerState(model, wrapped, loading=loading)
    for number, scheduler in enumerate(accelerator._schedulers):
        state[_name("scheduler", number)] = scheduler
    for number, loader in enumerate(accelerator._dataloaders):
        if getattr(loader, "use_stateful_dataloader", False):
            state[_name("dataloader", number)] = OfThisRank(loader)
        # No name of a dataloader: within an epoch it stands still, and would be taken for a position that does.
        state[_name("epoch", number)] = _Loader(loader)
    for number, custom in enumerate(accelerator._custom_objects):
        state[_name("custom", number)] = custom
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    state["accelerator"] = _Progress(accelerator)
    state["generators"] = OfThisRank(RandomState())
    return state


def save_state(
    accelerator: Accelerator, url: str, *, storage_writer: BucketWriter | None = None, **options: Any
) -> SaveHandle:
    """Save the state of an accelerator to a URL in the background. All ranks.

    It waits for the save before, and returns once training may change the state.

    Args:
        accelerator: the accelerator, after `prepare`.
        url: URL of the checkpoint.
        storage_writer: writer to save with. By default one that is kept for all saves of the accelerator.
        options: as for `bucketpoint.async_save`.

    Returns:
        a handle: the checkpoint can be loaded once `handle.result()` returns. Accelerate counts the save.

    Raises:
        BucketpointError: the save before this one failed, or the accelerator trains with DeepSpeed or Megatron-LM.
        StagingError: the state cannot be copied.
    """
    saves: Saves = vars(accelerator).setdefault("_bucketpoint_saves", Saves(BucketWriter()))
    handle = saves.save(url, lambda: accelerator_state(accelerator), storage_writer=storage_writer, **options)
    accelerator.project_configuration.iteration += 1
    return handle


def restore(accelerator: Accelerator, run: str, *, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Load the newest whole checkpoint of a run, as `load_state` does. All ranks.

    Args:
        accelerator: as for `load_state`.
        run: URL of the folder that has a folder for each checkpoint, with a number at the end of its name.
        storage_options: options of the store.

    Returns:
        the URL of the checkpoint, or None if there is none: the run begins from scratch.
    """
    call = "restore()"
    newest = job_ranks(call).on_coordinator(lambda: latest_checkpoint(run, storage_options=storage_options), call)
    if newest is not None:
        load_state(accelerator, newest, storage_reader=BucketReader(newest, storage_options=storage_options))
    return newest


def load_state(accelerator: Accelerator, url: str, *, storage_reader: BucketReader | None = None) -> None:
    """Load a checkpoint of `save_state` into an accelerator that was prepared in the same way. All ranks.

    The number of processes may differ. A rank that the checkpoint knows nothing of keeps its own random state and its
    own state of stateful dataloaders.

    Args:
        accelerator: the accelerator, after `prepare`.
        url: URL of the checkpoint.
        storage_reader: reader to load with; by default a `BucketReader` of the URL.

    Raises:
        CheckpointNotFoundError: there is no whole checkpoint at the URL.
        MismatchError: the state and the checkpoint do not fit.
    """

    def prepared() -> tuple[BucketReader, dict[str, Any], ResumePlanner]:
        reader = storage_reader or BucketReader(url)
        metadata = reader.read_metadata()
        state = _state_of(accelerator, loading=True)
        for name, value in list(state.items()):
            if isinstance(value, OfThisRank) and accelerator.process_index not in saved_ranks(metadata, name):
                del state[name]
        return reader, with_states(state), ResumePlanner(state)

    call = f"load_state({url!r})"
    ranks = job_ranks(call)
    reader, state, planner = ranks.together(call, prepared)
    with ranks.calling_dcp(call, url):
        dcp.load(state, checkpoint_id=url, storage_reader=reader, planner=planner)


def _name(kind: str, number: int) -> str:
    return kind if number == 0 else f"{kind}_{number}"


class _Loader:
    """The epoch of a dataloader, and the seed of its order.

    A dataloader of Accelerate shuffles by the number of times that it was iterated over, which begins at 0 in a new
    process: the order of the first epoch would come again.
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


class _Progress:
    """Numbers that an accelerator counts."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step, "iteration": self._accelerator.project_configuration.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["iteration"] + 1
