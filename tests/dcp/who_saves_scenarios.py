"""What ranks do that leave their job while it saves. Each function runs on every rank at once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bucketpoint
from bucketpoint import BucketWriter, CheckpointManager, RetentionPolicy, StagingOptions
from bucketpoint.retention import Keep
from staging.helpers import held_copies


def leaves_during_its_last_save(rank: int, world: int, root: str) -> list[str]:
    """Begin saves by a manager and without one, destroy all groups before they are copied, and name their errors."""
    sharded = distribute_tensor(torch.arange(64.0), init_device_mesh("cpu", (world,)), [Shard(0)])
    state = {"model": {"w": torch.ones(8), "sharded": sharded}}
    beside = StagingOptions(use_async_staging=True)
    manager = CheckpointManager(root, policy=RetentionPolicy(Keep(latest=1)), staging=beside)
    first = manager.save(1, state)
    first.result()
    writer = BucketWriter(staging=beside)
    with held_copies():
        second = manager.save(2, state)
        handles = [second, bucketpoint.async_save(state, checkpoint_id=f"{root}-other/a", storage_writer=writer)]
        dist.destroy_process_group()
    errors = [type(handle.exception()).__name__ for handle in handles if handle is not None]
    # The ranks go on with another test.
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}-store", world), rank=rank, world_size=world)
    return errors
