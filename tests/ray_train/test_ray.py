"""Ray Train's workers on URLs: killed in an upload and resumed on fewer workers, they see each sample once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs
import pytest
import ray.train
import ray.train.torch
import torch

import bucketpoint
from bucketpoint import BucketpointError, MismatchError
from bucketpoint.dcp.planning.rank_state import rank_state
from bucketpoint.integrations.ray import _load_plain, _noted_empty_dicts, checkpoint_url, report, restore
from kit.servers import S3Server
from kit.trainers import assert_same_steps, block
from ray_train import trainer

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]


def filesystem(server: S3Server) -> pyarrow.fs.FileSystem:
    return pyarrow.fs.S3FileSystem(
        endpoint_override=server.endpoint,
        access_key=server.env["AWS_ACCESS_KEY_ID"],
        secret_key=server.env["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
    )


def fit(
    function: Any,
    config: dict[str, Any],
    server: S3Server,
    bucket: str,
    *,
    workers: int,
    failures: int = 0,
    **keep: Any,
) -> Any:
    """Train with so many workers as the run `run` of a bucket."""
    return ray.train.torch.TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=bucket,
            storage_filesystem=filesystem(server),
            failure_config=ray.train.FailureConfig(max_failures=failures),
            checkpoint_config=ray.train.CheckpointConfig(**keep),
        ),
    ).fit()


def whole(bucket: str, server: S3Server) -> list[str]:
    """Return the steps of the folders that hold a whole checkpoint, and of those that hold none, as `6` and `-18`."""
    store, prefix = bucketpoint.stores.open_store(f"s3://{bucket}/run", storage_options=server.options)
    keys = [info.key for info in store.list(f"{prefix}/")]
    committed = {key.split("/")[1] for key in keys if key.endswith("/.metadata")}
    begun = {key.split("/")[1] for key in keys if "_step-" in key}
    return sorted(("" if folder in committed else "-") + folder.rpartition("_step-")[2] for folder in begun)


def test_resumes_with_fewer_workers_after_a_kill_in_an_upload(bucketpoint_minio: S3Server, tmp_path: Path) -> None:
    bucket = bucketpoint_minio.make_bucket()
    config = {"kind": "fsdp2", "report": str(tmp_path / "killed"), "kill_at": 18, "kill": [0, 1, 2, 3]}
    with pytest.raises(ray.train.WorkerGroupError):
        fit(trainer.train, config, bucketpoint_minio, bucket, workers=4)
    # The save under way has objects, and is no checkpoint.
    assert whole(bucket, bucketpoint_minio) == ["-18", "12", "6"]
    config = {"kind": "fsdp2", "report": str(tmp_path / "resumed"), "kill_at": 0, "kill": []}
    result = fit(trainer.train, config, bucketpoint_minio, bucket, workers=2)
    told = json.loads((tmp_path / "resumed").read_text())
    assert (told["from"], told["world"]) == (12, 2)
    assert_same_steps(told["seen"], trainer.in_one_process()[12:])
    assert checkpoint_url(result.checkpoint).endswith("_step-24")
    # Ray's own: the metrics of the newest checkpoint.
    assert result.metrics["step"] == 24


def test_begins_again_by_ray_after_a_killed_worker_and_keeps_as_many_as_told(
    bucketpoint_minio: S3Server, tmp_path: Path
) -> None:
    bucket = bucketpoint_minio.make_bucket()
    config = {"kind": "ddp", "report": str(tmp_path / "report"), "kill_at": 18, "kill": [1]}
    result = fit(trainer.train, config, bucketpoint_minio, bucket, workers=4, failures=1, num_to_keep=2)
    told = json.loads((tmp_path / "report").read_text())
    assert told["from"] == 12
    assert_same_steps(told["seen"], trainer.in_one_process()[12:])
    assert len(result.best_checkpoints) == 2
    # What is left of the save that was killed is nobody's checkpoint.
    assert whole(bucket, bucketpoint_minio) == ["-18", "18", "24"]


def test_saves_to_the_bucket_by_rays_own_example_with_five_changed_lines(bucketpoint_minio: S3Server) -> None:
    from ray.train.examples.pytorch import torch_linear_example as original

    changes = {
        "import torch\n": "import torch\nfrom bucketpoint.integrations.ray import report, restore\n",
        "    results = []\n": "    state = {'model': model, 'optimizer': optimizer, 'epoch': 0}\n"
        "    restore(state)\n    results = []\n",
        "for epoch in range(epochs):": "for epoch in range(state['epoch'], epochs):",
        "train.report(result, checkpoint=Checkpoint.from_directory(tmpdir))": "report(result, "
        "{**state, 'epoch': epoch + 1}, step=epoch)",
    }
    text = Path(original.__file__).read_text()
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    # A module that cannot be imported reaches the workers by value.
    changed: dict[str, Any] = {"__name__": "linear_example"}
    exec(text, changed)
    bucket = bucketpoint_minio.make_bucket()
    config = {"batch_size": 4, "epochs": 2, "data_size": 100, "val_size": 40}
    fit(changed["train_func"], config, bucketpoint_minio, bucket, workers=2)
    assert whole(bucket, bucketpoint_minio) == ["0", "1"]
    # One worker, whose model DDP does not wrap, goes on with the third epoch.
    fit(changed["train_func"], {**config, "epochs": 3}, bucketpoint_minio, bucket, workers=1)
    assert whole(bucket, bucketpoint_minio) == ["0", "1", "2"]


def test_trains_and_resumes_with_the_example_of_the_page(
    bucketpoint_minio: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bucket = bucketpoint_minio.make_bucket()
    path = f"storage_path='{bucket}', storage_filesystem=filesystem"
    code = block("ray.md", "python").replace('storage_path="s3://bucket/runs"', path).replace('"run-7"', '"run"')
    # As the main module's the functions reach the workers by value.
    around = {"__name__": "__main__", "filesystem": filesystem(bucketpoint_minio)}
    exec(code.replace("4):", "3):"), around)
    assert whole(bucket, bucketpoint_minio) == ["1", "2", "3"]
    exec(code.replace("num_workers=2", "num_workers=1"), around)
    assert whole(bucket, bucketpoint_minio) == ["2", "3", "4"]


def mistakes(config: dict[str, Any]) -> None:
    """Make mistakes of users, and write down the errors."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    errors = []
    for options in (
        {"state": state},
        {"state": state, "step": 1, "storage_writer": bucketpoint.BucketWriter(), "storage_options": {}},
        {"state": {"optimizer": optimizer}, "step": 1},
        {"state": {"nets": {"generator": [model]}}, "step": 1},
    ):
        try:
            report({"loss": 1.0}, **options)
        except BucketpointError as error:
            errors.append(str(error))
    Path(config["report"]).write_text(json.dumps(errors))
    # A store that is not Ray's.
    report({"loss": 1.0}, state, step=1, storage_options=config["other"])


def test_tells_what_to_do_about_mistakes(
    bucketpoint_minio: S3Server, bucketpoint_moto: S3Server, tmp_path: Path
) -> None:
    bucket = bucketpoint_minio.make_bucket()
    bucketpoint_moto.client().create_bucket(Bucket=bucket)
    config = {"report": str(tmp_path / "errors"), "other": bucketpoint_moto.options}
    with pytest.raises(ray.train.WorkerGroupError, match="reads from another store"):
        fit(mistakes, config, bucketpoint_minio, bucket, workers=1)
    no_step, both, no_model, nested = json.loads((tmp_path / "errors").read_text())
    assert "step=" in no_step
    assert "S3Writer(storage_options=" in both
    assert "together with its model" in no_model
    assert "'nets' of the state holds models" in nested


def counts_anew(config: dict[str, Any]) -> None:
    """Save values that have grown, then fewer steps, and write down what is restored."""
    ours = rank_state(ray.train.get_context().get_world_rank())
    state = {
        "lr": torch.ones(2),
        "run": 1,
        "history": [{"loss": 0.5}],
        "best": {"step": {3: 0.5}},
        "last": [torch.ones(1)],
    }
    state.update({"never": {}, "now": {"loss": [None]}, "losses": {"train": {"1": 0.5}, "val": {}}, "rank": ours})
    report({"loss": 1.0}, state, step=9)
    report({"loss": 1.0}, {**state, "run": 2}, step=8)
    report({"loss": 1.0})
    while not str(getattr(ray.train.get_checkpoint(), "path", "")).endswith("_step-8"):
        time.sleep(0.1)
    found: dict[str, Any] = {"lr": torch.zeros(2), "run": 0, "history": [], "best": {}, "last": None}
    found.update({"never": {}, "now": None, "losses": {}, "rank": rank_state(None)})
    restore(found)
    if ray.train.get_context().get_world_rank() == 1:
        Path(config["report"]).write_text(repr(found))


def test_restores_what_ray_knows_with_dicts_and_lists_that_have_grown(
    bucketpoint_minio: S3Server, tmp_path: Path
) -> None:
    config = {"report": str(tmp_path / "restored")}
    fit(counts_anew, config, bucketpoint_minio, bucketpoint_minio.make_bucket(), workers=2)
    assert (tmp_path / "restored").read_text() == repr(
        {
            "lr": torch.ones(2),
            "run": 2,
            "history": [{"loss": 0.5}],
            "best": {"step": {3: 0.5}},
            "last": [torch.ones(1)],
            "never": {},
            "now": {"loss": [None]},
            "losses": {"train": {"1": 0.5}, "val": {}},
            "rank": {"rank-1": 1},
        }
    )


def lost(config: dict[str, Any]) -> None:
    if ray.train.get_checkpoint() is None:
        report({"loss": 1.0}, {"model": torch.nn.Linear(2, 2)}, step=1)
    else:
        restore({"model": torch.nn.Linear(2, 2)})


def test_refuses_to_begin_from_scratch_if_ray_knows_a_checkpoint_that_is_gone(bucketpoint_minio: S3Server) -> None:
    bucket = bucketpoint_minio.make_bucket()
    fit(lost, {}, bucketpoint_minio, bucket, workers=1)
    (key,) = (key for key in bucketpoint_minio.keys(bucket, "run/") if key.endswith("/.metadata"))
    bucketpoint_minio.client().delete_object(Bucket=bucket, Key=key)
    with pytest.raises(ray.train.WorkerGroupError, match="does not have"):
        fit(lost, {}, bucketpoint_minio, bucket, workers=1)


def test_names_a_filesystem_without_a_url() -> None:
    assert checkpoint_url(ray.train.Checkpoint("/data/run/c", pyarrow.fs.LocalFileSystem())) == "/data/run/c"
    wrapped = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("memory")))
    assert checkpoint_url(ray.train.Checkpoint("/run/c", wrapped)) == "memory:///run/c"
    with pytest.raises(BucketpointError, match=r"'mock' has no URL.*storage_path"):
        checkpoint_url(ray.train.Checkpoint("run/c", pyarrow.fs._MockFileSystem()))


@pytest.mark.parametrize(
    "expected", [{"val": {}}, {"train": {"1": 0.5}, "val": {}}, {"a": {2: {"b": {}}}, "c": []}, {}]
)
@pytest.mark.parametrize("here", [{}, {"val": {}}, {"train": {"1": 0.0}, "val": {"1": 0.0}}])
def test_restores_empty_dicts_whatever_the_state_has_before(expected: Any, here: Any, tmp_path: Path) -> None:
    state = {"losses": expected, "loss": 1.0}
    bucketpoint.save({**state, **_noted_empty_dicts(state)}, tmp_path)
    assert _load_plain({"losses": here, "loss": None}, str(tmp_path), None) == state


def test_restores_a_checkpoint_without_a_note_of_empty_dicts(tmp_path: Path) -> None:
    bucketpoint.save({"losses": {"train": {"1": 0.5}, "val": {}}, "never": {"val": {}}}, tmp_path)
    here: dict[str, Any] = {"losses": {}, "never": {"val": {}}}
    expected = {"losses": {"train": {"1": 0.5}}, "never": {"val": {}}}
    assert _load_plain(here, str(tmp_path), None) == expected
    with pytest.raises(MismatchError, match="missing"):
        _load_plain({"missing": None}, str(tmp_path), None)


def test_saves_a_state_without_empty_dicts_as_it_is() -> None:
    assert _noted_empty_dicts({"losses": {"train": {"1": 0.5}}, "history": [], "epoch": 0}) == {}
