"""Runs of torchtitan's trainer: a process for each rank, forked from one that has imported it, as that takes long."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TypeVar

from kit.servers import free_port

T = TypeVar("T")

TIMEOUT_S = 400

_LOSS = re.compile(r"step:\s*(\d+)\s+\S*?loss:\s*([0-9.]+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

OURS = "bucketpoint.integrations.torchtitan.use"


@dataclass(frozen=True)
class Ran:
    """What became of a run.

    Attributes:
        exits: of each rank; negative for the signal that ended it.
        logs: of each rank, without colours.
    """

    exits: list[int | None]
    logs: list[str]

    @property
    def losses(self) -> dict[int, float]:
        """By step, as rank 0 saw them."""
        return {int(step): float(loss) for step, loss in _LOSS.findall(self.logs[0])}

    def succeeded(self) -> Ran:
        assert self.exits == [0] * len(self.exits), "\n".join(log[-6000:] for log in self.logs)
        return self


def called(function: Callable[..., T], *args: object) -> T:
    """What a function returns in a process where torchtitan is imported."""
    with _context().Pool(1) as pool:
        return pool.apply(function, args)


def train(
    assets: Path,
    dump: Path,
    *flags: str,
    world: int = 1,
    config: str = "on_cpu",
    env: Mapping[str, str] | None = None,
    shard_bytes: int | None = None,
    dies_before_commit: bool = False,
    sigterm_at: int = 0,
) -> Ran:
    """Run `torchtitan.train` on so many ranks, and wait for its end.

    Args:
        flags: of its command line, besides the model and its data.
        config: a function of `titan.debug_model`.
        shard_bytes: bytes of tensors in one file of an export.
        dies_before_commit: rank 0 is killed once the data of its first save is uploaded, before the checkpoint exists.
        sigterm_at: the step at which SIGTERM reaches the last rank.
    """
    context = _context()
    dump.mkdir(parents=True, exist_ok=True)
    command = ["--module", "titan.debug_model", "--config", config]
    command += ["--hf_assets_path", str(assets / "tokenizer"), "--dataloader.dataset_path", str(assets / "text")]
    command += ["--dump_folder", str(dump), "--checkpoint.enable", *flags]
    shared = {**(env or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    logs = [dump / f"rank-{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        changes: list[tuple[Callable[..., None], object]] = [(_export_in_files_of, shard_bytes)]
        changes += [(_die_before_commit, dies_before_commit and rank == 0)]
        changes += [(_send_sigterm, sigterm_at if rank == world - 1 else 0)]
        arguments = (own, command, log, [change for change in changes if change[1]])
        ranks.append(context.Process(target=_rank, args=arguments))
    for one in ranks:
        one.start()
    try:
        for one in ranks:
            one.join(TIMEOUT_S)
    finally:
        for one in ranks:
            if one.is_alive():
                one.kill()
                one.join()
    return Ran([one.exitcode for one in ranks], [_COLOUR.sub("", log.read_text(errors="replace")) for log in logs])


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["titan.cpu"])
    return context


def _rank(
    env: Mapping[str, str], command: Sequence[str], log: Path, changes: Sequence[tuple[Callable[..., None], object]]
) -> None:
    os.environ.update(env)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["train", *command]
    # Imported already, by the server that this process was forked from.
    from titan.cpu import main

    for change, argument in changes:
        change(argument)
    main()


def _export_in_files_of(nbytes: int) -> None:
    from bucketpoint.integrations import torchtitan

    torchtitan.export_safetensors = functools.partial(torchtitan.export_safetensors, shard_bytes=nbytes)  # type: ignore[assignment]


def _die_before_commit(_: object) -> None:
    from bucketpoint.dcp.writer import BucketWriter

    BucketWriter.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]


def _send_sigterm(at: int) -> None:
    from titan.cpu import BucketpointManager

    asked = BucketpointManager._should_save

    def told(self: BucketpointManager, curr_step: int, last_step: bool = False) -> bool:
        if curr_step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return asked(self, curr_step, last_step)

    BucketpointManager._should_save = told  # type: ignore[method-assign]
