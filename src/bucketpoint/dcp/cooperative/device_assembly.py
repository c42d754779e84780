"""Assembly of a request on the device of its targets, verified by the checksums that the readers took.

All calls must come from one thread: the current stream of that thread orders the work that is queued here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from bucketpoint.transfer import Extent, Request
from bucketpoint.transfer.checksum import combine, crc32c
from bucketpoint.transfer.download import check_block, check_part

Piece = tuple[int, int]
"""A number of bytes, and their CRC32C."""


class DeviceMemory:
    """Counter of the memory that a load holds on the device. Memory that is given back returns to torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken = 0
        self.peak_bytes = 0
        """Most bytes that were held at once."""

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory of `nbytes`, with undefined content."""
        self._taken += nbytes
        self.peak_bytes = max(self.peak_bytes, self._taken)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def give(self, taken: torch.Tensor) -> None:
        """Give back memory from `take`, once no more work will be queued for it."""
        self._taken -= taken.numel()


class DeviceAssembly:
    """A request whose bytes arrive on the device in any order.

    Checksums are never computed on the device. The rank that read a piece computed the CRC32C in host memory, and
    `vouch` notes it here; the checksums of pieces are combined to that of a block, or of a part of an item. Bytes that
    the pieces do not cover exactly are copied back to the host to be checked.
    """

    leased = 0
    """Bytes of host memory that the assembly holds: none."""

    def __init__(self, url: str, request: Request, memory: DeviceMemory) -> None:
        self.request = request
        self._url = url
        self._memory = memory
        self._bytes: torch.Tensor | None = None
        self._missing = request.stop - request.start
        self._pieces: dict[int, Piece] = {}

    def direct(self, start: int, stop: int) -> None:
        """Return None: the caller has no host memory that could receive bytes directly."""

    def place(self, start: int, stop: int) -> torch.Tensor:
        """Return the device memory for bytes `[start, stop)` of the object."""
        if self._bytes is None:
            self._bytes = self._memory.take(self.request.stop - self.request.start)
        return self._bytes[start - self.request.start : stop - self.request.start]

    def put(self, start: int, data: memoryview) -> None:
        """Copy the object's bytes from `start` on from host memory to the device, and take their checksum."""
        self.vouch(start, (len(data), crc32c(data)))
        # Torch warns of read-only memory, such as that of other ranks: copy it first.
        source = bytearray(data) if data.readonly else data
        self.place(start, start + len(data)).copy_(torch.frombuffer(source, dtype=torch.uint8))

    def vouch(self, start: int, piece: Piece) -> None:
        """Note the CRC32C of the object's bytes from `start` on."""
        self._pieces[start] = piece

    def arrived(self, nbytes: int) -> bool:
        """Count bytes that have arrived at their place. Return True once none is missing."""
        self._missing -= nbytes
        assert self._missing >= 0
        return self._missing == 0

    def finish(self) -> None:
        """Verify and deliver every extent, then free the memory. Raises CorruptDataError on a wrong checksum."""
        if self._bytes is None:
            self.place(self.request.start, self.request.start)
        for extent in self.request.extents:
            self._check(extent)
        for extent in self.request.extents:
            assert extent.deliver_there is not None
            extent.deliver_there(self.place(extent.start, extent.stop))
        assert self._bytes is not None
        self._memory.give(self._bytes)
        self._bytes = None
        self._pieces = {}

    def _check(self, extent: Extent) -> None:
        if extent.part_of is not None:
            check_part(self._url, extent, extent.part_of, self._crc_of(extent.start, extent.stop))
        start = extent.start
        for block in extent.blocks:
            check_block(self._url, extent, start, block, self._crc_of(start, start + block.nbytes))
            start += block.nbytes

    def _crc_of(self, start: int, stop: int) -> int:
        vouched = self._vouched(start, stop)
        return crc32c(_on_host(self.place(start, stop))) if vouched is None else vouched

    def _vouched(self, start: int, stop: int) -> int | None:
        total = 0
        while start < stop:
            piece = self._pieces.get(start)
            if piece is None or not 0 < piece[0] <= stop - start:
                return None
            total = combine(total, piece[1], piece[0])
            start += piece[0]
        return total


def borders_of(request: Request) -> Iterator[int]:
    """Yield the offsets at which the extents of a request and their blocks begin and end, in order; some twice."""
    for extent in request.extents:
        start = extent.start
        yield start
        for block in extent.blocks:
            start += block.nbytes
            yield start
        yield extent.stop


def pieces_of(start: int, view: memoryview, borders: set[int]) -> list[Piece]:
    """Cut the object's bytes from `start` on at the borders within them, and return the CRC32C of each piece."""
    stop = start + len(view)
    cuts = [start, *sorted(border for border in borders if start < border < stop), stop]
    return [(high - low, crc32c(view[low - start : high - start])) for low, high in itertools.pairwise(cuts)]


def _on_host(data: torch.Tensor) -> memoryview:
    copied = bytearray(data.numel())
    if copied:
        torch.frombuffer(copied, dtype=torch.uint8).copy_(data)
    return memoryview(copied)
