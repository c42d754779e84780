"""Trains a small GPT on Python source under FSDP2, saves to a bucket in the background, and resumes from the newest
whole checkpoint on another number of ranks, as long as it divides `--batch`. CPU with gloo or CUDA with NCCL, one node
or many.

    torchrun --nproc-per-node 4 examples/train_gpt.py --checkpoint s3://bucket/run
    torchrun --nproc-per-node 8 --nnodes 4 --rdzv-endpoint HOST:PORT examples/train_gpt.py --checkpoint s3://bucket/run
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bucketpoint import S3Reader, S3Writer, latest_checkpoint

BYTES = 256  # the vocabulary: text is learned byte by byte
MASKED = 0  # a byte that source code never holds


def main() -> None:
    args = parse_args()
    device = init_distributed()
    log = Log(args.events)
    log.write(pids=gather(os.getpid()), world_size=dist.get_world_size())
    try:
        train(args, device, log)
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device, log: Log) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch % world_size:
        raise SystemExit(f"--batch {args.batch} cannot be shared out evenly among {world_size} ranks: pass a multiple")
    torch.manual_seed(args.seed)
    model = shard(GPT(args.layers, args.width, args.heads, args.context).to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    data = Windows(read_text(Path(args.text)), args.context, args.seed)
    app = AppState(model, optimizer, Progress(noise=torch.Generator().manual_seed(args.seed)))
    saver = Saver(args.checkpoint, log) if args.checkpoint else None

    # One rank asks the bucket and tells the others: a checkpoint that appears in between must not split the job.
    newest = broadcast(latest_checkpoint(args.checkpoint) if args.checkpoint and rank == 0 else None)
    if newest:
        dcp.load({"app": app}, checkpoint_id=newest, storage_reader=S3Reader())
        log.write(resumed=newest, step=app.progress.step)

    while app.progress.step < args.steps:
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(app.progress.step, args)
        batch = data.take(app.progress.position, args.batch)
        # Every rank draws the whole batch's noise and uses its own rows: the number of ranks changes nothing.
        masked = torch.rand(args.batch, args.context, generator=app.progress.noise) < args.mask
        mine = slice(rank * args.batch // world_size, (rank + 1) * args.batch // world_size)
        inputs = batch[:, :-1].masked_fill(masked, MASKED)[mine].to(device)
        targets = batch[mine, 1:].to(device)

        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        app.progress.step += 1
        app.progress.position += args.batch
        dist.all_reduce(loss.detach_())
        log.write(
            step=app.progress.step,
            loss=loss.item() / world_size,
            seconds=time.perf_counter() - started,
            uploading=saver is not None and saver.busy,
        )
        if saver and (app.progress.step % args.save_every == 0 or app.progress.step == args.steps):
            saver.save(app)
    if saver:
        saver.wait()


class Saver:
    """Saves in the background, one save at a time, with one writer for the whole run."""

    def __init__(self, root: str, log: Log) -> None:
        self.root = root.rstrip("/")
        self.log = log
        self.writer = S3Writer()
        # A save talks between ranks while training does too. On one group their collectives could meet in a different
        # order on each rank; a group of its own keeps them apart.
        self.group = dist.new_group(backend="gloo")
        self.pending: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        return self.pending is not None and not self.pending.done()

    def save(self, app: AppState) -> None:
        self.wait()
        step, started = app.progress.step, time.perf_counter()
        url = f"{self.root}/step-{step}"
        future = dcp.async_save({"app": app}, checkpoint_id=url, storage_writer=self.writer, process_group=self.group)
        self.log.write(saving=url, step=step, blocked=time.perf_counter() - started)
        future.add_done_callback(lambda done: self._report(done, url, time.perf_counter() - started))
        self.pending = future

    def _report(self, done: Future[Any], url: str, seconds: float) -> None:
        if done.exception() is None:
            self.log.write(saved=url, seconds=seconds)

    def wait(self) -> None:
        """Wait for the save in flight; a save that failed raises here, on every rank."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None


@dataclass
class Progress:
    """Where training is, besides the weights. The same on every rank."""

    noise: torch.Generator
    step: int = 0
    position: int = 0
    """Windows of text consumed so far."""


@dataclass
class AppState(Stateful):
    """Everything that a resumed run needs, as DCP wants it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    progress: Progress

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        progress = self.progress
        return {
            "model": model,
            "optim": optim,
            "step": progress.step,
            "position": progress.position,
            "rng": progress.noise.get_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )
        self.progress.step = state_dict["step"]
        self.progress.position = state_dict["position"]
        self.progress.noise.set_state(state_dict["rng"])


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A byte-level language model."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard(model: GPT, device: torch.device) -> GPT:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Windows:
    """Text cut into windows, in an order that is shuffled anew for each epoch and depends on the seed alone."""

    def __init__(self, text: bytes, length: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length, self.seed = length, seed
        self.count = (len(text) - 1) // length
        self.epoch, self.order = -1, torch.empty(0, dtype=torch.int64)

    def take(self, position: int, count: int) -> Tensor:
        """Windows `position` to `position + count` of the endless stream, each one byte longer than the context."""
        return torch.stack([self._window(position + i) for i in range(count)]).long()

    def _window(self, index: int) -> Tensor:
        epoch, within = divmod(index, self.count)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.epoch, self.order = epoch, torch.randperm(self.count, generator=generator)
        start = int(self.order[within]) * self.length
        return self.text[start : start + self.length + 1]


def read_text(folder: Path) -> bytes:
    """The Python files of a folder, one after the other."""
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise SystemExit(f"no Python source in {folder}: name another folder with --text")
    return text


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Log:
    """What happens, as JSON lines for a program that watches and as short lines for a person. Only rank 0 has one."""

    def __init__(self, path: str | None) -> None:
        self.enabled = dist.get_rank() == 0
        self.file = open(path, "a") if path and self.enabled else None  # noqa: SIM115 (lives as long as the process)
        self.lock = threading.Lock()

    def write(self, **event: Any) -> None:
        if not self.enabled:
            return
        with self.lock:
            if self.file:
                self.file.write(json.dumps(event) + "\n")
                self.file.flush()
            print(
                "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in event.items()), flush=True
            )


def init_distributed() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def broadcast(value: str | None) -> str | None:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: int) -> list[int]:
    """Every rank's value, on every rank."""
    values = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--checkpoint", metavar="URL", help="where to save and to resume from; without it nothing is saved"
    )
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", default=sysconfig.get_paths()["stdlib"], metavar="FOLDER", help="of Python files")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes")
    parser.add_argument("--batch", type=int, default=16, help="windows a step, over all ranks")
    parser.add_argument("--mask", type=float, default=0.05, help="share of input bytes that are hidden")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=10, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--events", metavar="FILE", help="append what happens as JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
