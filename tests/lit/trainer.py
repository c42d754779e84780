"""A trainer in the manner of Lightning's documentation: it saves every 6 steps, and goes on where it stopped.

Arguments: URL of the run, file for what rank 0 saw, `ddp` or `fsdp2`, number of ranks, and the step at which every rank
is killed right after its save has begun; 0 for none.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch

from bucketpoint.integrations.lightning import (
    BucketCheckpoint,
    BucketDDPStrategy,
    BucketModelParallelStrategy,
    BucketSingleDeviceStrategy,
)
from bucketpoint.retention import Keep, RetentionPolicy, Save, SaveEvery

EPOCHS, SAMPLES, BATCH = int(os.environ.get("EPOCHS", "3")), 72, int(os.environ.get("BATCH", "8"))


class Model(lightning.LightningModule):
    """A small network that notes which samples each step sees, and its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.seen: list[Any] = []
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def configure_model(self) -> None:
        if self.kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        samples, inputs = batch
        outputs = self.net(inputs)
        loss = (outputs**2 + outputs).mean()
        mean = self.all_gather(loss.detach()).mean().item()
        self.seen.append((self.global_step + 1, sorted(self.all_gather(samples).flatten().tolist()), mean))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Killed(lightning.Callback):
    """Kills the process after the callbacks before it have begun a save."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(root: str, report: str, kind: str, world: int, kill_at: int) -> None:
    lightning.seed_everything(0, verbose=False)
    strategy: Any = BucketDDPStrategy() if kind == "ddp" else BucketModelParallelStrategy(world, 1)
    if world == 1:
        strategy = BucketSingleDeviceStrategy(device="cpu")
    policy = RetentionPolicy(Keep(latest=2), save=Save(every=[SaveEvery(6)]))
    checkpoint = BucketCheckpoint(root, policy=policy)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if kill_at:
        # Lightning moves checkpoint callbacks to the end.
        trainer.callbacks.append(Killed(kill_at))
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 8))
    loader = torch.utils.data.DataLoader(
        data, batch_size=BATCH // world, shuffle=True, num_workers=int(os.environ.get("WORKERS", "0"))
    )
    model = Model(kind)
    trainer.fit(model, loader, ckpt_path=root)
    if trainer.is_global_zero:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        Path(report).write_text(json.dumps({"seen": model.seen, "rate": rate, "epoch": trainer.current_epoch}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
