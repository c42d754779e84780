"""Accelerate's trainers on URLs: killed in a save and resumed on other ranks, they see each sample once."""

from __future__ import annotations

import json
import os
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
from bucketpoint import BucketpointError
from bucketpoint.integrations.accelerate import accelerator_state, load_state, save_state
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Keep, RetentionPolicy
from bucketpoint.testing.servers import S3Server, free_port

TRAINER = Path(__file__).with_name("trainer.py")

LAST = 27

EPOCHS = "range(step // len(loader), int(__import__('os').environ['EPOCHS']))"


def train(root: str, report: Path, kind: str, world: int, server: S3Server, *, kill_at: int = 0, **env: str) -> Any:
    """Run the trainer on so many ranks. Return what rank 0 saw; None if the trainer was killed."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
    ran = subprocess.run(
        [sys.executable, *launch, str(TRAINER), root, str(report), kind, str(kill_at)],
        env={**os.environ, **server.env, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if kill_at:
        assert ran.returncode != 0
        assert not report.exists()
        return None
    assert ran.returncode == 0, ran.stderr[-6000:]
    return json.loads(report.read_text())


def chunks(url: str, key: str, server: S3Server) -> int:
    """Return the number of chunks in which a tensor was saved."""
    metadata: Any = bucketpoint.BucketReader(url, storage_options=server.options).read_metadata()
    return len(metadata.state_dict_metadata[key].chunks)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_run_killed_in_a_save_goes_on_with_fewer_ranks_as_if_nothing_had_happened(
    kind: str, minio: S3Server, tmp_path: Path
) -> None:
    bucket = minio.make_bucket()
    whole = train(f"s3://{bucket}/whole", tmp_path / "whole", kind, 4, minio)
    assert whole["from"] == 0
    assert [step for step, _, _ in whole["seen"]] == list(range(1, LAST + 1))
    root = f"s3://{bucket}/run"
    train(root, tmp_path / "killed", kind, 4, minio, kill_at=18)
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
    train(f"s3://{bucket}/run", tmp_path / "killed", "ddp", 2, minio, kill_at=18, **env)
    resumed = train(f"s3://{bucket}/run", tmp_path / "resumed", "ddp", 2, minio, **env)
    assert resumed["seen"] == whole["seen"][12:]


def test_the_example_of_the_page_trains_and_goes_on(minio: S3Server, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "accelerate.md"
    program = tmp_path / "train.py"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    bucket = minio.make_bucket()
    program.write_text(code.replace("s3://bucket/", f"s3://{bucket}/").replace("range(step // len(loader), 4)", EPOCHS))
    for epochs, world, last in (("1", 2, 10), ("4", 1, 120)):
        launch = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
        env = {**os.environ, **minio.env, "ACCELERATE_USE_CPU": "true", "EPOCHS": epochs, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launch, str(program)], env=env, check=True, timeout=200)
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
