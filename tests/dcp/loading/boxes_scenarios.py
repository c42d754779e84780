"""What ranks do that load boxes together. Each function runs on every rank at once."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.boxes import BoxReader
from bucketpoint.integrations.promised import Promises
from dcp.cooperative.cooperative_scenarios import counted, expected_tensor


def weights() -> dict[str, torch.Tensor]:
    return {
        "rows": expected_tensor((512, 300)),
        "columns": expected_tensor((400, 512)) + 1,
        "norm": expected_tensor((700,)),
        "fused": expected_tensor((600, 256)).bfloat16(),
    }


def load_shards(rank: int, world: int, url: str) -> int:
    """Load as a rank of tensor parallelism does: rows of one tensor, columns of another, the whole of a third."""
    group = dist.new_group(list(range(world)))
    rows, columns, norm, fused = torch.zeros(256, 300), torch.zeros(400, 256), torch.zeros(700), torch.zeros(300, 256)
    reader = BoxReader(url, cooperative="node", process_group=group)
    with counted() as count:
        metadata = reader.read_metadata()

        def load(boxes, *, last=False, failure=None):  # type: ignore[no-untyped-def]
            reader.load(boxes, metadata, process_group=group, alone=not last, failure=failure)

        promises = Promises(load)
        saved = {key: promises.promise(key, tensor.shape, tensor.dtype) for key, tensor in weights().items()}
        with promises.noting():
            rows.copy_(saved["rows"].narrow(0, rank * 256, 256))
            columns.copy_(saved["columns"].narrow(1, rank * 256, 256))
            norm.copy_(saved["norm"])
            for number, part in enumerate(saved["fused"].chunk(3)):
                fused.narrow(0, number * 100, 100).copy_(part.narrow(0, rank * 100, 100))
    state = weights()
    assert torch.equal(rows, state["rows"][rank * 256 :][:256])
    assert torch.equal(columns, state["columns"][:, rank * 256 :][:, :256])
    assert torch.equal(norm, state["norm"])
    thirds = [part[rank * 100 :][:100].float() for part in state["fused"].chunk(3)]
    assert torch.equal(fused, torch.cat(thirds))
    return count.read


def one_rank_fails(rank: int, world: int, url: str) -> str:
    reader = BoxReader(url, cooperative="group")
    metadata = reader.read_metadata()
    try:
        reader.load([], metadata, failure=BucketpointError("no module lm_head") if rank else None)
    except BucketpointError as error:
        return error.message
    return "loaded"
