"""The clients of this process: one for each set of options in each environment, shared by the stores that have them."""

from __future__ import annotations

import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Options(Protocol):
    """What a client is made of."""

    def cache_key(self) -> tuple[Any, ...]:
        """Equal for options that one client serves."""


_PROXIES_AND_AUTHORITIES = (
    "ALL_PROXY",
    "CURL_CA_BUNDLE",
    "HOME",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
)
"""Variables, in either case, that decide how any client reaches its service, and where it finds its files."""


@dataclass(frozen=True)
class Environment:
    """Digests of what the environment says of a service: there are secrets among the values.

    Attributes:
        place: which store is reached, and how.
        credentials: as whom.
    """

    place: bytes
    credentials: bytes


class Pin:
    """The environment in which a store was first used: it stays with that client whatever the environment says later.

    It does not cross to another process, which has an environment of its own.
    """

    def __init__(self) -> None:
        self._environment: Environment | None = None

    def environment(self, read: Callable[[], Environment]) -> Environment:
        """The environment, which `read` says at the first call."""
        if self._environment is None:
            self._environment = read()
        return self._environment

    def __reduce__(self) -> tuple[Any, ...]:
        return Pin, ()


O = TypeVar("O", bound=Options)  # noqa: E741
C = TypeVar("C")


class ClientCache(ABC, Generic[O, C]):
    """Makes a client once for each set of options, environment and process. Any thread may ask, and use what it gets.

    Attributes:
        prefixes, variables: of the environment variables that the service's library reads.
        credentials: those of them that say as whom, and not where.
    """

    prefixes: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()
    credentials: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[tuple[Any, ...], C] = {}
        self._watching_forks = False

    @abstractmethod
    def build(self, options: O) -> C:
        """A new client."""

    def get(self, options: O, pin: Pin | None = None) -> C:
        """The client for these options, built at the first call. Without a pin: for the environment as it is."""
        key = self.key(options, pin)
        client = self._clients.get(key)
        if client is None:
            with self._lock:
                client = self._clients.get(key)
                if client is None:
                    self._watch_forks()
                    client = self._clients[key] = self.build(options)
        return client

    def found(self, options: O, pin: Pin | None = None) -> C | None:
        """The client for these options if there is one."""
        return self._clients.get(self.key(options, pin))

    def key(self, options: O, pin: Pin | None) -> tuple[Any, ...]:
        """Equal where one client serves."""
        return options.cache_key(), (pin or Pin()).environment(self.environment)

    def environment(self) -> Environment:
        """The environment as it is now."""
        place, credentials = hashlib.sha256(), hashlib.sha256()
        for name, value in sorted(os.environ.items()):
            if name.startswith(self.prefixes) or name in self.variables or name.upper() in _PROXIES_AND_AUTHORITIES:
                digest = credentials if name in self.credentials else place
                digest.update(f"{name}={value}\0".encode(errors="surrogateescape"))
        return Environment(place.digest(), credentials.digest())

    def _watch_forks(self) -> None:
        if not self._watching_forks and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
            self._watching_forks = True

    def _forget(self) -> None:
        # Two processes on one TLS connection would garble it; the lock may be held by a thread that the child lacks.
        self._lock = threading.Lock()
        self._clients = {}
