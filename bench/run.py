"""Runs the benchmark: every contender side by side, interleaved, on MinIO over TLS, then through an emulated wire.

    python bench/run.py                     the whole of it, about 25 minutes on 2 cores
    python bench/run.py --quick             one or two rounds, under 5 minutes
    python bench/run.py --only save,load --contenders bucketpoint,raw --pairs 3
    python bench/run.py --only staging      what asynchronous saves cost training; the rest of the report stays
    python bench/run.py --only ranks        what many ranks write and read together
    python bench/run.py --only retention    what plans and prunes cost
    python bench/run.py --only stalls       what the limit on silent reads gains
    python bench/run.py --only stores       other stores, and any filesystem, beside others over the same library
    python bench/run.py --only start-up     CPU time of commands before their first request
    python bench/run.py --only unchanged    what copies of unchanged bytes save, and what looking for them costs
    python bench/run.py --only serving      a model's weights into an engine's parameters
    python bench/run.py --report            all thresholds, and the report, from the raw figures that are there

Transfers, in three passes. "loopback": a MinIO over TLS, timed. "count": the same operations through a proxy that only
writes down every request. "wire": through the proxy with 20 ms added to every request and 25 MB/s a connection, timed.
Each measurement is a forked child; a round runs every contender once, in an order that shifts by one each round, so a
ratio is taken between neighbours in time. The server's data lies on tmpfs, and only the client's CPU time counts.
Each other part has a folder: `measure.py` runs it, `worker.py` is the measured process, `report.py` words the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools"), str(ROOT / "src")]

import get_minio  # noqa: E402
from bench import environments, report  # noqa: E402
from bench.contenders import CONTENDERS, Setting, bucket_and_prefix  # noqa: E402
from bench.endpoints import client_env, empty, proxied  # noqa: E402
from bench.lines import Worker  # noqa: E402
from bench.proxy_process import RunningProxy  # noqa: E402
from bench.ranks import measure as ranks  # noqa: E402
from bench.requests_seen import summary  # noqa: E402
from bench.retention import measure as retention  # noqa: E402
from bench.serving import measure as serving  # noqa: E402
from bench.staging import measure as staging  # noqa: E402
from bench.stalls import measure as stalls  # noqa: E402
from bench.start_up import measure as start_up  # noqa: E402
from bench.stores import measure as stores  # noqa: E402
from bench.unchanged import measure as unchanged  # noqa: E402
from kit.http import Wire  # noqa: E402
from kit.servers import S3Server, minio  # noqa: E402

WIRE = Wire(delay_s=0.020, bytes_per_s=25e6)
BUCKET = "bench-checkpoints"
FALLBACK_LAYOUT = (199_904_256, 799_617_024)
"""Object sizes for the raw transfers when bucketpoint itself is not measured: weights, moments."""

SELDOM = ("s3fs", "bucketpoint-lean")
"""Contenders whose ratios no threshold needs: they run in few rounds, and s3fs would take most of the time."""

PARTS = {
    "staging": staging.measure,
    "ranks": ranks.measure,
    "retention": retention.measure,
    "stalls": stalls.measure,
    "stores": stores.measure,
    "start-up": start_up.measure,
    "unchanged": unchanged.measure,
    "serving": serving.measure,
}
"""Among the operations of `--only`: the parts of the benchmark in modules of their own."""

ALL_OPS = ",".join(["save", "load", "quarter0", "quarter1", *PARTS])

TMPFS_NEEDED = 12 << 30


@dataclass
class Bench:
    """One run: its options, workers, scratch folder, and the measurements so far."""

    options: argparse.Namespace
    scratch: Path
    fast: Path
    s5cmd: str | None
    workers: dict[str, Worker] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    layout: Sequence[int] = FALLBACK_LAYOUT

    def measure(self, name: str, op: str, where: str, round_: int, server: S3Server, url: str) -> dict[str, Any]:
        contender = CONTENDERS[name]
        if contender.env not in self.workers:
            worker = Worker.start("bench.worker", python=environments.python_of(contender.env))
            self.workers[contender.env], self.state = worker, worker.hear()
        setting = Setting(url, self.layout, str(self.fast / "files"), self.s5cmd or "")
        command = {
            "contender": name,
            "op": op,
            "setting": asdict(setting),
            "env": client_env(server),
            # Unmeasured requests would only be in the way of the count.
            "warm_url": None if where == "count" else self.url(name, "warm"),
        }
        worker = self.workers[contender.env]
        answer = worker.ask(command)
        if worker.ended:
            raise SystemExit(f"{answer['error']}: out of memory?")
        answer.update(contender=name, op=op, where=where, round=round_)
        self.measurements.append(answer)
        report.print_measurement(answer)
        return answer

    def url(self, name: str, leaf: str) -> str:
        return str(self.scratch / "disk" / leaf) if name == "disk" else f"s3://{BUCKET}/{name}/{leaf}"

    def holder(self, name: str) -> str:
        """The contender whose checkpoint this one loads: itself, or one that writes the same."""
        other = CONTENDERS[name].loads_of
        return other if other in self.options.contenders and other is not None else name

    def forget(self, server: S3Server, url: str) -> None:
        """Free the memory that a checkpoint takes up in the server or on the disk."""
        if "://" not in url:
            shutil.rmtree(url, ignore_errors=True)
            return
        bucket, prefix = bucket_and_prefix(url)
        empty(server, bucket, self.fast, prefix + "/")

    def learn_layout(self, server: S3Server, url: str) -> None:
        """The raw transfers move objects of the sizes that bucketpoint makes of the state."""
        bucket, prefix = bucket_and_prefix(url)
        pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        sizes = [entry["Size"] for page in pages for entry in page.get("Contents", [])]
        self.layout = sorted(size for size in sizes if size > 1 << 20) or FALLBACK_LAYOUT


def timed_pass(bench: Bench, server: S3Server, where: str, names: Sequence[str], rounds: int, slow_rounds: int) -> None:
    for round_ in range(rounds):
        shift = round_ % len(names)
        order = [name for name in [*names[shift:], *names[:shift]] if name not in SELDOM or round_ < slow_rounds]
        for op in bench.options.only:
            if where == "wire" and op not in ("save", "load"):
                continue
            for name in order:
                if op in CONTENDERS[name].ops:
                    holder = bench.holder(name) if op != "save" else name
                    bench.measure(name, op, where, round_, server, bench.url(holder, f"round-{round_}"))
                if op == "save" and name == "bucketpoint" and round_ == 0:
                    bench.learn_layout(server, bench.url(name, "round-0"))
                if op == "save" and bench.holder(name) != name:
                    bench.forget(server, bench.url(name, f"round-{round_}"))
            if op == "load":
                for name in order:
                    if not CONTENDERS[name].knows_state:
                        bench.forget(server, bench.url(name, f"round-{round_}"))
        for name in order:
            bench.forget(server, bench.url(name, f"round-{round_}"))


def count_pass(bench: Bench, server: S3Server, proxy: RunningProxy, names: Sequence[str]) -> None:
    """Every operation once, with its requests. An overwrite comes last, so that the loads see a fresh checkpoint."""
    for name in names:
        contender = CONTENDERS[name]
        if name in ("disk", "bucketpoint-lean"):
            continue
        for op in [op for op in bench.options.only if op in contender.ops] + ["overwrite"] * contender.knows_state:
            answer = bench.measure(name, op, "count", 0, server, bench.url(name, "count"))
            if "error" not in answer:
                answer["requests"] = summary(proxy.requests(answer["start"], answer["end"]))
        bench.forget(server, bench.url(name, "count"))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """What this run measures: the transfers, and the parts of their own."""
    binary = get_minio.obtain()
    if binary is None:
        raise SystemExit("the benchmark needs a MinIO server")
    result: dict[str, Any] = {}
    for name, measure in PARTS.items():
        if name in options.only:
            with tempfile.TemporaryDirectory(prefix="bench-", dir=_disk_folder()) as scratch, _fast_folder() as fast:
                result[name] = measure(Path(scratch), fast, binary, quick=options.quick)
    options.only = [op for op in options.only if op not in PARTS]
    return {**run_transfers(options, binary), **result} if options.only else result


def run_transfers(options: argparse.Namespace, binary: Path) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=_disk_folder()) as scratch, _fast_folder() as fast:
        s5cmd = environments.s5cmd_binary()
        bench = Bench(options, Path(scratch), fast, s5cmd)
        names = [name for name in options.contenders if name != "s5cmd" or s5cmd]
        try:
            if "loopback" in options.passes:
                with minio(binary, tls=True, data=fast / "loopback") as server:
                    server.client().create_bucket(Bucket=BUCKET)
                    timed_pass(bench, server, "loopback", names, options.pairs, options.slow_pairs)
                shutil.rmtree(fast / "loopback", ignore_errors=True)
            with minio(binary, data=fast / "proxied") as plain:
                plain.client().create_bucket(Bucket=BUCKET)
                if "count" in options.passes:
                    with proxied(bench.scratch, plain, Wire()) as (server, proxy):
                        count_pass(bench, server, proxy, names)
                if "wire" in options.passes:
                    with proxied(bench.scratch, plain, WIRE) as (server, _):
                        remote = [name for name in names if name not in ("disk", "bucketpoint-lean")]
                        timed_pass(bench, server, "wire", remote, options.wire_pairs, options.wire_slow_pairs)
        finally:
            for worker in bench.workers.values():
                worker.stop()
        return {
            "machine": environments.describe(binary, s5cmd),
            "state": bench.state,
            "layout": list(bench.layout),
            "wire": asdict(WIRE),
            "seconds": round(time.monotonic() - began),
            "quick": options.quick,
            "measurements": bench.measurements,
        }


def _disk_folder() -> Path:
    folder = ROOT / ".cache"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def _fast_folder() -> Iterator[Path]:
    """Where the server keeps its data: in memory where there is room, so that the disk is not what is measured."""
    shm = Path("/dev/shm")
    fits = shm.is_dir() and shutil.disk_usage(shm).free > TMPFS_NEEDED
    with tempfile.TemporaryDirectory(prefix="bench-", dir=shm if fits else _disk_folder()) as folder:
        yield Path(folder)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; the figures are only a first impression")
    parser.add_argument("--pairs", type=int, help="rounds of each ratio (default 7)")
    parser.add_argument("--only", type=names, default=names(ALL_OPS), help=f"of {ALL_OPS}")
    parser.add_argument("--contenders", type=names, default=list(CONTENDERS), help=", ".join(CONTENDERS))
    parser.add_argument("--passes", type=names, default=names("loopback,count,wire"), help="loopback,count,wire")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: write the report of the raw figures anew"
    )
    parser.add_argument("--out", type=Path, help="the report (default docs/benchmark.md; .cache/ with --quick)")
    options = parser.parse_args(arguments)
    unknown = set(options.contenders) - set(CONTENDERS)
    if unknown_ops := set(options.only) - set(names(ALL_OPS)):
        parser.error(f"no such operation: {', '.join(sorted(unknown_ops))}")
    if unknown:
        parser.error(f"no such contender: {', '.join(sorted(unknown))}")
    options.out = options.out or ROOT / (".cache/benchmark-quick.md" if options.quick else "docs/benchmark.md")
    options.pairs = options.pairs or (2 if options.quick else 7)
    options.slow_pairs = 1 if options.quick else min(3, options.pairs)
    options.wire_pairs = 1 if options.quick else options.pairs
    options.wire_slow_pairs = 0 if options.quick else 1
    return options


def main() -> None:
    options = parse()
    # Leave no server, proxy or gigabytes in memory behind when a time limit ends the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    began = time.monotonic()
    result = {} if options.report else run(options)
    whole = report.merged(result, options.out)
    report.write(whole, options.out)
    print(report.thresholds_text(result or whole))
    print(f"written: {options.out} ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
