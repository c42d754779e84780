"""Save without stopping: the state is copied while the next step computes, and uploaded after that.

    python examples/zero_overhead.py s3://bucket/run
    torchrun --nproc-per-node 2 examples/zero_overhead.py s3://bucket/run

CPU or CUDA. Forward and backward only read the weights; `optimizer.step()` writes them, so it alone waits for the copy.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import bucketpoint
from bucketpoint import BucketReader, BucketWriter, SaveHandle, StagingOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="URL of the run; checkpoints go to ROOT/step-N")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()

    device = set_up()
    model, optimizer = build(args.width, device)
    # Made once: the writer keeps its staging memory between saves. Two buffers, so that a slow upload stops nothing.
    writer = BucketWriter(staging=StagingOptions(use_async_staging=True, when_busy="double_buffer"))
    # Saving gets a group of its own: its messages must not meet those of training.
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    inputs = torch.randn(256, args.width, device=device)
    # The optimizer's moments exist once it has stepped, so the memory that saves will need is known after a first step.
    train_step(model, optimizer, inputs, None)
    writer.prefault(state_of(model, optimizer))

    saves: list[SaveHandle] = []
    saved_weight = torch.empty(0)
    staging: SaveHandle | None = None
    for step in range(1, args.steps + 1):
        blocked = train_step(model, optimizer, inputs, staging)
        if staging is not None:
            say(f"step {step:3}  waited {blocked * 1e3:5.1f} ms for the copy, before optimizer.step()")
            staging = None
        if step % args.save_every == 0:
            started = time.perf_counter()
            staging = bucketpoint.async_save(
                state_of(model, optimizer),
                checkpoint_id=f"{args.root.rstrip('/')}/step-{step}",
                storage_writer=writer,
                process_group=group,
            )
            say(f"step {step:3}  async_save returned after {(time.perf_counter() - started) * 1e3:5.1f} ms")
            saves.append(staging)
            saved_weight = model[0].weight.detach().to("cpu", copy=True)

    for save in saves:
        save.result()
        say(f"{save.url} is committed")
    writer.close()
    check(str(saves[-1].url), args.width, device, saved_weight)
    if dist.is_initialized():
        dist.destroy_process_group()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, save: SaveHandle | None
) -> float:
    """One step, and the seconds it waited for the copy of the state that `save` is taking."""
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    started = time.perf_counter()
    if save is not None:
        save.staged.result()
    blocked = time.perf_counter() - started
    optimizer.step()
    return blocked


def set_up() -> torch.device:
    cuda = torch.cuda.is_available()
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def build(width: int, device: torch.device) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU()))).to(device)
    return model, torch.optim.AdamW(model.parameters())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}


def check(url: str, width: int, device: torch.device, expected: torch.Tensor) -> None:
    """Load the last checkpoint into a new model: it holds the weights of the moment at which it was saved."""
    model, optimizer = build(width, device)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=url, storage_reader=BucketReader())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    torch.testing.assert_close(model[0].weight.detach().cpu(), expected, rtol=0, atol=0)
    say(f"{url} holds what was saved")


def say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
