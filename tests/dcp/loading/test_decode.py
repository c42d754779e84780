"""Items that are not what they claim: refused before they take the memory that they would become."""

from __future__ import annotations

import functools
import io
import pickle
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._extension import ExtensionRegistry, ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem

from bucketpoint import BucketReader, LoadPlanner
from bucketpoint.dcp.api import KeysPlanner
from bucketpoint.dcp.loading import decode
from bucketpoint.dcp.loading.decode import decode_item, load_bytes
from bucketpoint.errors import BucketpointError, CorruptDataError, MetadataError, UnsafeDataError
from bucketpoint.format.item_info import ItemInfo
from kit.checkpoints import saved

MIB = 1 << 20
TENSOR = torch.arange(50_000.0)
BOMB_BYTES = 1 << 28
ZSTD = ("stream.zstd/1",)


def packed(pieces: Any) -> bytes:
    machine = zstandard.ZstdCompressor().compressobj()
    return b"".join([*map(machine.compress, pieces), machine.flush()])


@functools.cache
def bomb(head: bytes = b"") -> bytes:
    """What becomes so many zeros behind `head`."""
    zeros = bytes(4 * MIB)
    return packed([head, *(zeros for _ in range(BOMB_BYTES // len(zeros)))])


def of(data: bytes, transforms: tuple[str, ...] | None = ZSTD) -> ItemInfo:
    return ItemInfo("x", 0, len(data), transforms)


def tensor_of(data: bytes, **options: Any) -> torch.Tensor:
    return decode_item(memoryview(bytearray(data)), of(data), ExtensionRegistry(), key="w", **options)


def bytes_of(data: bytes, *, trusted: bool = False) -> bytes:
    registry = ExtensionRegistry()
    return load_bytes(memoryview(data), of(data), registry, key="b", trusted=trusted, planner=DefaultLoadPlanner())


@contextmanager
def traced(most: int) -> Iterator[None]:
    """No more than so many bytes are allocated within."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most


@pytest.mark.contract
def test_reads_a_compressed_tensor_within_the_size_of_its_shape() -> None:
    nbytes = TENSOR.numel() * 4
    assert torch.equal(tensor_of(packed([saved(TENSOR)]), tensor_nbytes=nbytes), TENSOR)
    assert torch.equal(tensor_of(packed([saved(torch.zeros(0, 5))]), tensor_nbytes=0), torch.zeros(0, 5))


@pytest.mark.parametrize("head", [b"", saved(TENSOR)], ids=["zeros", "a tensor and zeros behind it"])
def test_refuses_a_bomb_in_place_of_a_tensor_at_the_size_of_its_shape(head: bytes) -> None:
    data = bomb(head)
    assert len(data) < MIB
    with traced(8 * MIB), pytest.raises(CorruptDataError, match="transforms are undone") as caught:
        tensor_of(data, tensor_nbytes=TENSOR.numel() * 4)
    assert caught.value.key == "w"


def test_refuses_a_bomb_in_place_of_bytes_at_the_stated_size_unless_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "FREE_BYTES", 2 * MIB)
    data = bomb()
    most = max(2 * MIB, 64 * len(data))
    with traced(2 * most + 8 * MIB), pytest.raises(UnsafeDataError, match=f"more than {most} ") as caught:
        bytes_of(data)
    assert "trusted=True" in str(caught.value)
    small = packed([bytes(3 * MIB)])
    with pytest.raises(UnsafeDataError):
        bytes_of(small)
    assert bytes_of(small, trusted=True) == bytes(3 * MIB)


def test_accepts_items_that_shrink_as_states_do() -> None:
    value = {"text": "the quick brown fox " * 100_000, "zeros": b"\0" * (8 * MIB)}
    data = saved(value)
    assert len(packed([data])) * 100 < len(data)
    assert torch.load(io.BytesIO(bytes_of(packed([data]))), weights_only=True) == value


@pytest.mark.parametrize("cut", [0, 3, 100])
def test_names_what_cannot_be_expanded_in_an_error(cut: int) -> None:
    data = packed([saved(TENSOR)])
    broken = data[: len(data) // 2] + b"\xff" * cut
    with pytest.raises(BucketpointError):
        tensor_of(broken, tensor_nbytes=TENSOR.numel() * 4)
    with pytest.raises(MetadataError, match="cannot be undone"):
        tensor_of(b"no zstd at all", tensor_nbytes=100)


# Archives that torch.load would expand by itself


def repacked(data: bytes, method: int, record: bytes | None = None) -> bytes:
    """The same archive with its records compressed, the tensor's replaced."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", method) as new:
        for name in old.namelist():
            body = record if record is not None and "/data/" in name else old.read(name)
            new.writestr(name, body)
    return stream.getvalue()


def decoded(data: bytes) -> torch.Tensor:
    return decode_item(memoryview(bytearray(data)), of(data, None), None, key="w", tensor_nbytes=TENSOR.numel() * 4)


def test_refuses_an_archive_that_torch_would_expand() -> None:
    data = repacked(saved(TENSOR), zipfile.ZIP_DEFLATED, bytes(32 * MIB))
    with traced(8 * MIB), pytest.raises(UnsafeDataError, match="a compressed archive"):
        decoded(data)


def test_refuses_the_format_before_torch_1_6_by_name_and_loads_it_if_trusted() -> None:
    data = memoryview(bytearray(saved(TENSOR, _use_new_zipfile_serialization=False)))
    with pytest.raises(UnsafeDataError, match=r"save it again with torch 1\.6 or later.*trusted=True"):
        decoded(data)
    assert torch.equal(decode_item(data, of(data, None), None, key="w", trusted=True), TENSOR)


# Through a load


@pytest.mark.contract
@pytest.mark.parametrize("value", [torch.zeros(16), 5], ids=["tensor", "bytes"])
def test_refuses_to_load_a_bomb_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(decode, "FREE_BYTES", 2 * MIB)
    # A writer without checksums, which would find what is put in its place before.
    dcp.save({"w": value}, storage_writer=FileSystemWriter(tmp_path, _extensions=[ZStandard()]), no_dist=True)
    (path,) = tmp_path.glob("*.distcp")
    data = bomb()
    path.write_bytes(data)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.length = len(data)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    kind = CorruptDataError if isinstance(value, torch.Tensor) else UnsafeDataError
    with pytest.raises(dcp.CheckpointException) as caught, traced(16 * MIB):
        dcp.load({"w": value}, storage_reader=BucketReader(f"file://{tmp_path}"), no_dist=True)
    assert isinstance(caught.value.failures[0][0], kind)


class PlannerOfAnotherFormat(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, LoadPlanner, KeysPlanner])
def test_passes_nothing_but_a_pickle_to_a_planner_that_unpickles(planner: type[DefaultLoadPlanner]) -> None:
    """Their torch.load is unrestricted: Python's reader may see a pickle where ours sees none."""
    data = b"neither a pickle nor an archive"
    view, info = memoryview(data), of(data, None)
    arguments: dict[str, Any] = {"key": "b", "trusted": False}
    with pytest.raises(UnsafeDataError):
        load_bytes(view, info, ExtensionRegistry(), planner=planner(), **arguments)
    assert load_bytes(view, info, ExtensionRegistry(), planner=PlannerOfAnotherFormat(), **arguments) == data
