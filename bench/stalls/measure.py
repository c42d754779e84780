"""Loads of which 1 % of the ranges get no answer for 20 s, with and without the limit on silence, in turns.

The proxy that holds ranges back is in this process: what it costs is in both loads of a pair.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from bench import environments
from bench.stalls.report import print_measurement
from bucketpoint import S3Reader, S3Writer, TransferOptions
from bucketpoint.transfer import long_reads
from kit import Delay, Fault, FaultProxy, Rule, Script, Slow
from kit.http import Wire
from kit.servers import S3Server, minio

BUCKET = "bench-stalls"
MIB = 1 << 20
TENSORS = 192
PART_BYTES = 3 * MIB // 4
"""Of each tensor, and so of each range."""

CONNECTIONS = 16
LATE = (40, 120)
"""The places of the late ones among them: 1 %. They move on by one from round to round."""

DELAY_S = 0.02
TAILS: dict[str, Fault] = {"answer": Delay(20.0), "body": Slow(12e3)}
"""An answer that comes 20 seconds late; a body of which the proxy sends 256 KiB every 20 seconds."""


@dataclass(frozen=True)
class Extent:
    """How much is measured: pairs of loads of each kind."""

    rounds: int = 3


WHOLE, QUICK = Extent(), Extent(1)


@dataclass
class Stalls:
    """One run of the part."""

    extent: Extent
    measurements: list[dict[str, Any]]

    def note(self, contender: str, op: str, where: str, round_: int, found: dict[str, Any]) -> None:
        measurement = {"contender": contender, "op": op, "where": where, "round": round_, **found}
        self.measurements.append(measurement)
        print_measurement(measurement)

    def run(self, server: S3Server) -> None:
        server.client().create_bucket(Bucket=BUCKET)
        numbers = torch.arange(PART_BYTES // 4, dtype=torch.float32)
        state = {f"w{index:03}": numbers + index for index in range(TENSORS)}
        url = server.url(BUCKET, "step-1")
        dcp.save(state, storage_writer=S3Writer(url, storage_options=server.options), no_dist=True)
        with FaultProxy(server.endpoint, wire=Wire(delay_s=DELAY_S)) as proxy:
            for where, fault in TAILS.items():
                for round_ in range(self.extent.rounds):

                    def begin(fault: Fault = fault, moved: int = round_) -> None:
                        proxy.clear()
                        rules = [Rule((fault,), ("GetObject",), "*.distcp", skip=at + moved, times=1) for at in LATE]
                        proxy.play(Script(tuple(rules)))

                    self.pair("load", where, round_, server.at(proxy.url), url, state, begin)

    def pair(
        self,
        op: str,
        where: str,
        round_: int,
        server: S3Server,
        url: str,
        expected: dict[str, torch.Tensor],
        begin: Callable[[], None],
    ) -> None:
        names = ["limited", "plain"] if round_ % 2 else ["plain", "limited"]
        for name in names:
            begin()
            self.note(name, op, where, round_, load(name, server, url, expected))


def load(name: str, server: S3Server, url: str, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    options = TransferOptions(part_bytes=PART_BYTES, connections=CONNECTIONS)
    reader = S3Reader(url, storage_options=server.options, transfer=options)
    target = {key: torch.zeros_like(value) for key, value in expected.items()}
    cpu, began = time.process_time(), time.perf_counter()
    with mock.patch.object(long_reads, "LEAST_S", long_reads.LEAST_S if name == "limited" else 3600.0):
        dcp.load(target, storage_reader=reader, no_dist=True)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    if not all(torch.equal(target[key], value) for key, value in expected.items()):
        return {"error": "other values were loaded"}
    return {"wall_s": took, "cpu_s": cpu}


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `stalls` part of the result."""
    began = time.monotonic()
    part = Stalls(QUICK if quick else WHOLE, [])
    with ExitStack() as stack:
        part.run(stack.enter_context(minio(binary, data=fast / "stalls")))
    return {
        "machine": environments.describe(binary, None),
        "quick": quick,
        "seconds": round(time.monotonic() - began),
        "ranges": TENSORS,
        "measurements": part.measurements,
    }
