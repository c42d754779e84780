"""Lightning's trainers and Fabric on URLs: killed in a save and resumed on other ranks, they see each sample once."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric import strategies as of_fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file

import bucketpoint
from bucketpoint import BucketpointError
from bucketpoint.convert import export_safetensors
from bucketpoint.integrations.lightning import BucketCheckpoint, BucketCheckpointIO, bucket_strategy
from kit.servers import S3Server
from kit.trainers import block, kill_and_resume, plain, run_example, train, train_example
from lit.test_resume import policy, trainer_of

TRAINER = Path(__file__).with_name("trainer.py")

LOOP = Path(__file__).with_name("fabric_trainer.py")

PAGE = "lightning.md"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp2"])
# Nine steps are an epoch of the trainer, which saves then; the loop saves every six.
@pytest.mark.parametrize(
    ("program", "weight", "good"),
    [(TRAINER, "model.net.0.weight", 9), (LOOP, "model.0.weight", 12)],
    ids=["trainer", "fabric"],
)
def test_resumes_with_fewer_ranks_after_a_kill_in_an_upload(
    program: Path, weight: str, good: int, kind: str, minio: S3Server, tmp_path: Path
) -> None:
    parts = {weight: 1 if kind == "ddp" else 4}
    kill_and_resume(program, kind, server=minio, folder=tmp_path, good=good, parts=parts)


@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp2"), ("fsdp2", "ddp"), ("ddp", "fsdp"), ("fsdp", "fsdp2")])
def test_resumes_with_another_strategy_and_larger_batches(
    first: str, then: str, minio: S3Server, tmp_path: Path
) -> None:
    root = f"s3://{minio.make_bucket()}/run"
    train(TRAINER, root, tmp_path / "first", first, world=2, server=minio, STEPS="9")
    resumed = train(TRAINER, root, tmp_path / "resumed", then, world=2, server=minio, BATCH="24")
    # The second and the third epoch.
    assert [len(samples) for _, samples, _ in resumed["seen"]] == [24] * 6
    for epoch in (resumed["seen"][:3], resumed["seen"][3:]):
        assert {sample for _, samples, _ in epoch for sample in samples} == set(range(72))


class Small(BoringModel):
    """Lightning's own model for tests, with a validation metric."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().validation_step(batch, batch_idx)
        self.log("val/loss", loss["x"])
        return loss


def trainer(*callbacks: Any, **options: Any) -> lightning.Trainer:
    return trainer_of(*callbacks, **{"max_epochs": 1, "limit_train_batches": 6, "num_sanity_val_steps": 2, **options})


def test_saves_when_the_policy_says_and_notes_each_validation(tmp_path: Path) -> None:
    told: list[bucketpoint.CommitInfo] = []
    checkpoint = BucketCheckpoint(tmp_path / "run", policy=policy(4), after_validation=True, on_commit=told.append)
    trainer(checkpoint, limit_val_batches=1).fit(Small())
    assert [info.step for info in told] == [4, 6]
    assert "val/loss" in told[-1].metrics
    again = BucketCheckpoint(tmp_path / "run", policy=policy(4))
    longer = trainer(again, limit_val_batches=1, max_epochs=2)
    longer.fit(Small(), ckpt_path=tmp_path / "run")
    assert longer.global_step == 12
    assert longer.current_epoch == 2
    steps = [int(folder.name[5:]) for folder in (tmp_path / "run").glob("step-*")]
    assert sorted(steps) == [4, 6, 8, 12]


def test_saves_accumulated_batches_once_a_step(tmp_path: Path) -> None:
    told: list[bucketpoint.CommitInfo] = []
    checkpoint = BucketCheckpoint(tmp_path / "run", policy=policy(1), on_commit=told.append)
    trainer(checkpoint, limit_val_batches=0, accumulate_grad_batches=3).fit(BoringModel())
    assert [info.step for info in told] == [1, 2]


def test_validates_weights_from_a_url(tmp_path: Path) -> None:
    model = BoringModel()
    trainer(BucketCheckpoint(tmp_path / "run", policy=policy(6)), limit_val_batches=0).fit(model)
    other = BoringModel()
    trainer(enable_checkpointing=False).validate(other, ckpt_path=f"{tmp_path}/run/step-6", verbose=False)
    assert torch.equal(other.layer.weight, model.layer.weight)
    export_safetensors(f"{tmp_path}/run/step-6", tmp_path / "hub", prefix="model")
    assert load_file(tmp_path / "hub/model.safetensors").keys() == {"layer.weight", "layer.bias"}
    other.load_state_dict(bucketpoint.load(f"{tmp_path}/hub"))


def test_saves_to_a_url_by_the_trainer_and_loads_what_it_trusts(tmp_path: Path) -> None:
    class WithOdd(BoringModel):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["odd"] = Path("of a type that torch.load refuses")

    first = trainer(enable_checkpointing=False, limit_val_batches=0)
    first.fit(WithOdd())
    first.save_checkpoint(tmp_path / "one", weights_only=False)
    first.strategy.wait()  # type: ignore[attr-defined]
    with pytest.raises(bucketpoint.UnsafeDataError, match="trusted=True"):
        trainer(enable_checkpointing=False, max_epochs=2).fit(WithOdd(), ckpt_path=tmp_path / "one")
    trusting = bucket_strategy(SingleDeviceStrategy, device="cpu", trusted=True)
    second = trainer(enable_checkpointing=False, strategy=trusting, max_epochs=2, limit_val_batches=0)
    second.fit(WithOdd(), ckpt_path=tmp_path / "one")
    assert second.global_step == 12


def test_refuses_strategies_callbacks_and_urls_that_could_not_save_or_load(tmp_path: Path) -> None:
    with pytest.raises(BucketpointError, match=r"SingleDeviceStrategy.*bucket_strategy\(DDPStrategy"):
        trainer(BucketCheckpoint(tmp_path / "run", policy=policy(1)), strategy="auto").fit(BoringModel())
    with pytest.raises(BucketpointError, match=r"not 'ddp'.*bucket_strategy\(DDPStrategy"):
        bucket_strategy("ddp")
    with pytest.raises(BucketpointError, match="save_top_k=-1"):
        trainer(ModelCheckpoint(dirpath=tmp_path, save_top_k=1)).fit(BoringModel())
    with pytest.raises(bucketpoint.CheckpointNotFoundError):
        trainer(enable_checkpointing=False).fit(BoringModel(), ckpt_path=tmp_path / "nowhere")


def test_pickles_a_strategy_for_spawned_processes() -> None:
    made = bucket_strategy(SingleDeviceStrategy, device="cpu", trusted=True)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made)
    assert again._reading == made._reading


def test_writes_a_plain_checkpoint_as_one_object(minio: S3Server) -> None:
    url = f"s3://{minio.make_bucket()}/plain/last.ckpt"
    plugin = BucketCheckpointIO(minio.options)
    options: Any = {"strategy": "auto", "plugins": [plugin], "enable_checkpointing": False, "limit_val_batches": 0}
    model = BoringModel()
    first = trainer(**options)
    first.fit(model)
    first.save_checkpoint(url, weights_only=False)
    second = trainer(**{**options, "max_epochs": 2})
    # Lightning 2.5 has no `weights_only`.
    safe: Any = {"weights_only": True} if "weights_only" in inspect.signature(second.fit).parameters else {}
    second.fit(model, ckpt_path=url, **safe)
    assert second.global_step == 12
    plugin.remove_checkpoint(url)
    with pytest.raises(bucketpoint.StoreError):
        plugin.load_checkpoint(url)


def test_trains_and_resumes_with_the_example_of_the_page(minio: S3Server, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(block(PAGE, "yaml"))
    root = f"s3://{minio.make_bucket()}/run-7"
    text = block(PAGE, "python").replace("s3://bucket/run-7", root)
    for epochs, world, last in ((1, 2, 16), (2, 1, 48)):
        now = text.replace("max_epochs=4", f"max_epochs={epochs}").replace("devices=2", f"devices={world}")
        train_example(now, f"{root}/step-{last}", world, minio, tmp_path)


def test_trains_the_example_with_lightning_alone_without_the_lines_of_the_page(minio: S3Server, tmp_path: Path) -> None:
    text = plain(PAGE).replace("max_epochs=4", "max_epochs=1").replace("devices=2", "devices=1")
    run_example(text, 1, minio, tmp_path)
    assert (tmp_path / "lightning_logs").is_dir()


# -- Fabric ------------------------------------------------------------------------------------------------------------


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
    strategy = bucket_strategy(of_fabric.SingleDeviceStrategy, device="cpu")
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


def test_raises_a_failed_save_in_the_next_one(tmp_path: Path) -> None:
    fabric, model, _ = fabric_of()
    (tmp_path / "file").touch()
    fabric.save(tmp_path / "file" / "one", {"model": model})
    with pytest.raises(BucketpointError, match="file"):
        fabric.save(tmp_path / "two", {"model": model})


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
