"""The part for stores: bucketpoint and others over the same library, to the same server. Orchestration only.

What is compared is in `MATCHES`, a row each; who saves and loads how is in `stores/worker.py`. Contenders of a match
take turns, one run each a round; then each operation runs once through a proxy that writes its requests down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import get_fake_gcs
from bench import environments
from bench.endpoints import client_env, empty, proxied
from bench.lines import Worker
from bench.requests_seen import summary
from bench.stores.report import print_measurement
from gcs_server import fake_gcs
from kit.http import Wire
from kit.servers import minio

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "bench-stores"
OPS = ("save", "load", "quarter0")


@dataclass(frozen=True)
class Place:
    """A bucket on a running server: how clients reach it, its URL, and how what a round left there is forgotten."""

    env: dict[str, str]
    root: str
    forget: Callable[[], None]


@dataclass(frozen=True)
class Match:
    """Contenders over one library.

    Attributes:
        env: the environment whose interpreter runs them.
        place: starts the server whose bucket is timed.
        counted: whether each operation runs once more through a proxy before MinIO, which counts its bytes.
    """

    contenders: Sequence[str]
    env: str
    place: Callable[[Stores], AbstractContextManager[Place | None]]
    counted: bool = False


@contextmanager
def on_minio(part: Stores) -> Iterator[Place]:
    """MinIO over TLS, its data in memory."""
    with minio(part.binary, tls=True, data=part.fast / "stores") as server:
        server.client().create_bucket(Bucket=BUCKET)

        yield Place(client_env(server), f"s3://{BUCKET}", lambda: empty(server, BUCKET, part.fast))


@contextmanager
def on_fake_gcs(part: Stores) -> Iterator[Place | None]:
    """fake-gcs-server in memory, without TLS; None where there is none."""
    binary = get_fake_gcs.find()
    if binary is None:
        print("stores: there is no fake-gcs-server here: run `make fake-gcs`", flush=True)
        yield None
        return
    with fake_gcs(binary) as server:
        bucket = server.make_bucket()

        def forget() -> None:
            for key in server.keys(bucket):
                server.ask("DELETE", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}")

        yield Place({**server.env, "NO_PROXY": "127.0.0.1", "NO_GCE_CHECK": "true"}, f"gs://{bucket}", forget)


MATCHES = (
    Match(("bucketpoint + s3fs", "torch + s3fs"), "s3fs", on_minio, counted=True),
    Match(("bucketpoint + gcs", "torch + gcsfs"), "gcsfs", on_fake_gcs),
)


@dataclass
class Stores:
    """One run of the part."""

    scratch: Path
    fast: Path
    binary: Path
    rounds: int
    measurements: list[dict[str, Any]] = field(default_factory=list)

    def run(self, match: Match) -> None:
        # gcsfs would ask the emulator for a bucket's type before each operation, in vain: that is not its speed.
        quiet = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        worker = Worker.start("bench.stores.worker", python=environments.python_of(match.env), env=quiet)
        try:
            with match.place(self) as place:
                if place is None:
                    return
                for round_ in range(self.rounds):
                    shift = round_ % len(match.contenders)
                    order = [*match.contenders[shift:], *match.contenders[:shift]]
                    for op in OPS[:2]:
                        for name in order:
                            found = worker.ask(_command(name, op, round_, place, warm=True))
                            self.note(name, op, "loopback", round_, found)
                    place.forget()
            if match.counted:
                self.count(match, worker)
        finally:
            worker.stop()

    def count(self, match: Match, worker: Worker) -> None:
        """Each operation once through a proxy that writes its requests down."""
        with minio(self.binary, data=self.fast / "counted") as plain:
            plain.client().create_bucket(Bucket=BUCKET)
            with proxied(self.scratch, plain, Wire()) as (server, proxy):
                place = Place(client_env(server), f"s3://{BUCKET}", lambda: None)
                for name in match.contenders:
                    for op in OPS:
                        found = worker.ask(_command(name, op, 0, place, warm=False))
                        if "error" not in found:
                            found["requests"] = summary(proxy.requests(found["start"], found["end"]))
                        self.note(name, op, "count", 0, found)

    def note(self, name: str, op: str, where: str, round_: int, found: dict[str, Any]) -> None:
        measurement = {"contender": name, "op": op, "where": where, "round": round_, **found}
        self.measurements.append(measurement)
        print_measurement(measurement)


def _command(name: str, op: str, round_: int, place: Place, *, warm: bool) -> dict[str, Any]:
    folder = f"{place.root}/{name.replace(' + ', '-')}"
    return {
        "contender": name,
        "op": op,
        "env": place.env,
        "url": f"{folder}/round-{round_}",
        # Unmeasured requests would only be in the way of the count.
        "warm_url": f"{folder}/warm" if warm else None,
    }


def measure(scratch: Path, fast: Path, binary: Path, *, quick: bool) -> dict[str, Any]:
    """The `stores` part of the result."""
    began = time.monotonic()
    part = Stores(scratch, fast, binary, rounds=2 if quick else 5)
    for match in MATCHES:
        part.run(match)
    return {
        "machine": environments.describe(binary, None),
        "quick": quick,
        "seconds": round(time.monotonic() - began),
        "measurements": part.measurements,
    }
