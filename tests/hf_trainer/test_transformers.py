"""transformers' Trainer on URLs: killed in a save and resumed on other ranks, it sees each sample once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf_trainer.trainer import dataset, small_model
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import bucketpoint
from bucketpoint.integrations.transformers import BucketTrainerMixin
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Keep, RetentionPolicy
from bucketpoint.testing.servers import S3Server, free_port

PROGRAM = Path(__file__).with_name("trainer.py")

LAST = 27


def launched(program: Path, arguments: list[str], world: int, server: S3Server, **env: str) -> Any:
    """Run a program on so many ranks."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}"]
    return subprocess.run(
        [sys.executable, *launch, str(program), *arguments],
        env={**os.environ, **server.env, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def train(root: str, report: Path, world: int, server: S3Server, *, kill_at: int = 0, **env: str) -> Any:
    """Run the trainer on so many ranks. Return what rank 0 saw; None if the trainer was killed."""
    ran = launched(PROGRAM, [root, str(report), str(world), str(kill_at)], world, server, **env)
    assert (ran.returncode != 0) == bool(kill_at), ran.stderr[-6000:]
    # A model without dropout draws no random numbers from save to save, which is no reason for an alarm.
    assert "changed in" not in ran.stderr
    return None if kill_at else json.loads(report.read_text())


@pytest.mark.parametrize(("worlds", "dropout"), [((4, 2), "0"), ((2, 2), "0.5")])
def test_a_run_killed_in_a_save_goes_on_as_if_nothing_had_happened(
    worlds: tuple[int, int], dropout: str, minio: S3Server, tmp_path: Path
) -> None:
    bucket = minio.make_bucket()
    first, then = worlds
    whole = train(f"s3://{bucket}/whole", tmp_path / "whole", first, minio, DROPOUT=dropout)
    assert [step for step, _, _ in whole["seen"]] == list(range(1, LAST + 1))
    root = f"s3://{bucket}/run"
    train(root, tmp_path / "killed", first, minio, kill_at=18, DROPOUT=dropout)
    # Nine steps are an epoch, so that the checkpoint lies in the middle of the second one.
    assert bucketpoint.latest_checkpoint(root, storage_options=minio.options) == f"{root}/step-12"
    resumed = train(root, tmp_path / "resumed", then, minio, DROPOUT=dropout)
    seen, expected = resumed["seen"], whole["seen"][12:]
    assert [each[:2] for each in seen] == [each[:2] for each in expected]
    losses, wanted = ([loss for _, _, loss in each] for each in (seen, expected))
    assert losses == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert (resumed["rate"], resumed["epoch"]) == (whole["rate"], whole["epoch"])


class OnBucket(BucketTrainerMixin, Trainer):
    """A trainer with checkpoints at a URL."""


def trainer(folder: Path, **options: Any) -> Any:
    given = {name: options.pop(name) for name in ("policy", "manager_options") if name in options}
    arguments = TrainingArguments(
        output_dir=str(folder / "logs"),
        use_cpu=True,
        per_device_train_batch_size=8,
        save_steps=2,
        max_steps=6,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    torch.manual_seed(0)
    data = dataset()
    return OnBucket(
        small_model(), arguments, train_dataset=data, eval_dataset=data[:8], checkpoint_url=folder / "run", **given
    )


def test_the_limit_and_the_best_model_become_a_policy_and_are_exported(tmp_path: Path) -> None:
    told: list[bucketpoint.CommitInfo] = []
    made = trainer(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        learning_rate=0.5,
        manager_options={"on_commit": told.append},
    )
    made.train()
    assert [info.step for info in told] == [2, 4, 6]
    assert all("eval_loss" in info.metrics for info in told)
    best = min(told, key=lambda info: info.metrics["eval_loss"])
    assert made.state.best_model_checkpoint == best.url
    assert made.evaluate()["eval_loss"] == pytest.approx(best.metrics["eval_loss"], rel=1e-5)
    policy = made._manager.policy
    assert (policy.keep.latest, [(rule.metric, rule.mode) for rule in policy.keep.best]) == (1, [("eval_loss", "min")])
    # Nothing but logs is local.
    assert not list((tmp_path / "logs").glob("checkpoint-*"))
    made.export_pretrained(tmp_path / "hub")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "hub")
    expected = dict(made.model.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in again.named_parameters())


def test_a_url_names_the_checkpoint_to_resume(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    with CheckpointManager(tmp_path / "run", policy=RetentionPolicy(Keep(latest=9))) as manager:
        assert manager.steps() == [2, 4, 6]
    longer = trainer(tmp_path, num_train_epochs=1)
    longer.args.max_steps = 8
    longer.train(resume_from_checkpoint=f"{tmp_path}/run/step-6")
    assert longer.state.global_step == 8
    assert [each["step"] for each in longer.state.log_history if "train_runtime" in each][-1] == 8


def test_a_run_without_checkpoints_begins_from_scratch(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 6


def test_a_folder_of_the_trainers_own_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    with pytest.raises(bucketpoint.BucketpointError, match="checkpoint-2"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_example_of_the_page_trains_and_goes_on(minio: S3Server, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    program = tmp_path / "train.py"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    bucket = minio.make_bucket()
    for epochs, world, last in ((1, 2, 16), (2, 1, 64)):
        text = code.replace('"s3://bucket/', f'"s3://{bucket}/').replace(
            "num_train_epochs=3", f"num_train_epochs={epochs}"
        )
        program.write_text(text.replace('output_dir="logs"', f"output_dir={str(tmp_path / 'logs')!r}"))
        ran = launched(program, [], world, minio, ACCELERATE_USE_CPU="true")
        assert ran.returncode == 0, ran.stderr[-6000:]
        newest = bucketpoint.latest_checkpoint(f"s3://{bucket}/run-7", storage_options=minio.options)
        assert newest == f"s3://{bucket}/run-7/step-{last}"
        minio.client().head_object(Bucket=bucket, Key="hub/model/model.safetensors")
        minio.client().delete_objects(
            Bucket=bucket,
            Delete={"Objects": [{"Key": f"hub/model/{name}"} for name in ("model.safetensors", "config.json")]},
        )
