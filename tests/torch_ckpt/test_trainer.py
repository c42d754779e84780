"""A trainer with torch_checkpointing and a bucket: killed in a save and resumed on other ranks."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bucketpoint.integrations.torch_checkpointing import BucketStorage, BucketStorageConfig, sweep
from kit.servers import S3Server
from kit.trainers import assert_same_steps, train

TRAINER = Path(__file__).with_name("trainer.py")


def storage(url: str, server: S3Server) -> BucketStorage:
    return BucketStorageConfig(url, server.options).create_storage()


def test_resumes_with_fewer_ranks_after_a_kill_in_a_save(minio: S3Server, tmp_path: Path) -> None:
    bucket = minio.make_bucket()
    whole = train(TRAINER, f"s3://{bucket}/whole", tmp_path / "whole", "sync", world=4, server=minio)
    assert whole["from"] == 0
    assert [step for step, _, _ in whole["seen"]] == list(range(1, 37))
    root = f"s3://{bucket}/run"
    with pytest.raises(AssertionError, match=r"Signal 9|SIGKILL"):
        train(TRAINER, root, tmp_path / "killed", "sync", "18", world=4, server=minio)
    assert not (tmp_path / "killed").exists()
    files = storage(root, minio)
    # What the killed save has uploaded is in its temporary directory, and in no checkpoint.
    assert {"step-6", "step-12", "tmp_step-18"} == set(files.ls(Path()))
    assert not files.exists(Path("step-18"))
    assert sorted(files.ls(Path("tmp_step-18"))) == [f"model_{rank}.pt" for rank in range(4)]
    saved = pickle.loads(files.read(Path("step-12/metadata.pkl")))
    (weight,) = saved["metadata"]["model"]["nested_path_to_metadata"]['["0.weight"]']
    assert weight["ranks"] == (0, 1, 2, 3)
    assert weight["sharding_metadata"]["data"]["placements"] == [{"type": "Shard", "dim": 0}]
    resumed = train(TRAINER, root, tmp_path / "resumed", "sync", world=2, server=minio)
    assert resumed["from"] == 12
    assert (whole["shards"], resumed["shards"]) == ([4] * 4, [2] * 4)
    assert_same_steps(resumed["seen"], whole["seen"][12:])
    # The commit of the two ranks took none of the files that the four had left.
    wanted_files = ["metadata.pkl", "model_0.pt", "model_1.pt", "optim_0.pt", "optim_1.pt"]
    again = storage(root, minio)
    assert again.ls(Path("step-18")) == wanted_files
    assert {name[:-2] for name in again.ls(Path("step-12"))} >= {"model_0.", "model_1.", "model_2.", "model_3."}
    left = sweep(again, older_than_s=-5)
    assert len(left) == 4
    assert all("/step-18/@tmp/model_" in f"/{key}" for key in left)
    assert again.ls(Path("step-18")) == wanted_files


def test_commits_asynchronous_saves_from_the_writers_process(minio: S3Server, tmp_path: Path) -> None:
    bucket = minio.make_bucket()
    root = f"s3://{bucket}/run"
    seen = train(TRAINER, root, tmp_path / "seen", "async", world=2, server=minio)
    assert seen["seen"][-1][0] == 36
    files = storage(root, minio)
    assert files.ls(Path()) == sorted(f"step-{step}" for step in range(6, 37, 6))
    again = train(TRAINER, root, tmp_path / "again", "async", world=2, server=minio)
    assert (again["from"], again["seen"]) == (36, [])
