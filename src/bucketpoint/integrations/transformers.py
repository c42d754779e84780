"""Hugging Face transformers: checkpoints of a `Trainer`, saved to and loaded from a URL.

Models and optimizers are saved sharded under FSDP, and once for all ranks under DDP: a run can resume with more or
fewer processes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bucketpoint.convert.export import export_safetensors, refuse_export
from bucketpoint.dcp.api import load
from bucketpoint.errors import BucketpointError, CheckpointExistsError, CheckpointNotFoundError, CorruptDataError
from bucketpoint.format import keys
from bucketpoint.integrations.parts import ModelState, OfThisRank, OptimizerState, RandomState
from bucketpoint.integrations.trainer_policy import best_of, fitting_metrics, policy_for
from bucketpoint.integrations.training_state import TrainingState
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import RetentionPolicy
from bucketpoint.stores import Store, open_store

logger = logging.getLogger(__name__)

try:
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ModuleNotFoundError as error:  # pragma: no cover
    raise ModuleNotFoundError(
        "bucketpoint.integrations.transformers needs transformers: pip install 'transformers[torch]>=5.23'",
        name=error.name,
    ) from error

_STATE_FILE = "trainer_state.json"


class BucketTrainerMixin:
    """Checkpoints of a `Trainer` at a URL: `class BucketTrainer(BucketTrainerMixin, Trainer)`.

    Saves run in the background: training waits only for the copy of the state. `output_dir` stays local, for logs.
    `train(resume_from_checkpoint=True)` resumes from the newest whole checkpoint, or starts from scratch if there is
    none. With a URL it resumes from that checkpoint, and the next save marks later checkpoints of the run for deletion.
    It also resumes from a folder that transformers saved. `train` returns once the last save is committed.

    Args:
        checkpoint_url: URL of the run.
        policy: retention policy, or its YAML file. By default all checkpoints are kept; with `save_total_limit` that
            many, as in transformers: the latest, and with `load_best_model_at_end` the best. The trainer's arguments
            decide when to save; of the policy's `save:` only signals are used.
        manager_options: as for `CheckpointManager`, such as `storage_options` and `on_commit`.

    Raises:
        BucketpointError: the trainer uses DeepSpeed, which has its own format; or the class lists the mixin after
            `Trainer`, whose own saves would then be used.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(BucketTrainerMixin)]
        if any((base.__module__, base.__name__) == ("transformers.trainer", "Trainer") for base in before):
            raise BucketpointError(
                f"{cls.__name__} lists BucketTrainerMixin after Trainer, whose saves it must replace",
                remedy=f"Write `class {cls.__name__}(BucketTrainerMixin, Trainer)`",
            )

    def __init__(
        self: Any,
        *args: Any,
        checkpoint_url: str | os.PathLike[str],
        policy: RetentionPolicy | str | os.PathLike[str] | None = None,
        manager_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not os.fspath(checkpoint_url):
            raise BucketpointError("checkpoint_url is empty", remedy="Give the URL of the run: s3://bucket/run-7")
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise BucketpointError(
                "DeepSpeed saves in its own format", remedy="Train with DDP or FSDP, or without BucketTrainerMixin"
            )
        self._checkpoint_url = checkpoint_url
        self._policy = policy
        self._manager_options = dict(manager_options or {})
        self._manager: CheckpointManager | None = None
        self._forget_resumed()
        self._evaluated: dict[int, dict[str, float]] = {}
        self._left_out: set[str] = set()
        self.add_callback(_OnSignals(self))

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model to a local folder, as `Trainer` does, and refuse a URL.

        Args:
            output_dir: the folder; by default the trainer's own.

        Raises:
            BucketpointError: `output_dir` is a URL.
        """
        if output_dir is not None and "://" in str(output_dir):
            raise BucketpointError(
                "save_model writes to local folders only",
                url=str(output_dir),
                remedy="Call trainer.export_pretrained(url), or save to a folder and copy it",
            )
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, and return once the last save is committed.

        Args:
            resume_from_checkpoint: True for the newest whole checkpoint of the run, or the URL or folder of one.
        """
        policy = policy_for(self._policy, self.args, self._checkpoint_url)
        manager = self._manager = CheckpointManager(self._checkpoint_url, policy=policy, **self._manager_options)
        self._saved_step = -1
        self._may_pass_over = resume_from_checkpoint is True
        # A later `train` must find the last save committed.
        with manager:
            while True:
                with tempfile.TemporaryDirectory(prefix="bucketpoint-") as folder:
                    self._folder = folder
                    try:
                        return super().train(self._found(resume_from_checkpoint), *args, **kwargs)  # type: ignore[misc]
                    except _PassOver as damaged:
                        resume_from_checkpoint = damaged.older

    def _forget_resumed(self) -> None:
        self._resumed_url: str | None = None
        self._resumed_best: str | None = None
        self._random = _LaterRandomState()

    def _found(self: Any, asked: str | os.PathLike[str] | bool | None) -> str | None:
        """Return the local folder from which the trainer resumes, with its state file. All ranks."""
        self._forget_resumed()
        if asked is None or asked is False:
            self._refuse_an_earlier_run()
            return None
        manager, told = self._manager, {"trainer": {"state": ""}}
        if asked is True:
            restored = manager.restore(told)
            if restored is None:
                logger.info("%s holds no checkpoint yet: training begins from scratch", self._checkpoint_url)
                return None
            self._resumed_url = restored.url
        else:
            url, steps = os.fspath(asked), manager.steps()
            if Path(url, _STATE_FILE).is_file():  # transformers saved it
                self._refuse_an_earlier_run()
                return url
            step = next((step for step in steps if manager.catalog.url_of(step) == url.rstrip("/")), None)
            if step is None:
                load(told, url, **self._reading())
                self._refuse_an_earlier_run()
            else:
                if step != steps[-1]:
                    logger.warning("training resumes from %s: the next save gives up later checkpoints", url)
                manager.restore(told, step, rollback=step != steps[-1])
            self._resumed_url = url
        Path(self._folder, _STATE_FILE).write_text(told["trainer"]["state"], encoding="utf-8")
        self._resumed_best = json.loads(told["trainer"]["state"])["best_model_checkpoint"]
        return str(self._folder)

    def _refuse_an_earlier_run(self: Any) -> None:
        """Refuse to start from scratch in a run with checkpoints: their steps could not be saved again."""
        saves = self.args.save_strategy != "no" or self._manager.policy.save.on
        steps = self._manager.steps() if saves else None
        if steps:
            raise CheckpointExistsError(
                f"The run has checkpoints up to step {steps[-1]}, but training does not resume from any of them",
                url=os.fspath(self._checkpoint_url),
                remedy="Resume with resume_from_checkpoint=True or the URL of one, or name another checkpoint_url",
            )

    def _get_output_dir(self: Any, trial: Any) -> str:
        """Return an empty folder: at the end of training the trainer deletes checkpoints there, all but the best."""
        return str(self._folder)

    def _reading(self) -> dict[str, Any]:
        return {
            name: self._manager_options[name] for name in ("storage_options", "fs") if name in self._manager_options
        }

    # -- saving -------------------------------------------------------------------------------------------------------

    def _determine_best_metric(self: Any, metrics: dict[str, Any], trial: Any) -> bool:
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
        self._evaluated = {self.state.global_step: numbers}
        best = super()._determine_best_metric(metrics, trial)  # type: ignore[misc]
        # With `save_strategy="best"` the result decides whether to save: keep the request of a signal.
        return bool(best) or self.control.should_save

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        if trial is not None:
            raise BucketpointError(
                "Trials of a hyperparameter search share one checkpoint_url",
                url=os.fspath(self._checkpoint_url),
                remedy="Search without BucketTrainerMixin, or with save_strategy='no'",
            )
        self.store_flos()
        step = self.state.global_step
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = self._manager.catalog.url_of(step)
        metrics = self._evaluated.get(step, {})
        if self.is_world_process_zero():
            metrics = fitting_metrics(metrics, self._manager.policy, self._left_out)
        if step == self._saved_step:
            # A signal caused a save of this step before the end of the epoch.
            self._manager.report(step, metrics)
            return

        def made() -> dict[str, Any]:
            parts = {"model": ModelState(self.model_wrapped)} if self.args.save_only_model else self._parts()
            if self.is_world_process_zero():
                self._note_callbacks()
                parts["trainer"] = {"state": json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True)}
            return parts

        if TrainingState(made).save(self._manager, step, metrics=metrics) is not None:
            self._saved_step = step

    def _parts(self: Any, generators: Any = None) -> dict[str, Any]:
        """Return all parts of the training but the trainer's own state, to save or to load into."""
        parts: dict[str, Any] = {
            "model": ModelState(self.model_wrapped),
            "optimizer": OptimizerState(self.model_wrapped, getattr(self.optimizer, "optimizer", self.optimizer)),
            "scheduler": self.lr_scheduler,
            "generators": OfThisRank(generators or RandomState()),
        }
        if self.accelerator.scaler is not None:
            parts["scaler"] = self.accelerator.scaler
        return parts

    def _note_callbacks(self: Any) -> None:
        """Add the states of callbacks to the trainer's state, as transformers' own save does."""
        noted: dict[str, Any] = self.state.stateful_callbacks
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(noted.get(name), list):
                    noted[name].append(callback.state())
                else:
                    noted[name] = callback.state()

    # -- loading: from a URL, or from a folder that transformers saved ------------------------------------------------

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a model that transformers saved. A model at a URL is loaded later, with the prepared optimizer."""
        if self._resumed_url is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        url = self._resumed_url
        if url is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        try:
            TrainingState(lambda: self._parts(self._random)).load(url, **self._reading())
        except CorruptDataError as error:
            steps = self._manager.steps() if self._may_pass_over else []
            urls = [self._manager.catalog.url_of(step) for step in steps]
            if url not in urls[1:]:
                raise
            logger.error("%s", error)
            raise _PassOver(urls[urls.index(url) - 1]) from error
        # The trainer looked for a local folder of this name, and found none: restore the URL.
        self.state.best_model_checkpoint = self._resumed_best

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        """Load a scaler that transformers saved. A scaler at a URL is loaded with the optimizer."""
        if self._resumed_url is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if self._resumed_url is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif self._random.loaded is not None:
            RandomState().load_state_dict(self._random.loaded)

    def _load_best_model(self: Any) -> None:
        if Path(self.state.best_model_checkpoint, _STATE_FILE).is_file():
            super()._load_best_model()  # type: ignore[misc]
            return
        self._manager.wait()
        model = TrainingState(lambda: {"model": ModelState(self.model_wrapped)})
        try:
            model.load(self.state.best_model_checkpoint, **self._reading())
        except CheckpointNotFoundError:
            # The trainer's best model may have occurred between two saves: load the best checkpoint.
            best = model.restore(self._manager, "best", metric=best_of(self.args).metric)
            self.state.best_model_checkpoint = best.url if best is not None else None

    # -- the end ------------------------------------------------------------------------------------------------------

    def export_pretrained(self: Any, url: str | os.PathLike[str], checkpoint: str | None = None) -> None:
        """Write a checkpoint's weights to a URL as `save_pretrained` does: safetensors, configuration and tokenizer.

        Called on all ranks, each of which streams its share of the files from bucket to bucket. Existing weights are
        replaced.

        Args:
            url: URL of the folder to write to.
            checkpoint: URL of the checkpoint; by default the best one with `load_best_model_at_end`, else the newest.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
        """
        options, fs = (self._manager_options.get(name) for name in ("storage_options", "fs"))
        try:
            chosen, model = self._exported(checkpoint)
            if self.is_world_process_zero():
                self._put_small_files(model, *open_store(url, storage_options=options, fs=fs))
        except Exception as error:
            refuse_export(error)
            raise
        export_safetensors(
            chosen,
            url,
            prefix="model",
            overwrite=True,
            storage_options=options,
            target_options=options,
            fs=fs,
            target_fs=fs,
        )

    def _exported(self: Any, checkpoint: str | None) -> tuple[str, Any]:
        """Return the checkpoint that `export_pretrained` exports, and the model."""
        chosen = checkpoint or (self.args.load_best_model_at_end and self.state.best_model_checkpoint) or None
        if chosen is None:
            from bucketpoint.catalog.catalog import latest_checkpoint

            chosen = latest_checkpoint(self._checkpoint_url, **self._reading())
        if chosen is None:
            raise CheckpointNotFoundError("There is no checkpoint to export", url=os.fspath(self._checkpoint_url))
        model = self.accelerator.unwrap_model(self.model)
        if hasattr(model, "peft_config"):
            raise BucketpointError(
                "PEFT adapters cannot be exported in the format of save_pretrained",
                url=chosen,
                remedy="Write the trainer's own model with trainer.save_model(folder)",
            )
        return chosen, model

    def _put_small_files(self: Any, model: Any, store: Store, prefix: str) -> None:
        """Write the configuration and tokenizer files of `save_pretrained`."""
        with tempfile.TemporaryDirectory(prefix="bucketpoint-") as folder:
            parts = (getattr(model, "config", None), getattr(model, "generation_config", None))
            for part in (*parts, self.processing_class):
                if part is not None:
                    part.save_pretrained(folder)
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                name = path.relative_to(folder).as_posix()
                store.put(keys.join(prefix, name), [memoryview(path.read_bytes())])


class _OnSignals(TrainerCallback):
    """Callback that saves on the signals that the policy names, and ends training on SIGTERM."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save |= self._trainer._manager.should_save(state.global_step)
        control.should_training_stop |= self._trainer._manager.stop_asked


class _PassOver(Exception):
    """Exception for a damaged checkpoint, with the URL of an older one to resume from."""

    def __init__(self, older: str) -> None:
        super().__init__(older)
        self.older = older


class _LaterRandomState(RandomState):
    """States of the random generators that are loaded, but set only when the trainer asks for it."""

    loaded: Mapping[str, Any] | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state
