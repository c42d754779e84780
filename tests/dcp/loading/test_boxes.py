"""Boxes of saved tensors are read into any targets: once, verified, of one commit, by ranks together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter, CorruptDataError
from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.boxes import BoxReader, SavedBox
from dcp.cooperative.cooperative_scenarios import counted, expected_tensor
from dcp.loading import boxes_scenarios as scenarios
from dcp.ranks import Ranks


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


def test_reads_a_box_that_several_targets_want_once(url: str) -> None:
    whole = expected_tensor((256, 300))
    save(url, embed=whole)
    tied = [torch.zeros(256, 300) for _ in range(3)]
    reader = BoxReader(url)
    with counted() as count:
        reader.load([SavedBox("embed", (0, 0), target) for target in tied], reader.read_metadata(), alone=True)
    assert count.read == whole.nbytes
    assert all(torch.equal(target, whole) for target in tied)


def test_names_the_key_of_a_flipped_bit(url: str) -> None:
    save(url, first=expected_tensor((64, 64)), second=expected_tensor((64, 64)))
    (path,) = Path(url.removeprefix("file://")).rglob("*.distcp")
    data = bytearray(path.read_bytes())
    at = bytes(data).rindex(bytes(expected_tensor((64, 64)).numpy().tobytes()))
    data[at + 64 * 4] ^= 1
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=times)
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
    run, state = f"file://{tmp_path}/run", scenarios.weights()
    for step in (1, 2):
        model = {name: tensor + step for name, tensor in state.items()}
        save(f"{run}/step-{step}", model=model, optimizer=torch.zeros(1000, 1000))
    read = two_ranks.run(scenarios.load_newest, run)
    # One rank read a small tensor once more, at once.
    assert sum(read) <= 1.02 * sum(tensor.nbytes for tensor in state.values())


def test_takes_no_rank_for_lost_if_another_cannot_be_reached(two_ranks: Ranks, url: str) -> None:
    for error in two_ranks.run(scenarios.load_without_an_address, url):
        assert "Unable to find address" in error
        assert "died" not in error


def test_fails_on_all_ranks_with_the_error_of_one(two_ranks: Ranks, tmp_path: Path, url: str) -> None:
    for call, args in (
        (scenarios.failed_load, (f"file://{tmp_path}/other", False)),
        (scenarios.failed_load_while_connecting, (f"file://{tmp_path}/other",)),
    ):
        found = two_ranks.run(call, *args)
        assert all("CheckpointNotFoundError: There is no .metadata" in text for text in found), found
    save(url, model=scenarios.weights())
    own, other = two_ranks.run(scenarios.failed_load, url, True)
    assert own == "KeyError: 'lm_head'"
    assert "KeyError: 'lm_head'" in other
    assert "rank=0" in other
