"""What ranks that load boxes of saved tensors do. Each function runs on every rank at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bucketpoint.dcp import process_groups
from bucketpoint.integrations.weights import Weights, WeightsOptions
from dcp.cooperative.cooperative_scenarios import counted, expected_tensor


def weights() -> dict[str, torch.Tensor]:
    return {
        "rows": expected_tensor((512, 300)),
        "columns": expected_tensor((400, 512)) + 1,
        "norm": expected_tensor((700,)),
        "fused": expected_tensor((600, 256)).bfloat16(),
    }


def _weights(world: int, url: str) -> Weights:
    return Weights(WeightsOptions.of({"url": url, "prefix": "model."}), dist.new_group(list(range(world))))


def load_newest(rank: int, world: int, url: str) -> int:
    """Load as a rank of tensor parallelism does: rows of one tensor, columns of another, the whole of a third."""
    rows, columns, norm, fused = torch.zeros(256, 300), torch.zeros(400, 256), torch.zeros(700), torch.zeros(300, 256)
    with counted() as count, _weights(world, url).loading() as tensors:
        # What one rank alone reads at once must not wait for the other.
        early = tensors["norm"].sum().item() if rank else None
        rows.copy_(tensors["rows"].narrow(0, rank * 256, 256))
        columns.copy_(tensors["columns"].narrow(1, rank * 256, 256))
        norm.copy_(tensors["norm"])
        for number, part in enumerate(tensors["fused"].chunk(3)):
            fused.narrow(0, number * 100, 100).copy_(part.narrow(0, rank * 100, 100))
    state = {name: tensor + 2 for name, tensor in weights().items()}
    assert torch.equal(rows, state["rows"][rank * 256 :][:256])
    assert torch.equal(columns, state["columns"][:, rank * 256 :][:, :256])
    assert torch.equal(norm, state["norm"])
    thirds = [part[rank * 100 :][:100].float() for part in state["fused"].chunk(3)]
    assert torch.equal(fused, torch.cat(thirds))
    assert early in (None, state["norm"].sum().item())
    return count.read


def failed_load(rank: int, world: int, url: str, missing: bool) -> str:
    """Return the error of a load; with `missing`, the first rank wants a tensor that is not there."""
    copied: Any = "lm_head" if missing and not rank else "norm"
    try:
        with _weights(world, url).loading() as tensors:
            torch.zeros(700).copy_(tensors[copied])
    except Exception as error:  # noqa: BLE001 (compared by the test)
        return f"{type(error).__name__}: {error}"
    return "loaded"


def failed_load_while_connecting(rank: int, world: int, url: str) -> str:
    """Return the error of `failed_load`; the first rank fails while the last one is still being connected."""
    connect = process_groups.connect

    def slowly(*args: Any) -> None:
        # Raises when the first rank closes the connection.
        process_groups.backend_of(connect(*args)).recv([torch.zeros(1)], 0, 5).wait()

    if rank == world - 1:
        process_groups.connect = slowly
    try:
        return failed_load(rank, world, url, False)
    finally:
        process_groups.connect = connect


def load_without_an_address(rank: int, world: int, url: str) -> str:
    """Return the error of a load in which the last rank has no address at which the others can reach it."""
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=4))

    def connect(*args: Any) -> None:
        raise RuntimeError("Unable to find address")

    original = process_groups.connect
    process_groups.connect = original if rank < world - 1 else connect
    try:
        with Weights(WeightsOptions.of({"url": url, "prefix": "model."}), group).loading():
            return "loaded"
    except Exception as error:  # noqa: BLE001 (compared by the test)
        return str(error)
    finally:
        process_groups.connect = original
