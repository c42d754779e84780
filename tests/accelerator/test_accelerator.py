"""Accelerate's trainers on URLs: killed in a save and resumed on other ranks, they see each sample once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

import bucketpoint
from bucketpoint import BucketpointError
from bucketpoint.integrations.accelerate import load_state, save_state, training_state
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Keep, RetentionPolicy
from kit.servers import S3Server
from kit.trainers import block, kill_and_resume, plain, run_example, train_example

TRAINER = Path(__file__).with_name("trainer.py")

PAGE = "accelerate.md"


# Torch's DataLoader draws a number whenever it is iterated over: with dropout the checkpoint ends an epoch.
@pytest.mark.parametrize(
    ("kind", "env"),
    [("ddp", {}), ("fsdp1", {}), ("fsdp2", {}), ("ddp", {"DROPOUT": "0.5", "SAMPLES": "96"})],
    ids=["ddp", "fsdp1", "fsdp2", "dropout"],
)
def test_resumes_after_a_kill_in_a_save_with_fewer_ranks_or_the_same_random_numbers(
    kind: str, env: dict[str, str], minio: S3Server, tmp_path: Path
) -> None:
    worlds, parts = (2 if env else 4, 2), {"model.0.weight": 1 if kind == "ddp" else 4}
    kill_and_resume(TRAINER, kind, server=minio, folder=tmp_path, worlds=worlds, parts=parts, **env)


def test_runs_the_example_as_a_plain_script_without_the_lines_that_the_page_names(
    minio: S3Server, tmp_path: Path
) -> None:
    for epochs in (1, 2):
        text = plain(PAGE).replace("len(loader), 4)", f"len(loader), {epochs})")
        run_example(text, 1, minio, tmp_path, ACCELERATE_USE_CPU="true")
    assert len(list((tmp_path / "run-7").iterdir())) == 8


def test_trains_and_resumes_with_the_example_of_the_page(minio: S3Server, tmp_path: Path) -> None:
    run = f"s3://{minio.make_bucket()}/run-7"
    text = block(PAGE, "python").replace("s3://bucket/run-7", run)
    for epochs, world, last in ((1, 2, 16), (4, 1, 128), (4, 1, 128)):
        now = text.replace("len(loader), 4)", f"len(loader), {epochs})")
        train_example(now, f"{run}/step-{last}", world, minio, tmp_path, ACCELERATE_USE_CPU="true")


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
def test_saves_and_restores_the_state_of_an_accelerator(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    policy = RetentionPolicy(Keep(latest=2))
    with CheckpointManager(str(tmp_path / "run"), policy=policy) as manager:
        for number in (1, 2, 3):
            step(accelerator, model, optimizer)
            training_state(accelerator).save(manager, number)
    expected = [each.clone() for each in model.parameters()]
    AcceleratorState._reset_state(True)
    again, model, optimizer = prepared(seed=1)
    with CheckpointManager(str(tmp_path / "run"), policy=policy) as manager:
        restored = training_state(again).restore(manager)
    assert restored is not None
    assert restored.step == 3
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))
    assert optimizer.state_dict()["state"][0]["step"] == 3


@pytest.mark.usefixtures("fresh")
def test_raises_no_alarm_for_saves_within_an_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model, optimizer = prepared()
    accelerator.prepare(torch.utils.data.DataLoader(torch.randn(8, 4), shuffle=True))
    writer = bucketpoint.BucketWriter()
    told: list[bucketpoint.CommitInfo] = []
    for number in range(5):
        step(accelerator, model, optimizer)
        save_state(accelerator, f"{tmp_path}/step-{number}", storage_writer=writer, on_commit=told.append).result()
    assert "although training continued" not in caplog.text
    assert [info.url for info in told] == [f"{tmp_path}/step-{number}" for number in range(5)]


@pytest.mark.usefixtures("fresh")
def test_resumes_in_the_middle_of_an_accumulation_with_a_pickled_accelerator(tmp_path: Path) -> None:
    accelerator, model, _ = prepared()
    accelerator.gradient_accumulation_steps = 2
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 4)).sum())
    handle = save_state(accelerator, f"{tmp_path}/step-1")
    # As in a dataset that holds it, for the workers of a dataloader.
    pickle.loads(pickle.dumps(accelerator))
    handle.result()
    save_state(accelerator, f"{tmp_path}/step-2").result()
    AcceleratorState._reset_state(True)
    again, *_ = prepared()
    load_state(again, f"{tmp_path}/step-1")
    assert (again.step, again.save_iteration) == (1, 1)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_refuses_formats_of_other_trainers(kind: DistributedType, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, *_ = prepared()
    monkeypatch.setattr(type(accelerator), "distributed_type", kind)
    with pytest.raises(BucketpointError, match=r"accelerator\.save_state"):
        training_state(accelerator).to_save()


@pytest.mark.usefixtures("fresh")
def test_names_an_optimizer_of_no_prepared_model() -> None:
    accelerator, *_ = prepared()
    accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(BucketpointError, match="one model"):
        training_state(accelerator).to_save()
