"""Hugging Face transformers: checkpoints of a `Trainer`, saved to and loaded from a URL.

Models and optimizers are saved sharded under FSDP, and once for all ranks under DDP, so that a run goes on with another
number of processes.
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

from bucketpoint.convert import ConvertOptions, plan_conversion, run_conversion
from bucketpoint.dcp import BucketReader, load, saved_ranks
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError
from bucketpoint.integrations.training_state import ModelState, OfThisRank, OptimizerState, RandomState
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Best, Keep, RetentionPolicy
from bucketpoint.stores import open_store

try:
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as error:  # pragma: no cover
    raise ModuleNotFoundError(
        "bucketpoint.integrations.transformers needs transformers: pip install 'transformers[torch]>=5.23'",
        name=error.name,
    ) from error

logger = logging.getLogger(__name__)

_STATE_FILE = "trainer_state.json"

_GENERATORS = "generators"

_ALL = 10**9
"""Checkpoints that are kept without `save_total_limit`."""


class BucketTrainerMixin:
    """Checkpoints of a `Trainer` at a URL: `class BucketTrainer(BucketTrainerMixin, Trainer)`.

    Saves go on beside training, which waits for the copy only. `output_dir` stays local, for logs.
    `train(resume_from_checkpoint=True)` goes on from the newest whole checkpoint, and begins from scratch if there is
    none yet; a URL names one. `train` returns once the last save is committed.

    Args:
        checkpoint_url: URL of the run.
        policy: retention policy, or its YAML file. By default all checkpoints are kept; or with `save_total_limit` that
            many of the latest, and with `load_best_model_at_end` the best one. When to save is up to the trainer's
            arguments.
        manager_options: as for `CheckpointManager`, such as `storage_options` and `on_commit`.

    Raises:
        BucketpointError: the trainer uses DeepSpeed, which has a format of its own.
    """

    def __init__(
        self: Any,
        *args: Any,
        checkpoint_url: str | os.PathLike[str],
        policy: RetentionPolicy | str | os.PathLike[str] | None = None,
        manager_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise BucketpointError(
                "DeepSpeed saves in a format of its own", remedy="Train with DDP or FSDP, or without BucketTrainerMixin"
            )
        self._checkpoint_url = checkpoint_url
        self._policy = policy
        self._manager_options = dict(manager_options or {})
        self._manager: CheckpointManager | None = None
        self._resumed_url: str | None = None
        self._random = _KeptState()
        self._evaluated: dict[int, dict[str, float]] = {}

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        manager = self._manager = CheckpointManager(
            self._checkpoint_url, policy=self._policy or _policy_of(self.args), **self._manager_options
        )
        with tempfile.TemporaryDirectory(prefix="bucketpoint-") as folder:
            found = self._found(resume_from_checkpoint, Path(folder))
            output = super().train(folder if found else None, *args, **kwargs)  # type: ignore[misc]
        manager.close()
        return output

    def _found(self: Any, asked: str | bool | None, folder: Path) -> bool:
        """Find the checkpoint to resume, and write the file of it that the trainer reads itself. All ranks."""
        self._resumed_url = None
        if asked is None or asked is False:
            return False
        told = _KeptState({"state": ""})
        if asked is True:
            restored = self._manager.restore({"trainer": told})
            if restored is None:
                logger.info("%s holds no checkpoint yet: training begins from scratch", self._checkpoint_url)
                return False
            self._resumed_url = restored.url
        else:
            load({"trainer": told}, asked, **self._reading())
            self._resumed_url = os.fspath(asked)
        folder.joinpath(_STATE_FILE).write_text(told.value["state"], encoding="utf-8")
        return True

    def _reading(self) -> dict[str, Any]:
        return {
            name: self._manager_options[name] for name in ("storage_options", "fs") if name in self._manager_options
        }

    # -- saving -------------------------------------------------------------------------------------------------------

    def _determine_best_metric(self: Any, metrics: dict[str, Any], trial: Any) -> bool:
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
        self._evaluated = {self.state.global_step: numbers}
        return bool(super()._determine_best_metric(metrics, trial))  # type: ignore[misc]

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
        state = self._state_to_save() if not self.args.save_only_model else {"model": ModelState(self.model_wrapped)}
        if self.is_world_process_zero():
            self._note_callbacks()
            state["trainer"] = {"state": json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True)}
        handle = self._manager.save(step, state, metrics=self._evaluated.get(step))
        if handle is not None:
            handle.staged.result()

    def _state_to_save(self: Any) -> dict[str, Any]:
        """Return all of the training but the trainer's own state, to save or to load into."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        state: dict[str, Any] = {
            "model": ModelState(self.model_wrapped),
            "optimizer": OptimizerState(self.model_wrapped, optimizer),
            "scheduler": self.lr_scheduler,
            _GENERATORS: OfThisRank(RandomState()),
        }
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        return state

    def _note_callbacks(self: Any) -> None:
        """Put the states of callbacks into the trainer's state, as a save of the trainer's own does."""
        noted: dict[str, Any] = self.state.stateful_callbacks
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(noted.get(name), list):
                    noted[name].append(callback.state())
                else:
                    noted[name] = callback.state()

    # -- loading ------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: the model is loaded together with the optimizer, once it is prepared."""

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        url = self._resumed_url
        if checkpoint is None or url is None:
            return
        state = self._state_to_save()
        state[_GENERATORS] = OfThisRank(self._random)
        reader = BucketReader(url, **self._reading())
        if self.args.process_index not in saved_ranks(reader.read_metadata(), _GENERATORS):
            del state[_GENERATORS]
        load(state, url, **self._reading())
        # The trainer looks for a folder of this name, and finds none.
        best = self.state.best_global_step
        if best:
            self.state.best_model_checkpoint = self._manager.catalog.url_of(best)

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        """Do nothing: the scaler is loaded together with the optimizer."""

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if self._random.value:
            RandomState().load_state_dict(self._random.value)

    def _load_best_model(self: Any) -> None:
        self._manager.wait()
        load({"model": ModelState(self.model_wrapped)}, self.state.best_model_checkpoint, **self._reading())

    # -- the end ------------------------------------------------------------------------------------------------------

    def export_pretrained(self: Any, url: str | os.PathLike[str], checkpoint: str | None = None) -> None:
        """Write a checkpoint's weights to a URL as `save_pretrained` does: safetensors, configuration and tokenizer.

        The process of rank 0 streams them from bucket to bucket; others return at once.

        Args:
            checkpoint: URL of the checkpoint; by default the best one with `load_best_model_at_end`, else the newest.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
        """
        if not self.is_world_process_zero():
            return
        chosen = checkpoint or (self.args.load_best_model_at_end and self.state.best_model_checkpoint) or None
        if chosen is None:
            from bucketpoint.catalog import latest_checkpoint

            chosen = latest_checkpoint(self._checkpoint_url, **self._reading())
        if chosen is None:
            raise CheckpointNotFoundError("There is no checkpoint to export", url=os.fspath(self._checkpoint_url))
        options = self._manager_options.get("storage_options")
        plan = plan_conversion(
            chosen,
            url,
            to_format="safetensors",
            options=ConvertOptions(prefix="model."),
            source_options=options,
            target_options=options,
        )
        run_conversion(plan)
        store, prefix = open_store(url, storage_options=options)
        with tempfile.TemporaryDirectory(prefix="bucketpoint-") as folder:
            model = self.accelerator.unwrap_model(self.model)
            # Only the small files of `save_pretrained`.
            for part in (model.config, getattr(model, "generation_config", None), self.processing_class):
                if part is not None:
                    part.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                store.put(f"{prefix.rstrip('/')}/{path.name}".lstrip("/"), [memoryview(path.read_bytes())])


class _KeptState:
    """A state that is kept until the trainer asks for it."""

    def __init__(self, value: dict[str, Any] | None = None) -> None:
        self.value: dict[str, Any] = value or {}

    def state_dict(self) -> dict[str, Any]:
        return self.value or RandomState().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = dict(state)


def _policy_of(arguments: Any) -> RetentionPolicy:
    """Return the policy that `save_total_limit` and `load_best_model_at_end` stand for."""
    best = []
    if arguments.load_best_model_at_end and arguments.metric_for_best_model:
        metric = arguments.metric_for_best_model
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        best.append(Best(name, "max" if arguments.greater_is_better else "min"))
    return RetentionPolicy(Keep(latest=arguments.save_total_limit or _ALL, best=best))
