"""Strategies of a `Trainer` whose checkpoints are URLs, saved sharded and in the background."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Protocol

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from bucketpoint.dcp import BucketWriter, load
from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.lightning.order import resume, samples_in_a_batch, with_repeatable_order
from bucketpoint.integrations.lightning.progress import count, settle
from bucketpoint.integrations.lightning.state import Pickled, newest_of
from bucketpoint.integrations.resume_planner import ResumePlanner
from bucketpoint.integrations.saves import Saves
from bucketpoint.integrations.training_state import ModelState, OptimizerState

logger = logging.getLogger(__name__)

_POSITION = "bucketpoint_samples"


class Run(Protocol):
    """A run whose newest checkpoint a strategy is asked to load."""

    def holds(self, url: str) -> bool:
        """Return True if the URL is that of the run."""

    def restore(self, state: dict[str, Any], planner: Any) -> str | None:
        """Load the newest whole checkpoint, and return its URL; None if the run has none yet. All ranks."""


class _Nothing(dict[str, Any]):
    """A checkpoint that Lightning takes for none: it restores nothing from it, and calls no hook."""

    def __bool__(self) -> bool:
        return False


class BucketStrategy:
    """Saves and loads of a `Trainer`'s strategy, which comes next in the order of the bases.

    `trainer.save_checkpoint(url)` returns once the state is copied; the next save and the end of training wait for the
    upload. Checkpoints are loaded into the prepared model, of any number of ranks.

    Args:
        storage_options: as for `BucketWriter`.
        trusted: load checkpoints of all types. Otherwise values of the trainer, of its callbacks and of the
            hyperparameters are loaded by `torch.load(weights_only=True)`.
    """

    run: Run | None = None
    """The run of a `BucketCheckpoint`, which knows more of its checkpoints than a listing shows."""

    def __init__(
        self, *args: Any, storage_options: Mapping[str, Any] | None = None, trusted: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._storage_options = storage_options
        self._trusted = trusted
        self._saves = Saves(BucketWriter(storage_options=storage_options))
        self._resumed: tuple[int | None, int] | None = None

    # Models must be sharded, and optimizers made, before a checkpoint is loaded into them.
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def setup(self, trainer: Any) -> None:
        for callback in trainer.checkpoint_callbacks if trainer.state.fn == TrainerFn.FITTING else ():
            if isinstance(callback, ModelCheckpoint) and callback.save_top_k not in (-1, 0):
                raise BucketpointError(
                    f"{type(self).__name__} deletes no checkpoints for Lightning's ModelCheckpoint",
                    remedy="Use BucketCheckpoint(url, policy=...), or ModelCheckpoint(save_top_k=-1), or "
                    "Trainer(enable_checkpointing=False)",
                )
        super().setup(trainer)  # type: ignore[misc]

    def teardown(self) -> None:
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self._saves.wait()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)  # type: ignore[misc]
        try:
            self._saves.wait()
        except BucketpointError as error:
            # The exception that ends training is the one to raise.
            logger.error("the last save failed: %s", error)

    # -- saving -------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        return ModelState(self.model).state_dict()

    def optimizer_state(self: Any, optimizer: Any) -> dict[str, Any]:
        return OptimizerState(self.model, _inner(optimizer)).state_dict()

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise BucketpointError(
                "trainer.save_checkpoint(storage_options=...) is not supported",
                remedy=f"Give them to the strategy: {type(self).__name__}(storage_options=...)",
            )
        self._saves.save(os.fspath(self.broadcast(filepath)), lambda: self.saved_state(checkpoint))

    def saved_state(self: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint of `trainer._checkpoint_connector.dump_checkpoint` as a state for DCP. All ranks."""
        rest = dict(checkpoint)
        state = {"model": rest.pop("state_dict")}
        for number, optimizer in enumerate(rest.pop("optimizer_states", [])):
            state[f"optimizer_{number}"] = optimizer
        rest[_POSITION] = self._position()
        # Some values differ between ranks, such as times. Lightning keeps those of rank 0.
        if self.is_global_zero:
            state["trainer"] = Pickled(rest)
        return state

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        module = self.lightning_module
        trainer, strict = module.trainer, module.strict_loading
        url = os.fspath(self.broadcast(checkpoint_path))
        rest = Pickled(trusted=self._trusted if weights_only is None else not weights_only)
        state: dict[str, Any] = {"model": ModelState(self.model, strict=strict), "trainer": rest}
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            for number, optimizer in enumerate(self.optimizers):
                state[f"optimizer_{number}"] = OptimizerState(self.model, _inner(optimizer), loading=True)
        one_more = [f"optimizer_{len(self.optimizers)}"] if fitting else []
        planner = ResumePlanner(state, strict=strict, unexpected=one_more)
        if fitting and self.run is not None and self.run.holds(url):
            found = self.run.restore(state, planner)
        else:
            found = newest_of(url, self._storage_options)
            load(state, found, storage_options=self._storage_options, planner=planner, trusted=self._trusted)
        # Lightning says at the end from where it has restored.
        trainer._checkpoint_connector._ckpt_path = found
        if found is None:
            logger.info("%s holds no checkpoint yet: training begins from scratch", url)
            return _Nothing({"pytorch-lightning_version": trainer_version()})
        checkpoint: dict[str, Any] = rest.value
        samples = checkpoint.pop(_POSITION, None)
        if fitting and "loops" in checkpoint:
            loops = checkpoint["loops"]["fit_loop"]
            settle(loops)
            self._resumed = (samples, loops["epoch_loop.batch_progress"]["current"]["processed"])
        # Hooks of Lightning look here, such as that of averaged weights. They see what the model has now.
        checkpoint["state_dict"] = self.lightning_module_state_dict()
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded into the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded into the optimizers."""

    # -- the order of samples -----------------------------------------------------------------------------------------

    def _position(self: Any) -> int | None:
        """Return how many samples all ranks together have taken from the epoch; None if that is not known."""
        loop = self.lightning_module.trainer.fit_loop
        loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
        # Of several dataloaders some may have begun again in the middle of the epoch.
        at_a_time = samples_in_a_batch(loaders[0], self.world_size) if len(loaders) == 1 else None
        return None if at_a_time is None else loop.epoch_loop.batch_progress.current.processed * at_a_time

    def process_dataloader(self: Any, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        trainer = self.lightning_module.trainer
        if trainer.training:
            loop = trainer.fit_loop
            with_repeatable_order(dataloader, loop.epoch_progress.current.processed)
            (samples, batches), self._resumed = self._resumed or (None, 0), None
            if not batches:
                return dataloader
            if samples is not None and samples_in_a_batch(dataloader, self.world_size):
                count(loop.epoch_loop.batch_progress.current, resume(dataloader, samples, self.world_size))
            elif not hasattr(dataloader, "load_state_dict"):
                logger.warning(
                    "%d batches of the epoch were taken before the checkpoint was saved, and the dataloader cannot "
                    "leave them out: it begins with its first batch. Give it state_dict and load_state_dict, as "
                    "torchdata's StatefulDataLoader has",
                    batches,
                )
        return dataloader


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that Lightning has wrapped."""
    return getattr(optimizer, "_optimizer", optimizer)


def trainer_version() -> str:
    """Return the version that Lightning looks for in a checkpoint."""
    from lightning.pytorch import __version__

    return str(__version__)


class BucketDDPStrategy(BucketStrategy, DDPStrategy):
    """Lightning's `DDPStrategy` with checkpoints at URLs: `Trainer(strategy=BucketDDPStrategy())`."""


class BucketModelParallelStrategy(BucketStrategy, ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` (FSDP2, tensor parallelism) with checkpoints at URLs."""


class BucketFSDPStrategy(BucketStrategy, FSDPStrategy):
    """Lightning's `FSDPStrategy` (FSDP1) with checkpoints at URLs, which are always sharded."""


class BucketSingleDeviceStrategy(BucketStrategy, SingleDeviceStrategy):
    """Lightning's `SingleDeviceStrategy` with checkpoints at URLs."""
