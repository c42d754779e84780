"""Measurement of a store's throughput from this machine by a bounded probe, and advice for `TransferOptions`."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from bucketpoint.doctor.report import Report
from bucketpoint.errors import StoreError
from bucketpoint.stores import Store
from bucketpoint.stores.retry import deadline
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.options import MIB, TransferOptions
from bucketpoint.transfer.pieces import for_each

LEVELS = ((1, 1 / 8), (8, 3 / 8), (24, 1 / 2))
"""Numbers of connections to try, each with its share of the probe's bytes."""

LARGEST_PIECE = 8 * MIB
SMALLEST_PIECE = 64 << 10
LATENCY_SAMPLES = 5

_LATENCY_SHARE = 0.15
_LARGEST_PART = 128 * MIB
_GOOD_ENOUGH = 0.9
_ENOUGH_BYTES = 64 * MIB
_PATIENCE_S = 60.0
"""Seconds for which a request of the probe is retried."""


@dataclass(frozen=True)
class Level:
    """Upload and download rates, in bytes per second, with a number of connections."""

    connections: int
    up: float
    down: float


@dataclass(frozen=True)
class Speed:
    """The result of a probe.

    Attributes:
        latency_s: seconds to read a small object.
        levels: rates by number of connections.
        piece_bytes: size of the objects of the first level.
    """

    latency_s: float
    levels: tuple[Level, ...]
    piece_bytes: int
    moved_bytes: int
    """Bytes that were transferred in each direction."""

    @property
    def connection_rate(self) -> float:
        """Bytes per second of one connection, without the latency of a request, in the slower direction."""
        rates = []
        for rate in (self.levels[0].up, self.levels[0].down):
            seconds = self.piece_bytes / rate
            rates.append(self.piece_bytes / max(seconds - self.latency_s, seconds / 10))
        return min(rates)

    def advice(self) -> TransferOptions:
        """Return the advised `TransferOptions`.

        Parts are so large, up to 128 MiB, that latency takes at most 15 % of the time of a part. They are never smaller
        than the default: smaller parts cost more requests and gain nothing. Connections are the fewest that reach 90 %
        of the best rate measured.
        """
        wanted = self.latency_s * self.connection_rate * (1 - _LATENCY_SHARE) / _LATENCY_SHARE
        smallest = TransferOptions().part_bytes
        part = min(max(2 ** math.ceil(math.log2(max(wanted, 1))), smallest), _LARGEST_PART)
        fastest_up, fastest_down = max(level.up for level in self.levels), max(level.down for level in self.levels)
        enough = max(
            next(level.connections for level in self.levels if level.up >= _GOOD_ENOUGH * fastest_up),
            next(level.connections for level in self.levels if level.down >= _GOOD_ENOUGH * fastest_down),
        )
        return TransferOptions(part_bytes=part, connections=enough)


def measure(report: Report, folder: str, nbytes: int, *, used: Callable[[str], None]) -> Speed | None:
    """Measure throughput below `folder` and report it. `used` is called with each key before it is written."""
    try:
        speed = probe(report.store, folder, nbytes, used=used)
    except StoreError as error:
        report.failed("throughput", error)
        return None
    for direction in ("up", "down"):
        rates = [f"{getattr(level, direction) / 1e6:,.0f} MB/s with {level.connections}" for level in speed.levels]
        report.say(f"throughput {direction}", "ok", f"{', '.join(rates)} connections")
    advised = speed.advice()
    part, rate, latency = advised.part_bytes >> 20, speed.connection_rate, speed.latency_s
    tried = "" if nbytes >= _ENOUGH_BYTES else f". This probe is small: {_ENOUGH_BYTES >> 20} MiB or more are better"
    waiting = latency / (latency + advised.part_bytes / rate)
    report.say(
        "advice",
        "ok",
        f"TransferOptions(part_bytes={part} << 20, connections={advised.connections}): an answer takes "
        f"{latency * 1e3:.1f} ms and a connection carries {rate / 1e6:,.0f} MB/s, so that a part of {part} MiB "
        f"waits for {waiting:.0%} of its time{tried}",
    )
    return speed


def probe(store: Store, folder: str, nbytes: int, *, used: Callable[[str], None]) -> Speed:
    """Write and read about `nbytes` below `folder`. Call `used` with each key first, so that the caller can delete it.

    Raises StoreError if a request failed, after all retries.
    """
    small = f"{folder}latency"
    used(small)
    store.put(small, [memoryview(b"x")])
    latency = statistics.median(_timed(lambda: store.get(small)) for _ in range(LATENCY_SAMPLES))
    content = memoryview(os.urandom(min(max(nbytes // 2, SMALLEST_PIECE), LARGEST_PIECE)))
    levels, moved, first = [], 0, 0
    for connections, share in LEVELS:
        piece = content[: int(min(max(nbytes * share / connections, SMALLEST_PIECE), len(content)))]
        keys = [f"{folder}speed-{number}" for number in range(max(round(nbytes * share / len(piece)), connections))]
        for key in keys:
            used(key)
        level = _level(store, keys, piece, connections)
        levels.append(level)
        moved += len(keys) * len(piece)
        first = first or len(piece)
    return Speed(latency, tuple(levels), first, moved)


def _level(store: Store, keys: list[str], piece: memoryview, connections: int) -> Level:
    crc, size = crc32c(piece), len(piece)

    def put(key: str) -> None:
        with deadline(_PATIENCE_S):
            store.put(key, [piece], crc32c=crc)

    def get(key: str) -> None:
        with deadline(_PATIENCE_S):
            store.read_into(key, 0, [memoryview(bytearray(size))])

    options = TransferOptions(connections=connections)
    up, down = (_timed(lambda do=do: for_each(keys, do, options)) for do in (put, get))  # type: ignore[misc]
    total = size * len(keys)
    return Level(connections, total / up, total / down)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    # At least 1 ns, because a clock that did not move would lead to a division by zero.
    return max(time.perf_counter() - started, 1e-9)
