"""A request put together on a device delivers what was read, and is checked by the checksums that its readers took."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.dcp.cooperative.device_assembly import DeviceAssembly, DeviceMemory, borders_of, pieces_of
from bucketpoint.errors import CorruptDataError
from bucketpoint.transfer import TransferOptions, plan_requests
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.download import Block, Extent, Request

SOURCE = random.Random(7).randbytes(3000)
CPU = torch.device("cpu")


def tensor_of(data: bytes | memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Built:
    """A request over SOURCE from byte 10 on, and what its extents were given."""

    def __init__(self, layout: list[tuple[int, list[int]]]) -> None:
        self.request = Request("data", None)
        self.delivered: dict[int, bytes] = {}
        at = 10
        for gap, sizes in layout:
            at += gap
            start, blocks = at, []
            for size in sizes:
                blocks.append(Block(size, crc32c(memoryview(SOURCE)[at : at + size])))
                at += size

            def deliver(raw: torch.Tensor, start: int = start) -> None:
                self.delivered[start] = bytes(raw.tolist())

            self.request.extents.append(Extent("data", start, at, lambda _: None, blocks, deliver_there=deliver))


@st.composite
def cases(draw: st.DrawFn) -> Any:
    extent = st.tuples(st.integers(0, 50), st.lists(st.integers(1, 200), min_size=1, max_size=4))
    layout = draw(st.lists(extent, min_size=1, max_size=3))
    cuts = st.lists(st.integers(0, 2700), max_size=8)
    return layout, draw(cuts), draw(cuts), draw(st.booleans()), draw(st.randoms())


def fill(assembly: DeviceAssembly, case: Any, source: bytes) -> None:
    """Readers of any cells, who cut at the blocks that they know, or not, and give all of it or a part at a time."""
    _, cuts, others, knowing, order = case
    request = assembly.request
    known = set(borders_of(request)) if knowing else set(others)
    borders = sorted({request.start, request.stop, *(cut for cut in cuts if request.start < cut < request.stop)})
    cells = list(itertools.pairwise(borders))
    order.shuffle(cells)
    for number, (start, stop) in enumerate(cells):
        view = memoryview(source)[start:stop]
        if number % 3 == 2:
            assembly.put(start, memoryview(bytearray(view)))
        else:
            assembly.place(start, stop).copy_(tensor_of(view))
            at = start
            for piece in pieces_of(start, view, known):
                assembly.vouch(at, piece)
                at += piece[0]
            assert at == stop
        assert assembly.arrived(stop - start) is (number == len(cells) - 1)


@given(case=cases())
def test_pieces_in_any_order_make_the_request(case: Any) -> None:
    built = Built(case[0])
    memory = DeviceMemory(CPU)
    assembly = DeviceAssembly("memory://", built.request, memory)
    fill(assembly, case, SOURCE)
    assembly.finish()
    assert built.delivered == {each.start: SOURCE[each.start : each.stop] for each in built.request.extents}
    assert memory.peak_bytes == built.request.stop - built.request.start


@given(case=cases(), at=st.integers(0, 3000))
def test_a_byte_that_was_altered_before_it_was_read_is_found_and_nothing_is_delivered(case: Any, at: int) -> None:
    built = Built(case[0])
    checked = [each for each in built.request.extents if each.start <= at < each.stop]
    altered = bytearray(SOURCE)
    altered[at % len(altered)] ^= 1
    assembly = DeviceAssembly("memory://", built.request, DeviceMemory(CPU))
    fill(assembly, case, bytes(altered))
    if not checked:
        assembly.finish()
        return
    with pytest.raises(CorruptDataError, match="Checksum mismatch"):
        assembly.finish()
    assert not built.delivered


def test_what_goes_to_a_device_is_never_requested_with_what_goes_to_the_host() -> None:
    kinds = [True, True, False, True, False, False]
    extents = [
        Extent("data", 10 * at, 10 * at + 10, lambda _: None, deliver_there=(lambda _: None) if there else None)
        for at, there in enumerate(kinds)
    ]
    requests = sorted(plan_requests(extents, TransferOptions()), key=lambda request: request.start)
    assert [(each.on_device, len(each.extents)) for each in requests] == [(True, 2), (False, 1), (True, 1), (False, 2)]


def test_cells_are_cut_at_the_blocks_of_their_readers_and_nowhere_else() -> None:
    view = memoryview(SOURCE)[100:200]
    found = pieces_of(100, view, {90, 100, 130, 131, 200, 250})
    assert [nbytes for nbytes, _ in found] == [30, 1, 69]
    assert [crc for _, crc in found] == [crc32c(view[:30]), crc32c(view[30:31]), crc32c(view[31:])]


def test_a_block_whose_pieces_do_not_add_up_is_fetched_back_and_checked() -> None:
    built = Built([(0, [100, 100])])
    request = built.request
    assembly = DeviceAssembly("memory://", request, DeviceMemory(CPU))
    assembly.place(10, 210).copy_(tensor_of(SOURCE[10:210]))
    # One piece over both blocks: of neither does it tell anything.
    assembly.vouch(10, (200, crc32c(memoryview(SOURCE)[10:210])))
    assembly.place(150, 151).add_(1)
    assert assembly.arrived(200)
    with pytest.raises(CorruptDataError, match="bytes 110-209"):
        assembly.finish()
