"""vLLM's models get from a checkpoint in the bucket the parameters that they get from the exported safetensors."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import bucketpoint
from bucketpoint import BucketWriter
from bucketpoint.errors import MismatchError
from kit.servers import S3Server, free_port

COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 514,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "head_dim": 64},
    "qwen2": {**COMMON, "tie_word_embeddings": True},
    "mixtral": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Its loader passes the tensors on to those of its parts.
    "qwen2_vl": {
        "text_config": {**COMMON, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}},
        "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 256, "num_heads": 2},
    },
}

VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def exported(folder: Path, kind: str, seed: int = 0, scale: float = 1) -> dict[str, torch.Tensor]:
    """Write a tiny model of random weights as vLLM reads it from a disk, and return its tensors."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **MODELS[kind])
    composed = "vision_config" in MODELS[kind]
    model = (AutoModelForImageTextToText if composed else AutoModelForCausalLM).from_config(
        config, dtype=torch.bfloat16
    )
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.mul_(1 if "norm" in name else scale)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def checkpoint(folder: Path, weights: dict[str, torch.Tensor], step: int = 7) -> str:
    """Save the tensors as a training program does: below `model`, beside an optimizer. Return the URL of the run."""
    state = {"model": weights, "optim": {"state": {name: {"exp_avg": w.float()} for name, w in weights.items()}}}
    dcp.save(state, checkpoint_id=f"file://{folder}/step-{step}", storage_writer=BucketWriter(), no_dist=True)
    return f"file://{folder}"


def run(world: int, folder: Path, **arguments: Any) -> list[Any]:
    """Run the workers, and return what each wrote. Raises with the end of the log of the first that failed."""
    program, results, workers = Path(__file__).with_name("worker.py"), [], []
    generate = "generate" in arguments
    folder.mkdir()
    for rank in range(1 if generate else world):
        out = folder / f"{rank}"
        given = {**arguments, "out": str(out), "skip_tokenizer_init": True}
        if not generate:
            given["place"] = str(folder / "meeting")
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        environ |= {"VLLM_DIST_IDENT": f"{folder.name}-{os.getpid()}", **VLLM_ENV}
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, str(program), json.dumps(given)]
            workers.append(subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))
        results.append(out)
    until = time.monotonic() + 500
    try:
        # A rank whose peer has failed waits for it.
        while time.monotonic() < until and {worker.poll() for worker in workers} <= {0, None}:
            if all(worker.poll() == 0 for worker in workers):
                break
            time.sleep(0.1)
    finally:
        codes = [worker.poll() for worker in workers]
        for worker in workers:
            worker.kill()
            worker.wait()
    failed = [rank for rank, code in enumerate(codes) if code] or [rank for rank, code in enumerate(codes) if code != 0]
    assert not failed, (folder / f"{failed[0]}.log").read_text()[-4000:]
    return [json.loads(out.read_text()) if generate else torch.load(out) for out in results]


def ours(url: str, **config: Any) -> dict[str, Any]:
    extra = {"url": url, "prefix": "model.", **config}
    return {"load_format": "bucketpoint", "model_loader_extra_config": extra}


@pytest.mark.parametrize(
    ("kind", "world", "dtype"),
    [
        ("llama", 1, "bfloat16"),
        ("llama", 1, "fp8_per_channel"),
        ("qwen2_vl", 1, "bfloat16"),
        ("llama", 2, "bfloat16"),
        ("llama", 2, "float32"),
        ("qwen2", 2, "bfloat16"),
        ("mixtral", 2, "bfloat16"),
        pytest.param("llama", 4, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_gives_every_parameter_as_the_exported_model_does(tmp_path: Path, kind: str, world: int, dtype: str) -> None:
    weights = exported(tmp_path / "exported", kind)
    url = checkpoint(tmp_path / "run", weights)
    model = {"model": str(tmp_path / "exported"), "dtype": dtype}
    if quantized := dtype.startswith("fp8"):
        model |= {"dtype": "bfloat16", "quantization": dtype}
    expected = run(world, tmp_path / "theirs", load_format="safetensors", **model)
    loaded = run(world, tmp_path / "ours", **ours(url), **model)
    for rank in range(world):
        theirs, own = expected[rank]["parameters"], loaded[rank]["parameters"]
        assert theirs.keys() == own.keys()
        assert quantized == (torch.uint8 in {tensor.dtype for tensor in own.values()})
        assert [name for name in own if not torch.equal(own[name], theirs[name])] == []
    assert sum(result["read"] for result in loaded) <= 1.02 * sum(tensor.nbytes for tensor in weights.values())


def test_loads_weights_again_and_refuses_to_leave_older_ones_among_them(tmp_path: Path) -> None:
    """Linear layers pack their weights meanwhile, and sleep of level 2 drops all of them."""
    weights = exported(tmp_path / "exported", "llama")
    url = checkpoint(tmp_path / "run", weights)
    lacking = {name: tensor for name, tensor in weights.items() if "1.self_attn.k_p" not in name}
    model, reload = {"model": str(tmp_path / "exported"), "dtype": "float32"}, {}
    for step, state in ((8, weights), (9, lacking)):
        checkpoint(tmp_path / "run", state, step)
        # Without its metadata, it is no checkpoint until the workers put that back.
        reload[f"{tmp_path}/{step}"] = f"{tmp_path}/run/step-{step}/.metadata"
        os.rename(reload[f"{tmp_path}/{step}"], f"{tmp_path}/{step}")
    copy = f"{tmp_path}/copy:1G"
    loaded = run(2, tmp_path / "ours", reload=reload, **ours(url, node_copy=copy), **model)
    for result in loaded:
        first, again, error = result["parameters"].values()
        assert len(first) == 8 + 7
        assert [name for name in first if not torch.equal(first[name], again[name])] == []
        assert re.search(r"MismatchError: .* lacks model\.layers\.1\.self_attn\.k_proj\.weight", error)
    # A worker reads alone what vLLM processes layer by layer, and would read all bytes again without the node's copy.
    assert sum(result["read"] for result in loaded) <= 2 * 1.02 * sum(tensor.nbytes for tensor in weights.values())


def test_refuses_to_start_on_damage_and_on_names_that_do_not_fit(tmp_path: Path) -> None:
    weights = exported(tmp_path / "exported", "llama")

    def without(part: str) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in weights.items() if part not in name}

    cases = {
        "lacking": (without("0.mlp.down_proj"), r"lacks model\.layers\.0\.mlp\.down_proj\.weight .*1\.mlp\.down_proj"),
        "part": (without("1.self_attn.k_proj"), r"lacks model\.layers\.1\.self_attn\.qkv_proj\.weight of"),
        "surplus": (
            {**weights, "model.layers.0.mlp.down_projection.weight": torch.ones(2)},
            r"refuses .*nearest names of the model are .*0\.mlp\.down_proj\.weight",
        ),
        "damaged": (weights, r"CorruptDataError.*lm_head\.weight"),
    }
    configs = [{"url": checkpoint(tmp_path / case, state), "prefix": "model."} for case, (state, _) in cases.items()]
    for path in (tmp_path / "damaged").rglob("*.distcp"):
        data, times = bytearray(path.read_bytes()), path.stat()
        at = bytes(data).find(weights["lm_head.weight"].view(torch.uint8).numpy().tobytes())
        if at >= 0:
            data[at + 9] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    configs.append({"url": configs[0]["url"], "prefx": "model."})
    model = {"model": str(tmp_path / "exported"), "dtype": "float32"}
    (result,) = run(1, tmp_path / "ours", refused=configs, **ours(configs[0]["url"]), **model)
    expected = [*(text for _, text in cases.values()), "Did you mean 'prefix'"]
    for text, error in zip(expected, result["parameters"]["errors"], strict=True):
        assert re.search(text, error), error


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (lambda tensor: torch.zeros(3).copy_(tensor), MismatchError),
        (lambda tensor: {}[tensor], MismatchError),
        (lambda tensor: torch.linalg.inv(tensor.view(1, 2)), RuntimeError),
        (lambda tensor: [].append(tensor, tensor), TypeError),
    ],
)
def test_passes_on_errors_that_do_not_come_from_names_or_shapes(tmp_path: Path, fail: Any, kind: Any) -> None:
    from vllm.config import LoadConfig

    from bucketpoint.integrations.vllm import BucketpointLoader

    url = checkpoint(tmp_path / "run", {"w": torch.ones(2)})
    model = torch.nn.Module()
    model.load_weights = lambda tensors: [fail(tensor) for _, tensor in tensors]
    config = SimpleNamespace(quantization=None, hf_config=None)
    with pytest.raises(kind) as caught:
        BucketpointLoader(LoadConfig(**ours(url))).load_weights(model, config)
    assert kind is MismatchError or "failed at w of" in caught.value.__notes__[0]


@pytest.mark.slow
def test_answers_after_the_commands_of_the_page_and_its_example(tmp_path: Path, minio: S3Server) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/vllm.md").read_text(encoding="utf-8").replace("\\\n", "")
    url, config = minio.url(minio.make_bucket(), "run"), str(tmp_path / "config")
    port = str(free_port())
    for name, value in {"s3://bucket/run": url, "CONFIG_DIR": config, "localhost:8000": f"127.0.0.1:{port}"}.items():
        page = page.replace(name, value)
    train, serve, ask = (shlex.split(line) for line in re.findall(r"^(?:torchrun|vllm|curl) .*", page, re.MULTILINE))
    environ = {**os.environ, **VLLM_ENV, **minio.env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(train, env=environ, cwd=root, check=True)
    # The program `vllm` of the wheel for CPUs misses the metadata of a package `vllm`.
    serve[:2] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    serve += ["--port", port, "--dtype", "float32", "--enforce-eager"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(serve, env=environ, stdout=log, stderr=subprocess.STDOUT) as server,
    ):
        try:
            answer, until = "", time.monotonic() + 500
            while not answer and server.poll() is None and time.monotonic() < until:
                time.sleep(1)
                answer = subprocess.run([*ask, "--silent"], stdout=subprocess.PIPE, text=True, check=False).stdout
        finally:
            server.terminate()
    assert answer, (tmp_path / "log").read_text()[-4000:]
    text = json.loads(answer)["choices"][0]["text"]
    assert f'# "text": {json.dumps(text)}\n' in page

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    model.load_state_dict(bucketpoint.load(url, step="latest", keys="model", storage_options=minio.options)["model"])
    tokenizer = AutoTokenizer.from_pretrained(config)
    prompt = tokenizer(json.loads(ask[ask.index("--json") + 1])["prompt"], return_tensors="pt")
    (tokens,) = model.generate(**prompt, do_sample=False, max_new_tokens=50)
    assert tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True) == text


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_generates_the_tokens_of_the_exported_model_also_after_an_update(tmp_path: Path, world: int) -> None:
    # Large weights, so that the tokens depend on them.
    weights = [exported(tmp_path / f"exported-{seed}", "llama", seed, scale=8) for seed in (0, 1)]
    run_url = checkpoint(tmp_path / "run", weights[0])
    checkpoint(tmp_path / "later", weights[1])
    arrives = {f"{tmp_path}/later/step-7": f"{tmp_path}/run/step-8"}
    arguments = {"dtype": "float32", "generate": True}
    theirs = {"load_format": "safetensors", **arguments}
    expected = [
        run(world, tmp_path / f"theirs-{seed}", model=f"{tmp_path}/exported-{seed}", **theirs) for seed in (0, 1)
    ]
    assert len({*map(str, expected)}) == 2
    model = str(tmp_path / "exported-0")
    updated = run(world, tmp_path / "ours", model=model, arrives=arrives, **ours(run_url), **arguments)
    assert updated == [[*expected[0][0], *expected[1][0]]]
