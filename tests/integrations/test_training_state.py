"""States of models and optimizers by the names of their parameters: what a trainer's integrations save and load.

And successive saves of them: how one that fails is told.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bucketpoint
from bucketpoint import BucketpointError, BucketWriter, MismatchError
from bucketpoint.dcp import process_groups
from bucketpoint.dcp.planning import rank_state
from bucketpoint.integrations import training_state
from bucketpoint.integrations.parts import OfThisRank, RandomState
from bucketpoint.integrations.training_state import Saves, TrainingState, job_ranks, with_parts
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Keep, RetentionPolicy
from dcp.ranks import Ranks
from dcp.saving.async_scenarios import GatedFileSystem
from manager.agree_scenarios import committed, failing_copy, full_disk, said


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


def training(state: dict[str, Any]) -> TrainingState:
    return TrainingState(lambda: with_parts(state, ""))


def save(state: dict[str, Any], url: Path) -> None:
    saves = Saves()
    training(state).save(saves, str(url))
    saves.wait()


def load(state: dict[str, Any], url: Path) -> None:
    training(state).load(str(url))


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    for left, right in zip(one["model"].parameters(), two["model"].parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_loads_and_trains_parameters_that_got_no_gradient(kind: Any, tmp_path: Path) -> None:
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


def test_loads_an_optimizer_without_a_step_as_a_new_one(tmp_path: Path) -> None:
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


def test_refuses_an_optimizer_of_another_model_and_checkpoints_with_more_or_none(tmp_path: Path) -> None:
    state = made(0)
    with pytest.raises(BucketpointError, match="No single model"):
        with_parts({**state, "model": Experts(1)}, "")
    state["model"].more = torch.nn.Linear(2, 2)
    save(state, tmp_path / "more")
    save({"model": Experts(0)}, tmp_path / "less")
    for name, text in (("more", r"model\.more\.bias"), ("less", r"has no optimizer.*save_only_model")):
        with pytest.raises(MismatchError, match=text):
            load(made(1), tmp_path / name)


def test_restores_by_a_manager_what_it_has_saved_and_passes_over_damage(tmp_path: Path) -> None:
    first, second = made(0), made(1)
    policy = RetentionPolicy(Keep(latest=3))
    with CheckpointManager(tmp_path, policy=policy) as manager:
        for step in (1, 2):
            train(first, both=False)
            training(first).save(manager, step)
    next((tmp_path / "step-2").rglob("*-optim-0.distcp")).unlink()
    with CheckpointManager(tmp_path, policy=policy) as manager:
        restored = training(second).restore(manager)
    assert restored is not None
    assert restored.step == 1
    assert sorted(float(state["step"]) for state in second["optimizer"].state.values()) == [0.0, 0.0, 1.0, 1.0]


def test_keeps_the_state_of_a_rank_that_the_checkpoint_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, mine = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (7.0, 3.0))
    bucketpoint.save({"scaler": OfThisRank(saved), "epoch": 1}, tmp_path)
    loading = TrainingState(lambda: {"scaler": OfThisRank(mine), "epoch": 0})
    with monkeypatch.context() as another_rank:
        another_rank.setattr(training_state, "this_rank", lambda: 5)
        another_rank.setattr(rank_state, "this_rank", lambda: 5)
        assert loading.load(str(tmp_path))["epoch"] == 1
    assert mine.get_scale() == 3
    loading.load(str(tmp_path))
    assert mine.get_scale() == 7


def test_sets_the_generators_of_those_devices_that_a_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # Generators of the CPU play those of CUDA.
    saved = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: saved)
    state = RandomState().state_dict()
    here = torch.Generator().manual_seed(3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (here,))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    RandomState().load_state_dict(state)
    assert torch.equal(here.get_state(), saved[0])


@pytest.fixture
def bit_generator() -> Iterator[None]:
    """Set numpy's bit generator back at the end."""
    before = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(before)


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
@pytest.mark.usefixtures("bit_generator")
def test_draws_the_same_numpy_numbers_after_a_load_with_any_bit_generator(kind: Any) -> None:
    np.random.set_bit_generator(kind(1))
    np.random.standard_normal()
    state = RandomState().state_dict()
    expected = np.random.standard_normal(5).tolist()
    RandomState().load_state_dict(state)
    assert np.random.standard_normal(5).tolist() == expected
    np.random.set_bit_generator(np.random.PCG64DXSM())
    with pytest.raises(MismatchError, match="set_bit_generator"):
        RandomState().load_state_dict(state)


def test_saves_generators_as_0_1_reads_them_and_loads_them_as_it_saved() -> None:
    kind, keys, *rest = np.random.get_state(legacy=True)
    old = {
        "python": random.getstate(),
        "numpy": [kind, *rest],
        "numpy_keys": torch.from_numpy(np.array(keys)),
        "torch": torch.get_rng_state(),
    }
    new = torch.load(io.BytesIO(RandomState().state_dict()["pickled"]), weights_only=True)
    assert new["numpy"] == old["numpy"]
    assert torch.equal(new["numpy_keys"], old["numpy_keys"])
    expected = np.random.random_sample(5).tolist()
    pickled = io.BytesIO()
    torch.save(old, pickled)
    RandomState().load_state_dict({"pickled": pickled.getvalue()})
    assert np.random.random_sample(5).tolist() == expected


def test_shows_that_the_save_fails_despite_ctrl_c_in_a_wait(tmp_path: Path) -> None:
    gated = GatedFileSystem()
    saves = Saves(BucketWriter(fs=gated))
    handle = saves.save(str(tmp_path / "file" / "step-1"), {"weight": torch.ones(3)})
    with mock.patch.object(handle, "result", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        saves.wait()
    (tmp_path / "file").touch()
    gated.gate.set()
    with pytest.raises(BucketpointError):
        saves.wait()
    # It is raised once.
    saves.wait()


def save_where_one_rank_fails(rank: int, world: int, root: str) -> Any:
    """Rank 1 cannot make its state at save 1, and cannot copy it at save 2; save 3 fails for all, and rank 0 knows."""
    saves = Saves(BucketWriter())

    def make() -> dict[str, Any]:
        return {"weight": torch.ones(3)}

    def no_state() -> dict[str, Any]:
        raise ValueError("no state")

    def save(step: int, make: Callable[[], dict[str, Any]] = make) -> str:
        return said(lambda: saves.save(f"{root}/step-{step}", make))

    outcomes = [save(1, no_state if rank == 1 else make)]
    with failing_copy(rank == 1):
        outcomes.append(save(2))
    with full_disk(True):
        outcomes.append(save(3))
        assert saves._last is not None
        saves._last.wait()
    if rank == 0:
        assert said(saves.wait) != "done"
    outcomes += [save(4), said(saves.wait)]
    return outcomes, committed(root)


def test_raises_on_all_ranks_and_goes_on_with_the_next_save(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        results = ranks.run(save_where_one_rank_fails, str(tmp_path))
    no_state = "BucketpointError: Rank 1 failed: ValueError: no state"
    no_copy = "StagingError: Copying the state to host memory failed: no room"
    assert results == [([no_state, no_copy, "done", "done", "done"], ["step-4"])] * 2


def test_saves_in_a_job_of_one_rank(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        saves = Saves(BucketWriter())
        for step in (1, 2):
            saves.save(f"{tmp_path}/run/step-{step}", {"weight": torch.ones(3)})
        saves.wait()
        # The group of the job's ranks waits as long as the job's own.
        group = job_ranks("a test").group
        assert process_groups.timeout_of(group) >= process_groups.timeout_of(None)
    finally:
        dist.destroy_process_group()
    assert committed(str(tmp_path / "run")) == ["step-1", "step-2"]
