"""Lookup of the targets on this rank, by object and range, for bytes that ranks read for each other."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from bucketpoint.transfer import BufferPool, Request
from bucketpoint.transfer.download import Assembly


class Targets:
    """The shared requests of a rank, with the assembly of each.

    Args:
        shared: the shared requests, each with the number of the object.
    """

    def __init__(
        self,
        shared: Sequence[tuple[int, Request]],
        url: str,
        memory: BufferPool,
    ) -> None:
        self._by_object: dict[int, list[Assembly]] = {}
        self._longest: dict[int, int] = {}
        for number, request in sorted(shared, key=lambda entry: entry[1].start):
            assembly = Assembly(url, request, memory.take, memory.give)
            self._by_object.setdefault(number, []).append(assembly)
            self._longest[number] = max(self._longest.get(number, 0), request.nbytes)

    def source(self, obj: int) -> tuple[str, str | None]:
        request = self._by_object[obj][0].request
        return request.key, request.etag

    def overlapping(self, obj: int, start: int, stop: int) -> list[Assembly]:
        entries = self._by_object[obj]
        index = bisect.bisect_right(entries, start - self._longest[obj], key=lambda entry: entry.request.start)
        assemblies = []
        while index < len(entries) and entries[index].request.start < stop:
            if entries[index].request.stop > start:
                assemblies.append(entries[index])
            index += 1
        return assemblies

    def direct(self, obj: int, start: int, stop: int) -> memoryview | None:
        """Return the caller's memory into which these bytes can be received, and from which they can be sent.

        None if there is no such memory.
        """
        assembly = self._only(obj, start, stop)
        return None if assembly is None else assembly.direct(start, stop)

    def place(self, obj: int, start: int, stop: int) -> memoryview | None:
        """Return memory, of the caller or of the assembly, into which these bytes can be received.

        None if there is no such memory.
        """
        assembly = self._only(obj, start, stop)
        return None if assembly is None else assembly.place(start, stop)

    def _only(self, obj: int, start: int, stop: int) -> Assembly | None:
        """Return the assembly that takes all of these bytes, if no other takes any; else None."""
        assemblies = self.overlapping(obj, start, stop)
        request = assemblies[0].request if len(assemblies) == 1 else None
        if request is None or request.start > start or request.stop < stop:
            return None
        return assemblies[0]
