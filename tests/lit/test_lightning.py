"""Lightning's trainers on URLs: killed in a save and resumed on other ranks, they see each sample once."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

import bucketpoint
from bucketpoint import BucketpointError, RetentionPolicy
from bucketpoint.integrations.lightning import BucketCheckpoint, BucketCheckpointIO, BucketSingleDeviceStrategy
from bucketpoint.retention import Best, Keep, Save, SaveEvery
from kit import FaultProxy, Kill, always
from kit.plugin import MakeProxy
from kit.servers import S3Server, free_port

TRAINER = Path(__file__).with_name("trainer.py")

LAST = 27

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def launched(program: Path, arguments: list[str], world: int, server: S3Server, **env: str) -> Any:
    """Run a program on so many ranks."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
    return subprocess.run(
        [sys.executable, *(launch if world > 1 else []), str(program), *arguments],
        env={**os.environ, **server.env, "OMP_NUM_THREADS": "1", **env},
        # Lightning logs to the working directory.
        cwd=None if program.parent == TRAINER.parent else program.parent,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def killed_in_an_upload(
    program: Path, arguments: list[str], world: int, server: S3Server, proxy: FaultProxy, url: str
) -> None:
    """Run a program on so many ranks, until SIGKILL to all of them when part of a checkpoint is in the bucket."""
    job = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), *arguments],
            env={**os.environ, **server.at(proxy.url).env, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.DEVNULL if rank else subprocess.PIPE,
            text=True,
            # The proxy kills the processes that upload for a rank, too.
            start_new_session=True,
        )
        for rank in range(world)
    ]
    key = url.split("/", 3)[3]
    groups = tuple(process.pid for process in ranks)
    proxy.play(always(Kill(groups), kinds=["PutObject"], keys=f"{key}/*.distcp", skip=1, times=1))
    try:
        errors = [process.communicate(timeout=500)[1] for process in ranks]
    finally:
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    assert [process.returncode for process in ranks] == [-signal.SIGKILL] * world, errors[0][-6000:]
    written = [each.request.key for each in proxy.exchanges if each.request.kind == "PutObject"]
    assert len([name for name in written if name.startswith(key)]) >= 2
    with pytest.raises(bucketpoint.BucketpointError):
        bucketpoint.load(url, storage_options=server.options)


def train(root: str, report: Path, kind: str, world: int, server: S3Server, **env: str) -> Any:
    """Run the trainer on so many ranks. Return what rank 0 saw."""
    ran = launched(TRAINER, [root, str(report), kind, str(world)], world, server, **env)
    assert ran.returncode == 0, ran.stderr[-6000:]
    return json.loads(report.read_text())


def chunks(url: str, key: str, server: S3Server) -> int:
    """Return the number of chunks in which a tensor was saved."""
    metadata: Any = bucketpoint.BucketReader(url, storage_options=server.options).read_metadata()
    return len(metadata.state_dict_metadata[key].chunks)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp2"])
def test_a_run_killed_in_an_upload_goes_on_with_fewer_ranks_as_if_nothing_had_happened(
    kind: str, minio: S3Server, fault_proxy: MakeProxy, tmp_path: Path
) -> None:
    bucket = minio.make_bucket()
    whole = train(f"s3://{bucket}/whole", tmp_path / "whole", kind, 4, minio)
    assert [step for step, _, _ in whole["seen"]] == list(range(1, LAST + 1))
    root = f"s3://{bucket}/run"
    proxy, arguments = fault_proxy(minio), [root, str(tmp_path / "killed"), kind, "4"]
    killed_in_an_upload(TRAINER, arguments, 4, minio, proxy, f"{root}/step-18")
    newest = bucketpoint.latest_checkpoint(root, storage_options=minio.options)
    # Nine steps are an epoch, so that the checkpoint lies in the middle of the second one.
    assert newest == f"{root}/step-12"
    assert chunks(newest, "model.net.0.weight", minio) == (1 if kind == "ddp" else 4)
    resumed = train(root, tmp_path / "resumed", kind, 2, minio, WORKERS="1")
    seen, expected = resumed["seen"], whole["seen"][12:]
    assert [each[:2] for each in seen] == [each[:2] for each in expected]
    losses, wanted = ([loss for _, _, loss in each] for each in (seen, expected))
    assert losses == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert (resumed["rate"], resumed["epoch"]) == (whole["rate"], whole["epoch"])


@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp2"), ("fsdp2", "ddp"), ("ddp", "fsdp"), ("fsdp", "fsdp2")])
def test_a_run_goes_on_with_another_strategy_and_larger_batches(
    first: str, then: str, minio: S3Server, tmp_path: Path
) -> None:
    root = f"s3://{minio.make_bucket()}/run"
    train(root, tmp_path / "first", first, 2, minio, STEPS="12")
    resumed = train(root, tmp_path / "resumed", then, 2, minio, BATCH="24")
    # The second epoch's last 48 samples and the third epoch.
    assert [len(samples) for _, samples, _ in resumed["seen"]] == [24] * 5
    second, third = resumed["seen"][:2], resumed["seen"][2:]
    assert len({sample for _, samples, _ in second for sample in samples}) == 48
    assert {sample for _, samples, _ in third for sample in samples} == set(range(72))


class Small(BoringModel):
    """Lightning's own model for tests, with a validation metric."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().validation_step(batch, batch_idx)
        self.log("val/loss", loss["x"])
        return loss


def trainer(*callbacks: Any, **options: Any) -> lightning.Trainer:
    given = {"strategy": BucketSingleDeviceStrategy(device="cpu"), "max_epochs": 1, "limit_train_batches": 6, **options}
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


def every(steps: int, **keep: Any) -> RetentionPolicy:
    return RetentionPolicy(Keep(latest=9, **keep), save=Save(every=[SaveEvery(steps)], on=["last_step"]))


def test_a_policy_says_when_to_save_and_each_validation_is_noted(tmp_path: Path) -> None:
    told: list[bucketpoint.CommitInfo] = []
    checkpoint = BucketCheckpoint(tmp_path / "run", policy=every(4), after_validation=True, on_commit=told.append)
    trainer(checkpoint, limit_val_batches=1).fit(Small())
    assert [info.step for info in told] == [4, 6]
    assert "val/loss" in told[-1].metrics
    again = BucketCheckpoint(tmp_path / "run", policy=every(4))
    longer = trainer(again, limit_val_batches=1, max_epochs=2)
    longer.fit(Small(), ckpt_path=tmp_path / "run")
    assert longer.global_step == 12
    assert longer.current_epoch == 2
    steps = [int(folder.name[5:]) for folder in (tmp_path / "run").glob("step-*")]
    assert sorted(steps) == [4, 6, 8, 12]


LONG = "val/" + "x" * 120


class LongNamed(BoringModel):
    """A model with a metric whose name is too long for a checkpoint."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({LONG: loss["loss"], "short": loss["loss"]})
        return loss


def test_a_metric_with_too_long_a_name_is_left_out_unless_the_policy_ranks_by_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[bucketpoint.CommitInfo] = []
    checkpoint = BucketCheckpoint(tmp_path / "run", policy=every(2), on_commit=told.append)
    trainer(checkpoint, limit_train_batches=4, limit_val_batches=0).fit(LongNamed())
    assert [list(info.metrics) for info in told] == [["short"], ["short"]]
    assert len([record for record in caplog.records if LONG in record.getMessage()]) == 1
    ranking = BucketCheckpoint(tmp_path / "ranked", policy=every(2, best=[Best(LONG, "min")]))
    with pytest.raises(BucketpointError, match="name of a metric"):
        trainer(ranking, limit_val_batches=0).fit(LongNamed())


def test_accumulated_batches_are_saved_once_a_step(tmp_path: Path) -> None:
    told: list[bucketpoint.CommitInfo] = []
    checkpoint = BucketCheckpoint(tmp_path / "run", policy=every(1), on_commit=told.append)
    trainer(checkpoint, limit_val_batches=0, accumulate_grad_batches=3).fit(BoringModel())
    assert [info.step for info in told] == [1, 2]


def test_weights_are_validated_from_a_url(tmp_path: Path) -> None:
    model = BoringModel()
    trainer(BucketCheckpoint(tmp_path / "run", policy=every(6)), limit_val_batches=0).fit(model)
    other = BoringModel()
    trainer(enable_checkpointing=False).validate(other, ckpt_path=f"{tmp_path}/run/step-6", verbose=False)
    assert torch.equal(other.layer.weight, model.layer.weight)


def test_the_trainer_saves_to_a_url_and_loads_what_it_trusts(tmp_path: Path) -> None:
    class Odd:
        pass

    class WithOdd(BoringModel):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["odd"] = Path("of a type that torch.load refuses")

    first = trainer(enable_checkpointing=False, limit_val_batches=0)
    first.fit(WithOdd())
    first.save_checkpoint(tmp_path / "one", weights_only=False)
    first.strategy._saves.wait()  # type: ignore[attr-defined]
    with pytest.raises(bucketpoint.UnsafeDataError, match="trusted=True"):
        trainer(enable_checkpointing=False, max_epochs=2).fit(WithOdd(), ckpt_path=tmp_path / "one")
    trusting = BucketSingleDeviceStrategy(device="cpu", trusted=True)
    second = trainer(enable_checkpointing=False, strategy=trusting, max_epochs=2, limit_val_batches=0)
    second.fit(WithOdd(), ckpt_path=tmp_path / "one")
    assert second.global_step == 12


def test_another_strategy_is_named_with_those_that_save(tmp_path: Path) -> None:
    with pytest.raises(BucketpointError, match=r"SingleDeviceStrategy.*BucketDDPStrategy"):
        trainer(BucketCheckpoint(tmp_path / "run", policy=every(1)), strategy="auto").fit(BoringModel())


def test_a_model_checkpoint_that_would_delete_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(BucketpointError, match="save_top_k=-1"):
        trainer(ModelCheckpoint(dirpath=tmp_path, save_top_k=1)).fit(BoringModel())


def test_a_url_without_a_checkpoint_is_an_error_unless_it_is_the_runs_own(tmp_path: Path) -> None:
    with pytest.raises(bucketpoint.CheckpointNotFoundError):
        trainer(enable_checkpointing=False).fit(BoringModel(), ckpt_path=tmp_path / "nowhere")


def test_a_checkpoint_of_another_model_is_refused_with_the_keys(tmp_path: Path) -> None:
    trainer(BucketCheckpoint(tmp_path / "run", policy=every(6)), limit_val_batches=0).fit(BoringModel())

    class Wider(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 3)

    with pytest.raises(bucketpoint.MismatchError, match=r"model\.layer\.weight"):
        trainer(enable_checkpointing=False).fit(Wider(), ckpt_path=tmp_path / "run")


def test_a_plain_checkpoint_is_one_object(minio: S3Server) -> None:
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


def blocks(language: str, number: int = 0) -> str:
    """Return a block of code in a language on the page, the first by default."""
    page = Path(__file__).parents[2] / "docs" / "lightning.md"
    return page.read_text(encoding="utf-8").split(f"```{language}\n")[number + 1].split("```")[0]


def plain(text: str, diff: str) -> str:
    """Return an example without the lines that its diff adds, with those that it takes away."""
    before, added = "", 0
    for line in diff.splitlines(keepends=True):
        if line.startswith("-"):
            before += line[1:]
            continue
        assert line[1:] in text
        text, before, added = text.replace(line[1:], before), "", added + 1
    assert added <= 5
    assert "ucket" not in text
    return text


def test_the_example_of_the_page_trains_and_goes_on(minio: S3Server, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    (tmp_path / "policy.yaml").write_text(blocks("yaml"))
    root = f"s3://{minio.make_bucket()}/run-7"
    for epochs, world, last in ((1, 2, 16), (2, 1, 48)):
        text = blocks("python").replace("s3://bucket/run-7", root).replace("max_epochs=4", f"max_epochs={epochs}")
        if world == 1:
            text = text.replace("devices=2", "devices=1")
        program.write_text(text)
        ran = launched(program, [], world, minio)
        assert ran.returncode == 0, ran.stderr[-6000:]
        assert bucketpoint.latest_checkpoint(root, storage_options=minio.options) == f"{root}/step-{last}"


def test_the_example_without_the_lines_that_the_page_names_trains_with_lightning_alone(
    minio: S3Server, tmp_path: Path
) -> None:
    text = plain(blocks("python"), blocks("diff"))
    program = tmp_path / "train.py"
    program.write_text(text.replace("max_epochs=4", "max_epochs=1"))
    ran = launched(program, [], 1, minio)
    assert ran.returncode == 0, ran.stderr[-6000:]
    assert (tmp_path / "lightning_logs").is_dir()
