"""Where bytes that ranks read for each other go on this rank: found by object and range. Reads and sends nothing."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from bucketpoint.dcp.device_assembly import DeviceAssembly, DeviceMemory, borders_of
from bucketpoint.dcp.held_memory import HeldMemory
from bucketpoint.transfer import Request
from bucketpoint.transfer.download import Assembly


class Targets:
    """The shared requests of a rank.

    Args:
        shared: each with the number of its object.
        everything: all requests of the rank.
        there: memory on the device for those that are put together there; None: none are.
    """

    def __init__(
        self,
        shared: Sequence[tuple[int, Request]],
        url: str,
        *,
        everything: Sequence[Request],
        memory: HeldMemory,
        there: DeviceMemory | None,
    ) -> None:
        self._by_object: dict[int, list[Assembly | DeviceAssembly]] = {}
        self._longest: dict[int, int] = {}
        self._borders: dict[int, list[int]] = {}
        for number, request in sorted(shared, key=lambda entry: entry[1].start):
            made: Assembly | DeviceAssembly
            if there is not None and request.on_device:
                made = DeviceAssembly(url, request, there)
            else:
                made = Assembly(url, request, memory.take, memory.give)
            if there is not None:
                self._borders[id(request)] = list(borders_of(request))
            self._by_object.setdefault(number, []).append(made)
            self._longest[number] = max(self._longest.get(number, 0), request.stop - request.start)
        self._common = common_memory(everything)

    def source(self, obj: int) -> tuple[str, str | None]:
        request = self._by_object[obj][0].request
        return request.key, request.etag

    def overlapping(self, obj: int, start: int, stop: int) -> list[Assembly | DeviceAssembly]:
        entries = self._by_object[obj]
        index = bisect.bisect_right(entries, start - self._longest[obj], key=lambda entry: entry.request.start)
        found = []
        while index < len(entries) and entries[index].request.start < stop:
            if entries[index].request.stop > start:
                found.append(entries[index])
            index += 1
        return found

    def direct(self, obj: int, start: int, stop: int) -> memoryview | None:
        """The caller's memory that these bytes can be received into, and sent from."""
        assembly = self.only(obj, start, stop)
        return None if assembly is None else assembly.direct(start, stop)

    def borders(self, obj: int, start: int, stop: int) -> set[int]:
        """Where these bytes are to be cut, so that each piece belongs to one block of what this rank wants."""
        found: set[int] = set()
        for assembly in self.overlapping(obj, start, stop):
            borders = self._borders[id(assembly.request)]
            found.update(borders[bisect.bisect_right(borders, start) : bisect.bisect_left(borders, stop)])
        return found

    def only(self, obj: int, start: int, stop: int) -> Assembly | DeviceAssembly | None:
        """The assembly that all of these bytes go to, if they go to no other."""
        found = self.overlapping(obj, start, stop)
        if len(found) != 1 or found[0].request.start > start or found[0].request.stop < stop:
            return None
        return None if id(found[0].request) in self._common else found[0]


def common_memory(requests: Sequence[Request]) -> set[int]:
    """The ids of requests with memory that another extent also fills, as tied tensors have.

    What was received there may have been overwritten before it is sent on.
    """
    places = sorted(
        (torch.frombuffer(extent.direct, dtype=torch.uint8).data_ptr(), len(extent.direct), id(request))
        for request in requests
        for extent in request.extents
        if extent.direct
    )
    common: set[int] = set()
    end, last = 0, 0
    for start, nbytes, request in places:
        if start < end:
            common |= {request, last}
        if start + nbytes > end:
            end, last = start + nbytes, request
    return common
