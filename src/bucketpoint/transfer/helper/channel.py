"""Channel between a trainer and its helper: pickled messages and file descriptors over a pair of sockets.

Unpickling is safe: both ends run bucketpoint, and no other process can open the sockets, which have no name.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from bucketpoint.forks import renew_in_child

_HEADER = struct.Struct("<Q")
"""Length of the pickled message, in bytes. The descriptors of the message are sent with its header."""

SIGN_OF_LIFE_S = 5.0
"""Seconds between two `Alive` messages of a helper that uploads."""


class Channel:
    """One end of the channel. Any thread may send; one thread at a time receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        # A forked child closes its copy, which would hide the trainer's end from the helper. A shutdown would also end
        # the parent's channel.
        renew_in_child(self, lambda copied: copied._socket.close())

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and duplicates of the descriptors.

        Raises:
            OSError: the other end is closed.
            pickle.PicklingError, TypeError, AttributeError: the message cannot be pickled; nothing was sent.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            socket.send_fds(self._socket, [_HEADER.pack(len(data))], descriptors)
            self._socket.sendall(data)

    def receive(self, *, until_end_of: int | None) -> tuple[Any, list[int]] | None:
        """Wait for a message, and return it with its descriptors. None if the other end is closed or breaks off.

        Args:
            until_end_of: result of `descriptor_of` for a process whose end counts as the end of the channel.

        Raises:
            Exception: the message cannot be unpickled. Further messages can be received.
        """
        # Messages of a process that has ended are no longer needed.
        if until_end_of is not None and until_end_of in self._wait(until_end_of, None):
            return None
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
            if not head:
                return None
            head += self._exactly(_HEADER.size - len(head))
            data = self._exactly(_HEADER.unpack(head)[0])
        except (ConnectionError, EOFError, BlockingIOError):
            return None
        try:
            return pickle.loads(data), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def is_quiet(self, process: int | None, within_s: float) -> bool:
        """Return True if neither a message nor the end of a process arrives within `within_s` seconds."""
        return not self._wait(process, within_s)

    def limit_waits(self, seconds: float) -> None:
        """Limit waits inside a message. At the limit, `send` raises BlockingIOError, and `receive` returns None."""
        limit = struct.pack("@ll", int(seconds), 0)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def close(self) -> None:
        """Close this end. The other end then receives None."""
        with contextlib.suppress(OSError):
            # This also wakes a receiving thread of this process.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _wait(self, process: int | None, within_s: float | None) -> list[int]:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if process is not None:
            waiting.register(process, select.POLLIN)
        return [descriptor for descriptor, _ in waiting.poll(None if within_s is None else within_s * 1000)]

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise EOFError
            view = view[received:]
        return bytes(data)


def descriptor_of(process: int) -> int | None:
    """Return a descriptor that becomes readable when a process ends; None if the system has no such descriptors."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None
