"""The examples of the page on experiment trackers, run with the trackers: each holds a reference to the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import bucketpoint
from bucketpoint import CheckpointManager, CommitInfo, RetentionPolicy
from bucketpoint.retention import Keep
from kit.servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

STEP = 7


def example(heading: str, **names: Any) -> Callable[[CommitInfo], None]:
    """Return the function of one section of the page. The names are those that the program has."""
    code = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("```py\n")[1].split("```")[0]
    around = {"bucketpoint": bucketpoint, **names}
    exec(code, around)
    told: Callable[[CommitInfo], None] = around["on_commit"]
    return told


def saved(on_commit: Callable[[CommitInfo], None], server: S3Server) -> str:
    """Save a checkpoint with a manager. Return its URL."""
    root = f"s3://{server.make_bucket()}/run"
    failures: list[Exception] = []

    def noted(info: CommitInfo) -> None:
        # An error in the function is only logged otherwise.
        try:
            on_commit(info)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    with CheckpointManager(
        root, policy=RetentionPolicy(Keep(latest=1)), on_commit=noted, storage_options=server.options
    ) as manager:
        manager.save(STEP, {"model": torch.nn.Linear(2, 2).state_dict()})
    assert failures == []
    return f"{root}/step-{STEP}"


def test_adds_a_reference_to_weights_and_biases(
    minio: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    with wandb.init(mode="offline", project="bucketpoint", dir=tmp_path) as run:
        url = saved(example("Weights & Biases", wandb=wandb, run=run), minio)
    # Its own process writes the file, until it ends.
    wandb.teardown()
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"checkpoint/commit_s" in log.read_bytes()
    assert url.encode() in log.read_bytes()


def test_adds_a_tag_and_metrics_to_mlflow(minio: S3Server, tmp_path: Path) -> None:
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    run_id = client.create_run(client.create_experiment("bucketpoint")).info.run_id
    url = saved(example("MLflow", client=client, run_id=run_id), minio)
    data = client.get_run(run_id).data
    assert data.tags["checkpoint"] == url
    assert data.metrics.keys() >= {"checkpoint.blocked_s", "checkpoint.commit_s", "checkpoint.nbytes"}
    assert [each.step for each in client.get_metric_history(run_id, "checkpoint.commit_s")] == [STEP]


def test_adds_a_text_and_scalars_to_tensorboard(minio: S3Server, tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as board:
        url = saved(example("TensorBoard", board=board), minio)
    seen = EventAccumulator(str(tmp_path)).Reload()
    (text,) = seen.Tensors("checkpoint/url/text_summary")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (STEP, url)
    (seconds,) = seen.Scalars("checkpoint/commit_s")
    assert (seconds.step, seconds.value > 0) == (STEP, True)
