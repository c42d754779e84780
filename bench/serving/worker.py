"""The measuring process of the part for serving: loads of weights into parameters that are laid out as vLLM's.

The parameters are torch's: an engine's start would take longer than what is measured. What is here and in no other
part: the model, and who loads it in which way, in `CONTENDERS`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench import gil
from bench.lines import answer_each, speaker
from bench.resident import forget_peak, memory

HIDDEN, KEYS, FFN, LAYERS, VOCAB = 1024, 256, 3584, 32, 32000
OPTIMIZER_ROWS = 32 << 10
"""Rows of a tensor beside the weights, 64 MB, that nobody asks for."""

Parameters = dict[str, torch.Tensor]


def weights() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of 291 tensors, 1.003 GB in bf16, as the Hub has them of a Llama of 32 layers."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part, rows in (("q", HIDDEN), ("k", KEYS), ("v", KEYS), ("o", HIDDEN)):
            yield f"{name}.self_attn.{part}_proj.weight", (rows, HIDDEN)
        yield f"{name}.mlp.gate_proj.weight", (FFN, HIDDEN)
        yield f"{name}.mlp.up_proj.weight", (FFN, HIDDEN)
        yield f"{name}.mlp.down_proj.weight", (HIDDEN, FFN)
        yield f"{name}.input_layernorm.weight", (HIDDEN,)
        yield f"{name}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


NUMBERS = {name: number for number, (name, _) in enumerate(weights())}
BYTES = sum(2 * torch.Size(shape).numel() for _, shape in weights())
_FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", HIDDEN), "v_proj": ("qkv_proj", HIDDEN + KEYS)}
_FUSED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", FFN)}


def value_of(name: str) -> float:
    """Return the value of all elements of a tensor, which bf16 has exactly."""
    return float(NUMBERS[name] % 251)


class Model:
    """The parameters of one worker of `world`, and vLLM's way to copy into them: narrow both sides, then copy."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self._rank, self._world = rank, world
        rows: dict[str, list[int]] = {}
        for name, shape in weights():
            axis, whole, _ = self._place(name)
            size = list(shape)
            if axis is not None:
                size[axis] //= world
            if whole in rows:
                rows[whole][0] += size[0]
            else:
                rows[whole] = size
        self.parameters = {name: torch.full(size, -1, dtype=torch.bfloat16) for name, size in rows.items()}

    def _place(self, name: str) -> tuple[int | None, str, int]:
        """Return the axis along which workers split a tensor, the parameter's name, and its first row there."""
        kind = name.split(".")[-2]
        fused, row = _FUSED.get(kind, (kind, 0))
        axis = None if "norm" in kind else 1 if kind in ("o_proj", "down_proj") else 0
        return axis, name.replace(kind, fused), row // self._world

    def views(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, part of the parameter, and the part of the tensor that belongs there."""
        for name, tensor in tensors:
            axis, whole, at = self._place(name)
            if axis is not None:
                size = tensor.shape[axis] // self._world
                tensor = tensor.narrow(axis, self._rank * size, size)
            yield name, self.parameters[whole].narrow(0, at, tensor.shape[0]), tensor

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, target, part in self.views(tensors):
            target.data.copy_(part)

    def wrong(self) -> list[str]:
        shapes = ((name, torch.empty(shape, device="meta")) for name, shape in weights())
        return [name for name, part, _ in self.views(shapes) if not bool((part == value_of(name)).all())]


def save(rank: int, world: int, environment: dict[str, str], url: str) -> None:
    """Save the weights as a training program of `world` ranks does, beside an optimizer's state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from bucketpoint import BucketWriter

    os.environ.update(environment)
    mesh = init_device_mesh("cpu", (world,))

    def part(shape: Sequence[int], value: float) -> DTensor:
        rows = torch.full((shape[0] // world, *shape[1:]), value, dtype=torch.bfloat16)
        return DTensor.from_local(rows, mesh, [Shard(0)])

    model = {name: part(shape, value_of(name)) for name, shape in weights()}
    state = {"model": model, "optim": part((OPTIMIZER_ROWS, HIDDEN), 1.0)}
    dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter())


def load_part(rank: int, world: int, environment: dict[str, str], url: str) -> list[str]:
    """Load a worker's part with the others of its host; return the names of tensors with other values."""
    os.environ.update(environment)
    model = Model(rank, world)
    _load_promised(model, url, dist.group.WORLD)
    return model.wrong()


def _load_promised(model: Model, url: str, group: Any = None) -> None:
    from bucketpoint.integrations.weights import Weights, WeightsOptions

    with Weights(WeightsOptions.of({"url": url, "prefix": "model."}), group).loading() as tensors:
        model.load(tensors.items())


def _load_dcp(model: Model, url: str) -> None:
    from bucketpoint import BucketReader

    shapes = ((name, torch.empty(shape, device="meta")) for name, shape in weights())
    targets = {name: part for name, part, _ in model.views(shapes)}
    dcp.load({"model": targets}, checkpoint_id=url, storage_reader=BucketReader(), no_dist=True)


def _load_runai(model: Model, url: str) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(url)
        model.load(streamer.get_tensors())


@dataclass(frozen=True)
class Contender:
    """`load(model, url)`; the modules are imported before the fork."""

    load: Callable[[Model, str], None]
    # An engine has imported torch._dynamo, which torch does in the first use of a dispatch mode.
    modules: Sequence[str] = ("bucketpoint.integrations.weights", "awscrt", "torch._dynamo")


CONTENDERS = {
    "bucketpoint": Contender(_load_promised),
    "dcp.load": Contender(_load_dcp),
    "runai": Contender(_load_runai, ("runai_model_streamer",)),
}


def main() -> None:
    say = speaker()
    # OpenMP's threads do not survive a fork: the parent must never start them.
    torch.set_num_threads(1)
    answer_each(say, _measure, lambda command: CONTENDERS[command["contender"]].modules)


def _measure(command: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(command["env"])
    model = Model()
    held = _lock_watched() if command["op"] == "lock" else None
    before = memory()
    forget_peak()
    used, start = os.times(), time.monotonic()
    CONTENDERS[command["contender"]].load(model, command["url"])
    end, now, after = time.monotonic(), os.times(), memory()
    answer: dict[str, Any] = {
        "start": start,
        "end": end,
        "wall_s": end - start,
        "user_s": now.user - used.user,
        "system_s": now.system - used.system,
        "needed_bytes": BYTES,
        "peak_bytes": max(after["VmHWM"] - after["RssFile"] - before["anonymous"], 0),
    }
    if held is not None:
        answer["lock_s_per_gb"] = held() * (end - start) / (BYTES / 1e9)
    if wrong := model.wrong():
        answer["error"] = f"{len(wrong)} tensors differ after the load, {wrong[0]} first"
    return answer


def _lock_watched() -> Callable[[], float]:
    """Let another process look at this one's lock; return a function that ends it, and returns the time's part held."""
    place, watched = gil.locate(), os.getpid()
    if place is None:
        return lambda: float("nan")
    (told, tell), (read, write) = os.pipe(), os.pipe()
    if os.fork() == 0:
        ended = threading.Event()
        os.close(tell)
        threading.Thread(target=lambda: (os.read(told, 1), ended.set()), daemon=True).start()
        held = gil.watch(watched, *place, lambda: True, ended)
        os.write(write, str(held.any).encode())
        os._exit(0)

    def end() -> float:
        os.close(tell)
        return float(os.read(read, 99))

    return end


if __name__ == "__main__":
    main()
