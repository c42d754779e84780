"""The copies themselves: in order with the caller's streams, in few calls that do not hold the interpreter.

What is copied where has been decided (`layout.py`); when the memory may be used again is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bucketpoint.staging.layout import Copy


@dataclass
class SideStreams:
    """One stream a device for the copies out of it, made on first use and kept."""

    streams: dict[torch.device, torch.Stream] = field(default_factory=dict)

    def of(self, device: torch.device) -> torch.Stream:
        stream = self.streams.get(device)
        if stream is None:
            stream = self.streams[device] = torch.Stream(device=device)
        return stream


@dataclass(frozen=True)
class Ordering:
    """What the caller's streams had been given when `stage()` was called: the copies come after it.

    Without it a side stream reads tensors that the optimizer's kernels are still writing.

    Attributes:
        caller: index of the caller's current device: a worker thread starts on device 0, and making a context there
            costs half a GiB a rank.
    """

    events: dict[torch.device, torch.Event]
    caller: int | None

    @classmethod
    def of(cls, devices: Sequence[torch.device]) -> Ordering:
        """Record where the caller's current streams are. Does not wait."""
        events: dict[torch.device, torch.Event] = {}
        for device in devices:
            if device.type != "cpu":
                event = torch.Event(device=device)
                event.record(torch.accelerator.current_stream(device))
                events[device] = event
        return cls(events, torch.accelerator.current_device_index() if events else None)

    def use_callers_device(self) -> None:
        """On the thread that copies, before anything else is asked of the driver."""
        if self.caller is not None:
            torch.accelerator.set_device_index(self.caller)


def run_copies(
    copies: Sequence[Copy],
    views: Sequence[torch.Tensor],
    streams: SideStreams,
    ordering: Ordering,
    *,
    non_blocking: bool,
) -> None:
    """Copy everything and wait until it is there.

    Args:
        views: host tensors; each copy goes to the one that it names.
        non_blocking: issue a device's copies without waiting for each.
    """
    by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    latest: torch.device | None = None
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for source, index in copies:
        if source.device != latest:
            latest = source.device
            targets, sources = by_device.setdefault(latest, ([], []))
        targets.append(views[index])
        sources.append(source)
    begun: list[torch.Stream] = []
    # Devices first: they work on while the processor copies its own.
    for device, (targets, sources) in sorted(by_device.items(), key=lambda item: item[0].type == "cpu"):
        if device.type == "cpu":
            torch._foreach_copy_(targets, sources)
            continue
        stream = streams.of(device)
        stream.wait_event(ordering.events[device])
        with stream:
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)
        begun.append(stream)
    # The sources stay referenced until here, so that the allocator cannot hand their memory to a kernel.
    for stream in begun:
        stream.synchronize()
