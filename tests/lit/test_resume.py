"""Runs that stop anywhere and go on: they see the samples, and end with the weights, of a run without a stop."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

import bucketpoint
from bucketpoint import BucketpointError, RetentionPolicy
from bucketpoint.integrations.lightning import BucketCheckpoint, bucket_strategy
from bucketpoint.retention import Keep, Save, SaveEvery

SAMPLES = 72

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def dataset(samples: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(samples), torch.randn(samples, 8, generator=torch.Generator().manual_seed(0)))


class Model(lightning.LightningModule):
    """A network that notes the samples of each step, and may have a layer that no step uses."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[int]]] = []
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        if unused:
            self.unused = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        samples, inputs = batch
        self.seen.append((self.global_step + 1, sorted(samples.tolist())))
        outputs = self.net(inputs)
        return (outputs**2 + outputs).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[1]).mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Stopped(Exception):
    """An exception of the program."""


class StopAfter(lightning.Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            raise Stopped


def policy(steps: int) -> RetentionPolicy:
    return RetentionPolicy(Keep(latest=99), save=Save(every=[SaveEvery(steps)], on=["last_step"]))


def trainer_of(*others: Any, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(others),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{
            "strategy": bucket_strategy(SingleDeviceStrategy, device="cpu"),
            "max_epochs": 3,
            "num_sanity_val_steps": 0,
            **options,
        },
    )


class Stateful:
    """A dataloader with a state of its own, as torchdata's StatefulDataLoader is."""

    def __init__(self) -> None:
        self._taken = 0

    def __len__(self) -> int:
        return SAMPLES // 8

    def __iter__(self) -> Iterator[Any]:
        self._taken %= len(self)
        for indices in torch.arange(SAMPLES).split(8)[self._taken :]:
            self._taken += 1
            yield dataset()[indices]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = state["taken"]


def shuffled(batch: int = 8) -> DataLoader[Any]:
    return DataLoader(dataset(), batch, shuffle=True)


def fit(
    root: Path,
    loader: Any,
    *others: Any,
    model: Callable[[], Any] = Model,
    every: int = 1,
    stop: int | None = None,
    validate: bool = False,
    **options: Any,
) -> Any:
    lightning.seed_everything(0, verbose=False)
    made = model()
    checkpoint = BucketCheckpoint(root, policy=policy(every))
    trainer = trainer_of(*others, *([] if stop is None else [StopAfter(stop)]), checkpoint, **options)
    validation = DataLoader(dataset(16), 4) if validate else None
    try:
        trainer.fit(made, loader, validation, ckpt_path=root)
    except Stopped:
        assert stop is not None
    return made


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        (3, {}),
        (9, {}),
        (9, {"max_steps": 20}),
        (5, {"accumulate_grad_batches": 2}),
        (6, {"val_check_interval": 3}),
    ],
)
def test_resumes_a_run_that_stops_as_if_nothing_had_happened(
    stop: int, options: dict[str, Any], tmp_path: Path
) -> None:
    run: Any = {"validate": "val_check_interval" in options, **options}
    whole = fit(tmp_path / "whole", Stateful(), **run)
    fit(tmp_path / "run", Stateful(), stop=stop, **run)
    assert bucketpoint.latest_checkpoint(tmp_path / "run") == f"{tmp_path}/run/step-{stop}"
    resumed = fit(tmp_path / "run", Stateful(), **run)
    assert resumed.seen == [each for each in whole.seen if each[0] > stop]
    for mine, wanted in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_begins_the_epoch_again_of_a_dataloader_without_a_state(tmp_path: Path) -> None:
    fit(tmp_path / "run", DataLoader(dataset(), 8), stop=4)
    resumed = fit(tmp_path / "run", DataLoader(dataset(), 8))
    # Lightning counts on, and takes the first batches again.
    assert [step for step, _ in resumed.seen] == list(range(5, 28))
    assert resumed.seen[0][1] == list(range(8))


@pytest.mark.parametrize("steps", [10, 9])
def test_resumes_with_more_steps_a_run_that_ended_at_max_steps(steps: int, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", Stateful(), every=100, max_epochs=-1, max_steps=21)
    fit(tmp_path / "run", Stateful(), every=100, max_epochs=-1, max_steps=steps)
    resumed = fit(tmp_path / "run", Stateful(), every=100, max_epochs=-1, max_steps=21)
    assert resumed.seen == whole.seen[steps:]


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("batch", [4, 24])
def test_begins_a_new_epoch_in_batches_of_another_size_after_one_has_ended(
    batch: int, validate: bool, tmp_path: Path
) -> None:
    fit(tmp_path / "run", shuffled(), stop=9, validate=validate)
    resumed = fit(tmp_path / "run", shuffled(batch), validate=validate)
    batches = SAMPLES // batch
    assert len(resumed.seen) == 2 * batches
    for epoch in (resumed.seen[:batches], resumed.seen[batches:]):
        assert sorted(itertools.chain(*(samples for _, samples in epoch))) == list(range(SAMPLES))


@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="Lightning 2.5 has no averages of weights")
def test_restores_averaged_weights_and_those_in_training(tmp_path: Path) -> None:
    def average() -> Any:
        return callbacks.EMAWeightAveraging(decay=0.5)

    whole = fit(tmp_path / "whole", Stateful(), average())
    fit(tmp_path / "run", Stateful(), average(), stop=5)
    resumed = fit(tmp_path / "run", Stateful(), average())
    for mine, wanted in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_refuses_a_checkpoint_with_more_than_the_model_has(tmp_path: Path) -> None:
    fit(tmp_path / "run", shuffled(), model=lambda: Model(unused=True), stop=5)
    with pytest.raises(bucketpoint.MismatchError, match=r"model\.unused\.weight.*strict_loading"):
        fit(tmp_path / "run", shuffled())


def test_refuses_a_run_with_newer_checkpoints_and_its_best_one_before_training(tmp_path: Path) -> None:
    fit(tmp_path, shuffled(), every=4, stop=9)
    newer = r"up to step 8.*ckpt_path=URL"
    for path, text in ((None, newer), ("last", newer), (f"{tmp_path}/step-4", newer), ("best", "bucketpoint ls")):
        model = Model()
        trainer = trainer_of(BucketCheckpoint(tmp_path, policy=policy(4)))
        with pytest.raises(BucketpointError, match=text):
            trainer.fit(model, shuffled(), ckpt_path=path)
        assert model.seen == []


def test_raises_an_exception_of_the_program_after_the_last_save_is_committed(tmp_path: Path) -> None:
    checkpoint = BucketCheckpoint(tmp_path, policy=policy(4))
    with pytest.raises(Stopped):
        trainer_of(StopAfter(5), checkpoint).fit(Model(), shuffled())
    assert bucketpoint.latest_checkpoint(tmp_path) == f"{tmp_path}/step-4"
    with pytest.raises(BucketpointError, match="closed"):
        checkpoint.manager.save(5, {})  # type: ignore[union-attr]


class SaveTo(lightning.Callback):
    def __init__(self, url: Path) -> None:
        self._url = url

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self._url)


def test_prefers_an_exception_of_the_program_to_a_failed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    callbacks = [SaveTo(tmp_path / "file" / "one"), StopAfter(5)]
    with pytest.raises(Stopped):
        trainer_of(*callbacks, enable_checkpointing=False).fit(Model(), shuffled())
    assert "the last save failed" in caplog.text
    with pytest.raises(BucketpointError, match="file/one"):
        trainer_of(callbacks[0], enable_checkpointing=False).fit(Model(), shuffled())


def test_names_state_that_cannot_be_pickled(tmp_path: Path) -> None:
    class Locked(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["lock"] = threading.Lock()

    with pytest.raises(BucketpointError, match=r"lock.*on_save_checkpoint"):
        fit(tmp_path, shuffled(), model=Locked)


def test_gives_a_checkpoint_the_metrics_of_its_own_step_only(tmp_path: Path) -> None:
    told: list[bucketpoint.CommitInfo] = []
    checkpoint = BucketCheckpoint(tmp_path, policy=policy(4), on_commit=told.append)
    model, validation = Model(), DataLoader(dataset(16), 4)
    trainer = trainer_of(checkpoint, max_epochs=1, val_check_interval=3)
    trainer.fit(model, shuffled(), validation)
    # Validations came after steps 3, 6 and 9.
    assert [(info.step, "val_loss" in info.metrics) for info in told] == [(4, False), (8, False), (9, True)]
    noted = _metrics_of(tmp_path)
    trainer.validate(model, validation, ckpt_path=f"{tmp_path}/step-4", verbose=False)
    assert _metrics_of(tmp_path) == noted


def _metrics_of(root: Path) -> Any:
    with bucketpoint.CheckpointManager(root, policy=policy(4)) as manager:
        return manager.catalog.snapshot().metrics()


def test_tests_weights_with_the_callbacks_of_lightning(tmp_path: Path) -> None:
    fit(tmp_path, shuffled(), stop=5)
    trainer_of().test(Model(), DataLoader(dataset(16), 4), ckpt_path=tmp_path, verbose=False)


def test_names_the_plugin_that_loads_a_plain_checkpoint(tmp_path: Path) -> None:
    first = trainer_of(enable_checkpointing=False, strategy="auto", max_epochs=1)
    first.fit(Model(), shuffled())
    first.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(BucketpointError, match=r"a\.ckpt.*BucketCheckpointIO"):
        trainer_of(enable_checkpointing=False).fit(Model(), shuffled(), ckpt_path=tmp_path / "a.ckpt")
