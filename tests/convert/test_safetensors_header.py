"""Headers of safetensors files: the library reads ours, and no header takes memory or says what cannot be."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.convert import plan_conversion
from bucketpoint.errors import MetadataError
from bucketpoint.format.safetensors_header import MAX_HEADER_BYTES, TensorEntry, decode_header, encode_header
from dcp.states import DTYPES

safetensors = pytest.importorskip("safetensors.torch")

READ = [torch.float8_e5m2fnuz, *(dtype for dtype in DTYPES if dtype != torch.complex128)]
TENSORS = st.dictionaries(
    st.text('ab. é中"\\\n', min_size=1, max_size=4),
    st.tuples(st.sampled_from(READ), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)


@given(TENSORS)
def test_writes_headers_that_are_read_here_and_by_the_library(tensors: dict[str, Any]) -> None:
    entries, position = [], 0
    for name, (dtype, shape) in tensors.items():
        entries.append(TensorEntry(name, dtype, tuple(shape), position))
        position += entries[-1].nbytes
    header = encode_header(entries)
    assert len(header) % 8 == 0
    found = decode_header(header[8:], position, key="x")
    assert sorted(found, key=repr) == sorted(entries, key=repr)
    loaded = safetensors.load(header + bytes(position))
    assert {name: (value.dtype, list(value.shape)) for name, value in loaded.items()} == tensors


def file(content: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**said: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **said}}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00" * 7,
        file({}, length=1 << 63),
        file({}, length=MAX_HEADER_BYTES + 1),
        file({}, length=100),
        file(b"[" * 100_000),
        file(b"[]"),
        file(b"{"),
        file(b'{"a": 1}'),
        file(b'{"__metadata__": {}, "__metadata__": {}}'),
        file(one(dtype="F99"), bytes(4)),
        file(one(dtype=["F32"]), bytes(4)),
        file(one(shape=[1 << 61, 1 << 61]), bytes(4)),
        file(one(shape=[0, 1 << 61, 1 << 61], data_offsets=[0, 0])),
        file(one(shape=[-1]), bytes(4)),
        file({**one(), "b": {**one()["a"], "data_offsets": [2, 6]}}, bytes(6)),
        file(one(shape=[True]), bytes(4)),
        file(one(shape=[1] * 100), bytes(4)),
        file(one(shape=None), bytes(4)),
        file(one(data_offsets=[4, 8]), bytes(8)),
        file(one(data_offsets=[0, 8]), bytes(8)),
        file(one(data_offsets=[0]), bytes(4)),
        file(one(), bytes(3)),
        file(one(), bytes(5)),
        file({**one(), "b": one()["a"]}, bytes(4)),
    ],
    ids=range(25),
)
def test_refuses_a_malformed_file_and_writes_nothing(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(MetadataError):
        plan_conversion(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
