"""Programs that end while a save is under way: what each does, and a server that forks them.

A forked program ends as any other, by Python's own finalization, and needs no seconds for its imports.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import bucketpoint
from background import choose_uploads
from bucketpoint import BucketWriter, CheckpointManager, RetentionPolicy, StagingOptions, StoreError
from bucketpoint.retention.policy import Keep, Save
from bucketpoint.stores.local import LocalStore
from faults.checkpoint_process import fork_beforehand
from kit.programs import TESTS

HANGS_S = 60
"""Longer than any of these programs takes on a busy machine; their stacks are in the output then."""

HUNG = "Timeout ("
"""How faulthandler begins."""


def state(value: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((1000,), float(value))}, "step": value}


# -- on the side of the tests -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """The end of one program: its exit status as `subprocess` has it, and what it wrote."""

    status: int
    output: str


_WITH_CTRL_C = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""What a shell starts in the background ignores Ctrl-C, and so does all that it starts."""


class Programs:
    """Starts programs, one after another or some ranks at once."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _WITH_CTRL_C, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
            text=True,
        )

    def run(self, output: Path, *arguments: str, ranks: int = 1) -> list[Ended]:
        assert self._server.stdout is not None
        outputs = [f"{output}-{rank}" for rank in range(ranks)]
        self._server.stdin.write(json.dumps([arguments, outputs]) + "\n")
        self._server.stdin.flush()
        statuses = json.loads(self._server.stdout.readline())
        return [Ended(status, Path(name).read_text()) for status, name in zip(statuses, outputs, strict=True)]

    def close(self) -> None:
        self._server.communicate(timeout=HANGS_S)


# -- the server -------------------------------------------------------------------------------------------------------


def serve() -> list[str] | None:
    """Fork until there is nothing more to do. In a program: its arguments."""
    choose_uploads()
    for line in sys.stdin:
        arguments, outputs = json.loads(line)
        children = []
        for rank, output in enumerate(outputs):
            child = os.fork()
            if not child:
                _become(output)
                return [*arguments, f"--rank={rank}", f"--ranks={len(outputs)}"]
            children.append(child)
        sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]) + "\n")
        sys.stdout.flush()
    return None


def _become(output: str) -> None:
    # A group of its own: a Ctrl-C at a terminal reaches the checkpoint process too.
    os.setpgid(0, 0)
    nothing, written = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for old, new in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(old, new)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.dump_traceback_later(HANGS_S, exit=True)


_kept: list[CheckpointManager] = []
"""As a script keeps its own, to its end."""


# -- the programs -----------------------------------------------------------------------------------------------------


def ending() -> bool:
    """Whether the main program is through, and the interpreter waits for threads."""
    return bool(threading._SHUTTING_DOWN)  # type: ignore[attr-defined]


def program(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--saver", choices=["dcp", "async_save", "manager"], required=True)
    parser.add_argument("--end", required=True)
    parser.add_argument("--process", action="store_true")
    parser.add_argument("--async-staging", action="store_true")
    parser.add_argument("--store-fails", action="store_true")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args(arguments)
    if args.process:
        fork_beforehand()
    if args.ranks > 1 or args.process:
        store = dist.FileStore(args.url.removeprefix("file://") + "-ranks", args.ranks)
        dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.ranks)
    _slow_store(args.store_fails, hold_s=0.3 if args.process or args.end in ("close", "sigterm-noted", "told") else 20)
    kind = AsyncCheckpointerType.PROCESS if args.process else AsyncCheckpointerType.THREAD
    staging = StagingOptions(use_async_staging=args.async_staging)
    end = args.end
    if args.saver == "manager":
        policy = RetentionPolicy(Keep(5), save=Save(on=("sigterm",) if end == "sigterm-noted" else ()))
        manager = CheckpointManager(args.url, policy=policy, staging=staging)
        _kept.append(manager)
        if end == "sigterm-noted":
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.should_save(2)
        save = manager.save(2, state(2))
        if end in ("close", "sigterm-noted"):
            manager.close()
    else:
        function = dcp.async_save if args.saver == "dcp" else bucketpoint.async_save
        writer = BucketWriter(staging=staging)
        save = function(state(2), checkpoint_id=args.url, storage_writer=writer, async_checkpointer_type=kind)
    if end == "told":
        with contextlib.suppress(Exception):
            save.result()
    _end(end)


def _slow_store(fails: bool, *, hold_s: float) -> None:
    """Uploads begin when the program has ended, and not before."""
    put = LocalStore.put

    def later(*args: Any, **kwargs: Any) -> Any:
        until = time.monotonic() + hold_s
        while not ending() and time.monotonic() < until:
            time.sleep(0.01)
        if fails:
            raise StoreError("there is no room left")
        return put(*args, **kwargs)

    LocalStore.put = later  # type: ignore[method-assign]


def _end(how: str) -> None:
    if how == "exit-3":
        sys.exit(3)
    if how == "raises":
        raise ValueError("the training failed")
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(HANGS_S)
    if how == "ctrl-c":
        os.killpg(os.getpgrp(), signal.SIGINT)
        time.sleep(HANGS_S)
    if how == "ctrl-c-at-the-end":
        threading.Thread(target=_interrupt_at_the_end, daemon=True).start()


def _interrupt_at_the_end() -> None:
    while not ending():
        time.sleep(0.01)
    os.killpg(os.getpgrp(), signal.SIGINT)


if __name__ == "__main__":
    given = serve()
    if given is not None:
        program(given)
