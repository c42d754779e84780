"""A request put together from pieces in any order delivers what one read of it delivers, and checks it as well."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.errors import CorruptDataError
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.download import SMALL_EXTENT_BYTES, Assembly, Block, Extent, Request

SOURCE = random.Random(5).randbytes(6 * SMALL_EXTENT_BYTES)


class Built:
    """A request over SOURCE, and what its extents were given."""

    def __init__(self, layout: list[tuple[int, int, str]]) -> None:
        self.request = Request("data", None)
        self.places: list[tuple[int, int, bytearray]] = []
        at = 10
        for gap, size, kind in layout:
            at += gap
            self._add(at, at + size, kind)
            at += size
        self.request.leased = at

    def _add(self, start: int, stop: int, kind: str) -> None:
        # A direct extent is wider than its place by what its blocks need.
        inner = (start + 3, stop - 2) if kind == "direct" else (start, stop)
        place = bytearray(inner[1] - inner[0])
        self.places.append((*inner, place))

        def deliver(view: memoryview | None) -> None:
            if view is not None:
                place[:] = view

        blocks = [Block(stop - start, crc32c(memoryview(SOURCE)[start:stop]))]
        direct = memoryview(place) if kind == "direct" else None
        self.request.extents.append(Extent("data", start, stop, deliver, blocks, direct, inner[0]))


@st.composite
def cases(draw: st.DrawFn) -> Any:
    extent = st.tuples(
        st.integers(0, 50),
        st.sampled_from([7, 1000, SMALL_EXTENT_BYTES + 500]),
        st.sampled_from(["direct", "copied"]),
    )
    layout = draw(st.lists(extent, min_size=1, max_size=5))
    return layout, draw(st.lists(st.integers(0, 6 * SMALL_EXTENT_BYTES), max_size=8)), draw(st.randoms())


@given(case=cases())
def test_assembles_the_request_from_pieces_in_any_order(case: Any) -> None:
    layout, cuts, order = case
    built = Built(layout)
    request = built.request
    borders = sorted({request.start, request.stop, *(cut for cut in cuts if request.start < cut < request.stop)})
    pieces = list(itertools.pairwise(borders))
    order.shuffle(pieces)
    assembly = Assembly("memory://", request)
    for number, (start, stop) in enumerate(pieces):
        place = assembly.direct(start, stop) if number % 2 else assembly.place(start, stop)
        if place is not None:
            place[:] = SOURCE[start:stop]
        else:
            assembly.put(start, memoryview(SOURCE)[start:stop])
        assert assembly.arrived(stop - start) is (number == len(pieces) - 1)
    assembly.finish()
    assert assembly.leased == 0
    for start, stop, place in built.places:
        assert place == SOURCE[start:stop]


@pytest.mark.parametrize("kind", ["direct", "copied"])
def test_finds_a_piece_that_was_altered_on_its_way(kind: str) -> None:
    built = Built([(0, SMALL_EXTENT_BYTES + 500, kind)])
    start, stop = built.request.start, built.request.stop
    altered = bytearray(SOURCE[start:stop])
    altered[len(altered) // 2] ^= 1
    assembly = Assembly("memory://", built.request)
    assembly.put(start, memoryview(altered))
    with pytest.raises(CorruptDataError, match="Checksum mismatch"):
        assembly.finish()


def test_gives_bytes_between_extents_no_place_in_the_callers_memory() -> None:
    built = Built([(0, SMALL_EXTENT_BYTES + 500, "direct"), (20, 1000, "copied")])
    assembly = Assembly("memory://", built.request)
    start, stop, place = built.places[0]
    assert assembly.direct(start, stop) == place
    assert assembly.direct(start - 1, stop) is None
    assert assembly.direct(start, stop + 1) is None
    assert assembly.direct(built.request.stop - 10, built.request.stop) is None
