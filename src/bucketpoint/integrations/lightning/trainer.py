"""Saves and loads of a `Trainer` at URLs: those of its strategy, and `BucketCheckpoint`, which saves by a policy.

`BucketCheckpointIO` is a plugin for plain checkpoints, of one file each.
"""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.parts import ModelState, OptimizerState, Pickled
from bucketpoint.integrations.trainer_policy import fitting_metrics
from bucketpoint.integrations.training_state import Saves, TrainingState, checkpoint_at
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import RetentionPolicy
from bucketpoint.stores import open_store
from bucketpoint.transfer import BufferPool, Meter, ObjectSource, Segment, TransferOptions, upload_objects

logger = logging.getLogger(__name__)


class UrlStrategy:
    """Base of strategies with checkpoints at URLs. Must be listed before Lightning's own class among the bases."""

    def __init__(
        self, *args: Any, storage_options: Mapping[str, Any] | None = None, trusted: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._reading: dict[str, Any] = {"storage_options": storage_options, "trusted": trusted}
        self._saves = Saves(BucketWriter(storage_options=storage_options))

    def wait(self) -> None:
        """Wait until the last save is committed. Raises BucketpointError if the save failed."""
        self._saves.wait()

    def _url_to_save(self: Any, path: Any, storage_options: Any) -> str:
        """Return the URL of rank 0 on all ranks."""
        if storage_options is not None:
            raise BucketpointError(
                "A save takes no storage_options",
                remedy="Give them to the strategy: bucket_strategy(DDPStrategy, storage_options=...)",
            )
        return str(self.broadcast(path))

    def _url_to_load(self: Any, path: Any) -> str:
        """Return the URL of the checkpoint at `path`, or else of the newest whole one below it."""
        url, options = str(self.broadcast(path)), self._reading["storage_options"]
        found = checkpoint_at(url, options)
        if found is None:
            _refuse_one_object(url, options)
        return found or url

    def _pickled(self, weights_only: bool | None) -> Pickled:
        return Pickled(trusted=self._reading["trusted"] if weights_only is None else not weights_only)


def _refuse_one_object(url: str, storage_options: Mapping[str, Any] | None) -> None:
    folder, _, name = url.rstrip("/").rpartition("/")
    try:
        store, key = open_store(folder, storage_options=storage_options)
        info = store.head(f"{key}/{name}" if key else name)
    except BucketpointError:
        # The load itself raises the error.
        return
    raise BucketpointError(
        f"This URL holds a single object of {info.size} bytes, not a checkpoint of several",
        url=url,
        remedy="A plain checkpoint of Lightning is loaded by Lightning's own strategies, with "
        "Trainer(plugins=[BucketCheckpointIO()]) from a bucket",
    )


class _Nothing(dict[str, Any]):
    """A checkpoint with the truth value False: Lightning restores nothing from it, and calls no hook."""

    def __bool__(self) -> bool:
        return False


class TrainerSaves(UrlStrategy):
    """Base of a `Trainer`'s strategies with checkpoints at URLs.

    `trainer.save_checkpoint(url)` returns once the state is copied; the next save and the end of training wait for the
    upload. Checkpoints are loaded into the prepared model.
    """

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
            self.wait()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)  # type: ignore[misc]
        try:
            self.wait()
        except BucketpointError as error:
            # Only logged: the exception that ended training must be raised.
            logger.error("the last save failed: %s", error)

    # -- saving -------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        return ModelState(self.model).state_dict()

    def optimizer_state(self: Any, optimizer: Any) -> dict[str, Any]:
        return OptimizerState(self.model, _inner(optimizer)).state_dict()

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        url = self._url_to_save(filepath, storage_options)
        TrainingState(lambda: self.parts_of(checkpoint)).save(self._saves, url)

    def parts_of(self: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Split a checkpoint of `trainer._checkpoint_connector.dump_checkpoint` into parts of a state. All ranks."""
        rest = dict(checkpoint)
        parts = {"model": rest.pop("state_dict")}
        for number, optimizer in enumerate(rest.pop("optimizer_states", [])):
            parts[f"optimizer_{number}"] = optimizer
        # Some values, such as times, differ between ranks. Lightning saves those of rank 0.
        if self.is_global_zero:
            parts["trainer"] = Pickled(rest)
        return parts

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        module = self.lightning_module
        trainer, strict = module.trainer, module.strict_loading
        fitting = trainer.state.fn == TrainerFn.FITTING
        optimizers = [_inner(optimizer) for optimizer in self.optimizers] if fitting else []
        rest = self._pickled(weights_only)
        parts: dict[str, Any] = {"model": ModelState(self.model, strict=strict), "trainer": rest}
        for number, optimizer in enumerate(optimizers):
            parts[f"optimizer_{number}"] = OptimizerState(self.model, optimizer)
        one_more = [f"optimizer_{len(optimizers)}"] if fitting else []
        state = TrainingState(lambda: parts, strict=strict, unexpected=one_more)
        url = str(self.broadcast(checkpoint_path))
        runs = [each for each in trainer.callbacks if isinstance(each, BucketCheckpoint)] if fitting else []
        run = next((each for each in runs if each.holds(url)), None)
        if run is None:
            found: str | None = self._url_to_load(url)
            state.load(str(found), **self._reading)
        else:
            found = run.restore(state)
        if found is None:
            logger.info("%s holds no checkpoint yet: training begins from scratch", url)
            return _Nothing({"pytorch-lightning_version": lightning_version})
        logger.info("%s is loaded", found)
        checkpoint: dict[str, Any] = rest.value
        if fitting and "loops" in checkpoint:
            _settle(checkpoint["loops"]["fit_loop"])
        # Hooks of Lightning, such as that of averaged weights, read the model's values here.
        checkpoint["state_dict"] = self.lightning_module_state_dict()
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded into the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded into the optimizers."""


class BucketCheckpoint(Checkpoint):
    """Callback in place of `ModelCheckpoint`: a policy decides when to save, and which checkpoints to keep.

    The trainer needs a strategy of `bucket_strategy`. With `ckpt_path=root`, `trainer.fit` resumes from the newest
    whole checkpoint, and starts from scratch if the run has none yet.

    Args:
        root: URL of the run.
        policy: retention policy, or its YAML file. Steps are those of `trainer.global_step`, metrics those of
            `trainer.callback_metrics`.
        after_validation: save also after each validation, with the metrics of the validation.
        options: as for `CheckpointManager`, such as `storage_options`, `on_commit` and `grace_s`.

    Attributes:
        manager: the manager, from the setup of `fit` to its end.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        policy: RetentionPolicy | str | os.PathLike[str],
        after_validation: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._root = root
        self._after_validation = after_validation
        self._options = {"policy": policy, **options}
        self.manager: CheckpointManager | None = None
        self._begin()

    def _begin(self) -> None:
        self._saved_step: int | None = None
        self._asked_step: int | None = None
        self._validated: tuple[int, set[str]] = (0, set())
        self._left_out: set[str] = set()

    @property
    def best_model_path(self) -> str:
        """Raise an error for `ckpt_path="best"`, which Lightning resolves here."""
        raise BucketpointError(
            "BucketCheckpoint does not support ckpt_path='best'",
            url=os.fspath(self._root),
            remedy="Pass the URL of a checkpoint: `bucketpoint ls ROOT` shows their metrics",
        )

    def holds(self, url: str) -> bool:
        """Return True if the URL is that of the run."""
        return self.manager is not None and url.rstrip("/") == self.manager.catalog.url.rstrip("/")

    def restore(self, state: TrainingState) -> str | None:
        """Load the newest whole checkpoint, and return its URL; None if the run has none yet. All ranks."""
        assert self.manager is not None
        restored = state.restore(self.manager)
        if restored is None:
            return None
        self._saved_step = self._asked_step = restored.step
        return restored.url

    # -- hooks of the trainer -----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, TrainerSaves):
            raise BucketpointError(
                f"BucketCheckpoint cannot save with {type(trainer.strategy).__name__}",
                url=os.fspath(self._root),
                remedy="Make the strategy with bucketpoint.integrations.lightning.bucket_strategy: "
                "Trainer(strategy=bucket_strategy(DDPStrategy))",
            )
        self._begin()
        self.manager = CheckpointManager(self._root, **self._options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert self.manager is not None
        # Checked here, as otherwise the first save would raise the error, possibly hours later.
        steps = self.manager.steps() if self._saved_step is None else []
        if steps and steps[-1] > trainer.global_step:
            raise BucketpointError(
                f"The run has checkpoints up to step {steps[-1]}, but training begins at step {trainer.global_step}",
                url=self.manager.catalog.url,
                remedy="To continue from its newest checkpoint, pass the run's URL: trainer.fit(..., ckpt_path=URL), "
                "because Lightning's 'last' finds none here; or save to another URL",
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        # With accumulated gradients several batches make one step.
        if step == 0 or step == self._asked_step:
            return
        self._asked_step = step
        assert self.manager is not None
        if self.manager.should_save(step):
            self._save(trainer)
        if self.manager.stop_asked:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        # `trainer.validate` after `fit` may have loaded another checkpoint.
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or trainer.global_step == 0:
            return
        assert self.manager is not None
        self._validated = trainer.global_step, set(trainer._logger_connector.metrics["callback"])
        if self._saved_step == trainer.global_step:
            self.manager.report(trainer.global_step, self._metrics(trainer))
        elif self._after_validation:
            self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.manager is not None
        step = trainer.global_step
        if step and step != self._saved_step and self.manager.should_save(step, last=True):
            self._save(trainer)
        self.manager.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        try:
            self.teardown(trainer, pl_module, "fit")
        except BucketpointError as error:
            # Only logged: the exception that ended training must be raised.
            logger.error("the last save failed: %s", error)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.manager is not None:
            self.manager.close()

    def _save(self, trainer: Any) -> None:
        assert self.manager is not None
        step, strategy = trainer.global_step, trainer.strategy
        dump = trainer._checkpoint_connector.dump_checkpoint
        metrics = self._metrics(trainer)
        validated_step, names = self._validated
        if validated_step != step:
            # Lightning keeps the metrics of a validation until the next one, but the model has changed since.
            metrics = {name: value for name, value in metrics.items() if name not in names}
        state = TrainingState(lambda: strategy.parts_of(dump(weights_only=False)))
        if state.save(self.manager, step, metrics=metrics) is not None:
            self._saved_step = step

    def _metrics(self, trainer: Any) -> dict[str, float]:
        """Return the metrics to save with a checkpoint. All ranks, because Lightning may reduce metrics here."""
        assert self.manager is not None
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        return fitting_metrics(finite, self.manager.policy, self._left_out) if trainer.is_global_zero else finite


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


def _settle(loops: dict[str, Any]) -> None:
    """Rewrite the saved counts of a fit loop for a run that may have another number of batches in an epoch.

    - Saved after the last batch of an epoch: the next epoch begins. Lightning would compare the saved number of batches
      with the present length of an epoch, and with `max_steps` skip most of the next epoch.
    - Saved in an epoch that ended early, at `max_steps` or by early stopping: the epoch continues. Lightning has
      counted this epoch as complete.
    """
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    current, total = batches["current"], batches["total"]
    names = ("ready", "started", "processed", "completed")
    if not current["ready"]:
        return
    if batches["is_last_batch"] and current["processed"] == current["ready"]:
        if current["completed"] < current["processed"]:
            # The save came before loggers counted the batch, which they do after the callbacks at the batch's end.
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
        for counts in epochs.values():
            counts.update(dict.fromkeys(names, counts["started"]))
        total.update(dict.fromkeys(names, total["processed"]))
        current.update(dict.fromkeys(names, 0))
        batches["is_last_batch"] = False
    elif epochs["current"]["processed"] == epochs["current"]["ready"]:
        for counts in epochs.values():
            counts["processed"] -= 1
            counts["completed"] = counts["processed"]


class BucketCheckpointIO(CheckpointIO):
    """Plugin for plain, unsharded checkpoints of Lightning and Fabric: each is one object, written by `torch.save`.

    The object appears whole or not at all. `Trainer(plugins=[BucketCheckpointIO()])` saves with Lightning's own
    strategies, while training waits.

    Args:
        storage_options: as for `BucketWriter`.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self._storage_options = storage_options

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint. `storage_options` replace those of the plugin."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        data = buffer.getbuffer()
        store, key = open_store(path, storage_options=storage_options or self._storage_options)
        options = TransferOptions()
        source = ObjectSource(key, (Segment(len(data), data),))
        pool = BufferPool(options.max_inflight_bytes)
        upload_objects(store, [source], options, pool=pool, meter=Meter("write", os.fspath(path), len(data), None))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint as `torch.load` does."""
        store, key = open_store(path, storage_options=self._storage_options)
        data, _ = store.get(key)
        loaded: dict[str, Any] = torch.load(
            io.BytesIO(data), map_location=map_location or "cpu", weights_only=weights_only
        )
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint, if there is one."""
        store, key = open_store(path, storage_options=self._storage_options)
        for failure in store.delete([key]):
            raise BucketpointError(f"The checkpoint cannot be deleted: {failure}", url=os.fspath(path))
