"""States of models and optimizers by the names of their parameters: what a trainer's integrations save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bucketpoint
from bucketpoint import MismatchError
from bucketpoint.integrations.resume_planner import ResumePlanner
from bucketpoint.integrations.training_state import with_state


class Experts(torch.nn.Module):
    """Two layers, of which the second one gets no gradient at first, and a frozen one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.used, self.idle, self.frozen = (torch.nn.Linear(3, 3) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, both: bool) -> Any:
        hidden = self.frozen(self.used(inputs))
        return self.idle(hidden) if both else hidden


def made(seed: int, kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    """Return a model, and an optimizer with a group without parameters, such as LoRA leaves behind."""
    model = Experts(seed)
    groups = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.0}]
    return {"model": model, "optimizer": kind(groups, lr=0.1)}


def train(state: dict[str, Any], *, both: bool) -> None:
    state["model"](torch.ones(1, 3), both).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def save(state: dict[str, Any], url: Path) -> None:
    bucketpoint.save({**state, **with_state(state, "")}, str(url))


def load(state: dict[str, Any], url: Path) -> None:
    found = with_state(state, "", loading=True)
    bucketpoint.load({**state, **found}, str(url), planner=ResumePlanner(found))


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    for left, right in zip(one["model"].parameters(), two["model"].parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_parameters_that_got_no_gradient_are_loaded_and_trained_on(kind: Any, tmp_path: Path) -> None:
    first, second = made(0, kind), made(1, kind)
    train(first, both=False)
    save(first, tmp_path)
    # The other model has been trained, and has gradients.
    train(second, both=True)
    second["model"](torch.ones(1, 3), True).sum().backward()
    load(second, tmp_path)
    second["optimizer"].zero_grad()
    for state in (first, second):
        train(state, both=True)
        train(state, both=False)
    assert_same(first, second)
    assert len(second["optimizer"].param_groups) == 2


def test_an_optimizer_without_a_step_is_loaded_as_a_new_one(tmp_path: Path) -> None:
    first, second = made(0), made(1)
    # Gradients, so that torch itself makes no state for the save.
    first["model"](torch.ones(1, 3), True).sum().backward()
    save(first, tmp_path)
    first["optimizer"].zero_grad()
    train(second, both=True)
    load(second, tmp_path)
    for state in (first, second):
        train(state, both=True)
    assert_same(first, second)


def test_a_checkpoint_with_more_than_the_model_is_refused(tmp_path: Path) -> None:
    state = made(0)
    state["model"].more = torch.nn.Linear(2, 2)
    save(state, tmp_path)
    with pytest.raises(MismatchError, match=r"model\.more\.bias"):
        load(made(1), tmp_path)


def test_a_checkpoint_without_the_optimizer_is_refused(tmp_path: Path) -> None:
    save({"model": Experts(0)}, tmp_path)
    with pytest.raises(MismatchError, match=r"optimizer\.param_groups"):
        load(made(1), tmp_path)
