"""Memory that another process can map."""

from __future__ import annotations

import os
import weakref


class SharedMemory:
    """Memory of this process with a descriptor, by which another process can map it too.

    Args:
        address: first byte, in this process.
        nbytes: size in bytes.
        descriptor: a descriptor of the memory. This object owns it, and closes it when it is collected.
    """

    def __init__(self, address: int, nbytes: int, descriptor: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
