"""A loop in the manner of Fabric's documentation: it saves every 6 steps, and goes on where it stopped.

Arguments: URL of the run, file for what rank 0 saw, and `ddp`, `fsdp` or `fsdp2`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bucketpoint
from bucketpoint.integrations.lightning import bucket_strategy

EPOCHS, SAMPLES, BATCH = 3, 72, 8


class FSDPOnCPU(FSDPStrategy):
    """FSDP1 without an accelerator: torch refuses only to look for a CPU by itself."""

    def setup_module(self, module: Any) -> Any:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **self._fsdp_kwargs)


def sharded(model: Any, mesh: Any) -> Any:
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main(root: str, report: str, kind: str) -> None:
    world = int(os.environ["WORLD_SIZE"])
    kinds = {"ddp": (DDPStrategy,), "fsdp": (FSDPOnCPU,), "fsdp2": (ModelParallelStrategy, sharded, world, 1)}
    strategy = bucket_strategy(*kinds[kind])
    fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 8))
    order: Any = DistributedSampler(data, world, fabric.global_rank, seed=0)
    # A dataloader of Fabric shuffles by the number of times that it was iterated over, which a new process begins at 0.
    loader: Any = DataLoader(data, BATCH // world, sampler=order)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if bucketpoint.latest_checkpoint(root) is not None:
        fabric.load(root, state)
    seen = []
    for epoch in range(state["step"] // len(loader), EPOCHS):
        order.set_epoch(epoch)
        for number, (samples, inputs) in enumerate(loader):
            if number < state["step"] - epoch * len(loader):
                continue
            outputs = model(inputs)
            loss = (outputs**2 + outputs).mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            mean = fabric.all_gather(loss.detach()).mean().item()
            seen.append((state["step"], sorted(fabric.all_gather(samples).flatten().tolist()), mean))
            if state["step"] % 6 == 0:
                fabric.save(f"{root}/step-{state['step']}", state)
    strategy.wait()
    if fabric.is_global_zero:
        Path(report).write_text(json.dumps({"seen": seen}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
