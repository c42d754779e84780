"""A trainer in the manner of Accelerate's example of checkpoints: it saves every 6 steps, and goes on where it stopped.

Arguments: folder of the run, file for what rank 0 saw, and `ddp`, `fsdp1` or `fsdp2`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin, set_seed

from bucketpoint.integrations.accelerate import restore, save_state

EPOCHS, SAMPLES, BATCH, SAVE_EVERY = 3, int(os.environ.get("SAMPLES", "72")), 8, 6


class Steps:
    """A custom object of the trainer."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def main(root: str, report: str, kind: str) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1 if kind == "fsdp1" else 2,
        auto_wrap_policy="NO_WRAP",
        cpu_ram_efficient_loading=False,
        use_orig_params=True,
    )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=None if kind == "ddp" else plugin,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        # Otherwise the schedule depends on the number of processes.
        step_scheduler_with_optimizer=False,
    )
    if kind != "ddp":
        # On CPUs Accelerate itself chooses DDP whatever the plugin says.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        # FSDP1 takes "cpu:0", as which Accelerate names this device, for another one than "cpu".
        accelerator.state.device = torch.device("cpu")
    set_seed(0)
    dropout = float(os.environ.get("DROPOUT", "0"))
    layers = [torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(32, 1)]
    model: Any = torch.nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 8))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=BATCH // accelerator.num_processes, shuffle=True)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps = Steps()
    accelerator.register_for_checkpointing(steps)

    restore(accelerator, root)
    seen: list[Any] = []
    for epoch in range(steps.done // len(loader), EPOCHS):
        begun = steps.done % len(loader)
        batches = accelerator.skip_first_batches(loader, begun) if begun else loader
        # Accelerate below 1.15 forgets the epoch when it skips batches.
        batches.set_epoch(epoch)
        for samples, inputs in batches:
            outputs = model(inputs)
            loss = (outputs**2 + outputs).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps.done += 1
            mean = accelerator.gather(loss.detach()).mean().item()
            seen.append((steps.done, sorted(accelerator.gather(samples).tolist()), mean))
            if steps.done % SAVE_EVERY == 0:
                save_state(accelerator, f"{root}/step-{steps.done}").result()
    if accelerator.is_main_process:
        told = {"seen": seen, "rate": scheduler.get_last_lr(), "iteration": accelerator.save_iteration}
        Path(report).write_text(json.dumps(told))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
