"""Host memory that states are staged into: one allocation of exactly the needed size, registered with the driver once.

What may be leased to whom is `pool.py`'s; nothing here copies.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from typing import TypeAlias

import torch

from bucketpoint.errors import StagingError

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes. Tensors lie as their sources do modulo a cache line, which keeps every dtype aligned."""

Place: TypeAlias = tuple[torch.dtype, "tuple[int, ...]", "tuple[int, ...]", int]
"""A strided view of an arena: dtype, shape, strides in elements, offset in bytes."""

_REGISTER_PORTABLE = 1
"""`cudaHostRegisterPortable` (CUDA Runtime API): pinned for every device of the process."""


class Arena:
    """Bytes of anonymous memory, private or shared, that live until the last tensor over them does.

    Args:
        nbytes: size in bytes, rounded up to a cache line.
        shared: make it passable to other processes as a file descriptor, without a copy.

    Raises:
        StagingError: the memory is not to be had.
    """

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.nbytes = self.size_of(nbytes)
        self.shared = shared
        self.pinned = False
        self._refused = False
        try:
            # An inference tensor could not be written to later, outside of inference mode.
            with torch.inference_mode(False):
                self.memory = _shared_bytes(self.nbytes) if shared else _private_bytes(self.nbytes)
        except (OSError, RuntimeError) as error:
            raise StagingError(
                f"{self.nbytes} bytes of host memory for staging are not to be had: {error}",
                remedy="Stage less per rank, or give the machine more memory",
            ) from error
        self._typed: dict[torch.dtype, tuple[torch.Tensor, int]] = {}
        self._unregister: weakref.finalize[[int], Arena] | None = None

    @staticmethod
    def size_of(nbytes: int) -> int:
        """Bytes of an arena for `nbytes`: whole cache lines, so that a view of any dtype divides it."""
        return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)

    def view(self, place: Place) -> torch.Tensor:
        """A tensor over the arena; the place's offset is a multiple of the dtype's size."""
        dtype, shape, stride, offset = place
        known = self._typed.get(dtype)
        if known is None:
            known = self._typed[dtype] = (self.memory.view(dtype), dtype.itemsize)
        typed, size = known
        return typed.as_strided(shape, stride, offset // size)

    def pin(self) -> bool:
        """Register the memory with the CUDA driver, if that has not been done. False if the driver refuses, or has."""
        if self._refused:
            return False
        if not self.pinned:
            pointer = self.memory.data_ptr()
            if not _register(pointer, self.nbytes):
                self._refused = True
                return False
            self.pinned = True
            # Unmapping registered memory leaves a registration that points at nothing.
            self._unregister = weakref.finalize(self, _unregister, pointer)
            self._unregister.atexit = False
        return True

    def unpin(self) -> None:
        """Take the registration back. The memory and every tensor over it stay."""
        if self._unregister is not None:
            self._unregister()
            self._unregister = None
        self.pinned = False

    def populate(self) -> None:
        """Make the kernel back every page now, rather than during the first copy."""
        self.memory.fill_(0)


def _private_bytes(nbytes: int) -> torch.Tensor:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # A forked data loader that shares pinned pages would make later writes go to pages the device does not see.
        if hasattr(mmap, advice):
            _advise(pages, getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)


def _shared_bytes(nbytes: int) -> torch.Tensor:
    """Memory in torch's own shared mapping, so that its pickler passes the descriptor on instead of copying."""
    if hasattr(os, "memfd_create"):
        # Not /dev/shm: a container's default of 64 MB there ends a write with SIGBUS.
        descriptor = os.memfd_create("bucketpoint-staging")
        try:
            os.ftruncate(descriptor, nbytes)
            # Where it cannot be mapped, torch would raise too, and leave a descriptor open.
            mmap.mmap(descriptor, nbytes).close()
            storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, nbytes)  # type: ignore[attr-defined]
        finally:
            os.close(descriptor)
    else:
        storage = torch.UntypedStorage._new_shared(nbytes, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (nbytes,), (1,))


def _advise(pages: mmap.mmap, advice: int) -> None:
    try:
        pages.madvise(advice)
    except OSError as error:
        logger.debug("madvise(%d) refused: %s", advice, error)


def _register(pointer: int, nbytes: int) -> bool:
    """Whether the driver took it. `cudaHostRegister` (CUDA Runtime API), by way of torch's binding."""
    result = torch.cuda.cudart().cudaHostRegister(pointer, nbytes, _REGISTER_PORTABLE)  # type: ignore[no-untyped-call]
    if int(result) != 0:
        logger.debug("cudaHostRegister of %d bytes answered %s", nbytes, result)
    return int(result) == 0


def _unregister(pointer: int) -> None:
    result = torch.cuda.cudart().cudaHostUnregister(pointer)  # type: ignore[no-untyped-call]
    if int(result) != 0:
        logger.debug("cudaHostUnregister answered %s", result)
