"""Arenas: host memory for staged states. Each is one allocation, registered with the CUDA driver once."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import weakref
from typing import TypeAlias

import torch

from bucketpoint.errors import StagingError
from bucketpoint.forks import occupy_standard_descriptors, renew_in_child

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes of a cache line. Staged tensors keep the address of their source modulo this size, so that they are aligned."""

Place: TypeAlias = tuple[torch.dtype, "tuple[int, ...]", "tuple[int, ...]", int]
"""A strided view of an arena: dtype, shape, strides in elements, offset in bytes."""

_REGISTER_PORTABLE = 1
"""`cudaHostRegisterPortable` (CUDA Runtime API): pinned for every device of the process."""


class SharedMemory:
    """Memory of this process with a file descriptor, mappable by other processes. A finalizer closes the descriptor."""

    def __init__(self, address: int, nbytes: int, descriptor: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False


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
