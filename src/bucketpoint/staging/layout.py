"""Layout of an arena: the position of each tensor, computed for each save from addresses and strides.

The copies that a layout plans are ordered after the caller's streams, and made in few calls, without holding the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from bucketpoint.errors import StagingError
from bucketpoint.forks import renew_in_child
from bucketpoint.format.tensor_bytes import contiguous_strides, refuse_freed
from bucketpoint.staging.pool import ALIGNMENT, Arena, Place

Copy: TypeAlias = tuple[torch.Tensor, int]
"""Tensor to read, and index of the place to copy it to, which has the same shape."""

Region: TypeAlias = tuple[int, int, int]
"""Start and end address of bytes in a device's memory that are copied unchanged, and their offset in the arena."""

# Plain tuples for speed: several are made for each of thousands of tensors, while training waits.


@dataclass
class ArenaLayout:
    """Plan of the copies, and the view that replaces each source.

    Attributes:
        nbytes: size of the arena: the bytes of the sources, and less than a cache line for each.
        places: the place of each source's copy, followed by places that occur only in `copies`.
        copies: tensor copies; fewer than sources if sources share memory.
        moves: memory of this process to copy as bytes, in addition to `copies`.
        devices: the devices of the sources.
    """

    nbytes: int = 0
    places: list[Place] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    moves: list[Region] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)


def lay_out(sources: Sequence[torch.Tensor], *, by_bytes: bool = False) -> ArenaLayout:
    """Plan the copies of strided tensors on devices whose `data_ptr()` is an address.

    Tensors that overlap at the source (tied weights, views of one buffer) overlap in the arena in the same way, and
    their bytes are copied once. The gaps of a strided view are copied only if another tensor needs them.

    Args:
        by_bytes: plan dense memory of this process as `moves`, not as `copies`.
    """
    layout = ArenaLayout(places=[_NOWHERE] * len(sources))
    dense: dict[torch.device, list[_Span]] = {}
    gappy: list[int] = []
    device: torch.device | None = None
    spans: list[_Span] = []
    for index, source in enumerate(sources):
        size, address = source.nbytes, source.data_ptr()
        if size == 0:
            layout.places[index] = (source.dtype, source.shape, source.stride(), 0)
            continue
        refuse_freed(source, kind=StagingError)
        if not (source.is_contiguous() or _is_dense(source)) or not _is_plain(source, address):
            gappy.append(index)
            dense.setdefault(source.device, [])
            continue
        if source.device != device:
            device = source.device
            spans = dense.setdefault(device, [])
        spans.append((address, -size, index))
    regions: dict[torch.device, list[Region]] = {}
    for device, spans in dense.items():
        moved = by_bytes and device.type == "cpu"
        regions[device] = _place_dense(sources, spans, layout, moved)
        if moved:
            # The largest first, so that threads which share the regions end at about the same time.
            layout.moves = sorted(regions[device], key=lambda region: region[0] - region[1])
    if gappy:
        _place_gappy(sources, gappy, regions, layout)
    layout.devices = list(dense)
    return layout


_Span: TypeAlias = tuple[int, int, int]
"""Address, negated size in bytes, and index of a source. When sorted, the widest at an address comes first."""

_NOWHERE: Place = (torch.uint8, (), (), 0)


def _place_dense(sources: Sequence[torch.Tensor], spans: list[_Span], layout: ArenaLayout, moved: bool) -> list[Region]:
    """Place dense sources: one region for each run of overlapping spans, by address."""
    regions: list[Region] = []
    places, copies = layout.places, layout.copies
    members: list[int] = []
    start = end = offset = 0
    cursor = layout.nbytes
    spans.sort()
    for address, minus_size, index in spans:
        source = sources[index]
        dtype = source.dtype
        # A byte copy may cover adjacent tensors; a tensor copy may not, because it cannot cross storages.
        if address > end or (address == end and not moved):
            if members:
                _copy_whole(sources, members, start, end, layout)
                members.clear()
            start, end = address, address - minus_size
            # The offset equals the source's address modulo a cache line, so that every view in the region is aligned.
            offset = cursor + (address - cursor) % ALIGNMENT
            cursor = offset - minus_size
            place = (dtype, source.shape, source.stride(), offset)
            if not moved:
                copies.append((source, index))
                if dtype in _OPAQUE:
                    _copy_as_bytes(source, place, layout)
            regions.append((start, end, offset))
        else:
            if address - minus_size > end:
                if not moved:
                    members.append(index)
                end = address - minus_size
                cursor = offset + end - start
                regions[-1] = (start, end, offset)
            place = (dtype, source.shape, source.stride(), offset + address - start)
        places[index] = place
    if members:
        _copy_whole(sources, members, start, end, layout)
    layout.nbytes = cursor
    return regions


def _copy_whole(
    sources: Sequence[torch.Tensor], members: Sequence[int], start: int, end: int, layout: ArenaLayout
) -> None:
    """Plan one copy of all bytes of the last region, which extends beyond its first tensor."""
    storage, size = sources[members[-1]].untyped_storage(), end - start
    if start < storage.data_ptr() or end > storage.data_ptr() + storage.nbytes():
        # No storage holds the whole region (two NumPy slices of one array): copy each tensor that extends it.
        for index in members:
            place = layout.places[index]
            layout.copies.append((sources[index], index))
            if place[0] in _OPAQUE:
                _copy_as_bytes(sources[index], place, layout)
        return
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    whole.set_(storage, start - storage.data_ptr(), (size,), (1,))
    offset = layout.places[layout.copies[-1][1]][3]
    layout.copies[-1] = (whole, len(layout.places))
    layout.places.append((torch.uint8, (size,), (1,), offset))


def _place_gappy(
    sources: Sequence[torch.Tensor],
    indices: Iterable[int],
    regions: dict[torch.device, list[Region]],
    layout: ArenaLayout,
) -> None:
    known: dict[tuple[object, ...], Place] = {}
    for index in indices:
        source = sources[index]
        plain = _is_plain(source, source.data_ptr())
        identity = (source.device, source.data_ptr(), source.dtype, source.shape, source.stride(), plain)
        place = known.get(identity)
        if place is None:
            place = _inside(source, regions.get(source.device, [])) if plain else None
            if place is None:
                place = _compact(source, layout)
            if plain:
                known[identity] = place
        layout.places[index] = place


def _inside(source: torch.Tensor, regions: list[Region]) -> Place | None:
    """Return the place of a view with gaps inside a region that is copied anyway; None if no region contains it."""
    address = source.data_ptr()
    reach = sum((size - 1) * step for size, step in zip(source.shape, source.stride(), strict=True)) + 1
    at = bisect_right(regions, address, key=lambda region: region[0]) - 1
    if at < 0 or address + reach * source.element_size() > regions[at][1]:
        return None
    start, _, offset = regions[at]
    return (source.dtype, source.shape, source.stride(), offset + address - start)


def _compact(source: torch.Tensor, layout: ArenaLayout) -> Place:
    """Place a tensor densely, outside the copied regions.

    An expanded dimension (stride 0) is copied once, and is expanded in the view, too.
    """
    unique = source
    for dim, (size, step) in enumerate(zip(source.shape, source.stride(), strict=True)):
        if step == 0 and size > 1:
            unique = unique.narrow(dim, 0, 1)
    steps = contiguous_strides(unique.shape)
    offset = -(-layout.nbytes // ALIGNMENT) * ALIGNMENT
    layout.nbytes = offset + unique.nbytes
    copied: Place = (source.dtype, unique.shape, steps, offset)
    layout.copies.append((unique, len(layout.places)))
    layout.places.append(copied)
    if source.dtype in _OPAQUE:
        _copy_as_bytes(unique, copied, layout)
    stride = (
        0 if size > 1 and kept == 1 else step
        for size, kept, step in zip(source.shape, unique.shape, steps, strict=True)
    )
    return (source.dtype, source.shape, tuple(stride), offset)


def _is_plain(tensor: torch.Tensor, address: int) -> bool:
    """Return True if the stored bytes are the values (no lazy conjugation or negation) and are aligned."""
    return not (tensor.is_neg() or tensor.is_conj() or address % tensor.element_size())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements lie one after another in some order of the dimensions (channels_last, transposed)."""
    expected = 1
    for step, size in sorted(
        (step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ):
        if step != expected:
            return False
        expected *= size
    return True


def _copy_as_bytes(source: torch.Tensor, place: Place, layout: ArenaLayout) -> None:
    """Replace the last copy by a copy of bytes, because torch cannot copy the dtype."""
    layout.copies[-1] = (source.view(torch.uint8), len(layout.places))
    layout.places.append((torch.uint8, *place[1:]))


_OPAQUE = frozenset(
    getattr(torch, name)
    for name in (*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), "bit", "float4_e2m1fn_x2")
    if hasattr(torch, name)
)
"""One-byte dtypes that some versions of torch store but cannot copy."""


# -- copies -----------------------------------------------------------------------------------------------------------

_PIECE = 16 << 20
"""Minimum size in bytes of a region's pieces, except the last."""

_QUEUED = 64
"""Maximum number of queued copies during training. A thread that finds the driver's queue full (some hundreds) waits
with the driver's lock held, so that no kernel starts. On an H100, 1,000 copies at once delayed a step by 130 ms."""


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
    streams: dict[torch.device, torch.Stream],
    movers: Movers,
    ordering: Ordering,
    *,
    non_blocking: bool,
    beside: bool,
) -> list[torch.Tensor]:
    """Copy to an arena as the layout describes, and wait for the copies.

    Args:
        streams: a stream per device for copies from that device; missing ones are added.
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
            if device not in streams:
                streams[device] = torch.Stream(device=device)
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
