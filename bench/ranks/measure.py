"""The ranks part of the benchmark: what several ranks save and load together, with bytes counted at the store.

Orchestration only. What a rank does is in `ranks/worker.py`; the ranks are processes of one gloo group on this machine.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import environments
from bench.endpoints import client_env, proxied
from bench.proxy_process import RunningProxy
from bench.ranks import worker as ranks_worker
from bench.ranks.report import print_measurement
from bench.requests_seen import kind_of
from bucketpoint.format.keys import parse_data_path
from dcp.ranks import Ranks
from kit.http import Wire
from kit.servers import S3Server, minio

BUCKET = "bench-ranks"
STORE_BYTES_PER_S = 200e6
SAVING, LOADING = 8, 4
LAYOUTS = ("ddp", "hsdp")
PLANNERS = ("bucketpoint", "dcp", "dcp-lowest")
KINDS = (("replicated", "replicated"), ("rows", "columns"))
MODES = ("off", "group")


@dataclass
class RanksPart:
    """One run of the ranks part."""

    rounds: int
    scratch: Path
    fast: Path
    minio: Path
    measurements: list[dict[str, Any]] = field(default_factory=list)

    def note(self, found: dict[str, Any]) -> None:
        self.measurements.append(found)
        print_measurement(found)

    def run(self) -> None:
        with minio(self.minio, data=self.fast / "ranks") as server:
            server.client().create_bucket(Bucket=BUCKET)
            with _ranks(SAVING, server) as ranks:
                for layout in LAYOUTS:
                    for planner in PLANNERS:
                        self._save(ranks, server, layout, planner)
            with _ranks(LOADING, server) as ranks:
                needed = {
                    saved: ranks.run(ranks_worker.save_for_loads, saved, f"s3://{BUCKET}/{saved}")[0]
                    for saved, _ in KINDS
                }
            wire = Wire(total_bytes_per_s=STORE_BYTES_PER_S)
            with (
                proxied(self.scratch, server, wire, workers=1) as (capped, proxy),
                _ranks(LOADING, capped) as ranks,
            ):
                for round_ in range(self.rounds):
                    for saved, loaded in KINDS:
                        for mode in MODES if round_ % 2 else MODES[::-1]:
                            self._load(ranks, proxy, round_, saved, loaded, mode, needed[saved])
        shutil.rmtree(self.fast / "ranks", ignore_errors=True)

    def _save(self, ranks: Ranks, server: S3Server, layout: str, planner: str) -> None:
        place = {"op": "save", "where": layout, "contender": planner, "round": 0}
        prefix = f"{layout}-{planner}"
        moved = ranks.run(ranks_worker.saves, layout, planner, f"s3://{BUCKET}/{prefix}", 2)
        for round_ in range(2):
            most = max((saves[round_] for saves in moved[1:]), key=lambda one: one["sent"] + one["received"])
            self.note(
                {
                    **place,
                    "round": round_,
                    "written": _bytes_of_ranks(server, f"{prefix}/{round_}/", SAVING),
                    "messages": most["sent"] + most["received"],
                    "coordinator_messages": moved[0][round_]["sent"] + moved[0][round_]["received"],
                    "items": most["items"],
                }
            )

    def _load(
        self, ranks: Ranks, proxy: RunningProxy, round_: int, saved: str, loaded: str, mode: str, needed: int
    ) -> None:
        found = ranks.run(ranks_worker.load, loaded, mode, f"s3://{BUCKET}/{saved}")
        window = min(one["start"] for one in found), max(one["end"] for one in found)
        requests = proxy.requests(*window)
        wrong = sorted({name for one in found for name in one["wrong"]})
        answer: dict[str, Any] = {
            "op": "load",
            "where": f"{saved}-{loaded}",
            "contender": mode,
            "round": round_,
            "seconds": max(one["seconds"] for one in found),
            "received": sum(record["received"] for record in requests),
            "requests": dict(Counter(map(kind_of, requests))),
            "needed_bytes": needed,
            "peak_bytes": max(one["peak_bytes"] for one in found),
            "explained": found[0]["explained"],
        }
        if wrong:
            answer["error"] = f"{len(wrong)} tensors differ after the load, {wrong[0]} first"
        self.note(answer)


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `ranks` part of the result."""
    began = time.monotonic()
    part = RanksPart(1 if quick else 3, scratch, fast, binary)
    part.run()
    return {
        "machine": environments.describe(binary, None),
        "quick": quick,
        "seconds": round(time.monotonic() - began),
        "store_bytes_per_s": STORE_BYTES_PER_S,
        "saving": SAVING,
        "loading": LOADING,
        "measurements": part.measurements,
    }


def _bytes_of_ranks(server: S3Server, prefix: str, world: int) -> list[int]:
    """What each rank has in the store, by the rank in the names of its objects."""
    written = [0] * world
    for page in server.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
        for entry in page.get("Contents", []):
            named = parse_data_path(entry["Key"].removeprefix(prefix))
            if named is not None:
                written[named[1]] += entry["Size"]
    return written


@contextlib.contextmanager
def _ranks(world: int, server: S3Server) -> Iterator[Ranks]:
    ranks = Ranks(world)
    try:
        ranks.run(ranks_worker.use, client_env(server))
        yield ranks
    finally:
        ranks.close()
