"""Trains a small network under FSDP2 where jobs are stopped and started again: on Slurm and on Kubernetes
(docs/jobs.md). It goes on from the newest checkpoint on any number of ranks, with gloo or NCCL.

    torchrun --nproc-per-node 4 examples/slurm/train.py examples/slurm/policy.yaml --steps 1000
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from bucketpoint import CheckpointManager

STOPPED = 75
"""Exit status of ranks that were told to stop before the last step: EX_TEMPFAIL of sysexits.h, "start me again"."""


def main() -> None:
    args = parse_args()
    logging.basicConfig(format="%(message)s")
    device = init_distributed()
    # Slurm's warning comes as SIGUSR1, which torchrun is told to ignore. For the manager both signals mean "stop".
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    stopped = train(args, device)
    # torchrun ends the other ranks of its node when one ends with another status than 0.
    dist.barrier()
    dist.destroy_process_group()
    if stopped:
        sys.exit(STOPPED)


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Train up to the last step. Return True if the job was told to stop before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    note = Path(args.stopped_note) if args.stopped_note and int(os.environ["LOCAL_RANK"]) == 0 else None
    if note is not None:
        note.write_text("", encoding="utf-8")  # torchrun may start the ranks again in the same place
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, args.width), nn.GELU(), nn.Linear(args.width, 1)).to(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict[str, Any]:
        model_state, optim_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optim": optim_state}

    # After SIGTERM the manager saves the step, and `close` waits for the upload, at most `--grace` seconds.
    with CheckpointManager(policy=args.policy, grace_s=args.grace) as manager:
        loaded = state()
        restored = manager.restore(loaded)
        if restored:
            set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        first = restored.step + 1 if restored else 1
        say(f"{ranks} ranks begin with step {first}")
        for step in range(first, args.steps + 1):
            # Every rank draws the whole batch of a step and takes its own rows: the number of ranks changes no batch.
            batch = torch.randn(args.batch, 64, generator=torch.Generator().manual_seed(step))[rank::ranks].to(device)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.sleep)
            if manager.should_save(step, last=step == args.steps):
                manager.save(step, state())
            if manager.stop_asked and step < args.steps:
                say(f"stopped after step {step}")
                if note is not None:
                    note.write_text(f"stopped after step {step}\n", encoding="utf-8")
                return True
    say(f"finished with step {args.steps}")
    return False


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def init_distributed() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("policy", help="the retention policy: which checkpoints are kept and when saves are made")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=240, help="rows a step, over all ranks")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument(
        "--grace", type=float, default=90, metavar="S", help="from the signal to the end of the last save"
    )
    parser.add_argument("--stopped-note", metavar="FILE", help="written on each node if the job was told to stop")
    parser.add_argument("--sleep", type=float, default=0, metavar="S", help="longer steps, for trials")
    return parser.parse_args()


if __name__ == "__main__":
    main()
