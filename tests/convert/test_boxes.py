"""A stretch of a tensor's bytes is what its boxes hold, in order, and each box is one stretch of each chunk."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.convert.payload_reader import Box, Filling, cut, shared, stretch_start
from bucketpoint.convert.source import Stretch

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def stretches(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    axes = []
    for size in shape:
        borders = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        axes.append([(low, high - low) for low, high in itertools.pairwise(borders)])
    return shape, [Box(tuple(o for o, _ in box), tuple(s for _, s in box)) for box in itertools.product(*axes)]


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(axis, offset, size)
    return whole


@given(stretches())
def test_joins_boxes_one_after_another_to_the_stretch(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    whole = torch.arange(prod(shape)).view(shape)
    boxes = list(cut(shape, start, stop))
    found = [number for box in boxes for number in part(whole, box).reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape)


@given(grids(), st.data())
def test_shares_one_stretch_of_a_chunk_with_a_box(grid: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, chunks = grid
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    whole = torch.arange(prod(shape)).view(shape)
    for box in cut(shape, start, stop):
        seen = []
        for chunk in chunks:
            common = shared(box, chunk)
            if common is None:
                continue
            held = part(whole, chunk).reshape(-1).tolist()
            at = stretch_start(chunk.sizes, common.within(chunk))
            assert held[at : at + common.nbytes] == part(whole, common).reshape(-1).tolist()
            seen += held[at : at + common.nbytes]
        assert sorted(seen) == part(whole, box).reshape(-1).tolist()


def test_reads_rows_of_several_chunks_without_cutting_them_to_elements() -> None:
    class Source:
        def read(self, key: str, start: int, out: memoryview) -> None:
            reads.append(len(out))
            out[:] = data[key][start : start + len(out)]

    whole, reads = bytes(range(240)) * 20, list[int]()
    data = {"a": whole[:1200], "b": whole[1200:]}
    last, first = Box((10, 0, 0), (30, 30, 4)), Box((0, 0, 0), (10, 30, 4))
    boxes = [(last, Stretch("b", 0, 3600)), (first, Stretch("a", 0, 1200))]
    segment = Filling(cast(Any, Source()), 1 << 20).whole((40, 30), 4, boxes)
    assert segment.fill is not None
    found = bytearray(len(whole))
    for start in range(0, len(whole), 777):
        segment.fill(start, memoryview(found)[start : start + 777])
    assert bytes(found) == whole
    assert len(reads) == 8  # One of the seven parts lies in both chunks.
