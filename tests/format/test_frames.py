"""Frames against torch itself: its loader, and its own frames."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.format.tensor_bytes import contiguous_strides
from bucketpoint.format.torch_zip import ALIGNMENT, PROBE_BYTES, ProbedFrame, frameable, probe_frame, tensor_frame
from kit.checkpoints import saved

pytestmark = pytest.mark.contract

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and "qint" not in str(value)}
    - {torch.quint8, torch.quint4x2, torch.quint2x4},
    key=str,
)
SAVED_BY_TORCH = [
    dtype for dtype in DTYPES if str(dtype).removeprefix("torch.").rstrip("1234567") not in ("int", "uint")
]

dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)


def framed(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    frame = tensor_frame(dtype, shape)
    payload = bytes(index % 2 for index in range(frame.payload_nbytes))  # 0 and 1 are valid in each dtype, bool too
    return frame.header + payload + frame.trailer, payload


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage().tolist())


@pytest.mark.filterwarnings("ignore")
@given(dtype=dtypes, shape=shapes)
def test_gives_the_framed_tensor_by_torch_load_and_its_payload_by_a_probe(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    whole, payload = framed(dtype, shape)
    loaded = torch.load(io.BytesIO(whole), weights_only=True)
    assert type(loaded) is torch.Tensor
    assert loaded.dtype == dtype
    assert tuple(loaded.shape) == shape
    assert loaded.is_contiguous()
    assert raw(loaded) == payload
    frame = tensor_frame(dtype, shape)
    expected = ProbedFrame(frame.payload_offset, len(payload), dtype, shape, contiguous_strides(shape), 0)
    assert probe_frame(whole) == expected


@given(dtype=dtypes, shape=st.lists(st.integers(0, 70000), max_size=3).map(tuple))
def test_keeps_every_payload_of_frames_in_a_row_aligned(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    frame = tensor_frame(dtype, shape)
    assert frame.payload_offset % ALIGNMENT == 0
    assert frame.nbytes % ALIGNMENT == 0
    assert frame.nbytes == len(frame.header) + frame.payload_nbytes + len(frame.trailer)


def test_makes_one_small_frame_for_all_tensors_of_a_shape() -> None:
    assert tensor_frame(torch.float32, (3, 4)) is tensor_frame(torch.float32, torch.Size((3, 4)))
    assert tensor_frame(torch.float32, (10,)).nbytes < len(saved(torch.zeros(10)))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_refuses_a_dtype_that_cannot_be_rebuilt(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError):
        tensor_frame(dtype, (1,))


@pytest.mark.parametrize("below", [0, 1, 2, 329, 400, 700, 1100, -1, -(1 << 30) - 5])
def test_loads_frames_beyond_4_gib_that_are_zip64(tmp_path: Path, below: int) -> None:
    nbytes = (1 << 32) - below
    frame = tensor_frame(torch.uint8, (nbytes,))
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(frame.header)
        file.seek(nbytes - 2, io.SEEK_CUR)  # a hole: nothing of this size is written
        file.write(b"\x07\x09" + frame.trailer)
        assert file.tell() == frame.nbytes
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert tuple(loaded.shape) == (nbytes,)
    assert loaded[-2:].tolist() == [7, 9]
    assert frame.nbytes % ALIGNMENT == 0
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == nbytes
    with path.open("rb") as file:
        found = probe_frame(file.read(PROBE_BYTES))
    assert found == ProbedFrame(frame.payload_offset, nbytes, torch.uint8, (nbytes,), (1,), 0)


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(3).as_subclass(Subclass),
        lambda: torch._efficientzerotensor((3,)),
    ],
    ids=["conj", "neg", "sparse", "csr", "meta", "subclass", "zero tensor"],
)
def test_leaves_anything_but_plain_tensors_and_parameters_to_torch_save(make: Callable[[], torch.Tensor]) -> None:
    assert not frameable(make())
    for tensor in (torch.nn.Parameter(torch.ones(3)), torch.ones(3, 4).t(), torch.empty(2, dtype=torch.float8_e4m3fn)):
        assert frameable(tensor)


@pytest.mark.filterwarnings("ignore")
def test_leaves_a_quantised_tensor_to_torch_save() -> None:
    try:
        quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8)
    except RuntimeError:  # an engine that this build lacks
        pytest.skip("this torch cannot quantise")
    assert not frameable(quantised)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", SAVED_BY_TORCH, ids=str)
def test_finds_the_payload_of_torchs_frame_by_a_probe(dtype: torch.dtype, protocol: int) -> None:
    shape = (3, 4)
    tensor = torch.zeros(12 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(shape)
    whole = saved(tensor, pickle_protocol=protocol)
    found = probe_frame(whole[:PROBE_BYTES])
    assert (found.dtype, found.shape, found.stride, found.storage_offset) == (dtype, shape, (4, 1), 0)
    payload = whole[found.payload_offset : found.payload_offset + found.payload_nbytes]
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert payload == archive.read("archive/data/0")


@given(
    size=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    offset=st.integers(0, 3),
    kind=st.sampled_from([torch.Tensor.detach, torch.nn.Parameter]),
)
def test_tells_by_a_probe_how_a_view_lies_in_its_storage(size: list[int], order: Any, offset: int, kind: Any) -> None:
    base = torch.arange(offset + torch.Size(size).numel(), dtype=torch.float32)
    dims = list(range(len(size)))
    order.shuffle(dims)
    view = base[offset:].view(size).permute(dims)
    whole = saved(kind(view))
    found = probe_frame(whole)
    payload = bytearray(whole[found.payload_offset : found.payload_offset + found.payload_nbytes])
    rebuilt = torch.frombuffer(payload, dtype=found.dtype).as_strided(found.shape, found.stride, found.storage_offset)
    assert torch.equal(rebuilt, view)


def altered(whole: bytes, old: bytes, new: bytes) -> bytes:
    assert whole.count(old) == 1
    return whole.replace(old, new)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "whole",
    [
        saved(torch.ones(3, dtype=torch.complex64).conj()),
        saved([torch.ones(3), torch.ones(4)]),
        saved(torch.ones(3).as_subclass(Subclass)),
        saved(torch.eye(3).to_sparse()),
        saved(torch.ones(3), _use_new_zipfile_serialization=False),
        saved({"a": torch.ones(3)}),
        saved(5),
        pickle.dumps(torch.ones(3)),
        saved(torch.ones(3))[:300],
        b"",
        b"PK\x03\x04",
        altered(saved(torch.ones(3)), b"little", b"big\0\0\0"),
        # BININT1 4, BININT1 5, TUPLE2 is the size; its storage has twenty elements.
        altered(saved(torch.ones(4, 5)), b"K\x04K\x05\x86", b"K\x05K\x05\x86"),
    ],
    ids=[
        *("conj", "two", "subclass", "sparse", "legacy", "dict", "number", "pickle", "truncated", "empty", "magic"),
        *("big endian", "more than its storage"),
    ],
)
def test_probes_nothing_but_one_plain_tensor(whole: bytes) -> None:
    assert probe_frame(whole) is None


FOREIGN = saved(torch.ones(4, 5))[: PROBE_BYTES // 2]


@given(st.lists(st.tuples(st.integers(0, len(FOREIGN) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_claims_nothing_impossible_of_a_damaged_frame_and_never_fails(damage: list[tuple[int, int]]) -> None:
    head = bytearray(FOREIGN)
    for position, value in damage:
        head[position] = value
    found = probe_frame(bytes(head))
    if found is not None and 0 not in found.shape:
        last = sum((n - 1) * step for n, step in zip(found.shape, found.stride, strict=True)) + found.storage_offset
        assert 0 <= last < found.payload_nbytes // found.dtype.itemsize
