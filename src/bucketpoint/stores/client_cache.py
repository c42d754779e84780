"""The clients of this process: one for each set of options, shared by every store that has them. Knows no service."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar


class Options(Protocol):
    """What a client is made of."""

    def cache_key(self) -> tuple[Any, ...]:
        """Equal for options that one client serves."""


O = TypeVar("O", bound=Options)  # noqa: E741
C = TypeVar("C")


class ClientCache(ABC, Generic[O, C]):
    """Makes a client once for each set of options and process. Any thread may ask, and use what it gets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[tuple[Any, ...], C] = {}
        self._watching_forks = False

    @abstractmethod
    def build(self, options: O) -> C:
        """A new client."""

    def get(self, options: O) -> C:
        """The client for these options, built at the first call."""
        key = options.cache_key()
        client = self._clients.get(key)
        if client is None:
            with self._lock:
                client = self._clients.get(key)
                if client is None:
                    self._watch_forks()
                    client = self._clients[key] = self.build(options)
        return client

    def found(self, options: O) -> C | None:
        """The client for these options if there is one."""
        return self._clients.get(options.cache_key())

    def _watch_forks(self) -> None:
        if not self._watching_forks and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
            self._watching_forks = True

    def _forget(self) -> None:
        # Two processes on one TLS connection would garble it; the lock may be held by a thread that the child lacks.
        self._lock = threading.Lock()
        self._clients = {}
