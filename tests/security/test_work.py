"""Short files whose reading once took minutes, hours or gigabytes: work that their length did not pay for."""

from __future__ import annotations

import json
import pickle
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.catalog.catalog import get_metadata
from bucketpoint.errors import CheckpointDeletedError, MetadataError
from bucketpoint.format import keys
from bucketpoint.format.index.decode import HEAD
from bucketpoint.format.index.int_columns import fits
from bucketpoint.format.index.ref import MAGIC
from bucketpoint.format.index.view import decode_index
from bucketpoint.format.metadata import codec, plain
from bucketpoint.format.metadata.facts import record_of
from bucketpoint.format.record import CommitRecord
from bucketpoint.format.torch_zip import probe_frame
from bucketpoint.stores import open_store
from security.corpus import ORDERED, P4, archive, global_, refusal, short, text

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
    state = P4 + b"(K\x03" + short("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t\x94"
    state += global_("numpy", "dtype") + short("f8") + b"\x89\x88\x87R"
    counted = (
        P4 + global_("builtins", "range") + b"\x94K\x00" + long4(long) + long4(1 << (8 * (20 << 10))) + b"\x87\x94"
    )
    return {
        **{f"many of {code!r}": P4 + code * 1_000_000 + b"." for code in (b"}", b"\x8f")},
        "a memo number for each byte": P4 + b"N" + b"\x94" * 1_000_000 + b".",
        "a shell of many numbers, built often": state
        + b"\x94" * 50_000
        + b"2" * 5_000
        + b"h\x00b0" * 5_000
        + b"h\x00b.",
        "ranges of long integers": counted + b"h\x00h\x01R0" * 400 + b"N.",
        "a long name of a layout": called(global_("torch.serialization", "_get_layout"), text("x" * 400_000), 40_000),
    }


@pytest.mark.parametrize("name", items())
def test_bounds_the_work_for_an_item_by_its_length(name: str) -> None:
    data = items()[name]
    began = time.process_time()
    found = refusal(data)
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
        "chunks that overlap": described({"x": tensor(torch.Size([1]), [chunk] * 2)}),
        "small objects": P4 + b"}" * 1_000_000 + b".",
        "a shape of long numbers": described({"x": tensor((1 << (8 * (30 << 10)),) * 60, [])}),
        "a long number of a format": described({}).replace(b"K\x01s", long4(1 << 16_000) + b"s"),
    }


def read_with_torch(data: bytes) -> CommitRecord:
    return record_of(codec.decode_metadata(data), data, metadata_etag=None)


@pytest.mark.parametrize("read", [read_with_torch, plain.read_record])
@pytest.mark.parametrize("name", metadata())
def test_bounds_the_work_for_metadata_by_its_length(name: str, read: Callable[[bytes], Any]) -> None:
    data = metadata()[name]
    began = time.process_time()
    with pytest.raises(MetadataError):
        read(data)
    assert time.process_time() - began <= LIMIT_S * max(len(data) / PIECE, 1)


def test_refuses_metadata_beyond_the_bound_that_the_caller_sets() -> None:
    data = described({f"{number}": tensor(torch.Size([1]), []) for number in range(1000)})
    codec.decode_metadata(data, most=64 * len(data))
    with pytest.raises(MetadataError, match="more work or memory"):
        codec.decode_metadata(data, most=18 * len(data))


def index_of(names: list[str], items: int, columns: Sequence[int]) -> bytes:
    """Make an index of which each column is one number."""
    structure = {"names": names, "properties": [["uint8", "strided", False, 0, False]], "transforms": []}
    facts = {
        "objects": [["data/x"]],
        "paths": 1,
        "bucketpoint": {},
        "storage_meta": None,
        "table": False,
        "version": [],
    }
    parts = [
        json.dumps(structure, separators=(",", ":")).encode(),
        b"null",
        b"".join(struct.pack("<Bq", 0, value) for value in columns),
        json.dumps(facts).encode(),
    ]
    stored = [(zlib.compress(part), len(part)) for part in parts] + [(bytes(4 * items), 4 * items)]
    head = HEAD.pack(MAGIC, items, *(number for data, size in stored for number in (len(data), size)))
    return head + b"".join(data for data, _ in stored)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        # Names that compress well: three kilobytes stood for 280,000 tensors of 64 dimensions each.
        (index_of(["a"] * 280_000, 0, [1, 64, *[0] * 13]), "dimensions"),
        # An item has four bytes: one megabyte stood for 262,144 chunks of 64 dimensions each, 450 MB.
        (index_of(["a"], 100_000, [1, 64, 100_000, 1, 0, 1, *[0] * 9]), "dimensions"),
        (index_of(["a"], 2, [1, 1, 2, 1, 0, 1, *[0] * 9]), "more elements"),
    ],
    ids=["names", "dimensions", "chunks that overlap"],
)
def test_refuses_an_index_of_which_little_stands_for_much(data: bytes, reason: str) -> None:
    with pytest.raises(MetadataError, match=reason):
        decode_index(data)


def test_writes_no_index_that_a_reader_would_refuse() -> None:
    column = [torch.tensor([number]) for number in (64, 100_000, 3)]
    assert not fits(column[0], column[1])
    assert fits(column[2], column[1])


def test_reads_only_the_head_of_a_metadata_object_that_no_writer_made(tmp_path: Path) -> None:
    store, prefix = open_store(f"file://{tmp_path}")
    for name, content in {"junk": b"\0" * (1 << 20), "large": b"\x80" * (1 << 20), "small": b"\0" * 100}.items():
        (tmp_path / name).write_bytes(content)
    for name, nbytes in {"junk": 128 << 10, "large": 128 << 10, "small": 100}.items():
        data, info = get_metadata(store, keys.join(prefix, name), max_bytes=1 << 19)
        assert (len(data), info.size) == (nbytes, (tmp_path / name).stat().st_size)


def test_leaves_a_frame_whole_whose_tensor_lies_in_no_storage() -> None:
    """Its shape was not compared with the length of the storage beside it."""
    pid = b"(" + text("storage") + global_("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x01tQ"
    meta = global_("torch._utils", "_rebuild_meta_tensor_no_storage") + b"(" + global_("torch", "float32")
    lost = P4 + pid + b"0" + meta + b"M\xe8\x03\x85K\x01\x85\x89tR."
    within = P4 + global_("torch._utils", "_rebuild_tensor_v2") + b"(" + pid + b"K\x00K\x01\x85K\x01\x85\x89" + ORDERED
    assert probe_frame(archive(within + b")RtR.")) is not None
    assert probe_frame(archive(lost)) is None


def test_takes_a_marker_of_an_endless_time_for_a_marker_still() -> None:
    with pytest.raises(CheckpointDeletedError):
        codec.decode_metadata(b'{"bucketpoint":"deleted","at":1' + b"0" * 400 + b"}")
