"""Megatron's own functions for checkpoints, as its training loop calls them, with a folder that stands for a URL.

Arguments: the folder, the URL of the run, file for what rank 0 saw, number of ranks, size of the tensor-parallel
groups, and the iteration at which rank 0 is killed: by then all data are uploaded, and the commit is next; 0 for none.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.training import checkpointing, global_vars
from megatron.training.arguments import parse_args
from trainer import BATCH, Trainer, Writer

from bucketpoint.integrations.megatron import let_stand_for

STEPS, SAVE_EVERY = 4, 2

# All that insists on a GPU, for tensors that are on the CPU; `trainer` replaces more.
make_tensor = torch.tensor
torch.tensor = lambda *data, device=None, **kw: make_tensor(*data, device="cpu" if device == "cuda" else device, **kw)
torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
torch.cuda.set_rng_state = lambda *_: None


def arguments_of_megatron(folder: str, tensor_parallel: int, world: int) -> Any:
    sys.argv = ["pretrain", f"--save={folder}", f"--load={folder}", "--ckpt-format=torch_dist"]
    sys.argv += ["--no-save-optim", "--no-load-optim", f"--tensor-model-parallel-size={tensor_parallel}"]
    args = parse_args()
    # As `validate_args` sets them, which asks for a GPU.
    for name in ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "rank"):
        setattr(args, name, 0)
    args.use_dist_ckpt, args.world_size, args.data_parallel_size = True, world, world // tensor_parallel
    global_vars.set_args(args)
    init_num_microbatches_calculator(0, None, BATCH, BATCH // args.data_parallel_size, args.data_parallel_size)
    return args


def main(rank: int, folder: str, url: str, report: str, world: int, tensor_parallel: int, kill_at: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    writer = Writer()
    let_stand_for(folder, url, storage_writer=writer)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    trainer = Trainer(tensor_parallel)
    arguments_of_megatron(folder, tensor_parallel, world)
    # Megatron refuses to go on without one.
    get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})
    context: dict[str, Any] = {}
    trainer.done, _ = checkpointing.load_checkpoint([trainer.model], None, None, checkpointing_context=context)
    first = trainer.done
    told: dict[str, Any] = {"from": first, "digests": {}}
    told["loaded"] = trainer.digest(trainer.model.sharded_state_dict())
    while trainer.done < first + STEPS:
        trainer.step()
        if trainer.done % SAVE_EVERY == 0:
            writer.dies = trainer.done == kill_at
            told["digests"][trainer.done] = trainer.digest(trainer.model.sharded_state_dict())
            if rank == 0:
                Path(report).write_text(json.dumps(told))
            checkpointing.save_checkpoint(trainer.done, [trainer.model], None, None, 0, checkpointing_context=context)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[4])
    torch.multiprocessing.start_processes(
        main, (*sys.argv[1:4], ranks, int(sys.argv[5]), int(sys.argv[6])), ranks, start_method="fork"
    )
