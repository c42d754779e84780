"""Checkpoints of others and readers of others: what torch and s3torchconnector wrote is read, slices too, and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bucketpoint import BucketReader, BucketWriter, S3Reader, S3Writer
from dcp.states import assert_loads, filled, varied
from kit.servers import S3Server
from services import Service
from transfer.wrappers import CountingStore, wrap_stores

pytestmark = pytest.mark.contract

GOLDEN = Path(__file__).parent / "golden"


class SlicePlanner(dcp.DefaultLoadPlanner):
    """Loads one box of a saved tensor into a plain tensor of that box's size."""

    def __init__(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def create_local_plan(self) -> LoadPlan:
        items = []
        for fqn in self.state_dict:
            items += create_read_items_for_chunk_list(fqn, self.metadata.state_dict_metadata[fqn], [self.chunk])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        target = self.state_dict[read_item.dest_index.fqn]
        for axis, (offset, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(axis, offset, size)
        return target


def counted(monkeypatch: pytest.MonkeyPatch) -> list[CountingStore]:
    return wrap_stores(monkeypatch, CountingStore)


def test_exchanges_checkpoints_with_fsspecs_writer_and_reader() -> None:
    ours, theirs, state = "memory://compat/ours", "memory://compat/theirs", varied()
    dcp.save(state, checkpoint_id=ours, storage_writer=BucketWriter(), no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_loads(state, FsspecReader(ours))
        dcp.save(state, storage_writer=FsspecWriter(theirs), no_dist=True)
    assert_loads(state, BucketReader(), theirs)


def test_loads_what_s3torchconnector_wrote(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = pytest.importorskip("s3torchconnector.dcp", reason="s3torchconnector is not installed")
    from s3torchconnector import S3ClientConfig

    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    url, state = f"s3://{bucket}/theirs", varied()
    config = S3ClientConfig(force_path_style=True)
    writer = connector.S3StorageWriter(region=s3.region, path=url, s3client_config=config)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert_loads(state, S3Reader(storage_options=s3.options), url)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
def test_reads_slices_without_the_rest(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    whole = filled((2048, 3000), torch.float32)
    url = service.url("x")
    if ours:
        dcp.save({"w": whole}, checkpoint_id=url, storage_writer=service.writer(), no_dist=True)
    else:
        dcp.save({"w": whole}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
        for path in tmp_path.iterdir():
            service.write(f"x/{path.name}", path.read_bytes())
    stores = counted(monkeypatch)
    # Rows, one element, columns, and the last row.
    for top, left, height, width in ((512, 0, 512, 3000), (100, 7, 1, 1), (0, 750, 2048, 750), (2047, 0, 1, 3000)):
        stores.clear()
        target, planner = {"w": torch.zeros(height, width)}, SlicePlanner((top, left), (height, width))
        dcp.load(target, checkpoint_id=url, storage_reader=service.reader(), planner=planner, no_dist=True)
        box = whole[top : top + height, left : left + width]
        assert torch.equal(target["w"].view(torch.int32), box.view(torch.int32))
        received = sum(store.received for store in stores)
        rows = height * 3000 * 4
        # Whole rows of a column slice, whole blocks of ours, one probe of theirs.
        assert received <= rows + (2 << 20)
        if width == 3000 and height > 1:
            assert received <= 1.01 * rows


def test_cuts_most_of_a_frame_out_of_it(tmp_path: Path) -> None:
    whole = torch.arange(5000.0).reshape(50, 100)
    dcp.save({"w": whole}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    target, planner = {"w": torch.zeros(40, 90)}, SlicePlanner((5, 7), (40, 90))
    dcp.load(target, storage_reader=BucketReader(tmp_path), planner=planner, no_dist=True)
    assert torch.equal(target["w"], whole[5:45, 7:97])


def test_saves_and_loads_by_the_older_entry_points() -> None:
    from torch.distributed.checkpoint import load_state_dict, save_state_dict

    url, target = "memory://compat/older", {"w": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state_dict({"w": torch.ones(3)}, BucketWriter(url), no_dist=True)
        load_state_dict(target, BucketReader(url), no_dist=True)
    assert target["w"].tolist() == [1.0] * 3


def golden_state() -> dict[str, Any]:
    """What `dcp.save` with a `BucketWriter` wrote into `golden` under the torch that the folder is named after."""
    return {
        "model": {"w": torch.arange(12, dtype=torch.float32).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)},
        "optim": {"state": {"w": {"exp_avg": torch.arange(12.0).reshape(3, 4), "step": torch.tensor(5)}}},
        "epoch": 3,
    }


@pytest.mark.parametrize("reader", [BucketReader, FileSystemReader], ids=["our reader", "this torch's own reader"])
def test_reads_a_checkpoint_saved_under_another_torch(reader: Callable[[str], Any]) -> None:
    assert_loads(golden_state(), reader(str(GOLDEN / "torch-2.15")))


def test_takes_the_schemes_of_the_class_in_validate_checkpoint_id() -> None:
    assert S3Writer.validate_checkpoint_id("s3://bucket/x")
    assert not S3Writer.validate_checkpoint_id("gs://bucket/x")
    assert not S3Reader.validate_checkpoint_id("bucket/x")
    assert BucketReader.validate_checkpoint_id("memory://x")
