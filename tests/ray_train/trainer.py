"""A training function in the manner of Ray Train's page on FSDP2: it reports a checkpoint every 6 steps, and resumes.

Its configuration has `kind` (`ddp` or `fsdp2`), `report` (file for what rank 0 saw), and `kill_at`, the step in whose
save the workers of `kill` are killed, once they have stored one of their objects.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import bucketpoint
from bucketpoint.integrations.ray import report, restore
from bucketpoint.stores.s3 import S3Store

EPOCHS, SAMPLES, BATCH, SAVE_EVERY = 3, 72, 8, 6


def parts(world: int, rank: int) -> tuple[Any, Any, Any]:
    """Return the model, and the dataloader with its sampler, of one rank."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 8))
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=1)
    return model, torch.utils.data.DataLoader(data, batch_size=BATCH // world, sampler=sampler), sampler


def step(model: Any, optimizer: Any, inputs: torch.Tensor) -> float:
    outputs = model(inputs)
    loss = (outputs**2 + outputs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def in_one_process() -> list[tuple[int, list[int], float]]:
    """Train without Ray and without a stop. Return number, samples and loss of each step."""
    model, loader, sampler = parts(1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for samples, inputs in loader:
            seen.append((len(seen) + 1, sorted(samples.tolist()), step(model, optimizer, inputs)))
    return seen


def killed_in_the_upload(config: dict[str, Any], rank: int) -> None:
    """Kill this process after its next object is stored, once for each file of markers."""
    put, marker = S3Store.put, Path(config["report"]).with_suffix(f".killed-{rank}")

    def put_and_die(store: S3Store, key: str, *args: Any, **kwargs: Any) -> Any:
        answer = put(store, key, *args, **kwargs)
        if f"step-{config['kill_at']}/data/" in key and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    S3Store.put = put_and_die  # type: ignore[method-assign]


def train(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    if rank in config["kill"]:
        killed_in_the_upload(config, rank)
    model, loader, sampler = parts(world, rank)
    if config["kind"] == "fsdp2":
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (world,)))
    else:
        model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "steps": 0}
    url = restore(state)
    seen: list[Any] = []
    told = {"from": state["steps"], "url": url, "world": world, "seen": seen}
    writer = bucketpoint.BucketWriter()
    for epoch in range(state["steps"] // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for samples, inputs in itertools.islice(loader, state["steps"] % len(loader), None):
            loss = step(model, optimizer, inputs)
            state["steps"] += 1
            everywhere: list[Any] = [None] * world
            dist.all_gather_object(everywhere, (samples.tolist(), loss))
            together = sorted(itertools.chain.from_iterable(each for each, _ in everywhere))
            seen.append((state["steps"], together, sum(each for _, each in everywhere) / world))
            if rank == 0:
                Path(config["report"]).write_text(json.dumps(told))
            metrics = {"loss": seen[-1][2], "step": state["steps"]}
            if state["steps"] == config["kill_at"]:
                # Ray takes the reports before: it never deletes a checkpoint of which it does not know.
                ray.train.get_all_reported_checkpoints()
            if state["steps"] % SAVE_EVERY == 0:
                handle = report(metrics, state, step=state["steps"], storage_writer=writer)
                if state["steps"] == config["kill_at"]:
                    # The others train on, and reach the next step only if nobody was killed.
                    handle.result()
    report({"loss": seen[-1][2], "step": state["steps"]})
