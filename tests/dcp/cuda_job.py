"""A training job on one GPU for `test_cuda.py`: FSDP2, Adam, NCCL, a manager that saves in the background.

python cuda_job.py ROOT LAST_STEP [KILLED_AT]    prints each step's loss, and digests of the final state
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bucketpoint import CheckpointManager, RetentionPolicy, StagingOptions
from bucketpoint.retention import Keep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 256


def main(root: str, last: int, killed_at: int | None) -> None:
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(1)
    # Dropout draws from the device's generator, whose state is part of what is saved.
    layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 1))
    model = fully_shard(torch.nn.Sequential(*layers).to(DEVICE), mesh=init_device_mesh(DEVICE, (1,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator(DEVICE)
    generator.manual_seed(2)
    device_rng = torch.cuda if DEVICE == "cuda" else torch

    def state_of() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        rng = {"data": generator.get_state(), "device": device_rng.get_rng_state()}
        return {"model": model_state, "optim": optimizer_state, "rng": rng}

    staging = StagingOptions(use_async_staging=True, when_busy="double_buffer")
    with CheckpointManager(root, policy=RetentionPolicy(Keep(2)), staging=staging) as manager:
        state = state_of()
        restored = manager.restore(state)
        if restored:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
            generator.set_state(state["rng"]["data"])
            device_rng.set_rng_state(state["rng"]["device"])
            print(f"restored {restored.step}", flush=True)
        for step in range(restored.step + 1 if restored else 1, last + 1):
            optimizer.zero_grad()
            loss = model(torch.randn(32, WIDTH, device=DEVICE, generator=generator)).square().mean()
            loss.backward()
            # Asynchronous staging: the copy of the state must have ended before the state changes.
            manager.wait()
            optimizer.step()
            print(f"loss {step} {loss.item().hex()}", flush=True)
            manager.save(step, state_of())
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
    whole = [tensor.full_tensor().double().sum().item().hex() for tensor in model.parameters()]
    print("model", *whole, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
