"""A trainer, cron and somebody's laptop prune one run at once, and some are killed: the end is that of one pruner.

The last two are processes of their own, `bucketpoint prune`. 200 checkpoints are `slow`, 24 are not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.catalog.deletion.prune import prune_by
from bucketpoint.catalog.deletion.worker import PruneWorker
from bucketpoint.catalog.notes import pin
from bucketpoint.catalog.policy_file import read_policy
from bucketpoint.format.catalog_keys import StepTemplate
from bucketpoint.location import Location
from catalog.memory import save
from kit.programs import run_program
from services import Service

LIMIT_S = 500
"""Far above what anything here takes: only a hang reaches it."""

PINNED, NEWER = 7, 5


@pytest.fixture
def catalog(service: Service) -> Catalog:
    return open_catalog(Location.of(service.url("run"), service.options))


def written(folder: Path, catalog: Catalog, thin: str) -> Path:
    file = folder / "policy.yaml"
    file.write_text(
        f"version: 1\nroot: {catalog.url}\n"
        "keep:\n  latest: 3\n  best: [{metric: loss, mode: min, count: 2}]\n"
        f"  every: [{{steps: 20}}, {{steps: 30{thin}}}]\n"
        "prune: {grace: 0s, max_delete: {count: 1000, fraction: 1.0}}\n"
    )
    return file


def fill(catalog: Catalog, steps: range) -> None:
    """Light checkpoints, by the catalog's own code. The same steps have the same tokens and metrics anywhere."""

    def one(step: int) -> None:
        save(catalog, step, token=f"{step:012x}", metrics={"loss": float(abs(step - 13))})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, steps))


def foreign(catalog: Catalog) -> dict[str, Any]:
    """What lies beside the run and looks like it, as a listing has it."""
    others = ("backup-of-step-5", "step-5x", "step-005", "step-5.txt", "Step-5", "archive/step-5", "other-5")
    prefixes = [f"run/{name}" for name in others] + ["step-5", "run2/step-5"]
    found = [info for info in catalog.store.list("") if info.key.startswith(tuple(prefixes)) or "other-N" in info.key]
    return {info.key: (info.etag, info.size, info.modified) for info in found}


def surround(catalog: Catalog) -> dict[str, Any]:
    beside = replace(catalog, template=StepTemplate("other-{step}"))
    save(beside, 5)
    for key in ("run/backup-of-step-5/x", "run/step-5x/x", "run/step-005/.metadata", "run/step-5.txt", "run/Step-5/x"):
        catalog.store.put(key, [memoryview(b"x")])
    for key in ("run/archive/step-5/.metadata", "step-5/.metadata", "run2/step-5/.metadata"):
        catalog.store.put(key, [memoryview(b"x")])
    return foreign(catalog)


def state(catalog: Catalog) -> tuple[set[str], list[Any]]:
    """All objects of the run's checkpoints, and its rows. Nothing that tells a time."""
    folders = tuple(f"step-{step}/" for step in range(1000))
    objects = {info.key.removeprefix(catalog.key("")) for info in catalog.store.list(catalog.key("step-"))}
    rows = [(row.step, row.id, row.kind, row.groups, row.metrics, row.pinned) for row in catalog.snapshot().rows()]
    return {key for key in objects if key.startswith(folders)}, rows


@contextlib.contextmanager
def program(service: Service, policy: Path) -> Iterator[subprocess.Popen[str]]:
    """`bucketpoint prune`, from cron or by hand. Killed if it is still there at the end."""
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("bucketpoint")), "prune", str(policy)],
        env=os.environ | service.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ended(process: subprocess.Popen[str]) -> str:
    """What it said. It did its work, or found another at it."""
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 or "another pruner " in said, said
    return said


VICTIM = """
import os, signal, sys
from bucketpoint.cli.app import run
from bucketpoint.stores import open_store
name, left, policy, url = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
kind = type(open_store(url)[0])
original = getattr(kind, name)
def counted(self, *arguments, **more):
    global left
    found = original(self, *arguments, **more)
    left -= bool(arguments[0])  # a delete of no keys is none
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
setattr(kind, name, counted)
sys.exit(run(["prune", policy]))
"""


def killed(service: Service, policy: Path, request: str, at: int) -> None:
    """`bucketpoint prune`, which SIGKILL ends once its request number `at` of a kind has been answered."""
    run_program(VICTIM, request, str(at), str(policy), service.url("run"), status=-signal.SIGKILL, env=service.env)


def expire(catalog: Catalog) -> None:
    """As if a quarter of an hour had passed for the lock."""
    if catalog.store.delete([catalog.own_key("pruner.json")]):
        raise AssertionError("the lock cannot be deleted")


@pytest.mark.parametrize(
    ("number", "thin", "kills"),
    [
        # The first deletion of a process asks whether it has the right to delete data.
        pytest.param(24, "", [("put", 9), ("delete", 3)], id="24"),
        pytest.param(
            200, ", thin: weights", [("put", 90), ("delete", 2), ("delete", 3)], marks=pytest.mark.slow, id="200"
        ),
    ],
)
def test_ends_with_three_pruners_of_which_some_are_killed_where_one_does(
    service: Service, catalog: Catalog, tmp_path: Path, number: int, thin: str, kills: list[tuple[str, int]]
) -> None:
    policy_file = written(tmp_path, catalog, thin)
    policy = read_policy(policy_file)
    alone = open_catalog(Location.of(catalog.url + "-alone", service.options))
    for one in (catalog, alone):
        fill(one, range(1, number + 1))
        pin(one, PINNED)
    around = surround(catalog)
    full = len(state(catalog)[0])

    # Some are killed: while they make tombstones; when records have gone; when metadata has. The next one goes on.
    for request, at in kills:
        killed(service, policy_file, request, at)
        expire(catalog)
        assert next(catalog.candidates()).step == number
    assert len(state(catalog)[0]) < full

    # Three at once, none of which the lock holds back for long. The trainer saves meanwhile.
    worker = PruneWorker(catalog, policy)
    over = threading.Event()

    def expiring() -> None:
        while not over.wait(0.02):
            expire(catalog)

    thread = threading.Thread(target=expiring)
    with program(service, policy_file) as cron, program(service, policy_file) as laptop:
        thread.start()
        try:
            for step in range(number + 1, number + 1 + NEWER):
                fill(catalog, range(step, step + 1))
                worker.ask()
            said = ended(cron) + ended(laptop)
            assert worker.drain(LIMIT_S)
        finally:
            over.set()
            thread.join()
    assert worker.failure is None
    expire(catalog)

    # And the next one has at most what the last of them were turned away from.
    with program(service, policy_file) as cron:
        said += ended(cron)
    assert "fault" not in said

    fill(alone, range(number + 1, number + 1 + NEWER))
    assert prune_by(alone, policy, holder="one").done.failures == []
    assert state(catalog) == state(alone)
    steps = [row[0] for row in state(catalog)[1]]
    assert {PINNED, 12, 13, number + NEWER} <= set(steps)
    assert len(steps) < number / 2
    assert foreign(catalog) == around
    left = [info.key for info in catalog.store.list(catalog.own_key(""))]
    assert [key for key in left if "__tombstone__" in key or key.endswith("pruner.json")] == []
    assert sum("/steps/" in key for key in left) == len(steps)
