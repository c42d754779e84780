"""Connections between the devices of the ranks that load together: NCCL, in a separate process group.

A carrier lasts for one load. The transfers that it begins run on the device; every wait for them has a time limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from bucketpoint.errors import BucketpointError

ExchangeMode = Literal["auto", "host", "device"]

_LOOK_AGAIN_S, _SOON_S, _LOOK_LATER_S = 200e-6, 20e-3, 2e-3
_WATCHDOG_SPARES = 10
"""Factor on the timeout for NCCL's own watchdog. It must act long after this module: it ends the process, while this
module raises an error."""


@dataclass(frozen=True)
class Parcel:
    """Bytes to send to, or receive from, a rank of the carrier: a contiguous uint8 tensor on the carrier's device."""

    peer: int
    data: torch.Tensor


class Carrier(Protocol):
    """Connections between the devices of some ranks.

    All calls must come from one thread, in the same order on every rank.
    """

    device: torch.device

    def move(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> None:
        """Begin to receive and send all parcels. Parcels between two ranks arrive in the order in which they are given.

        Work that is queued on the device later runs after the transfers.
        """

    def wait(self, within: timedelta, meanwhile: Callable[[], None]) -> None:
        """Wait until all work queued on the device is done.

        Args:
            within: the longest time to wait.
            meanwhile: called from time to time; raises to end the wait, for example if a rank has failed.

        Raises:
            RuntimeError: the work failed, or took longer.
        """

    def abort(self) -> None:
        """End all transfers under way. No method may be called afterwards."""


@dataclass(frozen=True)
class Device:
    """A device from which this rank can exchange bytes with others.

    Attributes:
        identity: a number that is unique to the device, never 0.
    """

    device: torch.device
    identity: int


def check_exchange(mode: str) -> ExchangeMode:
    """Return the mode. Raises BucketpointError for a value that `exchange=` does not take."""
    for known in get_args(ExchangeMode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    raise BucketpointError(
        f"exchange={mode!r} is not known", remedy=f"Pass one of {', '.join(map(repr, get_args(ExchangeMode)))}"
    )


def device_here() -> Device | None:
    """Return the current CUDA device; None if this torch cannot use CUDA or has no NCCL."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return Device(device, int.from_bytes(hashlib.sha256(uuid.encode()).digest()[:7], "big") + 1)


def open_carrier(token: str, rank: int, size: int, device: torch.device, within: timedelta) -> Carrier:
    """Connect the devices of `size` ranks. A collective among them.

    Args:
        token: the same on all these ranks, and used only once.
        within: how long to wait for the others.

    Raises:
        BucketpointError: the devices could not be connected in time.
    """
    try:
        return NcclCarrier(token, rank, size, device, within)
    except (RuntimeError, ValueError) as error:
        raise BucketpointError(
            f"NCCL could not connect the devices of the {size} ranks that load together: {error}",
            remedy='Look at the other ranks\' errors and at NCCL_DEBUG=INFO, or pass exchange="host"',
        ) from error


class NcclCarrier:
    """Carrier over NCCL, in a process group that torch does not register. Uses the calling thread's current stream."""

    def __init__(self, token: str, rank: int, size: int, device: torch.device, within: timedelta) -> None:
        from torch.distributed.distributed_c10d import ProcessGroupNCCL, _get_default_store

        self.device = device
        options = ProcessGroupNCCL.Options()
        options._timeout = within * _WATCHDOG_SPARES
        with _watchdog_that_spares_the_process():
            # Not `dist.new_group`, for the same reasons as in `peers.py`.
            self._backend: Any = ProcessGroupNCCL(
                PrefixStore(f"bucketpoint/{token}/device", _get_default_store()), rank, size, options
            )
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            # NCCL makes the communicator in the first collective, so all ranks make one here: later transfers may not
            # involve all ranks.
            _in_time(self._meet, within)
            self.wait(within, lambda: None)
        except BaseException:
            self.abort()
            raise

    def move(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> None:
        if receives or sends:
            # All in one NCCL group: otherwise two ranks could each wait in a send for the other to receive.
            self._backend._start_coalescing()
            for parcel in receives:
                self._backend.recv([parcel.data], parcel.peer, 0)
            for parcel in sends:
                self._backend.send([parcel.data], parcel.peer, 0)
            work = self._backend._end_coalescing()
            if work is not None:
                work.wait()

    def wait(self, within: timedelta, meanwhile: Callable[[], None]) -> None:
        began = time.monotonic()
        self._event.record(torch.cuda.current_stream(self.device))
        while not self._event.query():
            waited = time.monotonic() - began
            if waited > within.total_seconds():
                raise RuntimeError(f"the device was not done after {waited:.0f} s")
            if waited > _SOON_S:
                meanwhile()
            time.sleep(_LOOK_AGAIN_S if waited < _SOON_S else _LOOK_LATER_S)

    def abort(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            # An error of the abort is ignored: the reason for the abort is what must be raised.
            with contextlib.suppress(RuntimeError):
                backend.abort()

    def _meet(self) -> None:
        with torch.cuda.device(self.device):
            self._backend.allreduce([torch.zeros(1, device=self.device)]).wait()
            torch.cuda.current_stream(self.device).synchronize()


@contextlib.contextmanager
def _watchdog_that_spares_the_process() -> Iterator[None]:
    """Make NCCL groups, in the block, whose watchdog does not end the process.

    By default it does when another rank is lost; this module aborts the group instead.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _in_time(action: Callable[[], None], within: timedelta) -> None:
    """Run a function that may block in a library for ever. If it takes too long, abandon the thread that runs it."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    thread = threading.Thread(target=run, name="bucketpoint-meet", daemon=True)
    thread.start()
    thread.join(within.total_seconds())
    if thread.is_alive():
        raise RuntimeError(f"another rank was silent for {within.total_seconds():.0f} s")
    if failed:
        raise failed[0]
