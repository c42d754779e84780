"""Trains a small model and resumes with all that a run needs: model, optimizer, scheduler, position in the data, random
state, and a value of each rank. Every job may have another number of ranks, as long as it divides `BATCH`.

    torchrun --nproc-per-node 2 examples/resume.py s3://bucket/run --until 40
    torchrun --nproc-per-node 3 examples/resume.py s3://bucket/run --until 80

Needs torchdata besides bucketpoint (`pip install torchdata`). A path in place of the URL works, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import bucketpoint

BATCH = 12  # samples a step, over all ranks
STEPS = 120  # the length of the schedule, whenever a job stops
SEED = 7


class GlobalBatches(Sampler[list[int]]):
    """Batches of this rank from an endless stream of samples, shuffled anew in each epoch.

    The position counts the samples of all ranks. It is therefore the same on each of them, and means the same to any
    other number of ranks; that of torchdata's own samplers counts the samples of one rank.
    """

    def __init__(self, count: int) -> None:
        self.count, self.position = count, 0
        self.epoch, self.order = -1, torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        share = BATCH // dist.get_world_size()
        first = self.position + dist.get_rank() * share
        self.position += BATCH
        return [self._sample(first + i) for i in range(share)]

    def _sample(self, position: int) -> int:
        epoch, within = divmod(position, self.count)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(SEED + epoch)
            self.epoch, self.order = epoch, torch.randperm(self.count, generator=generator)
        return int(self.order[within])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Training:
    """Model and optimizer, under the names of the parameters: those fit any number of ranks. DCP calls both methods."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if BATCH % world:
        raise SystemExit(f"{BATCH} samples cannot be shared out evenly among {world} ranks")

    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    samples = torch.randn(500, 32)
    data = TensorDataset(samples, samples.square().mean(1, keepdim=True))
    # The generator: else the workers' seed is drawn from the random state of each rank, and saved with the loader.
    batches = GlobalBatches(len(data))
    loader = StatefulDataLoader(data, batch_sampler=batches, num_workers=args.workers, generator=torch.Generator())
    noise = torch.Generator().manual_seed(SEED)  # the same on every rank: all draw for the whole batch, and take a part
    torch.manual_seed(SEED + 1 + rank)  # what differs between ranks, such as dropout, is drawn from here
    here = {"samples": 0}  # a value of each rank: how many samples it has trained on

    def state() -> dict[str, Any]:
        return {
            "training": Training(model, optimizer),
            "scheduler": scheduler,
            "loader": loader,
            "noise": noise.get_state(),
            "ranks": bucketpoint.rank_state({"random": torch.get_rng_state(), **here}),
        }

    with bucketpoint.CheckpointManager(args.root, keep=3, every=10) as manager:
        held = state()
        del held["ranks"]  # another number of ranks may have saved it
        restored = manager.restore(held)
        if restored:
            noise.set_state(held["noise"])
            saved = bucketpoint.load(restored.url, keys="ranks")["ranks"]
            if mine := saved.get(f"rank-{rank}"):  # a rank that was not there keeps its seed, and begins to count
                torch.set_rng_state(mine["random"])
                here["samples"] = mine["samples"]

        step = restored.step if restored else 0
        for inputs, targets in loader:
            if step == args.until or manager.stop_asked:
                break
            step += 1
            share = len(inputs)
            drawn = torch.randn(BATCH, inputs.shape[1], generator=noise)[rank * share : (rank + 1) * share]
            loss = nn.functional.mse_loss(model(inputs + 0.1 * drawn), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            here["samples"] += share
            dist.all_reduce(loss.detach_())
            if rank == 0:
                print(f"step {step} loss {loss.item() / world:.6f} lr {scheduler.get_last_lr()[0]:.6f}", flush=True)
            if manager.should_save(step, last=step == args.until):
                manager.save(step, state)
    counts: list[Any] = [None] * world
    dist.all_gather_object(counts, here["samples"])
    if rank == 0:
        print(f"samples of each rank: {counts}", flush=True)
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("root", metavar="URL", help="where the checkpoints of the run are, or a folder")
    parser.add_argument("--until", type=int, default=STEPS, metavar="STEP", help="stop after this step")
    parser.add_argument("--workers", type=int, default=1, help="of the loader; the same in every job")
    return parser.parse_args()


if __name__ == "__main__":
    main()
