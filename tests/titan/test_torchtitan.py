"""torchtitan's trainer with our override: it saves, prunes and resumes, and dead saves cost nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import bucketpoint
from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.location import Location
from kit.servers import S3Server
from titan import scenarios
from titan.runs import OURS, called, train

# A quiet machine needs a tenth of this; it is there against hangs only.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a text, which torchtitan's package does not bring."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("assets")
    (folder / "tokenizer").mkdir()
    (folder / "text").mkdir()
    texts = [" ".join(f"w{(i * 7 + j * 13) % 97}" for j in range(200)) for i in range(200)]
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"]))
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    marks = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    (folder / "tokenizer" / "tokenizer_config.json").write_text(marks)
    (folder / "text" / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


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


def model_at(url: str, server: S3Server) -> dict[str, torch.Tensor]:
    """The tensors of a model in a checkpoint, by their names there."""
    state = bucketpoint.load(url, keys=["*.weight"], storage_options=server.options)
    return flatten_state_dict({name: part for name, part in state.items() if name != "optimizer"})[0]


def downloaded(server: S3Server, url: str, folder: Path) -> list[str]:
    """The names of the files below a URL, which are in the folder then."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    folder.mkdir()
    names = [key.removeprefix(f"{prefix}/") for key in server.keys(bucket, f"{prefix}/")]
    for name in names:
        server.client().download_file(bucket, f"{prefix}/{name}", str(folder / name))
    return names


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an export, all of whose files are in its index."""
    from safetensors.torch import load_file

    named: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {path.name for path in folder.glob("*.safetensors")} == set(named.values())
    files = {path: load_file(folder / path) for path in named.values()}
    return {name: files[path][name] for name, path in named.items()}


@pytest.fixture
def root(minio: S3Server) -> str:
    return minio.url(minio.make_bucket(), "run")


def test_saves_beside_training_prunes_and_resumes_with_another_number_of_ranks(
    minio: S3Server, root: str, assets: Path, tmp_path: Path
) -> None:
    catalog = open_catalog(Location.of(root, minio.options))
    override = f'{OURS}={{"on_commit": "titan.scenarios:note"}}'
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


def test_exports_the_last_step_to_a_bucket_and_begins_from_it_on_fewer_ranks(
    minio: S3Server, root: str, assets: Path, tmp_path: Path
) -> None:
    # The model keeps its random values, so that the full checkpoint of step 1 has those of the last step.
    hub, bucket = minio.url(minio.make_bucket(), "hub"), root.split("/")[2]
    common: dict[str, Any] = {"env": minio.env, "config": "untrained", "shard_bytes": 8 << 20}
    override = f'{OURS}={{"last_save_in_hf": "{hub}"}}'
    last = [*flags(root, steps=2, override=override), "--checkpoint.last_save_model_only"]
    train(assets, tmp_path / "seed", *last, "--checkpoint.create_seed_checkpoint", **common).succeeded()
    assert minio.keys(hub.split("/")[2]) == []
    train(assets, tmp_path / "two", *last, world=2, **common).succeeded()
    catalog = open_catalog(Location.of(root, minio.options))
    assert there(catalog) == [(0, "full"), (1, "full"), (2, "weights")]

    model = model_at(f"{root}/step-1", minio)
    torch.save(model, tmp_path / "model")
    called(scenarios.to_hugging_face, str(tmp_path / "model"))
    expected = torch.load(tmp_path / "model")
    assert {"tokenizer.json", "tokenizer_config.json"} < set(downloaded(minio, f"{hub}/step-2", tmp_path / "hub"))
    read = tensors_in(tmp_path / "hub")
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name

    # Without a seed each run begins with other random values.
    other = minio.url(bucket, "other")
    override = f'{OURS}={{"initial_load_in_hf": "{hub}/step-2"}}'
    first = [*flags(other, steps=1, override=override), "--checkpoint.initial_load_model_only"]
    train(assets, tmp_path / "one", *first, **common).succeeded()
    torch.save(model_at(f"{other}/step-1", minio), tmp_path / "model")
    called(scenarios.to_hugging_face, str(tmp_path / "model"))
    again = torch.load(tmp_path / "model")
    assert again.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(again[name], tensor), name


def test_refuses_what_does_not_fit_safetensors_before_training_begins() -> None:
    refused = called(scenarios.refusal, {"folder": "s3://bucket/run", "last_save_in_hf": True})
    assert "last_save_in_hf is not supported with a remote" in refused
    root, hub = "s3://bucket/run", "s3://bucket/hub"
    fit = {"hf_source": hub, "hf_target": hub}
    cases: dict[str, dict[str, Any]] = {
        "names the folder of the run": {"hf_target": f"{root}/"},
        "nowhere://": {"hf_target": "nowhere://hub"},
        "hold a model only": {"hf_target": hub, "last_save_model_only": False},
        "Pass --checkpoint.initial_load_model_only": {"hf_source": hub, "initial_load_model_only": False},
    }
    *refusals, none = called(scenarios.refusals_of_safetensors, root, [*cases.values(), fit], "an adapter")
    assert [message for message, given in zip(cases, refusals, strict=True) if message not in given] == []
    assert none == ""
    (refused,) = called(scenarios.refusals_of_safetensors, root, [fit], None)
    assert "no adapter" in refused


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
