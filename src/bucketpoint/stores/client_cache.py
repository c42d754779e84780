"""The clients of this process: one for each set of options and environment, shared by the stores that use them."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from bucketpoint.forks import process_lock
from bucketpoint.stores.cutoff import give_up_when_cut
from bucketpoint.version import __version__

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
"""Variables, in upper or lower case, that decide how a client reaches the service and which files it reads."""


Environment = tuple[bytes, bytes]
"""Two digests of environment variables: of those that decide which store is reached and how, and of those that hold
credentials. Digests, because some of the values are secrets."""


class FirstEnvironment:
    """The environment in which a store was first used: the store keeps its client if the environment changes later."""

    def __init__(self) -> None:
        self._environment: Environment | None = None

    def environment(self, read: Callable[[], Environment]) -> Environment:
        """Return the environment; the first call gets it from `read`, and later calls return the same."""
        if self._environment is None:
            self._environment = read()
        return self._environment

    def __reduce__(self) -> tuple[Any, ...]:
        # The environment is not pickled: another process has its own.
        return FirstEnvironment, ()


C = TypeVar("C")


class ClientCache(Generic[C]):
    """Cache of one client for each set of options, environment and process. Thread-safe.

    Args:
        prefixes, variables: prefixes and names of the environment variables that the service's library reads.
        credentials: names of those variables that hold credentials rather than decide which store is reached.
    """

    def __init__(
        self,
        build: Callable[[Any], C],
        prefixes: tuple[str, ...],
        *,
        variables: frozenset[str] = frozenset(),
        credentials: frozenset[str] = frozenset(),
    ) -> None:
        self._build, self._prefixes, self._variables, self._credentials = build, prefixes, variables, credentials
        self._clients: dict[tuple[Any, ...], C] = {}
        # Two processes that write to one TLS connection would garble it.
        self._lock = process_lock(self._clients.clear)

    def get(self, options: Any, pin: FirstEnvironment | None = None) -> C:
        """Return the client for these options and `pin` (None: the current environment), built at the first call."""
        key = self._key(options, pin)
        client = self._clients.get(key)
        if client is None:
            client = give_up_when_cut(lambda: self._built(key, options), "making the client")
        return client

    def _built(self, key: tuple[Any, ...], options: Any) -> C:
        with self._lock:
            client = self._clients.get(key)
            if client is None:
                client = self._clients[key] = self._build(options)
        return client

    def renew(self, options: Any, pin: FirstEnvironment | None, stale: C, build: Callable[[Any, C], C]) -> None:
        """Replace a stale client by `build(options, stale)`, unless another thread has replaced it already."""
        key = self._key(options, pin)
        with self._lock:
            if self._clients.get(key) in (stale, None):
                self._clients[key] = build(options, stale)

    def is_same_place(self, options: Any, pin: FirstEnvironment | None) -> bool:
        """Return True if the environment still leads to the store that the client for these options reaches."""
        return self._environment()[0] == self._key(options, pin)[1][0]

    def _key(self, options: Any, pin: FirstEnvironment | None) -> tuple[Any, Environment]:
        """Return the cache key: equal for options and environments that can share one client."""
        return options.cache_key(), (pin or FirstEnvironment()).environment(self._environment)

    def _environment(self) -> Environment:
        place, credentials = hashlib.sha256(), hashlib.sha256()
        for name, value in sorted(os.environ.items()):
            if name.startswith(self._prefixes) or name in self._variables or name.upper() in _PROXIES_AND_AUTHORITIES:
                digest = credentials if name in self._credentials else place
                digest.update(f"{name}={value}\0".encode(errors="surrogateescape"))
        return place.digest(), credentials.digest()


def user_agent(*parts: str | None) -> str:
    """Return the user agent of a client: bucketpoint, and `parts` without those that are None."""
    return " ".join(part for part in (f"bucketpoint/{__version__}", *parts) if part)


def is_loopback(host: str) -> bool:
    """Return True if requests to this host do not leave the machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def frozen(value: Any) -> Any:
    """Convert a value to a hashable one. Results are equal exactly if the values are equal."""
    if isinstance(value, Mapping):
        return ("mapping", *sorted((name, frozen(item)) for name, item in value.items()))
    if isinstance(value, list | tuple | set | frozenset):
        items = [frozen(item) for item in value]
        return (type(value).__name__, *(sorted(items, key=repr) if isinstance(value, set | frozenset) else items))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
