"""What resharding costs: bytes and requests at the store, memory of our own, and nothing for what cannot fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import bucketpoint as bp
from bucketpoint import BucketReader, BucketWriter, TransferOptions
from bucketpoint.format.item_info import read_item
from bucketpoint.transfer import BufferPool
from dcp import reshard_job as job
from dcp.reshard_job import OnMesh
from dcp.states import filled, same_bits
from dcp.test_compat import counted
from transfer.wrappers import CountingStore

pytestmark = pytest.mark.contract

MIB = 1 << 20
LAYER = {"q": (1024, 1024), "kv": (256, 1024), "up": (4096, 1024), "down": (1024, 4096), "norm": (1024,)}
"""Shapes of a small transformer's layer, in bfloat16: 21 MB."""

MATRICES, LARGE = ("q", "up", "down"), ("large",)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[CountingStore]:
    return counted(monkeypatch)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[BufferPool]:
    """Every pool of memory of our own that is made."""
    made: list[BufferPool] = []
    original = BufferPool.__init__

    def noted(self: BufferPool, limit_bytes: int) -> None:
        original(self, limit_bytes)
        made.append(self)

    monkeypatch.setattr(BufferPool, "__init__", noted)
    return made


def layer(only: tuple[str, ...] = tuple(LAYER)) -> dict[str, torch.Tensor]:
    shapes = {**LAYER, "large": (8192, 2048)}
    return {name: filled(shapes[name], torch.bfloat16, seed=number) for number, name in enumerate(only)}


def line(world: int, *placements: Placement, mesh: tuple[int, ...] | None = None) -> OnMesh:
    return OnMesh(mesh or (world,), tuple(range(world)), placements)


def states(layout: OnMesh, wholes: dict[str, torch.Tensor], *, blank: bool = False) -> list[dict[str, Any]]:
    def local(expected: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(expected) if blank else expected.clone()

    found = []
    world = len(layout.ranks)
    for rank in range(world):
        with job.as_rank(rank, world):
            found.append({name: job.held(layout, whole, rank, local)[0] for name, whole in wholes.items()})
    return found


def saved(path: Path, layout: OnMesh, wholes: dict[str, torch.Tensor]) -> None:
    job.save(states(layout, wholes), lambda: BucketWriter(path), DefaultSavePlanner)


def loaded(path: Path, layout: OnMesh, wholes: dict[str, torch.Tensor], options: TransferOptions | None = None) -> int:
    """Load, compare with what was saved, and return how many bytes the ranks need."""
    targets = states(layout, wholes, blank=True)
    job.load(targets, lambda: BucketReader(path, transfer=options), DefaultLoadPlanner)
    needed = 0
    for rank, target in enumerate(targets):
        for name, whole in wholes.items():
            box = layout.box(whole.shape, rank)
            assert box is not None
            local = target[name].to_local()
            assert same_bits(local, job.part(whole, box)), (name, rank)
            needed += local.nbytes
    return needed


def received(stores: list[CountingStore]) -> tuple[int, int]:
    """Bytes and requests for data: `.metadata` is read by another call."""
    return sum(store.received for store in stores), sum(store.calls["read_into"] for store in stores)


@pytest.mark.parametrize(
    ("before", "after", "names", "most"),
    [
        *[
            (line(ranks, Shard(0)), line(fewer, Shard(0)), tuple(LAYER), 1.02)
            for ranks, fewer in ((4, 4), (8, 1), (16, 2))
        ],
        *[(line(ranks, Shard(0)), line(more, Shard(0)), LARGE, 1.02) for ranks, more in ((2, 8), (4, 3), (3, 2))],
        # Each rank reads the rows that its columns lie in.
        *[(line(4, Shard(0)), line(ranks, Shard(1)), MATRICES, 1.01 * ranks) for ranks in (2, 4)],
        (line(8, Shard(0), Shard(1), mesh=(4, 2)), line(4, Shard(0)), MATRICES, 1.02),
    ],
)
def test_reads_no_more_than_the_ranks_need(
    tmp_path: Path, stores: list[CountingStore], before: OnMesh, after: OnMesh, names: tuple[str, ...], most: float
) -> None:
    wholes = layer(names)
    saved(tmp_path, before, wholes)
    stores.clear()
    needed = loaded(tmp_path, after, wholes)
    fetched, requests = received(stores)
    assert fetched <= most * needed
    if before.placements == after.placements:
        # Of each object that a rank needs, and of the checksums of its blocks where only a part of it is needed.
        cut = names is LARGE
        assert requests <= (2 * (len(before.ranks) + len(after.ranks)) if cut else len(before.ranks))


@pytest.mark.parametrize(("saving", "loading"), [(8, 6), (3, 8), (5, 4)])
def test_reads_one_block_twice_where_a_shard_is_cut(
    tmp_path: Path, stores: list[CountingStore], saving: int, loading: int
) -> None:
    wholes = layer()
    saved(tmp_path, line(saving, Shard(0)), wholes)
    blocks = dict.fromkeys(wholes, 0)
    for index, info in (BucketReader(tmp_path).read_metadata().storage_data or {}).items():
        blocks[index.fqn] = max(blocks[index.fqn], read_item(info).block_nbytes or 0)
    stores.clear()
    options = TransferOptions(coalesce_gap_bytes=0, free_gap_bytes=0)
    needed = loaded(tmp_path, line(loading, Shard(0)), wholes, options)
    assert needed <= received(stores)[0] <= needed + (loading - 1) * sum(blocks.values())


@pytest.mark.parametrize(("before", "after"), [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Replicate())])
def test_keeps_resharding_within_the_budget_for_memory(
    tmp_path: Path, pools: list[BufferPool], before: Placement, after: Placement
) -> None:
    budget, wholes = 2 * MIB, {"w": filled((4096, 2048), torch.float32)}
    saved(tmp_path, line(2, before), wholes)
    pools.clear()
    loaded(tmp_path, line(4, after), wholes, TransferOptions(max_inflight_bytes=budget, connections=8))
    assert len(pools) >= 4
    assert max(pool.peak_bytes for pool in pools) <= budget
    if after == Shard(1):
        assert min(pool.peak_bytes for pool in pools) > 0


def test_names_and_refuses_what_holds_no_part_of_a_tensor(tmp_path: Path, stores: list[CountingStore]) -> None:
    wholes = layer(("norm",))
    saved(tmp_path, line(2, Shard(0)), wholes)
    stores.clear()
    with job.as_rank(0, 1):
        mesh = OnMesh((1,), (0,), ()).device_mesh()
        state = {"norm": DTensor.from_local(torch.zeros(1024, dtype=torch.bfloat16), mesh, [Partial()])}
    with pytest.raises(bp.BucketpointError, match=r"norm.*Partial"):
        job.load([state], lambda: BucketReader(tmp_path), bp.LoadPlanner)
    assert received(stores) == (0, 0)


def test_commits_no_shard_of_another_size_than_torch_plans(tmp_path: Path) -> None:
    with job.as_rank(0, 2):
        mesh = OnMesh((2,), (0, 1), ()).device_mesh()
        first = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=(4,), stride=(1,), run_check=False)
    with job.as_rank(1, 2):
        mesh = OnMesh((2,), (0, 1), ()).device_mesh()
        second = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], shape=(4,), stride=(1,), run_check=False)
    with pytest.raises(bp.IncompleteSaveError, match=r"w\[2\]"):
        job.save([{"w": first}, {"w": second}], lambda: BucketWriter(tmp_path), DefaultSavePlanner)
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"w": torch.zeros(4)}, storage_reader=BucketReader(tmp_path), no_dist=True)
