"""Boxes of saved tensors are read into any targets: once, verified, of one commit, by ranks together."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter, CorruptDataError
from bucketpoint.dcp import process_groups
from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.boxes import BoxReader, SavedBox
from bucketpoint.integrations.weights import Weights, WeightsOptions
from dcp.cooperative.cooperative_scenarios import counted, expected_tensor
from dcp.ranks import Ranks
from kit.damage import flip


def weights() -> dict[str, torch.Tensor]:
    return {
        "rows": expected_tensor((512, 300)),
        "columns": expected_tensor((400, 512)) + 1,
        "norm": expected_tensor((700,)),
        "fused": expected_tensor((600, 256)).bfloat16(),
    }


def _weights(world: int, url: str, timeout: timedelta | None = None) -> Weights:
    group = dist.new_group(list(range(world)), timeout=timeout)
    return Weights(WeightsOptions.of({"url": url, "prefix": "model."}), group)


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


def failed_load(rank: int, world: int, url: str, missing: bool, timeout: timedelta | None = None) -> str:
    """Return the error of a load; with `missing`, the first rank wants a tensor that is not there."""
    copied: Any = "lm_head" if missing and not rank else "norm"
    try:
        with _weights(world, url, timeout).loading() as tensors:
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

    with mock.patch.object(process_groups, "connect", slowly if rank == world - 1 else connect):
        return failed_load(rank, world, url, False)


def load_without_an_address(rank: int, world: int, url: str) -> str:
    """Return the error of a load in which the last rank has no address at which the others can reach it."""

    def connect(*args: Any) -> None:
        raise RuntimeError("Unable to find address")

    with mock.patch.object(process_groups, "connect", connect if rank == world - 1 else process_groups.connect):
        return failed_load(rank, world, url, False, timedelta(seconds=4))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/step-1"


def save(url: str, /, **state: Any) -> None:
    dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter(), no_dist=True)


def test_reads_several_boxes_of_one_tensor_into_targets_of_any_layout_and_dtype(url: str) -> None:
    whole = expected_tensor((4000, 300))
    save(url, w=whole, scalar=torch.tensor(3.0), optim=torch.zeros(500, 500), step=7)
    fused, turned, lower = torch.zeros(20, 300), torch.zeros(300, 5), torch.zeros(4000, 100, dtype=torch.bfloat16)
    scalar = torch.zeros(())
    boxes = [
        SavedBox("w", (0, 0), fused[10:]),
        SavedBox("w", (0, 0), fused[:5]),
        SavedBox("w", (3995, 0), turned.t()),
        SavedBox("w", (0, 200), lower),
        SavedBox("scalar", (), scalar),
    ]
    reader = BoxReader(url)
    with counted() as count:
        reader.load(boxes, reader.read_metadata(), alone=True)
        assert count.gets == 1
        # Columns are read with their rows, and each of the other boxes with its block of 512 KiB.
        assert count.read < whole.nbytes + 3 * (512 << 10) + (16 << 10)
    assert torch.equal(fused, torch.cat([whole[:5], torch.zeros(5, 300), whole[:10]]))
    assert torch.equal(turned, whole[3995:].t())
    assert torch.equal(lower, whole[:, 200:].bfloat16())
    assert scalar.item() == 3
    # A box that several targets want is read once.
    tied = [torch.zeros(4000, 300) for _ in range(3)]
    with counted() as count:
        reader.load([SavedBox("w", (0, 0), target) for target in tied], reader.read_metadata(), alone=True)
    assert count.read == whole.nbytes
    assert all(torch.equal(target, whole) for target in tied)


def test_names_the_key_of_a_flipped_bit(url: str) -> None:
    save(url, first=expected_tensor((64, 64)), second=expected_tensor((64, 64)))
    (path,) = Path(url.removeprefix("file://")).rglob("*.distcp")
    flip(path, 0.75)
    reader = BoxReader(url)
    with pytest.raises(CorruptDataError, match="second"):
        reader.load([SavedBox(key, (0, 0), torch.zeros(2, 64)) for key in ("first", "second")], reader.read_metadata())


@pytest.mark.parametrize("change", ["overwrite", "delete"])
def test_raises_when_the_checkpoint_is_replaced_between_two_loads(url: str, change: str) -> None:
    save(url, w=expected_tensor((64, 64)))
    reader, target = BoxReader(url), torch.zeros(32, 64)
    metadata = reader.read_metadata()
    reader.load([SavedBox("w", (0, 0), target)], metadata, alone=True)
    if change == "overwrite":
        save(url, w=expected_tensor((64, 64)) + 1)
    for path in Path(url.removeprefix("file://")).rglob("*.distcp") if change == "delete" else ():
        path.unlink()
    with pytest.raises(BucketpointError, match="damaged"):
        reader.load([SavedBox("w", (32, 0), torch.zeros(32, 64))], metadata, alone=True)


def test_ranks_of_a_group_read_each_byte_of_the_newest_checkpoint_once(two_ranks: Ranks, tmp_path: Path) -> None:
    run, state = f"file://{tmp_path}/run", weights()
    for step in (1, 2):
        model = {name: tensor + step for name, tensor in state.items()}
        save(f"{run}/step-{step}", model=model, optimizer=torch.zeros(1000, 1000))
    read = two_ranks.run(load_newest, run)
    # One rank read a small tensor once more, at once.
    assert sum(read) <= 1.02 * sum(tensor.nbytes for tensor in state.values())


def test_takes_no_rank_for_lost_if_another_cannot_be_reached(two_ranks: Ranks, url: str) -> None:
    for error in two_ranks.run(load_without_an_address, url):
        assert "Unable to find address" in error
        assert "died" not in error


def test_fails_on_all_ranks_with_the_error_of_one(two_ranks: Ranks, tmp_path: Path, url: str) -> None:
    for call, args in (
        (failed_load, (f"file://{tmp_path}/other", False)),
        (failed_load_while_connecting, (f"file://{tmp_path}/other",)),
    ):
        found = two_ranks.run(call, *args)
        assert all("CheckpointNotFoundError: There is no .metadata" in text for text in found), found
    save(url, model=weights())
    own, other = two_ranks.run(failed_load, url, True)
    assert own == "KeyError: 'lm_head'"
    assert "KeyError: 'lm_head'" in other
    assert "rank=0" in other
