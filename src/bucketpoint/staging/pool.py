"""Arenas: host memory for staged states, each one allocation that is registered with the CUDA driver once.

A pool keeps them between saves, and leases each to one staged state at a time, under a cap on bytes. Its options.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from bucketpoint.errors import BucketpointError, StagingError, StagingOverlapError
from bucketpoint.forks import occupy_standard_descriptors, renew_in_child
from bucketpoint.staging.lease import Lease, SharedMemory

logger = logging.getLogger(__name__)

WhenBusy = Literal["wait", "double_buffer", "error"]

TORCH_FIELDS = ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy")


@dataclass(frozen=True)
class StagingOptions:
    """Options of staging, independent of each other. Options for accelerators have no effect without one.

    The first four have the names, the meaning and the order of `torch.distributed.checkpoint.staging.StagingOptions`.

    Attributes:
        use_pinned_memory: register the memory with the driver, once, so that device copies run at full speed.
        use_shared_memory: stage into memory that a checkpoint process reads without a second copy.
        use_async_staging: `stage()` returns a future, and the copy runs during training, which must not change the
            state until the future is done. False by default, unlike in torch, so that `async_save` returns a plain
            future.
        use_non_blocking_copy: issue all device copies before waiting for any.
        when_busy: reaction of a new save to an earlier save that still reads its memory: `"wait"` waits for its end,
            `"double_buffer"` copies at once into separate memory (twice the bytes), `"error"` raises
            `StagingOverlapError`.
        max_bytes: limit on the host memory held for staging, in bytes; None for as much as the state needs.
        unread_timeout_s: seconds after which a staged state that no save has begun to read stops blocking others. Its
            memory is never overwritten: the next save gets other memory.

    Raises:
        BucketpointError: `when_busy` is unknown, or a limit is not above 0.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = False
    use_non_blocking_copy: bool = True
    when_busy: WhenBusy = "wait"
    max_bytes: int | None = None
    unread_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.when_busy not in get_args(WhenBusy):
            raise BucketpointError(
                f"when_busy={self.when_busy!r} is invalid", remedy=f"Choose one of {', '.join(get_args(WhenBusy))}"
            )
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise BucketpointError(f"max_bytes={self.max_bytes} leaves no memory for staging")
        if not self.unread_timeout_s > 0:
            raise BucketpointError(f"unread_timeout_s={self.unread_timeout_s} must be above 0")


def as_staging_options(config: Any) -> StagingOptions:
    """Return `config` as `StagingOptions`: torch's options are translated, and None becomes the defaults.

    Raises:
        BucketpointError: `config` is of another type.
    """
    if config is None:
        return StagingOptions()
    if isinstance(config, StagingOptions):
        return config
    if all(hasattr(config, name) for name in TORCH_FIELDS):
        pinned, shared, beside, non_blocking = (bool(getattr(config, name)) for name in TORCH_FIELDS)
        return StagingOptions(pinned, shared, beside, non_blocking)
    raise BucketpointError(
        f"{type(config).__qualname__} does not describe staging options",
        remedy="Pass bucketpoint.StagingOptions, or torch.distributed.checkpoint.staging.StagingOptions",
    )


ALIGNMENT = 64
"""Bytes of a cache line. Staged tensors keep the address of their source modulo this size, so that they are aligned."""

Place: TypeAlias = tuple[torch.dtype, "tuple[int, ...]", "tuple[int, ...]", int]
"""A strided view of an arena: dtype, shape, strides in elements, offset in bytes."""

_REGISTER_PORTABLE = 1
"""`cudaHostRegisterPortable` (CUDA Runtime API): pinned for every device of the process."""


class Arena:
    """Anonymous memory, private or shared, that is freed with the last tensor over it.

    Args:
        nbytes: size in bytes, rounded up to a cache line.
        shared: True if other processes can map the memory by a file descriptor, without a copy.

    Raises:
        StagingError: the memory cannot be allocated.
    """

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.nbytes = self.size_of(nbytes)
        self.shared = shared
        self._refused = self._populated = False
        try:
            # Created outside of inference mode: an inference tensor could not be written to later outside of that mode.
            with torch.inference_mode(False):
                self.memory, descriptor = _shared_bytes(self.nbytes) if shared else (_private_bytes(self.nbytes), None)
        except (OSError, RuntimeError) as error:
            raise StagingError(
                f"{self.nbytes} bytes of host memory for staging could not be allocated: {error}",
                remedy="Stage less per rank, or give the machine more memory",
            ) from error
        # For the upload helper. DCP's checkpoint process gets the memory by torch's pickler.
        self.shared_memory = (
            SharedMemory(self.memory.data_ptr(), self.nbytes, descriptor) if descriptor is not None else None
        )
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._registration: weakref.finalize[..., Arena] | None = None
        renew_in_child(self, Arena._leave_to_parent)

    @staticmethod
    def size_of(nbytes: int) -> int:
        """Round `nbytes` up to whole cache lines, so that the arena can be viewed as any dtype."""
        return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)

    def view(self, place: Place) -> torch.Tensor:
        """Return a tensor over the arena. The place's offset must be a multiple of the dtype's size."""
        dtype, shape, stride, offset = place
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self.memory.view(dtype)
        return typed.as_strided(shape, stride, offset // dtype.itemsize)

    @property
    def pinned(self) -> bool:
        return self._registration is not None

    def pin(self) -> bool:
        """Register the memory with the CUDA driver, once. Return False if the driver refuses or has refused before."""
        if self._registration is None and not self._refused:
            pointer = self.memory.data_ptr()
            # Otherwise the driver would back the pages one by one, under a lock that kernels wait for: 0.35 s per GB.
            self.populate()
            self._refused = not _accepted("cudaHostRegister", pointer, self.nbytes, _REGISTER_PORTABLE)
            if not self._refused:
                # Unregistered before the memory is unmapped: otherwise the driver's registration would dangle.
                self._registration = weakref.finalize(self, _accepted, "cudaHostUnregister", pointer)
                self._registration.atexit = False
        return self.pinned

    def unpin(self) -> None:
        """Undo the registration with the driver. Tensors over the memory stay valid."""
        if self._registration is not None:
            self._registration()
            self._registration = None

    def _leave_to_parent(self) -> None:
        # The driver cannot be used in a fork, and the registration is the parent's.
        if self._registration is not None:
            self._registration.detach()
            self._registration = None

    def populate(self) -> None:
        """Make the kernel back every page now, on all of torch's threads, rather than during the first copy."""
        if not self._populated:
            self._populated = True
            self.memory[:: mmap.PAGESIZE].fill_(0)


_HUGEPAGE, _DONTDUMP, _WIPEONFORK = 14, 16, 18
"""Advice for madvise(2) of Linux. Python does not define all of the names.

DONTDUMP: a core dump must not contain a second copy of the state.
WIPEONFORK: if a forked data loader shared pinned pages, the parent would later write to pages that the device does not
see. So the child gets zeroed pages. With DONTFORK the child could map other memory at this address, and would lose that
memory when an inherited tensor is collected."""


def _advise(memory: torch.Tensor, *advices: int) -> torch.Tensor:
    if sys.platform == "linux":
        pages, libc = (ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)), ctypes.CDLL(None)
        for advice in advices:
            if libc.madvise(*pages, advice):
                logger.debug("advice %d on memory refused", advice)
    return memory


def _private_bytes(nbytes: int) -> torch.Tensor:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return _advise(torch.frombuffer(pages, dtype=torch.uint8), _HUGEPAGE, _DONTDUMP, _WIPEONFORK)


def _shared_bytes(nbytes: int) -> tuple[torch.Tensor, int | None]:
    """Allocate memory as a shared storage of torch, so that torch's pickler passes the descriptor instead of a copy.

    Returns:
        The memory and, where the system has `memfd_create`, a descriptor of it, which the caller must close.
    """
    descriptor = None
    if hasattr(os, "memfd_create"):
        occupy_standard_descriptors()
        # Not /dev/shm: containers default to 64 MB there, and a write beyond that ends the process with SIGBUS.
        descriptor = os.memfd_create("bucketpoint-staging")
        try:
            os.ftruncate(descriptor, nbytes)
            # Map the memory here first: if the mapping failed in torch, a descriptor would stay open.
            mmap.mmap(descriptor, nbytes).close()
            storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, nbytes)  # type: ignore[attr-defined]
        except BaseException:
            os.close(descriptor)
            raise
    else:
        storage = torch.UntypedStorage._new_shared(nbytes, device="cpu")  # type: ignore[no-untyped-call]
    memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (nbytes,), (1,))
    return _advise(memory, _DONTDUMP), descriptor


def _accepted(call: str, *arguments: int) -> bool:
    """Call the CUDA Runtime API through torch. Return True if the driver accepts."""
    result = int(getattr(torch.cuda.cudart(), call)(*arguments))  # type: ignore[no-untyped-call]
    if result != 0:
        logger.debug("%s%s answered %d", call, arguments, result)
    return result == 0


GRACE_S = 1.0
"""Seconds to wait for the end of a lease. The future of a save is done shortly before DCP drops the staged state."""

_REMEMBERED_SIZES = 4


def overlap(lease: Lease) -> StagingOverlapError:
    """Return the error that names the save still in flight."""
    return StagingOverlapError(f"{lease.label}, staged {time.monotonic() - lease.started:.1f} s ago, has not ended")


class ArenaPool:
    """The arenas of one stager.

    An arena serves any state of exactly its size: training makes new dicts for each save, which get the same arena.
    """

    def __init__(self, options: StagingOptions) -> None:
        self._options = options
        self._most = 2 if options.when_busy == "double_buffer" else 1
        self._begin()
        renew_in_child(self, ArenaPool._begin)

    def _begin(self) -> None:
        # A forked child needs other arenas: saves of the parent use these.
        self._lock = threading.Lock()
        # The newest lease is the last, so that a waiting save waits for the oldest.
        self._arenas: dict[Arena, Lease | None] = {}
        # Sizes of surrendered arenas: not leased again, but counted by the cap until the lease ends.
        self._given_up: list[tuple[int, Lease]] = []
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED_SIZES)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held, leased or idle."""
        with self._lock:
            return sum(arena.nbytes for arena in self._arenas)

    def lease(self, nbytes: int) -> tuple[Arena, Lease]:
        """Lease an arena of `nbytes`, rounded up to a cache line. Wait or raise while none is free.

        Raises:
            StagingOverlapError: an earlier save has not ended, and `when_busy="error"`.
            StagingError: the cap is too small, states that are not saved fill it, or the memory cannot be allocated.
        """
        needed = self._size_under_cap(nbytes)
        while True:
            with self._lock:
                granted = self._grant(needed)
                if granted is not None:
                    return granted
                leased: list[tuple[Arena | None, Lease]] = list(self._leased())
                leased += [(None, lease) for _, lease in self._given_up if lease.begun]
                if not leased:
                    # No lease is left whose end would make room.
                    unsaved = sum(nbytes for nbytes, _ in self._given_up)
                    raise StagingError(
                        f"Staging this state needs {needed} bytes, and states that were staged and never saved hold "
                        f"{unsaved} of the {self._options.max_bytes} bytes that max_bytes allows",
                        remedy="Drop what stage() returned if no save will read it, or set a higher max_bytes",
                    )
            self._wait(*leased[0])

    def prepare(self, nbytes: int, make_ready: Callable[[Arena], None]) -> None:
        """Allocate the arenas that the next saves of this size will get, and call `make_ready` for the idle ones.

        Raises:
            StagingError: the cap is too small, or the memory cannot be allocated.
        """
        needed = self._size_under_cap(nbytes)
        # With the lock held, so that no arena is leased while `make_ready` writes to it.
        with self._lock:
            self._settle()
            while (
                sum(lease is not None or arena.nbytes == needed for arena, lease in self._arenas.items()) < self._most
            ):
                arena = self._make(needed)
                if arena is None:
                    break
                self._arenas[arena] = None
            for arena, lease in self._arenas.items():
                if lease is None and arena.nbytes == needed:
                    make_ready(arena)

    def surrender(self, arena: Arena) -> None:
        """Drop an arena: the holders of tensors over it keep the memory, and no other state will get it.

        Also used for private memory that is sent to another process: torch moves such tensors to shared memory.
        """
        with self._lock:
            lease = self._arenas.pop(arena, None)
            if lease is not None:
                self._given_up.append((arena.nbytes, lease))
        arena.unpin()

    def close(self) -> None:
        """Wait for running saves and free the memory. A state that no save reads keeps its memory."""
        while True:
            with self._lock:
                self._settle()
                held = next(self._leased(), None)
                if held is None:
                    self._drop_idle(keep=())
                    return
            arena, lease = held
            if not lease.wait_if_read(GRACE_S):
                self.surrender(arena)

    def _size_under_cap(self, nbytes: int) -> int:
        needed = Arena.size_of(nbytes)
        cap = self._options.max_bytes
        if cap is not None and needed > cap:
            raise StagingError(
                f"Staging this state needs {needed} bytes of host memory, and max_bytes is {cap}",
                remedy=f"Set StagingOptions(max_bytes=...) to {needed} or more, or save synchronously with dcp.save",
            )
        return needed

    def _grant(self, needed: int) -> tuple[Arena, Lease] | None:
        self._settle()
        idle = [arena for arena, lease in self._arenas.items() if lease is None]
        if len(self._arenas) - len(idle) >= self._most:
            return None
        arena = next((arena for arena in idle if arena.nbytes == needed), None) or self._make(needed)
        if arena is None:
            return None
        self._sizes.append(needed)
        lease = Lease(self._options.unread_timeout_s)
        self._arenas.pop(arena, None)
        self._arenas[arena] = lease
        return arena, lease

    def _leased(self) -> Iterator[tuple[Arena, Lease]]:
        return ((arena, lease) for arena, lease in self._arenas.items() if lease is not None)

    def _make(self, needed: int) -> Arena | None:
        """Make a new arena. Return None if the cap leaves no room until a lease has ended."""
        # If this size recurs (a model and an optimizer saved in turn), keep the arenas of all recent sizes.
        self._drop_idle(keep={needed, *self._sizes} if needed in self._sizes else {needed})
        if not self._fits(needed):
            self._drop_idle(keep={needed})
        return Arena(needed, shared=self._options.use_shared_memory) if self._fits(needed) else None

    def _settle(self) -> None:
        for arena, lease in self._arenas.items():
            if lease is not None and lease.ended:
                self._arenas[arena] = None
        self._given_up = [(nbytes, lease) for nbytes, lease in self._given_up if not lease.ended]

    def _fits(self, needed: int) -> bool:
        cap = self._options.max_bytes
        held = sum(arena.nbytes for arena in self._arenas) + sum(nbytes for nbytes, _ in self._given_up)
        return cap is None or held + needed <= cap

    def _drop_idle(self, keep: Collection[int]) -> None:
        for arena, lease in list(self._arenas.items()):
            if lease is None and arena.nbytes not in keep:
                arena.unpin()
                del self._arenas[arena]

    def _wait(self, arena: Arena | None, lease: Lease) -> None:
        """Wait for the end of a lease, or raise if `when_busy="error"`. `arena` is None if already surrendered."""
        if self._options.when_busy == "error":
            if lease.ended_within(GRACE_S):
                return
            if not lease.abandoned:
                raise overlap(lease)
        elif lease.wait("The next save"):
            return
        if arena is not None:
            self.surrender(arena)
