"""torchtitan's trainer with our override: it saves, prunes and resumes, and dead saves cost nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.location import Location
from kit.servers import S3Server
from titan import scenarios
from titan.runs import OURS, called, train

# A quiet machine needs a tenth of this; it is there against hangs only.
pytestmark = pytest.mark.timeout(1800)


def flags(root: str, *, steps: int, interval: int = 1, keep: int = 3, override: str | None = OURS) -> list[str]:
    given = [
        *("--checkpoint.folder", root, "--checkpoint.interval", str(interval)),
        *("--checkpoint.keep_latest_k", str(keep), "--training.steps", str(steps)),
    ]
    return [*given, "--override.imports", override] if override else given


def there(catalog: Catalog) -> list[tuple[int, str]]:
    """Steps and kinds of the checkpoints that have a `.metadata` and no tombstone, the oldest first."""
    snapshot = catalog.snapshot()
    going = {folder for folder, _ in snapshot.going()}
    found = [one for one in snapshot.checkpoints if one.folder not in going]
    return [(one.step, one.kind) for one in found if catalog.metadata_info(one.folder) is not None]


@pytest.fixture
def root(minio: S3Server) -> str:
    return minio.url(minio.make_bucket(), "run")


def test_saves_beside_training_prunes_and_resumes_with_another_number_of_ranks(
    minio: S3Server, root: str, assets: Path, tmp_path: Path
) -> None:
    catalog = open_catalog(Location.of(root, minio.options))
    override = f'{OURS}={{"on_commit": "titan.told:note"}}'
    common = [*flags(root, steps=5, override=override), "--checkpoint.async_mode", "async"]
    split = ["--parallelism.tensor_parallel_degree", "2"]
    env = {**minio.env, "TOLD": str(tmp_path / "told")}
    whole = train(assets, tmp_path / "two", *common, *split, world=2, env=env).succeeded()
    assert there(catalog) == [(3, "full"), (4, "full"), (5, "full")]
    # torchtitan makes its last save itself, while nothing trains any more.
    told = [f"{step} {root}/step-{step}" for step in range(1, 5)]
    assert (tmp_path / "told").read_text().splitlines()[:4] == told

    again = train(assets, tmp_path / "one", *common, "--checkpoint.load_step", "3", env=env).succeeded()
    assert list(again.losses) == [4, 5]
    for step, loss in again.losses.items():
        assert loss == pytest.approx(whole.losses[step], abs=2e-3)
    assert there(catalog) == [(3, "full"), (4, "full"), (5, "full")]


def test_loses_no_good_checkpoint_by_saves_that_are_killed(
    minio: S3Server, root: str, assets: Path, tmp_path: Path
) -> None:
    catalog = open_catalog(Location.of(root, minio.options))
    train(assets, tmp_path / "good", *flags(root, steps=3), env=minio.env).succeeded()
    good = [(1, "full"), (2, "full"), (3, "full")]
    assert there(catalog) == good
    for step in (4, 5, 6):
        command = flags(root, steps=9, interval=step)
        dead = train(assets, tmp_path / f"dead-{step}", *command, env=minio.env, dies_before_commit=True)
        assert dead.exits == [-signal.SIGKILL], dead.logs[0][-3000:]
        assert there(catalog) == good
    assert [folder for folder in catalog.folders() if catalog.metadata_info(folder) is None] == [
        "step-4",
        "step-5",
        "step-6",
    ]

    # The newest of the good ones is damaged as well: the one before it will do.
    catalog.store.delete([info.key for info in catalog.store.list(catalog.key("step-3/data/"))])
    last = train(assets, tmp_path / "last", *flags(root, steps=7, interval=7), env=minio.env).succeeded()
    assert "step 3 cannot be loaded, so an older checkpoint is tried" in last.logs[0]
    assert list(last.losses) == [3, 4, 5, 6, 7]
    # What was damaged is set aside by the next commit, and counts no more.
    assert there(catalog) == [(1, "full"), (2, "full"), (7, "full")]


@pytest.mark.parametrize(
    ("override", "left"),
    [
        pytest.param(None, ["step-3"], id="torchtitan's own purge counts them, and deletes what was just saved"),
        pytest.param(f'{OURS}={{"fresh": true}}', ["step-1", "step-2", "step-3"], id="ours does not"),
    ],
)
def test_trains_beside_dead_saves_of_an_earlier_run(
    override: str | None, left: list[str], assets: Path, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoint"
    for step in (4, 5, 6):
        (checkpoints / f"step-{step}").mkdir(parents=True)
        (checkpoints / f"step-{step}" / "__0_0.distcp").write_bytes(b"begun")
    train(assets, tmp_path, *flags("checkpoint", steps=3, override=override)).succeeded()
    assert sorted(path.parent.name for path in checkpoints.glob("step-*/.metadata")) == left


def test_follows_a_policy_in_where_when_and_what_and_resumes_from_no_model_alone(
    minio: S3Server, root: str, assets: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        """
version: 1
root: ${RUN}
save: {every: [{steps: 1}]}
keep: {latest: 1, every: [{steps: 2}]}
prune: {grace: 0s}
"""
    )
    env = {**minio.env, "RUN": root, "BUCKETPOINT_POLICY": str(policy)}
    catalog = open_catalog(Location.of(root, minio.options))
    common = flags("checkpoint", steps=4, interval=100)
    common += ["--checkpoint.async_mode", "async_with_pinned_mem", "--checkpoint.last_save_model_only"]
    train(assets, tmp_path / "two", *common, world=2, env=env).succeeded()
    assert there(catalog) == [(2, "full"), (3, "full"), (4, "weights")]

    # torchtitan cannot deal its data out anew.
    less = ["--checkpoint.exclude_from_loading", "dataloader"]
    again = train(assets, tmp_path / "one", *common, *less, env=env).succeeded()
    assert list(again.losses) == [4]
    assert there(catalog) == [(2, "full"), (3, "full"), (4, "weights")]


def test_continues_from_a_seed_saves_by_a_signal_and_exports_the_last_step(
    minio: S3Server, root: str, assets: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nroot: ${RUN}\nsave: {on: [sigterm]}\nkeep: {latest: 5}\n")
    env = {**minio.env, "RUN": root, "BUCKETPOINT_POLICY": str(policy)}
    catalog = open_catalog(Location.of(root, minio.options))
    common = [*flags("checkpoint", steps=4, interval=100), "--checkpoint.last_save_model_only"]
    train(assets, tmp_path / "seed", *common, "--checkpoint.create_seed_checkpoint", env=env).succeeded()
    assert there(catalog) == [(0, "full")]

    common += ["--checkpoint.async_mode", "async"]
    export = ["--checkpoint.last_save_in_hf", "--checkpoint.export_dtype", "bfloat16"]
    ran = train(assets, tmp_path / "two", *common, *export, world=2, env=env, sigterm_at=2).succeeded()
    assert f"loaded {root}/step-0 in" in ran.logs[0]
    assert list(ran.losses) == [1, 2, 3, 4]
    assert there(catalog) == [(0, "full"), (2, "full")]
    # torchtitan writes these to a local folder whatever the root is.
    exported = load_file(next((tmp_path / "two/checkpoint/step-4").glob("*.safetensors")))
    assert exported
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}


def test_refuses_an_export_to_a_bucket_before_training_begins() -> None:
    refused = called(scenarios.refusal, {"folder": "s3://bucket/run", "last_save_in_hf": True})
    assert "last_save_in_hf is not supported with a remote" in refused


def test_takes_the_number_to_keep_for_the_policy_where_there_is_no_file(tmp_path: Path) -> None:
    few, everything = called(scenarios.policies, [{"keep_latest_k": 4}, {"keep_latest_k": 0}])
    assert (few["keep"]["latest"], few["prune"]["when"]) == (4, "after_commit")
    assert few["prune"]["grace"] == timedelta(0)
    assert everything["prune"]["when"] == "manual"

    for name, latest in (("named", 7), ("environment", 8)):
        (tmp_path / name).write_text(f"version: 1\nkeep: {{latest: {latest}}}\n")
    configs = [{"policy": str(tmp_path / "named")}, {}]
    named, from_environment = called(scenarios.policies, configs, str(tmp_path / "environment"))
    assert (named["keep"]["latest"], from_environment["keep"]["latest"]) == (7, 8)


def test_imports_torchtitan_nowhere_else() -> None:
    code = "import sys, bucketpoint; from bucketpoint import *; assert not [n for n in sys.modules if 'titan' in n]"
    subprocess.run([sys.executable, "-c", code], check=True)
