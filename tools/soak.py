"""Saves and restores a run for a long time while requests fail, with retention on, and looks for anything that grows.

    python tools/soak.py                              300 saves and 60 restores, 2 % of requests meeting a fault
    python tools/soak.py --saves 30 --restores 6      a short one
    python tools/soak.py --background process         a process of its own uploads, and is killed in every tenth save

Exits with 1 if a checkpoint was lost or mixed, or if memory, descriptors, threads, processes or open uploads grew, here
or in the process that uploads.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import get_minio
from bucketpoint import BucketpointError, CheckpointManager, TransferOptions
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.location import Location
from bucketpoint.retention import from_yaml
from kit import FaultProxy, Script, mixed, servers

POLICY = """
version: 1
keep:
  latest: 3
  every:
    - {steps: 50}
prune:
  when: after_commit
  grace: 0s
"""
OPTIONS = TransferOptions(part_bytes=5 << 20, connections=4, single_put_bytes=1 << 20)
LARGE = (5 << 20) + 4096
KILLED = 0.1
"""Of the saves by a process: in which it is killed."""

WARM_UP = 0.2
"""Of the saves: what comes before is not compared, as caches and pools are being filled."""

CONNECTIONS = 40
"""Most connections that may be open. The client of a store keeps as many as it has needed at once, up to 32: more on a
busy machine, where pruning lags behind and then deletes many checkpoints at once."""

GROWTH_BYTES = 16 << 20
"""How much more memory the last saves may take than the first after the warm-up."""


@dataclass(frozen=True)
class Sample:
    """What the process holds at one moment. The proxy lies in it, too: its threads and sockets are counted apart."""

    step: int
    resident: int
    descriptors: int
    threads: int
    connections: int
    processes: int = 0
    helper_resident: int = 0
    helper_descriptors: int = 0


@dataclass
class Soak:
    """The counts of a run."""

    saved: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    restored: int = 0
    failed_restores: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    unknown: int = 0
    killed: int = 0
    samples: list[Sample] = field(default_factory=list)
    expected: set[int] = field(default_factory=set)


def state(step: int) -> dict[str, Any]:
    return {
        "model": {"large": torch.full((LARGE,), step % 251, dtype=torch.uint8)},
        "optim": {"moment": torch.full((1000,), float(step))},
        "step": step,
    }


def sample(step: int) -> Sample:
    gc.collect()
    helpers = upload_processes()
    names = [thread.name for thread in threading.enumerate()]
    connections = names.count("fault-proxy-connection")
    return Sample(
        step,
        resident("self"),
        descriptors_but_connections(),
        len(names) - connections,
        connections,
        len(helpers),
        sum(resident(each) for each in helpers),
        sum(len(os.listdir(f"/proc/{each}/fd")) for each in helpers),
    )


def descriptors_but_connections() -> int:
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    connections = {f"socket:[{line.split()[9]}]" for line in lines}
    found = 0
    for each in os.listdir("/proc/self/fd"):
        # It may have been closed meanwhile.
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{each}") not in connections
    return found


def resident(process: int | str) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def upload_processes() -> list[int]:
    """Process ids of the children that upload."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread or a child may end meanwhile.
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                if b"transfer.helper.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.add(int(child))
    return sorted(found)


def run(options: argparse.Namespace, server: servers.S3Server, proxy: FaultProxy) -> Soak:
    bucket = server.make_bucket("soak")
    root, through = f"s3://{bucket}/run", server.at(proxy.url).options
    found, chance = Soak(), random.Random(options.seed)
    restores = set(chance.sample(range(2, options.saves + 1), min(options.restores, options.saves - 1)))
    policy = from_yaml(POLICY, environ={})
    transfer = replace(OPTIONS, background=options.background)
    manager = CheckpointManager(root, policy=policy, storage_options=through, transfer=transfer)
    proxy.play(mixed(options.faults, seed=options.seed))
    for step in range(1, options.saves + 1):
        save(manager, step, found, kill=options.background == "process" and chance.random() < KILLED)
        if step in restores:
            restore(manager, found)
        found.samples.append(sample(step))
        if step % max(options.saves // 10, 1) == 0:
            look(root, server, found)
            tell(found, proxy)
            forget(found, proxy)
    manager.close()
    proxy.play(Script())
    look(root, server, found)
    forget(found, proxy)
    uploads = open_uploads(server, bucket, found)
    print(f"open uploads at the end: {len(uploads)}, of which {found.unknown} were begun in answers that were lost")
    if len(uploads) > found.unknown:
        found.losses.append(f"uploads stay open: {uploads}")
    return found


def save(manager: CheckpointManager, step: int, found: Soak, *, kill: bool) -> None:
    try:
        handle = manager.save(step, state(step))
        assert handle is not None
        for process in upload_processes() if kill else ():
            os.kill(process, signal.SIGKILL)
            found.killed += 1
        handle.result()
    except BucketpointError as error:
        found.failed[type(error).__name__] += 1
        print(f"step {step:4}: {error}", flush=True)
        # The manager tells of a save that failed once more, at the next one.
        manager.wait()
    except CheckpointException as failure:
        first = next(iter(failure.failures.values()))[0]
        found.failed[type(first).__name__] += 1
        print(f"step {step:4}: {first}", flush=True)
    else:
        found.saved += 1
        found.expected.add(step)


def restore(manager: CheckpointManager, found: Soak) -> None:
    target = state(0)
    try:
        restored = manager.restore(target)
    except BucketpointError as error:
        found.failed_restores[type(error).__name__] += 1
        return
    newest = max(found.expected, default=None)
    if restored is None or restored.passed or (newest is not None and restored.step < newest):
        found.losses.append(f"restored {restored} where step {newest} was committed")
        return
    values = {int(one) for one in target["optim"]["moment"].unique().tolist()} | {target["step"]}
    bytes_ = set(target["model"]["large"].unique().tolist())
    if values != {restored.step} or bytes_ != {restored.step % 251}:
        found.losses.append(f"step {restored.step} holds {values} and {bytes_}")
    found.restored += 1


def look(root: str, server: servers.S3Server, found: Soak) -> None:
    """What the policy keeps is there, and whole. Past the proxy."""
    catalog = open_catalog(Location.of(root, server.options))
    there = {one.step for one in catalog.steps().checkpoints}
    kept = {*sorted(found.expected)[-3:], *(step for step in found.expected if step % 50 == 0)}
    for step in sorted(kept - there):
        found.losses.append(f"step {step} is to be kept and is not there")
    for step in sorted(kept & there):
        damage = verify(open_checkpoint(Location.of(catalog.url_of(step), server.options))).damage
        if damage:
            found.losses.append(f"step {step} is damaged: {damage[0].message}")


def forget(found: Soak, proxy: FaultProxy) -> None:
    """What has passed is kept in this process, and would grow; of it only the keys of uploads are asked for again."""
    begun = [one for one in proxy.exchanges if one.request.kind == "CreateMultipartUpload"]
    found.begun |= {one.request.key for one in begun}
    # The store began these, and the answer with their id was lost: on MinIO only a lifecycle rule ends them.
    found.unknown += sum(one.status == 200 and one.fault is not None and one.fault != "delay" for one in begun)
    proxy.clear()


def open_uploads(server: servers.S3Server, bucket: str, found: Soak) -> list[str]:
    """Keys of uploads neither completed nor aborted. MinIO lists them for an exact key only."""
    store = open_catalog(Location.of(f"s3://{bucket}", server.options)).store
    return [key for key in sorted(found.begun) if any(store.list_multipart(key))]


def tell(found: Soak, proxy: FaultProxy) -> None:
    last = found.samples[-1]
    faults = proxy.board.total.faults.total()
    print(
        f"step {last.step:4}: {found.saved} saved, {found.failed.total()} failed, {found.restored} restored, "
        f"{faults} faults; {last.resident / 1e6:.0f} MB, {last.descriptors} descriptors, {last.threads} threads, "
        f"{last.connections} connections",
        flush=True,
    )


def growth(samples: Sequence[Sample]) -> list[str]:
    """What grew between the first samples after the warm-up and the last ones, by their medians."""
    settled = samples[int(len(samples) * WARM_UP) :]
    width = max(len(settled) // 5, 1)
    found = []
    limits = {
        "resident": GROWTH_BYTES,
        "descriptors": 4,
        "threads": 2,
        "processes": 0,
        "helper_resident": GROWTH_BYTES,
        "helper_descriptors": 4,
    }
    for name, most in limits.items():
        first, last = (
            sorted(getattr(one, name) for one in some)[len(some) // 2] for some in (settled[:width], settled[-width:])
        )
        print(f"{name}: {first:,} after the warm-up, {last:,} at the end")
        if last - first > most:
            found.append(f"{name} grew from {first:,} to {last:,}")
    most_open = max(one.connections for one in samples)
    print(f"connections: {most_open} at most")
    if most_open > CONNECTIONS:
        found.append(f"{most_open} connections were open")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--saves", type=int, default=300)
    parser.add_argument("--restores", type=int, default=60)
    parser.add_argument("--faults", type=float, default=0.02, help="probability that a request meets one")
    parser.add_argument("--background", choices=["thread", "process"], default="thread", help="who uploads")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    binary = get_minio.find()
    if binary is None:
        raise SystemExit("the soak needs a MinIO server: run `make minio`")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    # Each sample collects garbage, which takes a tenth of a second where it looks through all that torch is made of.
    gc.freeze()
    began, cpu = time.monotonic(), time.process_time()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with servers.minio(binary) as server, FaultProxy(server.endpoint) as proxy:
        found = run(options, server, proxy)
        counts = proxy.board.total
    dist.destroy_process_group()
    grown = growth(found.samples)
    print(f"{counts.faults.total()} faults in {counts.requests.total()} requests, seed {options.seed}:")
    for name, count in counts.faults.most_common():
        print(f"  {count:5}  {name}")
    print(f"{found.saved} of {options.saves} saves committed; the others raised {dict(found.failed)}")
    if options.background == "process":
        print(f"{found.killed} processes that uploaded were killed")
    print(f"{found.restored} restores right; {dict(found.failed_restores)} raised")
    print(f"{time.monotonic() - began:.0f} s, of which {time.process_time() - cpu:.0f} s of processor time")
    for wrong in [*found.losses, *grown]:
        print(f"WRONG: {wrong}")
    print("nothing was lost, and nothing grew" if not found.losses and not grown else "FAILED")
    return 1 if found.losses or grown else 0


if __name__ == "__main__":
    sys.exit(main())
