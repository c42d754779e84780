"""Byte runs of slices, against torch's own slicing."""

from __future__ import annotations

from itertools import product
from operator import mul
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.format.tensor_bytes import Runs, slice_runs


@st.composite
def slices(draw: Any) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """A tensor with any strides that torch makes, over a storage in which it need not begin, and a slice of it."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    offset = draw(st.integers(0, 3))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.int64]))
    numel = torch.Size(shape).numel()
    tensor = (
        torch.arange(offset + numel).to(dtype)[offset:].view(shape).permute(draw(st.permutations(range(len(shape)))))
    )
    for dim in range(tensor.dim()):
        if draw(st.booleans()) and tensor.shape[dim] > 1:
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
    lengths = tuple(draw(st.integers(0, size)) for size in tensor.shape)
    offsets = tuple(draw(st.integers(0, size - n)) for size, n in zip(tensor.shape, lengths, strict=True))
    return tensor, offsets, lengths


def runs_of(tensor: torch.Tensor, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Runs:
    return slice_runs(
        tensor.shape, offsets, lengths, tensor.element_size(), tensor.stride(), int(tensor.storage_offset())
    )


def narrowed(tensor: torch.Tensor, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage().tolist())


def starts_of(runs: Runs) -> list[int]:
    steps = product(*(range(count) for count, _ in runs.outer)) if runs.run_nbytes else ()
    strides = [stride for _, stride in runs.outer]
    return [runs.start + sum(map(mul, at, strides)) for at in steps]


@given(slices())
def test_makes_the_slice_of_the_runs_and_of_the_covering_range_by_the_strides(
    case: tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]],
) -> None:
    tensor, offsets, lengths = case
    runs = runs_of(tensor, offsets, lengths)
    storage, expected = raw(tensor), narrowed(tensor, offsets, lengths)
    starts = starts_of(runs)
    joined = b"".join(storage[start : start + runs.run_nbytes] for start in starts)
    assert joined == raw(expected.contiguous().clone())
    assert len(starts) == runs.count
    assert runs.nbytes == torch.Size(lengths).numel() * tensor.element_size()
    if starts:
        assert (runs.start, runs.end) == (min(starts), max(starts) + runs.run_nbytes)
        assert runs.span == runs.end - runs.start
        flat = torch.frombuffer(bytearray(storage[runs.start : runs.end]), dtype=tensor.dtype)
        assert torch.equal(flat.as_strided(lengths, tensor.stride()), expected)


@given(slices(), st.integers(0, 200))
def test_covers_the_runs_by_coalesced_ones_with_wide_gaps(
    case: tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]], gap: int
) -> None:
    tensor, offsets, lengths = case
    runs = runs_of(tensor, offsets, lengths)
    joined = runs.coalesced(gap)
    assert (joined.start, joined.end) == (runs.start, runs.end)
    covered = {at for start in starts_of(joined) for at in range(start, start + joined.run_nbytes)}
    assert {at for start in starts_of(runs) for at in range(start, start + runs.run_nbytes)} <= covered
    if joined.outer:
        assert joined.outer[-1][1] - joined.run_nbytes > gap


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_makes_one_run_of_rows_of_a_contiguous_tensor(shape: list[int], data: Any) -> None:
    first = data.draw(st.integers(0, shape[0] - 1))
    count = data.draw(st.integers(1, shape[0] - first))
    row = torch.Size(shape[1:]).numel() * 4
    runs = slice_runs(shape, (first, *[0] * (len(shape) - 1)), (count, *shape[1:]), 4)
    assert runs == Runs(first * row, count * row)
    assert runs.count == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (((1_000_000, 4096), (0, 1024), (1_000_000, 1024), 2), Runs(2048, 2048, ((1_000_000, 8192),))),
        (((1 << 20, 1 << 20), (1 << 19, 0), (1 << 19, 1 << 20), 8), Runs(1 << 42, 1 << 42)),
        (((), (), (), 8), Runs(0, 8)),
        (((3, 4), (1, 2), (0, 2), 4), Runs(24, 0)),
    ],
    ids=["columns of a million rows", "sizes beyond 32 bits", "a scalar", "an empty slice"],
)
def test_makes_one_small_object_of_a_slice(arguments: Any, expected: Runs) -> None:
    assert slice_runs(*arguments) == expected


@pytest.mark.parametrize(
    ("offsets", "lengths"), [((0,), (1,)), ((-1, 0), (1, 1)), ((0, 3), (1, 2)), ((0, 0), (4, 1)), ((0, 0), (-1, 1))]
)
def test_refuses_a_slice_outside_the_shape(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        slice_runs((3, 4), offsets, lengths, 4)
