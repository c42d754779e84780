"""Cost and gain of a node's copy: loads beside it and without, processes of a node together, and what it costs a save.

    python bench/node_copy.py
    python bench/node_copy.py --nbytes 200_000_000 --folder /local_nvme --only save

Each figure is that of a new process, whose time begins after its imports. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools"), str(ROOT / "src")]

MEMORY = "/dev/shm"
PARTS = ("load", "wire", "node", "ranks", "save")
TENSORS = 16
FILLING = 3
"""Saves until the copy, whose limit is that of three, deletes a checkpoint at each. The first, which starts
the helper, is not measured."""

SAVED = ("cpu", "blocked", "commit", "end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", type=int, default=400_000_000)
    parser.add_argument("--processes", type=int, default=8, help="processes of the node; each has a state of its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=200e6, help="bytes a second of the emulated wire")
    parser.add_argument("--folder", type=Path, help="folder on a disk, for the bucket and the copy")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        _child(json.loads(args.child))
        return
    import get_minio
    from bench.endpoints import proxied
    from kit.http import Wire
    from kit.servers import minio

    with contextlib.ExitStack() as stack:
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        plain = stack.enter_context(minio(get_minio.obtain(), data=disk / "bucket"))
        wired, _ = stack.enter_context(proxied(disk, plain, Wire(total_bytes_per_s=args.rate), workers=1))
        bench = _Bench(args, {"disk": disk / "copy", "memory": memory / "copy"}, plain.make_bucket())
        for part, server in zip(PARTS, (plain, wired, plain, plain, plain), strict=True):
            if args.only in (None, part):
                getattr(bench, part)(server)


class _Bench:
    def __init__(self, args: argparse.Namespace, copies: dict[str, Path], bucket: str) -> None:
        self.args, self.copies, self.bucket = args, copies, bucket

    def load(self, server: Any) -> None:
        """Loads of one process from MinIO on this machine."""
        self._loads(server, "loopback")

    def wire(self, server: Any) -> None:
        """The same through the emulated wire."""
        self._loads(server, f"wire of {self.args.rate / 1e6:.0f} MB/s")

    def _loads(self, server: Any, where: str) -> None:
        url = f"s3://{self.bucket}/{where.split()[0]}"
        self._run(server, do="save", url=url, nbytes=self.args.nbytes)
        times: dict[str, list[float]] = {"bucket": [], **{name: [] for name in self.copies}}
        for _ in range(self.args.rounds):
            times["bucket"] += [self._run(server, do="load", url=url, nbytes=self.args.nbytes)["seconds"]]
            for name, copy in self.copies.items():
                shutil.rmtree(copy, ignore_errors=True)
                cold = self._run(server, do="load", url=url, nbytes=self.args.nbytes, copy=str(copy))
                second = self._run(server, do="load", url=url, nbytes=self.args.nbytes, copy=str(copy))
                times.setdefault(f"{name}, cold", []).append(cold["seconds"])
                times[name] += [second["seconds"]]
                print(f"  {where}, copy on {name}: cold {_sources(cold)}; second {_sources(second)}")
        base = statistics.median(times.pop("bucket"))
        print(f"{where}: load of {self.args.nbytes / 1e6:.0f} MB without a copy {base:.2f} s")
        for name, seconds in times.items():
            median = statistics.median(seconds)
            print(f"{where}: copy on {name} {median:.2f} s, {median / base:.2f} x")

    def node(self, server: Any) -> None:
        """Processes that each load the same, at once, as servers of a node do."""
        count, nbytes = self.args.processes, self.args.nbytes // 2
        url = f"s3://{self.bucket}/node"
        self._run(server, do="save", url=url, nbytes=nbytes)
        for name, copy in (("no copy", None), *self.copies.items()):
            if copy is not None:
                shutil.rmtree(copy, ignore_errors=True)
            found = self._together(server, count, do="load", url=url, nbytes=nbytes, copy=copy and str(copy))
            read = sum(each["read"] for each in found)
            slowest = max(each["seconds"] for each in found)
            print(f"{count} processes, {name}: {read / found[0]['total']:.3f} x the bytes, slowest {slowest:.2f} s")

    def ranks(self, server: Any) -> None:
        """Ranks of a node that load the same with cooperative="node", and with a copy instead of the exchange."""
        count, nbytes = self.args.processes // 2, self.args.nbytes // 2
        url = f"s3://{self.bucket}/ranks"
        self._run(server, do="save", url=url, nbytes=nbytes)
        for copy in self.copies.values():
            shutil.rmtree(copy, ignore_errors=True)
        again = ((f"{name}, again", copy) for name, copy in self.copies.items())
        for name, copy in (("exchange", None), *self.copies.items(), *again):
            given = {"copy": copy and str(copy), "cooperative": "node"}
            with tempfile.TemporaryDirectory() as meeting:
                found = self._together(server, count, do="load", url=url, nbytes=nbytes, meeting=meeting, **given)
            slowest = max(each["seconds"] for each in found)
            read = sum(each["read"] for each in found)
            cpu = sum(each["cpu"] for each in found)
            print(f"{count} ranks, {name}: {read / nbytes:.3f} x the bytes, {slowest:.2f} s, CPU {cpu:.1f} s")

    def save(self, server: Any) -> None:
        """Saves beside training with copies and without, by turns: CPU time of trainer and helper, and durations."""
        for copy in self.copies.values():
            shutil.rmtree(copy, ignore_errors=True)
        copies = {"no copy": None, **{name: str(copy) for name, copy in self.copies.items()}}
        order = {"url": f"s3://{self.bucket}/save", "nbytes": self.args.nbytes, "copies": copies}
        found = self._run(server, do="save", rounds=FILLING + self.args.rounds, **order)["saves"]
        for name, saves in found.items():
            for phase, some in (("new", saves[1:FILLING]), ("reused", saves[FILLING:])):
                base = found["no copy"][1:]
                over = [min(each[key] for each in some) - min(each[key] for each in base) for key in SAVED]
                mean = statistics.mean(each["cpu"] for each in some) - statistics.mean(each["cpu"] for each in base)
                print(
                    f"save, {name}, {phase} files: CPU {over[0] / self.args.nbytes * 1e9:+.2f} s/GB "
                    f"(mean {mean / self.args.nbytes * 1e9:+.2f}), blocked {1000 * over[1]:+.0f} ms, "
                    f"until the commit {over[2]:+.2f} s, until the end {over[3]:+.2f} s"
                )

    def _run(self, server: Any, **order: Any) -> dict[str, Any]:
        return self._together(server, 1, **order)[0]

    def _together(self, server: Any, count: int, **order: Any) -> list[dict[str, Any]]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        orders = [
            json.dumps({**order, "options": server.options, "rank": rank, "world": count}) for rank in range(count)
        ]
        command = [sys.executable, "-W", "ignore", __file__, "--child"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        children = [subprocess.Popen([*command, each], **pipes) for each in orders]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        return [json.loads(child.communicate()[0]) for child in children]


def _sources(found: dict[str, Any]) -> str:
    return f"{found['read'] / 1e6:.1f} MB from the bucket, {found['node'] / 1e6:.1f} MB from the copy"


# -- the measured process ----------------------------------------------------------------------------------------------


def _child(order: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import bucketpoint
    from bucketpoint import NodeCopy, S3Reader, S3Writer, TransferOptions

    if order.get("meeting"):
        store = f"file://{order['meeting']}/store"
        dist.init_process_group("gloo", init_method=store, rank=order["rank"], world_size=order["world"])
    size = order["nbytes"] // TENSORS // 4
    # Memory that has been written to, as that of a model has.
    state = {"model": {f"w{number}": torch.full((size,), float(number)) for number in range(TENSORS)}}

    def transfer(folder: str | None, checkpoints: float = 10) -> TransferOptions:
        return TransferOptions(node_copy=NodeCopy(folder, int(checkpoints * order["nbytes"])) if folder else None)

    print("ready", flush=True)
    sys.stdin.readline()
    began, cpu = time.monotonic(), _cpu()
    found: dict[str, Any] = {}
    if order["do"] == "save":
        copies = order.get("copies", {"": None})
        options = {name: transfer(copy, 3.1) for name, copy in copies.items()}
        writers = {
            name: S3Writer(storage_options=order["options"], transfer=options[name], overwrite=True) for name in copies
        }
        found["saves"] = {name: [] for name in copies}
        for number in range(order.get("rounds", 1)):
            for name, writer in writers.items():
                # A checkpoint of its own for each turn, as a manager makes them: the copy deletes the oldest.
                url = order["url"] + (f"/{name}/{number}".replace(" ", "-") if name else "")
                began, cpu = time.monotonic(), _cpu(writer.uploads.process_id)
                handle = bucketpoint.async_save(state, checkpoint_id=url, storage_writer=writer, no_dist=True)
                handle.result()
                used, ended, stats = _cpu(writer.uploads.process_id) - cpu, time.monotonic() - began, handle.stats
                figures = (used, stats.blocked_s, stats.total_s, ended)
                found["saves"][name].append(dict(zip(SAVED, figures, strict=True)))
        for writer in writers.values():
            writer.close()
    else:
        mode = order.get("cooperative", "off")
        given = {"transfer": transfer(order.get("copy")), "cooperative": mode}
        reader = S3Reader(order["url"], storage_options=order["options"], **given)
        dcp.load(state, storage_reader=reader, no_dist=not order.get("meeting"))
        read, node = reader.stats.read_bytes, reader.stats.node_bytes
        found = {"read": read, "node": node, "total": read + node, "cpu": _cpu() - cpu}
    print(json.dumps({**found, "seconds": time.monotonic() - began}))


def _cpu(helper: int | None = None) -> float:
    """CPU time of this process, and of the helper."""
    used = time.process_time()
    if helper is not None:
        fields = Path(f"/proc/{helper}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


if __name__ == "__main__":
    main()
