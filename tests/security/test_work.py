"""Short files whose reading once took minutes, hours or gigabytes: work that their length did not pay for."""

from __future__ import annotations

import json
import pickle
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.errors import CheckpointDeletedError, MetadataError
from bucketpoint.format.index.encode import HEAD, MAGIC
from bucketpoint.format.index.view import decode_index
from bucketpoint.format.metadata import codec, plain
from bucketpoint.format.pickles.items import refused_globals
from bucketpoint.format.zip_probe import probe_frame
from security.corpus import ORDERED, P4, archive, global_, short, text

np = pytest.importorskip("numpy")

LIMIT_S, PIECE = 1.0, 64 << 10
"""Processor time for each piece of so many bytes, or less."""


def long4(number: int) -> bytes:
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<I", len(raw)) + raw


def called(function: bytes, argument: bytes, count: int) -> bytes:
    """A function that is called so often with the same argument."""
    return P4 + function + b"\x94" + argument + b"\x85\x94" + b"h\x00h\x01R0" * count + b"N."


def items() -> dict[str, bytes]:
    long = 1 << (8 * (40 << 10))
    state = P4 + b"}" + short("int") + b"K\x01s\x94" + global_("uuid", "UUID") + b")\x81"
    counted = (
        P4 + global_("builtins", "range") + b"\x94K\x00" + long4(long) + long4(1 << (8 * (20 << 10))) + b"\x87\x94"
    )
    return {
        "a shell of many numbers, built often": state
        + b"\x94" * 50_000
        + b"2" * 5_000
        + b"h\x00b0" * 5_000
        + b"h\x00b.",
        "ranges of long integers": counted + b"h\x00h\x01R0" * 400 + b"N.",
        "a long name of a layout": called(global_("torch.serialization", "_get_layout"), text("x" * 400_000), 40_000),
    }


@pytest.mark.parametrize("name", items())
def test_the_work_for_an_item_is_bounded_by_its_length(name: str) -> None:
    data = items()[name]
    began = time.process_time()
    found = refused_globals(data)
    assert time.process_time() - began <= LIMIT_S * max(len(data) / PIECE, 1)
    assert found


def repeated(depth: int, count: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] * count
    return value


def described(entries: dict[str, Any], **facts: Any) -> bytes:
    metadata = Metadata(entries, None, {})
    vars(metadata)["bucketpoint"] = {"format": 1, **facts}
    return pickle.dumps(metadata)


def tensor(size: Any, chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)


def metadata() -> dict[str, bytes]:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    shared = tensor(torch.Size([1]), [chunk] * 20_000)
    return {
        "lists in lists in lists": described({}, more=repeated(5, 40)),
        "chunks that tensors share": described({f"{number}": shared for number in range(2_000)}),
        "a shape of long numbers": described({"x": tensor((1 << (8 * (30 << 10)),) * 60, [])}),
        "a long number of a format": described({}).replace(b"K\x01s", long4(1 << 16_000) + b"s"),
    }


@pytest.mark.parametrize("read", [codec.record_from_metadata, plain.read_record])
@pytest.mark.parametrize("name", metadata())
def test_the_work_for_metadata_is_bounded_by_its_length(name: str, read: Callable[[bytes], Any]) -> None:
    data = metadata()[name]
    began = time.process_time()
    with pytest.raises(MetadataError):
        read(data)
    assert time.process_time() - began <= LIMIT_S * max(len(data) / PIECE, 1)


def test_an_index_of_tensors_without_chunks_takes_no_more_memory_than_it_has_items_for() -> None:
    """Names that compress well: three kilobytes stood for 280,000 tensors of 64 dimensions each."""
    structure = {"names": ["a"] * 280_000, "properties": [["float32", "strided", False, 0, False]], "transforms": []}
    facts = {"objects": [], "paths": 0, "bucketpoint": {}, "storage_meta": None, "table": False, "version": []}
    columns = [1, 64, *[0] * 13]
    parts = [
        json.dumps(structure, separators=(",", ":")).encode(),
        b"null",
        b"".join(struct.pack("<Bq", 0, value) for value in columns),
        json.dumps(facts).encode(),
    ]
    stored = [(zlib.compress(part), len(part)) for part in parts] + [(b"", 0)]
    head = HEAD.pack(MAGIC, 0, *(number for data, size in stored for number in (len(data), size)))
    with pytest.raises(MetadataError, match="dimensions"):
        decode_index(head + b"".join(data for data, _ in stored))


def test_a_frame_whose_tensor_lies_in_no_storage_is_not_taken_apart() -> None:
    """Its shape was not compared with the length of the storage beside it."""
    pid = b"(" + text("storage") + global_("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x01tQ"
    meta = global_("torch._utils", "_rebuild_meta_tensor_no_storage") + b"(" + global_("torch", "float32")
    lost = P4 + pid + b"0" + meta + b"M\xe8\x03\x85K\x01\x85\x89tR."
    within = P4 + global_("torch._utils", "_rebuild_tensor_v2") + b"(" + pid + b"K\x00K\x01\x85K\x01\x85\x89" + ORDERED
    assert probe_frame(archive(within + b")RtR.")) is not None
    assert probe_frame(archive(lost)) is None


def test_a_marker_of_an_endless_time_is_a_marker_still() -> None:
    with pytest.raises(CheckpointDeletedError):
        codec.decode_metadata(b'{"bucketpoint":"deleted","at":1' + b"0" * 400 + b"}")
