"""`BucketCheckpoint`, the callback that saves a `Trainer` by a retention policy."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.lightning.strategies import BucketStrategy
from bucketpoint.integrations.trainer_policy import fitting_metrics
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import RetentionPolicy

logger = logging.getLogger(__name__)


class BucketCheckpoint(Checkpoint):
    """Callback in place of `ModelCheckpoint`: a policy says when to save, and which checkpoints to keep.

    The trainer needs one of bucketpoint's strategies. With `ckpt_path=root`, `trainer.fit` goes on from the newest
    whole checkpoint, and begins from scratch if the run has none yet.

    Args:
        root: URL of the run.
        policy: the policy, or its YAML file. Steps are the trainer's `global_step`. Its metrics are those of
            `trainer.callback_metrics`.
        after_validation: save after each validation, too, with its metrics.
        options: as for `CheckpointManager`, such as `storage_options`, `on_commit` and `grace_s`.
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
        self._policy = policy
        self._after_validation = after_validation
        self._options = options
        self.manager: CheckpointManager | None = None
        """The manager, from the setup of `fit` to its end."""
        self._begin()

    def _begin(self) -> None:
        self._saved_step: int | None = None
        self._asked_step: int | None = None
        self._restored = False
        self._validated: tuple[int, set[str]] = (0, set())
        self._left_out: set[str] = set()

    @property
    def best_model_path(self) -> str:
        """Refuse `ckpt_path="best"`, for which Lightning asks here."""
        raise BucketpointError(
            "BucketCheckpoint does not know which checkpoint is meant by ckpt_path='best'",
            url=os.fspath(self._root),
            remedy="Pass the URL of a checkpoint: `bucketpoint ls ROOT` shows their metrics",
        )

    # -- the strategy's run -------------------------------------------------------------------------------------------

    def holds(self, url: str) -> bool:
        """Return True if the URL is that of the run."""
        return self.manager is not None and url.rstrip("/") == self.manager.catalog.url.rstrip("/")

    def restore(self, state: dict[str, Any], planner: Any) -> str | None:
        """Load the newest whole checkpoint, and return its URL; None if the run has none yet. All ranks."""
        assert self.manager is not None
        restored = self.manager.restore(state, planner=planner)
        if restored is None:
            return None
        self._saved_step = self._asked_step = restored.step
        self._restored = True
        return restored.url

    # -- hooks of the trainer -----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, BucketStrategy):
            raise BucketpointError(
                f"BucketCheckpoint cannot save with {type(trainer.strategy).__name__}",
                url=os.fspath(self._root),
                remedy="Use a strategy of bucketpoint.integrations.lightning: "
                "Trainer(strategy=BucketDDPStrategy()), BucketFSDPStrategy, BucketModelParallelStrategy or "
                "BucketSingleDeviceStrategy",
            )
        self._begin()
        self.manager = CheckpointManager(self._root, policy=self._policy, **self._options)
        trainer.strategy.run = self

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert self.manager is not None
        # Otherwise the first save says so, which may come hours later.
        steps = [] if self._restored else self.manager.steps()
        if steps and steps[-1] > trainer.global_step:
            raise BucketpointError(
                f"The run has checkpoints up to step {steps[-1]}, and training begins at step {trainer.global_step}",
                url=self.manager.catalog.url,
                remedy="To go on from its newest checkpoint, pass the run's URL: trainer.fit(..., ckpt_path=URL), as "
                "Lightning's 'last' finds none here; or save to another URL",
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
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        assert self.manager is not None
        if trainer.global_step == 0:
            return
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
            # The exception that ends training is the one to raise.
            logger.error("the last save failed: %s", error)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.manager is not None:
            self.manager.close()

    def _save(self, trainer: Any) -> None:
        assert self.manager is not None
        step = trainer.global_step
        dump = trainer._checkpoint_connector.dump_checkpoint
        metrics = self._metrics(trainer)
        validated_step, names = self._validated
        if validated_step != step:
            # Lightning keeps them until the next validation, but they are those of an earlier model.
            metrics = {name: value for name, value in metrics.items() if name not in names}
        handle = self.manager.save(
            step, lambda: trainer.strategy.saved_state(dump(weights_only=False)), metrics=metrics
        )
        if handle is not None:
            concurrent.futures.wait([handle.staged])
            self._saved_step = step

    def _metrics(self, trainer: Any) -> dict[str, float]:
        """Return the metrics that a checkpoint can have. All ranks, as Lightning may reduce them here."""
        assert self.manager is not None
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        return fitting_metrics(finite, self.manager.policy, self._left_out) if trainer.is_global_zero else finite
