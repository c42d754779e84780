"""A trainer in the manner of Lightning's documentation: it saves every 9 steps, and goes on where it stopped.

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
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from bucketpoint.integrations.lightning import BucketCheckpoint, bucket_strategy
from bucketpoint.retention import Keep, RetentionPolicy, Save, SaveEvery

SAMPLES, BATCH, WORLD = 72, int(os.environ.get("BATCH", "8")), int(os.environ["WORLD_SIZE"])


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


class FSDPOnCPU(FSDPStrategy):
    """FSDP1 without an accelerator: torch refuses only to look for a CPU by itself."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: bucket_strategy(DDPStrategy),
    "fsdp": lambda: bucket_strategy(FSDPOnCPU),
    "fsdp2": lambda: bucket_strategy(ModelParallelStrategy, WORLD, 1),
}


def main(root: str, report: str, kind: str) -> None:
    lightning.seed_everything(0, verbose=False)
    policy = RetentionPolicy(Keep(latest=2), save=Save(every=[SaveEvery(9)]))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=STRATEGIES[kind](),
        max_epochs=3,
        max_steps=int(os.environ.get("STEPS", "-1")),
        callbacks=[BucketCheckpoint(root, policy=policy)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH // WORLD, shuffle=True)
    model = Model(kind)
    trainer.fit(model, loader, ckpt_path=root)
    if trainer.is_global_zero:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        Path(report).write_text(json.dumps({"seen": model.seen, "rate": rate, "epoch": trainer.current_epoch}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
