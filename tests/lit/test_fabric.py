"""Fabric's strategies on URLs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.strategies import SingleDeviceStrategy

from bucketpoint import BucketpointError
from bucketpoint.integrations.lightning import bucket_strategy
from kit.servers import S3Server
from kit.trainers import block, kill_and_resume, plain, run_example, train_example

PAGE = "lightning.md"

PROGRAM = Path(__file__).with_name("fabric_trainer.py")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp2"])
def test_resumes_a_loop_of_fabric_killed_in_an_upload_with_fewer_ranks(
    kind: str, minio: S3Server, tmp_path: Path
) -> None:
    parts = {"model.0.weight": 1 if kind == "ddp" else 4}
    kill_and_resume(PROGRAM, kind, server=minio, folder=tmp_path, parts=parts)


def test_commits_the_last_save_of_the_example_as_it_ends_and_resumes(minio: S3Server, tmp_path: Path) -> None:
    root = f"s3://{minio.make_bucket()}/run-8"
    text = block(PAGE, "python", 1).replace("s3://bucket/run-8", root)
    for epochs, world, last in ((2, 2, 30), (2, 1, 60)):
        now = text.replace("loader), 4", f"loader), {epochs}").replace("devices=2", f"devices={world}")
        train_example(now, f"{root}/step-{last}", world, minio, tmp_path)


def test_trains_the_example_with_fabric_alone_without_the_lines_of_the_page(minio: S3Server, tmp_path: Path) -> None:
    text = plain(PAGE, 1).replace("devices=2", "devices=1").replace("loader), 4", "loader), 1")
    run_example(text, 1, minio, tmp_path)
    assert len(list((tmp_path / "run-8").iterdir())) == 3


def fabric_of() -> tuple[Any, Any, Any]:
    strategy = bucket_strategy(SingleDeviceStrategy, device="cpu")
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    model = torch.nn.Linear(3, 3)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    return fabric, model, optimizer


def test_restores_values_of_the_program_and_returns_those_not_asked_for(tmp_path: Path) -> None:
    fabric, model, optimizer = fabric_of()
    saved, scaler = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (7.0, 3.0))
    state = {"model": model, "optimizer": optimizer, "scaler": saved, "epoch": 3, "more": {"a": [1]}}
    fabric.save(tmp_path / "run" / "step-7", state, filter={"more": lambda name, _: name == "a"})
    fabric.strategy.wait()
    again, other, its_optimizer = fabric_of()
    target = {"model": other, "optimizer": its_optimizer, "scaler": scaler, "epoch": 0}
    # The URL of the run names its newest checkpoint.
    assert again.load(tmp_path / "run", target) == {"more": {"a": [1]}}
    assert (scaler.get_scale(), target["epoch"]) == (7, 3)
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(BucketpointError, match="no 'unknown'"):
        again.load(tmp_path / "run", {"model": other, "unknown": 1})
    assert "more" in again.load(tmp_path / "run", {"model": other, "unknown": 1}, strict=False)


def test_refuses_states_with_a_kept_name_without_a_model_and_without_objects(tmp_path: Path) -> None:
    fabric, model, optimizer = fabric_of()
    with pytest.raises(BucketpointError, match="together with its model"):
        fabric.save(tmp_path / "one", {"optimizer": optimizer})
    with pytest.raises(BucketpointError, match="my_fabric"):
        fabric.save(tmp_path / "one", {"fabric": model})
    fabric.save(tmp_path / "one", {"model": model})
    fabric.strategy.wait()
    with pytest.raises(BucketpointError, match="my_fabric"):
        fabric.load(tmp_path / "one", {"model": model, "fabric": 1})
    with pytest.raises(BucketpointError, match="objects to load into"):
        fabric.load(tmp_path / "one")
