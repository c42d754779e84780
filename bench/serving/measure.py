"""The part for serving: weights out of a checkpoint, beside `dcp.load` and Run:ai's streamer. Orchestration only.

What is loaded, and how, is in `serving/worker.py`. Contenders take turns; then loads run through a proxy that writes
their requests down: of a step, of a run, and of two and four workers of a host together.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench import environments
from bench.endpoints import client_env, proxied
from bench.lines import Worker
from bench.requests_seen import summary
from bench.serving.report import WORLDS, print_measurement
from bench.serving.worker import BYTES, CONTENDERS, load_part, save, value_of, weights
from bench.thresholds import OURS
from dcp.ranks import Ranks
from kit.http import Wire
from kit.servers import minio

BUCKET = "bench-serving"
RUN = f"s3://{BUCKET}/run"
STEP, FILE = f"{RUN}/step-7", "exported/model.safetensors"
SAVING_RANKS = 8


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `serving` part of the result."""
    began = time.monotonic()
    measurements: list[dict[str, Any]] = []

    def note(where: str, op: str, name: str, round_: int, found: dict[str, Any]) -> None:
        measurements.append({"contender": name, "op": op, "where": where, "round": round_, **found})
        print_measurement(measurements[-1])

    worker = Worker.start("bench.serving.worker", python=environments.python_of("runai"))

    def ask(op: str, name: str, env: dict[str, str], url: str) -> dict[str, Any]:
        return worker.ask({"contender": name, "op": op, "env": env, "url": url})

    try:
        with minio(binary, tls=True, data=fast / "timed") as server:
            _fill(server, fast)
            env = _env(server)
            for round_ in range(3 if quick else 7):
                names = [*CONTENDERS][round_ % 3 :] + [*CONTENDERS][: round_ % 3]
                for name in names:
                    url = f"s3://{BUCKET}/{FILE}" if name == "runai" else STEP
                    note("loopback", "load", name, round_, ask("load", name, env, url))
                note("loopback", "lock", OURS, round_, ask("lock", OURS, env, STEP))
        with minio(binary, data=fast / "counted") as plain:
            _fill(plain, fast)
            with proxied(scratch, plain, Wire()) as (server, proxy):
                for op, url in (("step", STEP), ("run", RUN)):
                    found = ask(op, OURS, _env(server), url)
                    if "error" not in found:
                        found["requests"] = summary(proxy.requests(found["start"], found["end"]))
                    note("count", op, OURS, 0, found)
                for world in WORLDS[1:]:
                    ranks, start = Ranks(world), time.monotonic()
                    wrong = [name for names in ranks.run(load_part, _env(server), STEP) for name in names]
                    ranks.close()
                    found = {"needed_bytes": BYTES, "requests": summary(proxy.requests(start, time.monotonic()))}
                    note("count", f"tp{world}", OURS, 0, {**found, **({"error": wrong[0]} if wrong else {})})
    finally:
        worker.stop()
    return {
        "machine": environments.describe(binary, None),
        "quick": quick,
        "seconds": round(time.monotonic() - began),
        "measurements": measurements,
    }


def _env(server: Any) -> dict[str, str]:
    """Return what all contenders find in the environment, the last for Run:ai's."""
    env = client_env(server)
    return {**env, "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0", "RUNAI_STREAMER_LOG_LEVEL": "WARNING"}


def _fill(server: Any, fast: Path) -> None:
    server.client().create_bucket(Bucket=BUCKET)
    ranks = Ranks(SAVING_RANKS)
    ranks.run(save, client_env(server), STEP)
    ranks.close()
    path = fast / "model.safetensors"
    tensors = {name: torch.full(shape, value_of(name), dtype=torch.bfloat16) for name, shape in weights()}
    save_file(tensors, path)
    server.client().upload_file(str(path), BUCKET, FILE)
    path.unlink()
