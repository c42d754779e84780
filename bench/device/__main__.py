"""Runs each part in a process of its own, against a MinIO server in memory. Orchestration only.

PYTHONPATH=tests:tools:. python -m bench.device --memory /dev/shm [--parts staging,steps,cores] [--out FOLDER] [--small]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import get_minio
from bench.endpoints import client_env
from bench.lines import environment
from kit.servers import minio

ROOT = Path(__file__).resolve().parents[2]
GB = 1_000_000_000
PARTS = {"staging": 110, "steps": 150, "cores": 240}
"""Seconds that a part may take."""


def _run(part: str, arguments: list[str], env: dict[str, str], out: Path) -> None:
    print(f"== {part}", flush=True)
    begun = time.monotonic()
    command = [sys.executable, "-m", *arguments]
    with (out / f"{part}.log").open("wb") as log:
        try:
            code = subprocess.run(
                command, env=environment(env), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=PARTS[part]
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    text = (out / f"{part}.log").read_text(errors="replace")
    print(text[-5000:] if code else text[-3500:], flush=True)
    print(f"== {part} ended with status {code} after {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder that the server keeps data in")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("."), help="where the log of each part goes")
    parser.add_argument(
        "--small", action="store_true", help="200 MB in place of 10 GB: a trial of the parts themselves"
    )
    asked = parser.parse_args()
    nbytes = GB // 5 if asked.small else 10 * GB
    binary = get_minio.find()
    if binary is None:
        raise SystemExit("no MinIO server was found: set MINIO to its path")
    asked.out.mkdir(parents=True, exist_ok=True)
    data = Path(tempfile.mkdtemp(dir=asked.memory))
    try:
        for part in asked.parts.split(","):
            if part == "staging":
                for tensors in (300, 2000):
                    sizes = json.dumps({"tensors": tensors, "nbytes": nbytes, "rounds": 5})
                    _run(part, ["bench.staging.worker", "cuda", sizes], {}, asked.out)
                continue
            with minio(binary, tls=True, data=data / "tls") as secure, minio(binary, data=data / "plain") as plain:
                secure.client().create_bucket(Bucket="device")
                plain.client().create_bucket(Bucket="device")
                servers = {"tls": client_env(secure), "http": client_env(plain)}
                env = {"BENCH_SERVERS": json.dumps(servers), "BENCH_DATA": str(data), **client_env(secure)}
                _run(part, [f"bench.device.{part}", str(nbytes)], env, asked.out)
            shutil.rmtree(data)
            data.mkdir()
    finally:
        shutil.rmtree(data, ignore_errors=True)
    print(f"{os.cpu_count()} cores", flush=True)


if __name__ == "__main__":
    main()
