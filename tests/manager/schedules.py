"""Random lives of a job that saves through a manager: calls, triggers, slow uploads, kills. The same for a seed."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bucketpoint.errors import BucketpointError
from bucketpoint.manager import CheckpointManager, ranks
from bucketpoint.retention import InFlight, Save, SaveEvery, SaveEveryMinutes
from bucketpoint.staging import StagingOptions
from bucketpoint.stores.local import LocalStore
from kit.kills import Job
from manager.manager_scenarios import policy

WORLD = 2
LIMIT_S = 60.0
LOST_S = 30.0
"""After so long a rank that waits for one that was killed gives up. A launcher would end it at once; here is none."""
DELAYS_S = (0.0, 0.0, 0.02, 0.1, 0.3)
CALLS = ("steps", "report", "pin", "unpin", "prune", "wait", "wait a little", "restore", "nothing", "nothing")


@dataclass(frozen=True)
class Life:
    """What one job does, from its restart to its end.

    Attributes:
        seed: of every choice that all ranks make alike.
        killed: by rank, after how many seconds it gets SIGKILL.
        last: saves at least once more, waits for it and closes.
    """

    seed: str
    killed: dict[int, float]
    last: bool


def lives(seed: int) -> list[Life]:
    """One or two lives of which most are killed, and one that is not."""
    rng = random.Random(seed)
    found = []
    for number in range(rng.choice((1, 1, 1, 2))):
        victims = rng.choice(((), (0,), (1,), (0, 1)))
        found.append(Life(f"{seed}/{number}", {rank: rng.uniform(0.0, 0.6) for rank in victims}, last=False))
    return [*found, Life(f"{seed}/last", {}, last=True)]


def run(seed: int, folder: Path) -> dict[str, int]:
    """One schedule; counts of what came about. Raises if a job hangs, fails, or does not go on where it should."""
    counts = dict.fromkeys(("lives", "ranks killed", "acknowledged", "restored"), 0)
    begun = time.monotonic()
    for life in lives(seed):
        acknowledged = _acknowledged(folder)
        with Job(WORLD, group_timeout_s=LOST_S) as job:
            job.ready()
            outcomes = job.run(live, str(folder), life, timeout_s=LIMIT_S)
        counts["lives"] += 1
        counts["ranks killed"] += sum(outcome.died for outcome in outcomes)
        restored = _restored(folder, life)
        assert len(set(restored)) <= 1, f"ranks restored {restored}"
        assert all(step >= max(acknowledged, default=0) for step in restored), f"{restored} after {acknowledged}"
        counts["restored"] += bool(restored and restored[0])
        if not life.killed:
            for outcome in outcomes:
                assert not outcome.died
                assert outcome.error is None, outcome.text
                assert not outcome.text, outcome.text
        if life.last:
            assert len(restored) == WORLD
            assert max(_acknowledged(folder)) > restored[0], "the last life saved nothing"
    counts["acknowledged"] = len(_acknowledged(folder))
    counts["seconds"] = int(time.monotonic() - begun)
    return counts


def _acknowledged(folder: Path) -> list[int]:
    return sorted({int(path.name) for path in folder.glob("acknowledged/*")})


def _restored(folder: Path, life: Life) -> list[int]:
    name = life.seed.replace("/", "-")
    return [int(path.read_text()) for path in sorted(folder.glob(f"restored-{name}-*")) if path.read_text()]


# -- on each rank -----------------------------------------------------------------------------------------------------


def state(value: float, rank: int) -> dict[str, Any]:
    """What all ranks have and what a rank has for itself. No DTensor, whose first use imports for seconds."""
    model = {name: torch.full((64,), float(value)) for name in ("w", f"own-{rank}")}
    return {"model": model, "step": int(value)}


def value_of(given: dict[str, Any]) -> int:
    values = {given["step"], *(number for tensor in given["model"].values() for number in tensor.tolist())}
    assert len(values) == 1, values
    return int(values.pop())


def live(rank: int, world: int, folder: str, life: Life) -> None:
    """Restore, train with saves and calls and signals at random, and close."""
    rng, own = random.Random(life.seed), random.Random(f"{life.seed}/{rank}")
    Path(folder, "acknowledged").mkdir(exist_ok=True)
    save = Save(
        every=(SaveEvery(rng.randrange(1, 6)), SaveEveryMinutes(1)),
        on=("first_step", "last_step", "sigterm", "sigusr1"),
        in_flight=InFlight(when_busy=rng.choice(("wait", "skip", "error")), timeout=timedelta(seconds=LOST_S / 2)),
    )
    staging = StagingOptions(
        use_async_staging=rng.random() < 0.3, when_busy=rng.choice(("wait", "wait", "double_buffer"))
    )
    put = LocalStore.put

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(own.choice(DELAYS_S))
        return put(*args, **kwargs)

    with (
        mock.patch.object(LocalStore, "put", slow),
        mock.patch.object(ranks, "COLLECTIVE_TIMEOUT", timedelta(seconds=LOST_S)),
        CheckpointManager(f"{folder}/run", policy=policy(rng.choice((2, 5)), save=save), staging=staging) as manager,
    ):
        target = state(0, rank)
        found = manager.restore(target)
        step = 0 if found is None else found.step
        assert value_of(target) == step
        Path(folder, f"restored-{life.seed.replace('/', '-')}-{rank}").write_text(str(step))
        if rank in life.killed:
            threading.Timer(life.killed[rank], os.kill, (os.getpid(), signal.SIGKILL)).start()
        _train(rank, world, folder, rng, manager, step)
        if life.last:
            manager.wait()
            step = max(manager.steps(), default=0) + 1
            _save(manager, step, rank, folder)
            manager.wait()


def _train(rank: int, world: int, folder: str, rng: random.Random, manager: CheckpointManager, step: int) -> None:
    for _ in range(rng.randrange(4, 12)):
        step += 1
        gradient = torch.ones(rng.randrange(1, 70_000))
        dist.all_reduce(gradient)
        assert gradient[0].item() == gradient[-1].item() == world
        told, who = rng.random(), rng.randrange(world)
        if told < 0.15 and rank == who:
            os.kill(os.getpid(), signal.SIGTERM if told < 0.03 else signal.SIGUSR1)
        wanted = rng.random() < 0.2
        if manager.should_save(step, last=rng.random() < 0.05) or wanted:
            _save(manager, step, rank, folder)
        _call(rng.choice(CALLS), rng, manager, rank)
        if manager.stop_asked:
            break


def _save(manager: CheckpointManager, step: int, rank: int, folder: str) -> None:
    try:
        handle = manager.save(step, state(step, rank))
    except BucketpointError as error:
        if "is still running" not in str(error):
            raise
        return
    if handle is not None:
        handle.add_done_callback(functools.partial(_acknowledge, Path(folder, "acknowledged", str(step))))


def _acknowledge(note: Path, handle: Any) -> None:
    if handle.failure() is None:
        note.touch()


def _call(name: str, rng: random.Random, manager: CheckpointManager, rank: int) -> None:
    if name in ("report", "pin", "unpin", "restore"):
        there = manager.steps()
        step = rng.random()
        if not there:
            return
        one = there[int(step * len(there))]
        # What is chosen may be pruned meanwhile.
        with suppress(BucketpointError):
            if name == "restore":
                manager.restore(state(0, rank), one)
            elif name == "report":
                manager.report(one, {"eval/loss": step})
            else:
                getattr(manager, name)(one)
    elif name == "wait a little":
        manager.wait(0.01)
    elif name in ("steps", "prune", "wait"):
        getattr(manager, name)()
