"""The weights that an engine gets: chosen, named, read once and never mixed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter, CheckpointManager
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, CorruptDataError, MismatchError
from bucketpoint.format.safetensors_header import TensorEntry, encode_header
from bucketpoint.integrations.weights import Weights, WeightsOptions
from dcp.cooperative.cooperative_scenarios import counted, expected_tensor


def save(url: str, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter(), no_dist=True)


def loaded(**config: Any) -> dict[str, torch.Tensor]:
    """Copy all weights, as an engine would without any parallelism."""
    with Weights(WeightsOptions.of(config)).loading() as tensors:
        targets = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        for name, target in targets.items():
            target.copy_(tensors[name])
    return targets


def test_reads_the_weights_and_nothing_of_the_optimizer(tmp_path: Path) -> None:
    model = {f"model.layers.{layer}.{name}": expected_tensor((500, 700)) for layer in range(9) for name in ("q", "k")}
    save(f"file://{tmp_path}", {"model": model, "optim": {"m": torch.ones(4000, 4000), "names": ["a"]}, "step": 7})
    with counted() as count:
        weights = loaded(url=f"file://{tmp_path}", prefix="model.")
    assert weights.keys() == model.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.items())
    assert count.read <= 1.02 * sum(tensor.nbytes for tensor in model.values())
    # One small read finds the commit, and one reads the metadata.
    assert count.gets == 2


def test_chooses_the_newest_the_best_or_a_step_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"file://{tmp_path}/run"
    text = f"version: 1\nroot: {run}\nkeep:\n  latest: 5\n  best: [{{metric: eval/loss, mode: min}}]\n"
    (tmp_path / "policy.yaml").write_text(text)
    with CheckpointManager(policy=str(tmp_path / "policy.yaml")) as manager:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            manager.save(step, {"w": torch.full((2,), float(step))})
            manager.wait()
            manager.report(step, {"eval/loss": loss})
    assert loaded(url=run)["w"].tolist() == [3, 3]
    assert loaded(url=run, step=1)["w"].tolist() == loaded(url=run, step="1")["w"].tolist() == [1, 1]
    with pytest.raises(BucketpointError, match="no `best` rule"):
        loaded(url=run, step="best")
    monkeypatch.setenv("BUCKETPOINT_POLICY", str(tmp_path / "policy.yaml"))
    assert loaded(url=run, step="best")["w"].tolist() == [2, 2]
    with pytest.raises(CheckpointNotFoundError, match="step 9"):
        loaded(url=run, step=9)
    with pytest.raises(CheckpointNotFoundError, match=r"There is no \.metadata"):
        loaded(url=f"file://{tmp_path}/other")
    entry = [TensorEntry("w", torch.float32, (2,), 0)]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model.safetensors").write_bytes(encode_header(entry) + torch.ones(2).numpy().tobytes())
    assert loaded(url=f"file://{tmp_path}/other")["w"].tolist() == [1, 1]


def swapped(tensors: dict[str, Any]) -> dict[str, Any]:
    """A mapping function: splits one tensor, and turns another by an operation that is no view."""
    first, second = tensors["wqkv"].split([2, 4])
    return {"first": first, "second": second, "turned": tensors["odd"].flip(0)}


def test_gives_names_as_wrappers_files_and_functions_make_them(tmp_path: Path) -> None:
    wrapped = {"module._orig_mod.a": torch.ones(2), "module.layers.1._fsdp_wrapped_module.b": torch.full((2,), 2.0)}
    save(f"file://{tmp_path}/wrapped", {"net": wrapped})
    assert {
        name: tensor[0].item() for name, tensor in loaded(url=f"file://{tmp_path}/wrapped", prefix="net.").items()
    } == {
        "a": 1,
        "layers.1.b": 2,
    }
    save(
        f"file://{tmp_path}/titan",
        {f"layers.{n}.attention.wq": torch.full((2,), float(n)) for n in (3, 10)} | {"x": torch.ones(1)},
    )
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj", "x": None}))
    weights = loaded(url=f"file://{tmp_path}/titan", names=str(names))
    assert {name: tensor[0].item() for name, tensor in weights.items()} == {
        "model.layers.3.self_attn.q_proj": 3,
        "model.layers.10.self_attn.q_proj": 10,
    }
    whole = expected_tensor((6, 3))
    save(f"file://{tmp_path}/fused", {"wqkv": whole, "odd": whole + 100})
    weights = loaded(url=f"file://{tmp_path}/fused", names="integrations.test_weights:swapped")
    assert torch.equal(weights["first"], whole[:2])
    assert torch.equal(weights["second"], whole[2:])
    assert torch.equal(weights["turned"], whole.flip(0) + 100)


def test_refuses_configurations_and_names_that_do_not_fit(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/one"
    save(url, {"model.w": torch.ones(2), "model.module.w": torch.zeros(2), "model._orig_mod.w": torch.zeros(2)})
    for config, text in (
        ({"url": url, "prefx": "model."}, "Did you mean 'prefix'"),
        ({"prefix": "model."}, "names no checkpoint"),
        ({"url": url, "names": "nowhere:function"}, "neither a JSON file nor a function"),
        ({"url": url, "names": str(tmp_path / "lost.json")}, "cannot be read"),
    ):
        with pytest.raises(BucketpointError, match=text):
            loaded(**config)
    with pytest.raises(MismatchError, match="Two tensors of the checkpoint get the name w"):
        loaded(url=url, prefix="model.")
    with pytest.raises(MismatchError, match=r"no tensor below 'net\.', but model\.w"):
        loaded(url=url, prefix="net.")


@pytest.mark.parametrize("at_once", [False, True])
def test_refuses_to_mix_two_checkpoints_of_one_url(tmp_path: Path, at_once: bool) -> None:
    url = f"file://{tmp_path}/latest"
    old, new = ({"a": torch.full((2, 2), float(n)), "b": torch.full((2, 2), float(n))} for n in (1, 2))
    save(url, old)
    with pytest.raises(CorruptDataError), Weights(WeightsOptions.of({"url": url})).loading() as tensors:
        if at_once:
            assert tensors["a"].sum().item() == 4
        save(url, new)
        torch.zeros(2, 2).copy_(tensors["b"])


@pytest.mark.parametrize("by", ["file", "function"])
def test_refuses_a_mapping_that_swaps_two_tensors(tmp_path: Path, by: str) -> None:
    save(f"file://{tmp_path}/step", {"q": torch.ones(3), "k": torch.zeros(3), "v": torch.zeros(3)})
    (tmp_path / "names.json").write_text('{"q": "k", "k": "q"}')
    names = str(tmp_path / "names.json") if by == "file" else f"{__name__}:exchanged"
    with pytest.raises(MismatchError, match="gives k the values of q, and q those of k"):
        loaded(url=f"file://{tmp_path}/step", names=names)


def exchanged(tensors: dict[str, Any]) -> dict[str, Any]:
    return {"q": tensors["k"], "k": tensors["q"], "v": tensors["v"]}


def test_gives_an_engine_the_quantized_weights_as_they_are_stored(tmp_path: Path) -> None:
    weight, scale = (
        TensorEntry("w.weight", torch.float8_e4m3fn, (4, 2), 0),
        TensorEntry("w.weight_scale_inv", torch.float32, (1, 1), 8),
    )
    data = (
        torch.ones(4, 2).to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
        + torch.full((1,), 3.0).numpy().tobytes()
    )
    (tmp_path / "model.safetensors").write_bytes(encode_header([weight, scale]) + data)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = loaded(url=f"file://{tmp_path}")
    assert weights["w.weight"].dtype is torch.float8_e4m3fn
    assert weights["w.weight"].float().tolist() == [[1, 1]] * 4
    assert weights["w.weight_scale_inv"].tolist() == [[3]]
