"""Copies from the state into an arena: ordered after the caller's streams, in few calls, without holding the GIL."""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeAlias

import torch

from bucketpoint.forks import renew_in_child
from bucketpoint.staging.arena import Arena
from bucketpoint.staging.layout import ArenaLayout, Region

_PIECE = 16 << 20
"""Minimum size in bytes of a region's pieces, except the last."""

_QUEUED = 64
"""Maximum number of queued copies during training. A thread that finds the driver's queue full (some hundreds) waits
with the driver's lock held, so that no kernel starts. On an H100, 1,000 copies at once delayed a step by 130 ms."""


class SideStreams(dict[torch.device, torch.Stream]):
    """One stream per device for copies from that device, created on first use."""

    def __missing__(self, device: torch.device) -> torch.Stream:
        self[device] = stream = torch.Stream(device=device)
        return stream


@dataclass(frozen=True)
class Ordering:
    """Events at the end of the caller's streams when `stage()` was called: the copies wait for them.

    Without the events a side stream would read tensors that the optimizer's kernels are still writing.

    Attributes:
        caller: index of the caller's current device, which the copying thread selects: a context on device 0, where
            threads start, costs half a GiB per rank.
    """

    events: dict[torch.device, torch.Event]
    caller: int | None

    @classmethod
    def of(cls, devices: Sequence[torch.device]) -> Ordering:
        """Record an event at the end of the caller's current streams. Does not wait."""
        events: dict[torch.device, torch.Event] = {}
        for device in devices:
            if device.type != "cpu":
                event = torch.Event(device=device)
                event.record(torch.accelerator.current_stream(device))
                events[device] = event
        return cls(events, torch.accelerator.current_device_index() if events else None)

    def use_callers_device(self) -> None:
        """Select the caller's device on the copying thread, before any other request to the driver."""
        if self.caller is not None:
            torch.accelerator.set_device_index(self.caller)


_VIEWS = 16
"""Number of tensor views made between two pieces. They take about 50 us, during which other threads wait."""


class Movers:
    """Threads that copy memory within this process, as many as torch computes with. Created on first use.

    A copy of torch waits, for each tensor, for the slowest of torch's threads. Here the other threads take over the
    pieces of a slow thread. Each piece acquires the GIL once, so do not use `Movers` during training.
    """

    def __init__(self) -> None:
        self._helpers: ThreadPoolExecutor | None = None
        renew_in_child(self, lambda movers: vars(movers).update(_helpers=None))

    def move(self, regions: Sequence[Region], base: int, meanwhile: Iterator[object]) -> None:
        """Copy regions to the address `base`, and wait for all threads. This thread also iterates over `meanwhile`."""
        threads = torch.get_num_threads()
        pieces = deque(_pieces(regions, base, threads))
        helpers = self._helpers = self._helpers or ThreadPoolExecutor(threads, thread_name_prefix="bucketpoint-copy")
        begun: list[Future[None]] = []
        try:
            # If the system allows no more threads, fewer threads do the work.
            with contextlib.suppress(RuntimeError):
                for _ in range(min(threads, len(pieces)) - 1):
                    begun.append(helpers.submit(_move, pieces, iter(())))
            _move(pieces, meanwhile)
        finally:
            # Wait even if interrupted: memory that a thread still writes to must not be given to another save.
            pieces.clear()
            wait(begun)
        for helper in begun:
            helper.result()

    def close(self) -> None:
        """End the threads. A later `move` starts new ones."""
        helpers, self._helpers = self._helpers, None
        if helpers is not None:
            helpers.shutdown(wait=True)


_Piece: TypeAlias = tuple[int, int, int]
"""Address to copy to, address to copy from, and size in bytes."""


def _pieces(regions: Sequence[Region], base: int, threads: int) -> Iterator[_Piece]:
    for start, end, offset in regions:
        # One large piece per thread: beyond a certain size, memmove bypasses the caches and takes a third less time.
        size = max(_PIECE, -(-(end - start) // threads))
        for begin in range(start, end, size):
            yield base + offset + begin - start, begin, min(size, end - begin)


def _move(pieces: deque[_Piece], between: Iterator[object]) -> None:
    while True:
        try:
            target, source, size = pieces.popleft()
        except IndexError:
            return
        # ctypes releases the GIL during the call.
        ctypes.memmove(target, source, size)
        next(between, None)


def run_copies(
    layout: ArenaLayout,
    arena: Arena,
    streams: SideStreams,
    movers: Movers,
    ordering: Ordering,
    *,
    non_blocking: bool,
    beside: bool,
) -> list[torch.Tensor]:
    """Copy to an arena as the layout describes, and wait for the copies.

    Args:
        non_blocking: issue a device's copies without waiting for each.
        beside: True if training continues during the copies, so that the driver's queue needs room for its kernels.

    Returns:
        A tensor over the arena for each place of the layout.
    """
    views: list[torch.Tensor] = []
    making = _make_views(layout, arena, views)
    if layout.copies:
        deque(making, maxlen=0)
    by_device: defaultdict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for source, index in layout.copies:
        targets, sources = by_device[source.device]
        targets.append(views[index])
        sources.append(source)
    begun: list[torch.Stream] = []
    try:
        # Devices first: they copy while the CPU copies host tensors.
        for device, (targets, sources) in sorted(by_device.items(), key=lambda item: item[0].type == "cpu"):
            if device.type == "cpu":
                torch._foreach_copy_(targets, sources)
                continue
            stream = streams[device]
            stream.wait_event(ordering.events[device])
            begun.append(stream)
            turn = _QUEUED if beside else len(targets)
            for first in range(0, len(targets), turn):
                if first:
                    stream.synchronize()
                with stream:
                    torch._foreach_copy_(
                        targets[first : first + turn], sources[first : first + turn], non_blocking=non_blocking
                    )
        if layout.moves:
            movers.move(layout.moves, arena.memory.data_ptr(), making)
    finally:
        # The sources stay referenced until here, so that the allocator cannot reuse their memory for another kernel.
        # Wait even after an error: a copy that still runs would write to the next state in this arena.
        for stream in begun:
            stream.synchronize()
    deque(making, maxlen=0)
    return views


def _make_views(layout: ArenaLayout, arena: Arena, views: list[torch.Tensor]) -> Iterator[None]:
    for begin in range(0, len(layout.places), _VIEWS):
        views += map(arena.view, layout.places[begin : begin + _VIEWS])
        yield
