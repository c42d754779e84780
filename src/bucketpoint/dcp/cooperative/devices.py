"""The exchange from device to device in a cooperative load.

The reader of a cell computes checksums in host memory and uploads the bytes to its device once. It sends the checksums
between hosts, beside each round's bytes: the receivers verify by them, as they have none of the bytes in host memory.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bucketpoint.dcp.cooperative.carrier import Carrier, Parcel
from bucketpoint.dcp.cooperative.device_assembly import DeviceAssembly, DeviceMemory, Piece, pieces_of
from bucketpoint.dcp.cooperative.peers import ARRIVE_WITHIN, Message, Peers
from bucketpoint.dcp.cooperative.schedule import Cell
from bucketpoint.dcp.cooperative.targets import Targets
from bucketpoint.errors import BucketpointError


class DeviceRounds:
    """The device-to-device part of the rounds of one load.

    Args:
        carrier: connections between the devices.
        exchange: connections between the hosts of the same ranks.
        peers: the ranks that the carrier connects, in the order of the carrier.
        memory: device memory, from which `targets` take theirs too.
    """

    def __init__(
        self,
        carrier: Carrier,
        exchange: Peers,
        peers: Sequence[int],
        targets: Targets,
        memory: DeviceMemory,
    ) -> None:
        self._carrier = carrier
        self._exchange = exchange
        self._here = exchange.rank
        self._number = {peer: number for number, peer in enumerate(peers)}
        self._targets = targets
        self._memory = memory
        # A short limit suffices: before bytes move, all ranks have said that they are ready.
        self._limit = min(ARRIVE_WITHIN, exchange.timeout)
        self._pieces: dict[tuple[int, int], list[Piece]] = {}
        self._stated = b""
        self._heard: dict[int, memoryview] = {}

    def vouch(self, cell: Cell, view: memoryview) -> None:
        """Compute the checksums of a cell that this rank has read, for the ranks that receive it."""
        if cell.on_device:
            borders = self._targets.borders(cell.obj, cell.start, cell.stop)
            borders.update(edge for peer in cell.on_device for span in cell.needs[peer] for edge in span)
            self._pieces[cell.obj, cell.start] = pieces_of(cell.start, view, borders)

    def state(self, cells: Sequence[Cell]) -> int:
        """Encode the checksums of this rank's cells of a round. Return the number of bytes."""
        words = array("I")
        for index, cell in enumerate(cells):
            if cell.reader == self._here and cell.on_device - {self._here}:
                pieces = self._pieces[cell.obj, cell.start]
                words.extend((index, len(pieces)))
                for piece in pieces:
                    words.extend(piece)
        self._stated = words.tobytes()
        return len(self._stated)

    def statements(self, cells: Sequence[Cell], sizes: Mapping[int, int]) -> tuple[list[Message], list[Message]]:
        """Return the messages with checksums to receive and to send between hosts, before all others.

        Args:
            sizes: bytes of the encoded checksums of each peer.
        """
        readers = {cell.reader for cell in cells if self._here in cell.on_device} - {self._here}
        wanting = {peer for cell in cells if cell.reader == self._here for peer in cell.on_device} - {self._here}
        self._heard = {reader: memoryview(bytearray(sizes[reader])) for reader in sorted(readers)}
        said = memoryview(bytearray(self._stated))
        return (
            [Message(reader, 0, data) for reader, data in self._heard.items()],
            [Message(peer, 0, said) for peer in sorted(wanting)],
        )

    def hand_out(self, cells: Sequence[Cell], read: Mapping[tuple[int, int], memoryview]) -> Iterator[DeviceAssembly]:
        """Move a round's bytes between devices. Yield the assemblies that are then complete, not yet verified.

        Args:
            read: the cells that this rank has read, by object and first byte. Their memory is free again once the first
                assembly is yielded, or once the iterator ends without one.

        Raises:
            BucketpointError: the device or a rank failed, or the exchange took too long.
        """
        stated = {reader: _read_statement(words) for reader, words in self._heard.items()}
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        taken: list[torch.Tensor] = []
        arrived: list[_Arrival] = []
        with self._losing():
            for index, cell in enumerate(cells):
                if cell.reader == self._here and cell.on_device:
                    pieces = self._pieces.pop((cell.obj, cell.start))
                    data = self._upload(cell, read[cell.obj, cell.start], taken)
                    for peer in sorted(cell.on_device):
                        for start, stop in cell.needs[peer]:
                            part = data[start - cell.start : stop - cell.start]
                            if peer == self._here:
                                arrived.append(_Arrival(cell, start, stop, part, pieces))
                            else:
                                sends.append(Parcel(self._number[peer], part))
                elif self._here in cell.on_device:
                    for start, stop in cell.needs[self._here]:
                        data = self._room(cell.obj, start, stop, taken)
                        receives.append(Parcel(self._number[cell.reader], data))
                        arrived.append(_Arrival(cell, start, stop, data, stated[cell.reader][index]))
            self._carrier.move(receives, sends)
            self._carrier.wait(self._limit, self._exchange.raise_if_told)
        for each in arrived:
            yield from self._settle(each)
        for buffer in taken:
            self._memory.give(buffer)

    def end(self) -> None:
        """Wait until all copies to the targets are complete. Raises BucketpointError."""
        with self._losing():
            self._carrier.wait(self._limit, self._exchange.raise_if_told)

    def _upload(self, cell: Cell, view: memoryview, taken: list[torch.Tensor]) -> torch.Tensor:
        data = self._room(cell.obj, cell.start, cell.stop, taken)
        return data.copy_(torch.frombuffer(view, dtype=torch.uint8), non_blocking=True)

    def _room(self, obj: int, start: int, stop: int, taken: list[torch.Tensor]) -> torch.Tensor:
        """Return the target's device memory for these bytes if there is exactly one, else temporary memory."""
        assembly = self._targets.only(obj, start, stop)
        if isinstance(assembly, DeviceAssembly):
            return assembly.place(start, stop)
        taken.append(self._memory.take(stop - start))
        return taken[-1]

    def _settle(self, arrival: _Arrival) -> Iterator[DeviceAssembly]:
        for assembly in self._targets.overlapping(arrival.cell.obj, arrival.start, arrival.stop):
            assert isinstance(assembly, DeviceAssembly)
            low, high = max(assembly.request.start, arrival.start), min(assembly.request.stop, arrival.stop)
            place = assembly.place(low, high)
            data = arrival.data[low - arrival.start : high - arrival.start]
            if place.data_ptr() != data.data_ptr():
                place.copy_(data)
            start = arrival.cell.start
            for nbytes, crc in arrival.pieces:
                if low <= start and start + nbytes <= high:
                    assembly.vouch(start, (nbytes, crc))
                start += nbytes
            if assembly.arrived(high - low):
                yield assembly

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._exchange.raise_if_told()
            raise BucketpointError(
                f"The exchange between devices failed, or a rank of it died or stood still: {str(error)[:300]}",
                remedy='Look at the other ranks\' errors, or pass exchange="host"',
            ) from error


@dataclass(frozen=True)
class _Arrival:
    """Bytes `[start, stop)` of a cell that this rank wants, and the checksums of the whole cell."""

    cell: Cell
    start: int
    stop: int
    data: torch.Tensor
    pieces: Sequence[Piece]


def _read_statement(words: memoryview) -> dict[int, list[Piece]]:
    """Decode checksums: the pieces of each cell, by the number of the cell in the round."""
    numbers = array("I", bytes(words))
    found: dict[int, list[Piece]] = {}
    at = 0
    while at < len(numbers):
        index, count = numbers[at : at + 2]
        pieces = numbers[at + 2 : at + 2 + 2 * count]
        found[index] = list(zip(pieces[::2], pieces[1::2], strict=True))
        at += 2 + 2 * count
    return found
