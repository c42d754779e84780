"""The weights that an engine gets: chosen, named, read once and never mixed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter, CheckpointManager
from bucketpoint.cli.app import run
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, CorruptDataError, MismatchError
from bucketpoint.format.safetensors_header import TensorEntry, encode_header
from bucketpoint.integrations.weights import Weights, WeightsOptions, read_kept
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
    # A checkpoint that is named, and not one within it.
    save(f"{run}/step-1/ema-7", {"w": torch.full((2,), 7.0)})
    assert loaded(url=f"{run}/step-1")["w"].tolist() == [1, 1]
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
    weights = loaded(url=f"file://{tmp_path}/wrapped", prefix="net.")
    assert {name: tensor[0].item() for name, tensor in weights.items()} == {"a": 1, "layers.1.b": 2}
    titan = {f"layers.{n}.attention.wq": torch.full((2,), float(n)) for n in (3, 10)}
    save(f"file://{tmp_path}/titan", titan | {"x": torch.ones(1)})
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


@pytest.mark.parametrize("by", ["save", "rm"])
@pytest.mark.parametrize("at_once", [False, True])
def test_refuses_a_checkpoint_that_is_replaced_or_deleted_during_the_load(
    tmp_path: Path, at_once: bool, by: str
) -> None:
    url = f"file://{tmp_path}/latest"
    old, new = ({"a": torch.full((2, 2), float(n)), "b": torch.full((2, 2), float(n))} for n in (1, 2))
    save(url, old)
    options = WeightsOptions.of({"url": url})
    with pytest.raises(CorruptDataError, match="a data object is missing"), Weights(options).loading() as tensors:
        if at_once:
            assert tensors["a"].sum().item() == 4
        if by == "save":
            save(url, new)
        else:
            assert run(["rm", "--yes", "--force", url]) == 0
        torch.zeros(2, 2).copy_(tensors["b"])


@pytest.mark.parametrize("by", ["pair", "ring", "function"])
def test_refuses_a_mapping_that_swaps_tensors(tmp_path: Path, by: str) -> None:
    save(f"file://{tmp_path}/step", {"q": torch.ones(3), "k": torch.zeros(3), "v": torch.zeros(3)})
    (tmp_path / "pair.json").write_text('{"q": "k", "k": "q"}')
    (tmp_path / "ring.json").write_text('{"q": "k", "k": "v", "v": "q"}')
    names = f"{__name__}:exchanged" if by == "function" else f"{tmp_path}/{by}.json"
    with pytest.raises(MismatchError, match=r"gives k the values of q, .* the values of k"):
        loaded(url=f"file://{tmp_path}/step", names=names)
    # A shift leaves no name in another's place.
    (tmp_path / "shift.json").write_text('{"q": null, "k": "q", "v": "k"}')
    assert loaded(url=f"file://{tmp_path}/step", names=f"{tmp_path}/shift.json").keys() == {"q", "k"}


def exchanged(tensors: dict[str, Any]) -> dict[str, Any]:
    return {"k": tensors["q"][:2], "q": tensors["k"], "v": tensors["v"]}


def test_reads_tensors_that_a_loader_keeps_as_they_came(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    save(url, {"w": expected_tensor((4, 3)), "b": torch.ones(4)})
    model = torch.nn.Linear(3, 4)
    with Weights(WeightsOptions.of({"url": url})).loading() as tensors:
        model.load_state_dict({"weight": tensors["w"], "bias": tensors["b"]}, assign=True)
        model.register_buffer("buffer", tensors["b"][1:])
        model.attribute = tensors["w"].t()
        read_kept(model)
    kept = [model.weight, model.buffer, model.attribute]
    assert [type(tensor) for tensor in kept] == [torch.nn.Parameter, torch.Tensor, torch.Tensor]
    assert torch.equal(model.attribute, expected_tensor((4, 3)).t())
    assert torch.equal(model.attribute.t(), model.weight)


def test_loads_into_parameters_of_the_inference_mode(tmp_path: Path) -> None:
    save(f"file://{tmp_path}", {"w": expected_tensor((4, 3))})
    with Weights(WeightsOptions.of({"url": f"file://{tmp_path}"})).loading() as tensors, torch.inference_mode():
        first, second, other = torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float64)
        for target in (first, second, other.t()):
            target.copy_(tensors["w"])
    for target in (first, second, other.t()):
        assert torch.equal(target, expected_tensor((4, 3)).to(target.dtype))


def test_tells_refusals_of_shapes_from_other_errors(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    save(url, {"w": torch.ones(4, 3)})
    weights = Weights(WeightsOptions.of({"url": url}))
    for fail, refused in (
        (lambda tensor: torch.zeros(5, 3).copy_(tensor), True),
        (lambda tensor: tensor.narrow(0, 3, 2), True),
        (lambda tensor: tensor.view(5, -1), True),
        (lambda tensor: tensor.select(2, 0), True),
        (lambda tensor: torch.linalg.inv(tensor), False),
        (lambda tensor: torch.zeros(4, 3).copy_(tensor) @ torch.ones(4, 3), False),
    ):
        with pytest.raises((RuntimeError, IndexError)) as caught, weights.loading() as tensors:
            fail(tensors["w"])
        assert weights.refused(caught.value) == refused


def test_gives_an_engine_the_quantized_weights_as_they_are_stored(tmp_path: Path) -> None:
    weight = TensorEntry("w.weight", torch.float8_e4m3fn, (4, 2), 0)
    scale = TensorEntry("w.weight_scale_inv", torch.float32, (1, 1), 8)
    tensors = (torch.ones(4, 2).to(torch.float8_e4m3fn).view(torch.uint8), torch.full((1,), 3.0))
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    (tmp_path / "model.safetensors").write_bytes(encode_header([weight, scale]) + data)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = loaded(url=f"file://{tmp_path}")
    assert weights["w.weight"].dtype is torch.float8_e4m3fn
    assert weights["w.weight"].float().tolist() == [[1, 1]] * 4
    assert weights["w.weight_scale_inv"].tolist() == [[3]]
