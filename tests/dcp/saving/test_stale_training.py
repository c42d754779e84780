"""What a writer says of real training: the changes of each save, and a part that stopped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import bucketpoint as bp
from bucketpoint.checkpoint.open import open_checkpoint


class Trainer:
    """A model with a frozen part, trained by Adam; `connected=False` gives the optimizer copies of the weights."""

    def __init__(self, folder: Path, *, connected: bool = True, lr: float = 1e-3, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict({"base": torch.nn.Linear(8, 8), "adapter": torch.nn.Linear(8, 8)})
        self.model["base"].requires_grad_(False)
        trained = list(self.model["adapter"].parameters())
        if not connected:
            trained = [torch.nn.Parameter(weight.detach().clone()) for weight in trained]
        self.optimizer = torch.optim.Adam(trained, lr=lr)
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        self.writer = bp.BucketWriter(**options)
        self.folder, self.steps = folder, 0

    def train(self) -> None:
        self.model["adapter"](self.model["base"](torch.randn(4, 8))).sum().backward()
        self.optimizer.step()

    def save(self) -> Any:
        self.steps += 100
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        handle = bp.async_save(state, checkpoint_id=f"{self.folder}/step-{self.steps}", storage_writer=self.writer)
        handle.result()
        return handle.changes


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "although training went on" in record.getMessage()]


def test_training_with_a_frozen_part_is_told_by_part_and_raises_no_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path)
    assert trainer.save() is None
    for _ in range(3):
        trainer.train()
        changes = trainer.save()
        assert changes.parts["model"].changed_items == 2
        assert changes.parts["model"].items == 4
        assert changes.parts["optimizer moments"].changed_items == 4
    assert changes.since == f"{tmp_path}/step-300"
    assert not warned(caplog)


def test_an_optimizer_that_holds_copies_of_the_weights_raises_an_alarm_for_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path, connected=False)
    trainer.save()
    for _ in range(3):
        for group in trainer.optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.ones_like(weight)
        trainer.optimizer.step()
        trainer.save()
    assert len(warned(caplog)) == 1
    assert "'model'" in warned(caplog)[0]


def test_an_optimizer_that_stopped_midway_is_named_with_the_save_in_which_it_last_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path)
    trainer.save()
    trainer.train()
    trainer.save()
    assert not warned(caplog)
    trainer.save()
    trainer.save()
    assert len(warned(caplog)) == 2
    for part, said in zip(("'model'", "'optimizer moments'"), warned(caplog), strict=True):
        assert part in said
        assert f"it last changed in {tmp_path}/step-200." in said
    trainer.train()
    trainer.save()
    trainer.save()
    assert len(warned(caplog)) == 2, "a pause as long as one before it is usual for this run"


def test_a_warm_up_at_rate_zero_raises_no_alarm_for_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(tmp_path, lr=0.0)
    trainer.save()
    for _ in range(2):
        trainer.train()
        trainer.save()
    assert not warned(caplog)


def test_the_record_and_the_log_have_the_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bucketpoint")
    trainer = Trainer(tmp_path)
    trainer.save()
    trainer.train()
    changes = trainer.save()
    assert open_checkpoint(f"{tmp_path}/step-200").record.changes == changes.to_plain()
    assert open_checkpoint(f"{tmp_path}/step-100").record.changes is None
    assert any(record.getMessage() == f"changed since {tmp_path}/step-100: {changes}" for record in caplog.records)
