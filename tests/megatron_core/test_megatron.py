"""megatron-core's checkpoints at URLs: a GPT killed before a commit goes on with other ranks, the same bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException

import bucketpoint
from bucketpoint import BucketpointError, BucketWriter
from bucketpoint.convert import export_safetensors
from bucketpoint.dcp.planning.agreement import CommitRead
from bucketpoint.errors import (
    BucketNotFoundError,
    CheckpointNotFoundError,
    CommitConflictError,
    IncompleteCheckpointError,
    MismatchError,
    RanksDisagreeError,
    UnsafeDataError,
)
from bucketpoint.integrations.megatron import BucketLoadStrategy, BucketSaveStrategy, let_stand_for, load, save
from bucketpoint.manager.ranks import Ranks
from bucketpoint.stores import open_store
from kit.servers import S3Server, free_port
from kit.trainers import block, train_example

TRAINER = Path(__file__).with_name("trainer.py")

LOOP = Path(__file__).with_name("loop.py")

AT_HOME = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MASTER_ADDR": "127.0.0.1"}

KILLED = "process 0 terminated with signal SIGKILL"


def run(arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **AT_HOME, "MASTER_PORT": str(free_port()), **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def train(
    root: str, report: Path, world: int, tensor_parallel: int, kind: str, *, kill_at: int = 0, **env: str
) -> dict[str, Any]:
    arguments = [root, str(report), str(world), str(tensor_parallel), kind, str(kill_at)]
    ran = run([str(TRAINER), *arguments], **env)
    assert ran.returncode == 0, ran.stderr[-6000:]
    told: dict[str, Any] = json.loads(report.read_text())
    return told


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 saw of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return train(str(folder / "run"), folder / "report.json", 4, 2, "sync")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_resumes_a_gpt_killed_before_a_commit_with_fewer_ranks_bit_by_bit(
    kind: str, whole: dict[str, Any], minio: S3Server, tmp_path: Path
) -> None:
    assert whole["from"] == 0
    root = f"s3://{minio.make_bucket()}/run"
    with pytest.raises(AssertionError, match=KILLED):
        train(root, tmp_path / "killed", 4, 2, kind, kill_at=6, **minio.env)
    # Everything is there but the commit.
    store, prefix = open_store(f"{root}/iter_0000006", storage_options=minio.options)
    left = [info.key.removeprefix(f"{prefix}/") for info in store.list(f"{prefix}/")]
    assert "metadata.json" in left
    assert len([path for path in left if path.startswith("data/")]) >= 4
    assert ".metadata" not in left
    assert bucketpoint.latest_checkpoint(root, storage_options=minio.options) == f"{root}/iter_0000003"

    resumed = train(root, tmp_path / "resumed", 2, 1, kind, **minio.env)
    assert resumed["from"] == 3
    assert resumed["loaded"] == whole["digests"]["3"]
    assert resumed["common"] == [{"hidden_size": 16, "saved_by": "trainer"}, 3.0]
    # Sums over tensor-parallel ranks are made in another order.
    assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=1e-5)
    assert bucketpoint.latest_checkpoint(root, storage_options=minio.options) == f"{root}/iter_0000009"


def test_resumes_megatrons_loop_from_the_newest_whole_checkpoint_in_a_new_folder(
    minio: S3Server, tmp_path: Path
) -> None:
    url = f"s3://{minio.make_bucket()}/run"

    def train_in(folder: str, world: int, kill_at: int) -> tuple[str, dict[str, Any]]:
        report = tmp_path / f"{folder}.json"
        arguments = [str(tmp_path / folder), url, str(report), str(world), str(world), str(kill_at)]
        ran = run([str(LOOP), *arguments], **minio.env)
        assert (ran.returncode == 0) == (kill_at == 0), ran.stderr[-6000:]
        return ran.stderr, json.loads(report.read_text())

    said, killed = train_in("node-1", 2, 4)
    assert KILLED in said
    # A tracker of a folder that was left behind is not believed.
    (tmp_path / "node-1" / "latest_checkpointed_iteration.txt").write_text("4")
    for folder, first in (("node-1", 2), ("node-2", 6)):
        _, resumed = train_in(folder, 1, 0)
        assert resumed["from"] == first
        assert resumed["loaded"] == killed["digests"][str(first)]
        killed["digests"].update(resumed["digests"])
    assert bucketpoint.latest_checkpoint(url, storage_options=minio.options) == f"{url}/iter_0000010"


def test_trains_and_resumes_with_the_example_of_the_page(minio: S3Server, tmp_path: Path) -> None:
    url = f"s3://{minio.make_bucket()}/run-7"
    code = block("megatron.md", "python").replace("s3://bucket/run-7", url)
    for steps, world in ((20, 2), (40, 1)):
        now = code.replace("range(step, 100)", f"range(step, {steps})")
        train_example(now, f"{url}/iter_{steps:07d}", world, minio, tmp_path, PYTHONWARNINGS="ignore")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone: megatron asks for one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state(value: float) -> dict[str, Any]:
    """Return a state with all kinds of shards that one rank can have."""
    tensor = ShardedTensor.from_rank_offsets
    value = float(value)
    layers = [torch.full((4,), value + layer) for layer in (0, 1)]
    return {
        "args": Namespace(hidden_size=16),
        "iteration": int(value),
        "plain": tensor("plain", torch.full((3, 4), value)),
        # Two shards under one name, as those of a gated linear unit.
        "gate": tensor("gated", torch.full((2, 4), value), (0, 0, 2)),
        "up": tensor("gated", torch.full((2, 4), value + 0.5), (0, 1, 2)),
        # One layer of two that are stacked.
        "layers": [tensor("stack", each, (0, layer, 2), prepend_axis_num=1) for layer, each in enumerate(layers)],
        "half": tensor("half", torch.full((5,), value, dtype=torch.bfloat16)),
        "generator": ShardedObject("generator", {"seed": value}, (1,), (0,)),
    }


def expect(loaded: dict[str, Any], value: float) -> None:
    assert loaded["args"] == Namespace(hidden_size=16)
    assert loaded["iteration"] == int(value)
    assert loaded["generator"] == {"seed": value}
    assert torch.equal(loaded["plain"], torch.full((3, 4), value))
    assert torch.equal(loaded["gate"], torch.full((2, 4), value))
    assert torch.equal(loaded["up"], torch.full((2, 4), value + 0.5))
    assert [each.tolist() for each in loaded["layers"]] == [[value] * 4, [value + 1] * 4]
    assert torch.equal(loaded["half"], torch.full((5,), value, dtype=torch.bfloat16))


@pytest.mark.usefixtures("alone")
def test_loads_what_is_saved_also_by_megatrons_own_reader_from_a_folder(tmp_path: Path) -> None:
    url = f"{tmp_path}/iter_0000007"
    assert save(state(7), url) is None
    expect(load(state(0), url), 7)
    expect(dist_checkpointing.load(state(0), url), 7)
    assert dist_checkpointing.load_common_state_dict(url)["iteration"] == 7
    export_safetensors(url, tmp_path / "hub")
    exported, saved = load_file(tmp_path / "hub/model.safetensors"), bucketpoint.load(url, trusted=True)
    assert exported.keys() == {"plain", "gated", "stack", "half"}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())


@pytest.mark.usefixtures("alone")
def test_runs_the_strategies_in_megatrons_own_functions_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    dist_checkpointing.save(state(7), str(tmp_path / "ours"), BucketSaveStrategy())
    expect(dist_checkpointing.load(state(0), str(tmp_path / "ours"), BucketLoadStrategy()), 7)
    strategy = BucketLoadStrategy()
    everything = serialization.load_sharded_metadata(str(tmp_path / "ours"), strategy)
    objects = {name for name, of in everything.items() if isinstance(of, ShardedObject)}
    assert objects == {"common_state/shard_0_1", "generator/shard_0_1"}
    assert everything.keys() - objects == {"plain", "gated", "stack", "half"}
    tensors = dist_checkpointing.load_tensors_metadata(str(tmp_path / "ours"), strategy)
    assert tensors["stack"].global_shape == (2, 4)


@pytest.mark.usefixtures("alone")
def test_loads_a_checkpoint_that_megatron_saved_from_a_url(
    minio: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # megatron's writer insists on a GPU.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    dist_checkpointing.save(state(7), str(tmp_path))
    store, prefix = open_store(f"s3://{minio.make_bucket()}/iter_7", storage_options=minio.options)
    for file in (file for file in tmp_path.iterdir() if file.is_file() and file.name != "store"):
        store.put(f"{prefix}/{file.name}", [memoryview(file.read_bytes())])
    # megatron's metadata names classes of DCP beyond those of torch's own metadata.
    trusting = BucketLoadStrategy(storage_options=minio.options, trusted=True)
    expect(load(state(0), f"{store.url}/{prefix}", sharded_strategy=trusting), 7)


@pytest.mark.usefixtures("alone")
def test_allows_changes_of_a_state_once_an_asynchronous_save_has_returned(minio: S3Server) -> None:
    url = f"s3://{minio.make_bucket()}/iter_7"
    saved = state(7)
    tensors = [each.data for each in saved.values() if isinstance(each, ShardedTensor)]
    request = save(saved, url, storage_options=minio.options, async_sharded_save=True, async_strategy="mcore")
    for each in (*tensors, *(layer.data for layer in saved["layers"])):
        each.zero_()
    request.execute_sync()
    expect(load(state(0), url, storage_options=minio.options), 7)


class Failing(BucketWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        raise BucketpointError("the commit fails")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_raises_for_a_failed_save_and_leaves_the_checkpoint_before_it(kind: str, tmp_path: Path) -> None:
    save(state(7), f"{tmp_path}/iter_7")
    strategy = BucketSaveStrategy(storage_writer=Failing())
    with pytest.raises(BucketpointError, match="the commit fails"):
        if kind == "sync":
            save(state(8), f"{tmp_path}/iter_8", sharded_strategy=strategy)
        else:
            options = {"async_sharded_save": True, "async_strategy": "mcore"}
            save(state(8), f"{tmp_path}/iter_8", sharded_strategy=strategy, **options).execute_sync()
    with pytest.raises(IncompleteCheckpointError):
        load(state(0), f"{tmp_path}/iter_8")
    with pytest.raises(CheckpointNotFoundError):
        load(state(0), f"{tmp_path}/iter_9")
    newest = bucketpoint.latest_checkpoint(tmp_path)
    assert newest is not None
    expect(load(state(0), newest), 7)


@pytest.mark.usefixtures("alone")
def test_raises_an_error_of_the_first_request_in_the_save_of_all_ranks(minio: S3Server) -> None:
    with pytest.raises(BucketNotFoundError) as raised:
        save(state(7), "s3://no-such-bucket-here/iter_7", storage_options=minio.options)
    # Within DCP, whose error has nothing to add.
    assert not isinstance(raised.value.__cause__, CheckpointException)


@pytest.mark.usefixtures("alone")
def test_returns_or_raises_mismatches_as_megatron_is_asked_to(tmp_path: Path) -> None:
    save(state(7), f"{tmp_path}/iter_7")
    other = {**state(0), "news": ShardedTensor.from_rank_offsets("news", torch.zeros(3))}
    del other["plain"]
    _, missing, unexpected = load(other, f"{tmp_path}/iter_7", strict="return_all")
    assert (missing, unexpected) == ({"plain"}, {"news"})
    with pytest.raises(BucketpointError, match="news"):
        load(other, f"{tmp_path}/iter_7")
    wide = {**state(0), "plain": ShardedTensor.from_rank_offsets("plain", torch.zeros(5, 4))}
    with pytest.raises(BucketpointError, match="shape"):
        load(wide, f"{tmp_path}/iter_7")
    # As of an embedding whose vocabulary was padded for another number of ranks.
    wide["plain"].allow_shape_mismatch = True
    loaded = load(wide, f"{tmp_path}/iter_7")["plain"]
    assert loaded[:, 0].tolist() == [7, 7, 7, 0, 0]


class Overtaken(BucketLoadStrategy):
    """A strategy that finds another checkpoint at the URL once it has read the values that are not sharded."""

    def load_common_item(self, checkpoint_dir: Any) -> Any:
        item = super().load_common_item(checkpoint_dir)
        save(state(8), checkpoint_dir)
        return item


@pytest.mark.usefixtures("alone")
def test_refuses_to_load_parts_of_two_commits_together(tmp_path: Path) -> None:
    url = f"{tmp_path}/latest"
    save(state(7), url)
    strategy = Overtaken()
    with pytest.raises(CommitConflictError, match="Load again"):
        load(state(0), url, sharded_strategy=strategy)
    # The strategy is usable again.
    expect(load(state(0), url, sharded_strategy=BucketLoadStrategy()), 8)
    expect(dist_checkpointing.load(state(0), url, strategy), 8)


class SecondOfTwo(Ranks):
    """Ranks of which the first has read another commit."""

    def __init__(self, call: str) -> None:
        super().__init__(call)
        self.rank = 1

    def shared(self, index: int, value: Any, what: str) -> Any:
        return CommitRead("0123456789ab", "'latest' (commit 0123456789ab)")


@pytest.mark.usefixtures("alone")
def test_refuses_a_load_where_another_rank_has_read_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{tmp_path}/latest"
    save(state(7), url)
    monkeypatch.setattr("bucketpoint.integrations.megatron.strategies.job_ranks", SecondOfTwo)
    with pytest.raises(RanksDisagreeError, match="rank 0: 'latest' "):
        load(state(0), url)


@pytest.mark.usefixtures("alone")
def test_needs_trust_for_objects_of_other_classes(tmp_path: Path) -> None:
    save({"other": ShardedObject("other", subprocess.CompletedProcess([], 7), (1,), (0,))}, f"{tmp_path}/iter_7")
    asked = {"other": ShardedObject("other", None, (1,), (0,))}
    with pytest.raises(UnsafeDataError, match="CompletedProcess"):
        load(asked, f"{tmp_path}/iter_7")
    trusting = BucketLoadStrategy(trusted=True)
    assert load(asked, f"{tmp_path}/iter_7", sharded_strategy=trusting)["other"].returncode == 7


@pytest.mark.usefixtures("alone")
def test_refuses_what_works_in_local_folders_only(tmp_path: Path) -> None:
    wrapped = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    with pytest.raises(BucketpointError, match=r"Use BucketSaveStrategy\(\)"):
        save(state(7), "s3://bucket/iter_7", sharded_strategy=wrapped)
    with pytest.raises(BucketpointError, match="verify_integrity"):
        save(state(7), "s3://bucket/iter_7", verify_integrity=True)
    with pytest.raises(BucketpointError, match="Give the URL of the bucket"):
        load(state(7), "msc://profile/iter_7")
    save(state(7), f"{tmp_path}/iter_7")
    with pytest.raises(BucketpointError, match="cannot be removed"):
        BucketLoadStrategy().remove_sharded_tensors(f"{tmp_path}/iter_7", "plain")
    bucketpoint.save({"model": {"weight": torch.ones(3)}}, f"{tmp_path}/step-1")
    with pytest.raises(MismatchError, match="no common state of megatron-core"):
        load(state(0), f"{tmp_path}/step-1")


def test_lets_a_folder_stand_for_one_run_and_refuses_one_that_is_used(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "latest_checkpointed_iteration.txt").write_text("500")
    with pytest.raises(BucketpointError, match="has other files"):
        let_stand_for(tmp_path / "used", f"{tmp_path}/run")
    bucketpoint.save({"model": {"weight": torch.ones(3)}}, f"{tmp_path}/run/step-1")
    with pytest.raises(BucketpointError, match="cannot load step-1"):
        let_stand_for(tmp_path / "folder", f"{tmp_path}/run")
    with pytest.raises(BucketpointError, match=r"belongs to .*/run"):
        let_stand_for(tmp_path / "folder", f"{tmp_path}/other")
    for url in (f"{tmp_path}/new", f"{tmp_path}/new/", f"{tmp_path}/new"):
        let_stand_for(tmp_path / "other", url)


def test_lets_two_nodes_that_share_a_new_folder_begin_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run = tmp_path / "folder", f"{tmp_path}/run"
    listed = Path.iterdir

    def other_first(path: Path) -> Any:
        # The other node marks the folder when this one has found no mark, or has not looked for it yet.
        monkeypatch.setattr(Path, "iterdir", listed)
        let_stand_for(folder, run)
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", other_first)
    let_stand_for(folder, run)


@pytest.mark.usefixtures("alone")
def test_recognises_the_folder_of_a_run_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    let_stand_for("./scratch", f"{tmp_path}/run")
    # As megatron spells what --save says; the last is its own for --non-persistent-ckpt-type global.
    spelled = {
        "a": "scratch",
        "b": "./scratch",
        "c": f"{tmp_path}/run/../scratch",
        "d": "link",
        "e": "scratch/non_persistent",
    }
    for name, folder in spelled.items():
        checkpoint = Path(folder, name)
        checkpoint.resolve().mkdir(parents=True)
        dist_checkpointing.save(state(7), str(checkpoint), BucketSaveStrategy())
        assert [each.name for each in checkpoint.resolve().iterdir()] == ["metadata.json"]
        expect(load(state(0), f"{tmp_path}/run/{'non_persistent/' if name == 'e' else ''}{name}"), 7)
