"""Chunks of a tensor are read in stretches of rows, and not element by element."""

from __future__ import annotations

from typing import Any, cast

from bucketpoint.convert.payload_reader import Box, Filling
from bucketpoint.convert.source import Stretch


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
