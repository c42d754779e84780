"""A trainer with torch_checkpointing's manager and FSDP2: it saves every 6 steps, and goes on where it stopped.

Arguments: URL of the run, file for what rank 0 saw, and `sync` or `async`; then perhaps the step in whose save every
rank is killed, between the upload of its first file and that of its last.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.staging import CheckpointStagerConfig

from bucketpoint.integrations.torch_checkpointing import BucketStorageConfig
from bucketpoint.stores.s3 import S3Store

STEPS, SAMPLES, BATCH, SAVE_EVERY = 36, 96, 8, 6
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def saver(kind: str) -> Any:
    if kind == "sync":
        return SyncCheckpointSaverConfig()
    # What torch_checkpointing's own documents say for machines without CUDA.
    staging = CheckpointStagerConfig(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    return AsyncCheckpointSaverConfig(staging_config=staging)


def tensors(model: Any, optimizer: Any) -> dict[str, Any]:
    optim = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {
        "model": get_model_state_dict(model),
        "optim": {name: value for name, value in optim.items() if isinstance(value, torch.Tensor)},
    }


def gather_without_cuda(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Stand in for the one method of torch_checkpointing 0.1.1 that needs CUDA even under gloo."""
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


def kill_before_the_last_file() -> None:
    put = S3Store.put

    def upload(self: S3Store, key: str, *args: Any, **more: Any) -> Any:
        if "/optim_" in key:
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, key, *args, **more)

    S3Store.put = upload  # type: ignore[method-assign]


def main(root: str, report: str, kind: str, kill_at: int = 0) -> None:
    dist.init_process_group("gloo")
    DefaultMetadataManager._all_gather_pickled_data = gather_without_cuda  # type: ignore[method-assign]
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(SAMPLES, 8)
    # The state of AdamW begins with the first step.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    storage_config = BucketStorageConfig.for_this_run(root)
    config = CheckpointManager.Config(
        save=saver(kind),
        storage_config=storage_config,
        items={"model": ItemSpec(resharder=DefaultResharder()), "optim": ItemSpec(resharder=DefaultResharder())},
    )
    manager = config.build()
    if kind == "sync":
        # Otherwise torch_checkpointing 0.1.1 writes the metadata in the first save of a manager only.
        manager._metadata_manager._should_cache_metadata = False  # type: ignore[union-attr]
    storage = storage_config.create_storage()
    saved = [int(name[5:]) for name in storage.ls(Path()) if name.startswith("step-")]
    done = first = max(saved, default=0)
    dist.barrier()
    if done:
        into = tensors(model, optimizer)
        loaded = manager.load(f"step-{done}", into=into, strict=True)
        set_model_state_dict(model, loaded["model"])
        rest = get_optimizer_state_dict(model, optimizer, options=FLAT)
        set_optimizer_state_dict(model, optimizer, {**rest, **loaded["optim"]}, options=FLAT)

    seen = []
    while done < STEPS:
        epoch, batch = divmod(done, SAMPLES // BATCH)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        samples = order[batch * BATCH : (batch + 1) * BATCH]
        mine = samples[rank * BATCH // world : (rank + 1) * BATCH // world]
        outputs = model(data[mine])
        loss = (outputs**2 + outputs).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, mine.tolist())
        seen.append((done, sorted(sample for part in parts for sample in part), mean.item() / world))
        if done % SAVE_EVERY == 0:
            if done == kill_at:
                kill_before_the_last_file()
            saving = manager.save(f"step-{done}", tensors(model, optimizer))
            if saving is not None:
                saving.result()
    manager.close()
    dist.barrier()
    if rank == 0:
        shards = [isinstance(one, DTensor) and one.device_mesh.size() for one in model.parameters()]
        Path(report).write_text(json.dumps({"from": first, "seen": seen, "shards": shards}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
