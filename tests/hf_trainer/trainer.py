"""A trainer in the manner of transformers' documentation: it saves every 6 steps, and goes on where it stopped.

Arguments: URL of the run, and file for what rank 0 saw.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from bucketpoint.integrations.transformers import BucketTrainerMixin

SAMPLES, BATCH, EPOCHS = 72, 8, 3


class BucketTrainer(BucketTrainerMixin, Trainer):
    """A trainer that notes which samples each step sees, and its loss."""

    seen: list[Any]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if "FSDP" in os.environ:
            # On CPUs Accelerate itself chooses DDP whatever the arguments say.
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=int(os.environ["FSDP"]),
                auto_wrap_policy="NO_WRAP",
                cpu_ram_efficient_loading=False,
                use_orig_params=True,
            )
            state.distributed_type, state.device = DistributedType.FSDP, torch.device("cpu")
            self.is_fsdp_enabled = True

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **kwargs)
        samples = sorted(self.accelerator.gather(inputs["input_ids"][:, 0].contiguous()).tolist())
        mean = self.accelerator.gather(loss.detach()).mean().item()
        self.seen.append((self.state.global_step + 1, samples, mean))
        return loss


def dataset() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.cat([torch.tensor([n]), torch.randint(0, 96, (7,), generator=generator)]) for n in range(SAMPLES)]
    return [{"input_ids": row, "labels": row} for row in rows]


def small_model() -> Any:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=float(os.environ.get("DROPOUT", "0")),
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def main(root: str, report: str) -> None:
    arguments = TrainingArguments(
        output_dir=f"{report}-logs",
        use_cpu=True,
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
        num_train_epochs=EPOCHS,
        save_steps=6,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)
    trainer = BucketTrainer(small_model(), arguments, train_dataset=dataset(), checkpoint_url=root)
    trainer.seen = []
    trainer.train(resume_from_checkpoint=True)
    trainer.export_pretrained(f"{root}-hub")
    if trainer.is_world_process_zero():
        told = {"seen": trainer.seen, "rate": trainer.lr_scheduler.get_last_lr(), "epoch": trainer.state.epoch}
        Path(report).write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
