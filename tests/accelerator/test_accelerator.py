"""Accelerate's trainers on URLs: killed in a save and resumed on other ranks, they see each sample once."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

import bucketpoint
from accelerator.launch import killed_in_an_upload, launched
from bucketpoint import BucketpointError
from bucketpoint.integrations.accelerate import accelerator_state, load_state, save_state
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Keep, RetentionPolicy
from kit.servers import S3Server

TRAINER = Path(__file__).with_name("trainer.py")

LAST = 27

EPOCHS = "range(step // len(loader), int(__import__('os').environ['EPOCHS']))"


def train(root: str, report: Path, kind: str, world: int, server: S3Server, **env: str) -> Any:
    """Run the trainer on so many ranks. Return what rank 0 saw."""
    ran = launched(TRAINER, [root, str(report), kind], world, server, **env)
    assert ran.returncode == 0, ran.stderr[-6000:]
    return json.loads(report.read_text())


def kill(root: str, kind: str, world: int, server: S3Server, folder: Path, **env: str) -> None:
    """Run the trainer until it is killed in the third upload."""
    killed_in_an_upload(
        TRAINER, [root, str(folder / "none"), kind], world, server, f"{root}/step-18", folder / "ranks", **env
    )


def chunks(url: str, key: str, server: S3Server) -> int:
    """Return the number of chunks in which a tensor was saved."""
    metadata: Any = bucketpoint.BucketReader(url, storage_options=server.options).read_metadata()
    return len(metadata.state_dict_metadata[key].chunks)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_run_killed_in_a_save_goes_on_with_fewer_ranks_as_if_nothing_had_happened(
    kind: str, minio: S3Server, tmp_path: Path
) -> None:
    bucket = minio.make_bucket()
    whole = train(f"s3://{bucket}/whole", tmp_path / "whole", kind, 4, minio)
    assert whole["from"] == 0
    assert [step for step, _, _ in whole["seen"]] == list(range(1, LAST + 1))
    root = f"s3://{bucket}/run"
    kill(root, kind, 4, minio, tmp_path)
    assert chunks(f"{root}/step-12", "model.0.weight", minio) == (1 if kind == "ddp" else 4)
    resumed = train(root, tmp_path / "resumed", kind, 2, minio)
    # The newest whole checkpoint, in the middle of the second epoch.
    assert resumed["from"] == 12
    seen, expected = resumed["seen"], whole["seen"][12:]
    assert [each[:2] for each in seen] == [each[:2] for each in expected]
    losses, wanted = ([loss for _, _, loss in each] for each in (seen, expected))
    assert losses == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert (resumed["rate"], resumed["iteration"]) == (whole["rate"], whole["iteration"])


def test_random_numbers_go_on_on_the_same_ranks(minio: S3Server, tmp_path: Path) -> None:
    bucket = minio.make_bucket()
    # The checkpoint ends an epoch: torch's DataLoader draws a number whenever it is iterated over.
    env = {"DROPOUT": "0.5", "SAMPLES": "96"}
    whole = train(f"s3://{bucket}/whole", tmp_path / "whole", "ddp", 2, minio, **env)
    kill(f"s3://{bucket}/run", "ddp", 2, minio, tmp_path, **env)
    resumed = train(f"s3://{bucket}/run", tmp_path / "resumed", "ddp", 2, minio, **env)
    assert resumed["seen"] == whole["seen"][12:]


PAGE = Path(__file__).parents[2] / "docs" / "accelerate.md"


def block(language: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"```{language}\n")[1].split("```")[0]


def test_the_lines_that_the_page_names_make_a_plain_script_of_its_example(tmp_path: Path) -> None:
    changes = block("diff").splitlines()
    assert sum(line[0] == "+" for line in changes) == 5
    lines = [line.partition("  # ")[0] for line in block("python").splitlines()]
    before: list[str] = []
    for line in changes:
        if line[0] == "-":
            before.append(line[1:])
        else:
            at = lines.index(line[1:])
            lines[at : at + 1], before = before, []
    plain = "\n".join(lines).replace("len(loader), 4)", "len(loader), int(os.environ['EPOCHS']))")
    assert "bucketpoint" not in plain
    program = tmp_path / "plain.py"
    program.write_text(plain)
    for epochs in ("1", "2"):
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "EPOCHS": epochs, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, env=env, capture_output=True, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
    assert len(list((tmp_path / "run-7").iterdir())) == 8


def test_the_example_of_the_page_trains_and_goes_on(minio: S3Server, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    code = block("python")
    bucket = minio.make_bucket()
    program.write_text(code.replace("s3://bucket/", f"s3://{bucket}/").replace("range(step // len(loader), 4)", EPOCHS))
    for epochs, world, last in (("1", 2, 16), ("4", 1, 128), ("4", 1, 128)):
        ran = launched(program, [], world, minio, ACCELERATE_USE_CPU="true", EPOCHS=epochs)
        assert ran.returncode == 0, ran.stderr[-6000:]
        newest = bucketpoint.latest_checkpoint(f"s3://{bucket}/run-7", storage_options=minio.options)
        assert newest == f"s3://{bucket}/run-7/step-{last}"


@pytest.fixture
def fresh() -> Iterator[None]:
    """Accelerate keeps its state in the process."""
    yield
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def prepared(*, seed: int = 0) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return (accelerator, *accelerator.prepare(model, optimizer))


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.randn(3, 4)).sum())
    optimizer.step()


@pytest.mark.usefixtures("fresh")
def test_a_manager_saves_and_restores_the_state_of_an_accelerator(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    policy = RetentionPolicy(Keep(latest=2))
    with CheckpointManager(str(tmp_path / "run"), policy=policy) as manager:
        for number in (1, 2, 3):
            step(accelerator, model, optimizer)
            manager.save(number, accelerator_state(accelerator))
    expected = [each.clone() for each in model.parameters()]
    AcceleratorState._reset_state(True)
    again, model, optimizer = prepared(seed=1)
    with CheckpointManager(str(tmp_path / "run"), policy=policy) as manager:
        restored = manager.restore(accelerator_state(again))
    assert restored is not None
    assert restored.step == 3
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))
    assert optimizer.state_dict()["state"][0]["step"] == 3


@pytest.mark.usefixtures("fresh")
def test_saves_within_an_epoch_raise_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model, optimizer = prepared()
    accelerator.prepare(torch.utils.data.DataLoader(torch.randn(8, 4), shuffle=True))
    writer = bucketpoint.BucketWriter()
    for number in range(5):
        step(accelerator, model, optimizer)
        save_state(accelerator, f"{tmp_path}/step-{number}", storage_writer=writer).result()
    assert "although training went on" not in caplog.text


@pytest.mark.usefixtures("fresh")
def test_a_rank_that_was_not_there_keeps_its_own_random_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, *_ = prepared()
    told: list[bucketpoint.CommitInfo] = []
    save_state(accelerator, f"{tmp_path}/step-1", on_commit=told.append).result()
    assert [info.url for info in told] == [f"{tmp_path}/step-1"]
    monkeypatch.setattr(type(accelerator), "process_index", 5)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    load_state(accelerator, f"{tmp_path}/step-1")
    assert torch.equal(torch.get_rng_state(), before)


class Experts(torch.nn.Module):
    """A model with a layer that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(4, 4)
        self.idle = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, *, both: bool = False) -> torch.Tensor:
        hidden = self.used(inputs)
        return self.idle(hidden) if both else hidden


def with_experts(seed: int) -> tuple[Accelerator, Any, Any]:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(seed)
    model = Experts()
    groups = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.0}]
    return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.1)))


@pytest.mark.usefixtures("fresh")
def test_parameters_without_gradients_and_groups_without_parameters_are_loaded(tmp_path: Path) -> None:
    def train_on(accelerator: Accelerator, model: Any, optimizer: Any, *, both: bool) -> None:
        accelerator.backward(model(torch.ones(1, 4), both=both).sum())
        optimizer.step()
        optimizer.zero_grad()

    first = with_experts(0)
    train_on(*first, both=False)
    save_state(first[0], f"{tmp_path}/step-1").result()
    train_on(*first, both=True)
    second = with_experts(1)
    # Gradients of a model that was tried out before the load.
    second[0].backward(second[1](torch.ones(1, 4)).sum())
    load_state(second[0], f"{tmp_path}/step-1")
    second[2].zero_grad()
    train_on(*second, both=True)
    assert all(torch.equal(one, two) for one, two in zip(first[1].parameters(), second[1].parameters(), strict=True))


@pytest.mark.usefixtures("fresh")
def test_an_optimizer_without_a_step_is_loaded_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    accelerator, model, optimizer = with_experts(0)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
    save_state(accelerator, f"{tmp_path}/step-1").result()
    accelerator, _, optimizer = with_experts(1)
    load_state(accelerator, f"{tmp_path}/step-1")
    assert accelerator.step == 1
    # As new ones.
    assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {0}


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_formats_of_other_trainers_are_refused(kind: DistributedType, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, *_ = prepared()
    monkeypatch.setattr(type(accelerator), "distributed_type", kind)
    with pytest.raises(BucketpointError, match=r"accelerator\.save_state"):
        accelerator_state(accelerator)


@pytest.mark.usefixtures("fresh")
def test_an_optimizer_of_no_prepared_model_is_named() -> None:
    accelerator, *_ = prepared()
    accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(BucketpointError, match="one model"):
        accelerator_state(accelerator)


@pytest.mark.usefixtures("fresh")
def test_a_checkpoint_of_another_model_is_refused_with_the_keys(tmp_path: Path) -> None:
    accelerator, *_ = prepared()
    save_state(accelerator, f"{tmp_path}/step-1").result()
    AcceleratorState._reset_state(True)
    other = Accelerator(cpu=True)
    other.prepare(torch.nn.Linear(5, 4))
    with pytest.raises(bucketpoint.MismatchError, match=r"model\.weight"):
        load_state(other, f"{tmp_path}/step-1")


def test_an_accelerator_that_has_saved_can_be_pickled(tmp_path: Path) -> None:
    # As in a dataset that holds it, for the workers of a dataloader.
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handle = save_state(accelerator, str(tmp_path / "step-1"))
    pickle.loads(pickle.dumps(accelerator))
    handle.result()
    save_state(accelerator, str(tmp_path / "step-2")).result()
