"""PyTorch's recipe "Asynchronous Saving with Distributed Checkpoint" on a bucket: only the storage writer is another.

    python examples/async_save_recipe.py s3://bucket/recipe

One process for each GPU, or two on the CPU. The recipe's two halves follow each other: a writer for each save, then one
writer that lives across saves.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bucketpoint import S3Reader, S3Writer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 5


class AppState(Stateful):
    """Model and optimizer as one object: DCP calls its state_dict and load_state_dict when it saves and loads."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


class ToyModel(nn.Module):
    """Anything with parameters would do."""

    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 8)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    # async_save needs a CPU backend beside NCCL.
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo", rank=rank, world_size=world_size)


def build(world_size):
    model = fully_shard(ToyModel().to(DEVICE), mesh=init_device_mesh(DEVICE, (world_size,)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.rand(8, 16, device=DEVICE)).sum().backward()
    optimizer.step()


def save_with_a_writer_each(root, world_size, group):
    model, optimizer = build(world_size)
    checkpoint_future = None
    for step in range(STEPS):
        train_step(model, optimizer)

        # One save in flight: wait for the previous one. Its failure, if any, is raised here.
        if checkpoint_future is not None:
            checkpoint_future.result()

        state_dict = {"app": AppState(model, optimizer)}
        checkpoint_future = dcp.async_save(
            state_dict,
            checkpoint_id=f"{root}/first/step{step}",
            storage_writer=S3Writer(),
            process_group=group,
        )
    checkpoint_future.result()
    return model, f"{root}/first/step{STEPS - 1}"


def save_with_one_writer(root, world_size, group):
    model, optimizer = build(world_size)
    # What is kept between saves is kept in the writer, so it has to live as long as the training.
    writer = S3Writer(cache_staged_state_dict=True)
    checkpoint_future = None
    for step in range(STEPS):
        train_step(model, optimizer)

        if checkpoint_future is not None:
            checkpoint_future.result()

        state_dict = {"app": AppState(model, optimizer)}
        checkpoint_future = dcp.async_save(
            state_dict,
            checkpoint_id=f"{root}/second/step{step}",
            storage_writer=writer,
            process_group=group,
        )
    checkpoint_future.result()
    return model, f"{root}/second/step{STEPS - 1}"


def check(model, url, world_size):
    """Load a checkpoint into a fresh model, and compare it with the one that was saved."""
    fresh, optimizer = build(world_size)
    dcp.load({"app": AppState(fresh, optimizer)}, checkpoint_id=url, storage_reader=S3Reader())
    for saved, loaded in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(loaded.to_local(), saved.to_local(), rtol=0, atol=0)
    if dist.get_rank() == 0:
        print(f"{url} holds what was saved", flush=True)


def run(rank, world_size, root):
    setup(rank, world_size)
    # Saving talks between ranks while training does too. On the CPU both would use the default group, and the order of
    # their messages could differ between ranks; so saving gets a group of its own.
    group = dist.new_group(backend="gloo")
    check(*save_with_a_writer_each(root, world_size, group), world_size)
    check(*save_with_one_writer(root, world_size, group), world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    world_size = torch.cuda.device_count() if DEVICE == "cuda" else 2
    mp.spawn(run, args=(world_size, sys.argv[1].rstrip("/")), nprocs=world_size, join=True)
