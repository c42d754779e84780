"""Saves and loads of one amount of bytes by 1 to 8 processes, over TLS and plain HTTP: GB/s and CPU s a GB."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

COUNTS = {"tls": (1, 2, 4, 8), "http": (1, 8)}


def _process(rank: int, contenders: list[str], env: dict[str, str], nbytes: int, barrier: Any, answers: Any) -> None:
    os.environ.update(env)
    import torch

    from bench import state as states
    from bench.contenders import CONTENDERS, Setting
    from bench.resident import cpu_s

    torch.set_num_threads(1)
    state = states.equal_tensors(max(16, 1600 * nbytes // 10_000_000_000), nbytes)
    small = states.equal_tensors(4, 4 << 20)
    target = torch.utils._pytree.tree_map(torch.ones_like, state)
    for name in contenders:
        contender = CONTENDERS[name]
        contender.save(small, Setting(f"s3://device/cores/{name}-small-{rank}"))
        contender.load(small, Setting(f"s3://device/cores/{name}-small-{rank}"))
        for tensor in torch.utils._pytree.tree_leaves(target):
            tensor.fill_(-1)
        for op in ("save", "load"):
            barrier.wait()
            begun, cpu = time.perf_counter(), cpu_s(os.getpid())
            if op == "save":
                contender.save(state, Setting(f"s3://device/cores/{name}-{rank}"))
            else:
                contender.load(target, Setting(f"s3://device/cores/{name}-{rank}"))
            answers.put((name, op, time.perf_counter() - begun, cpu_s(os.getpid()) - cpu))
            barrier.wait()
        pairs = zip(*map(torch.utils._pytree.tree_leaves, (state, target)), strict=True)
        same = all(torch.equal(saved, loaded) for saved, loaded in pairs)
        answers.put((name, "same", float(same), 0.0))
        barrier.wait()
        barrier.wait()


def main() -> None:
    nbytes = int(sys.argv[1])
    servers = json.loads(os.environ["BENCH_SERVERS"])
    contenders = ["bucketpoint"]
    try:
        import s3torchconnector.dcp  # noqa: F401

        contenders.append("s3torchconnector")
    except ImportError:
        print("s3torchconnector is not installed", flush=True)
    spawn = multiprocessing.get_context("spawn")
    for scheme, counts in COUNTS.items():
        for count in counts:
            barrier, answers = spawn.Barrier(count + 1), spawn.Queue()
            arguments = (contenders, servers[scheme], nbytes // count, barrier, answers)
            processes = [spawn.Process(target=_process, args=(rank, *arguments)) for rank in range(count)]
            for process in processes:
                process.start()
            for name in contenders:
                for op in ("save", "load"):
                    barrier.wait()
                    begun = time.perf_counter()
                    found = [answers.get(timeout=100) for _ in processes]
                    took = time.perf_counter() - begun
                    barrier.wait()
                    cpu = sum(each[3] for each in found)
                    print(
                        f"{scheme} {count} processes, {name}, {op}: {nbytes / took / 1e9:.2f} GB/s, "
                        f"{took:.2f} s, CPU {cpu / nbytes * 1e9:.3f} s/GB",
                        flush=True,
                    )
                same = [answers.get(timeout=100) for _ in processes]
                barrier.wait()
                if not all(each[2] for each in same):
                    print(f"{scheme} {count} processes, {name}: THE LOAD DIFFERS", flush=True)
                for stored in Path(os.environ["BENCH_DATA"]).glob("*/device/*"):
                    shutil.rmtree(stored, ignore_errors=True)
                barrier.wait()
            for process in processes:
                process.join(30)


if __name__ == "__main__":
    main()
