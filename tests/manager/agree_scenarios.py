"""What ranks do when one of them fails, is late, or never comes. Each function runs on every rank at once."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

import bucketpoint
from bucketpoint import BucketWriter, LoadPlanner, StagingOptions
from bucketpoint.dcp import meeting
from bucketpoint.errors import BucketpointError, RanksDisagreeError
from bucketpoint.manager import CheckpointManager, ranks
from bucketpoint.manager import manager as managing
from bucketpoint.manager.ranks import Ranks
from bucketpoint.retention import InFlight, Save, SaveEvery
from bucketpoint.staging import stager
from bucketpoint.stores.local import LocalStore
from manager.manager_scenarios import policy, state

TIMEOUT_S = 1.5
"""Of the policies here: no wait that ends in success is as long, and those that end in an error are."""


def impatient(**save: Any) -> Any:
    in_flight = InFlight(timeout=timedelta(seconds=TIMEOUT_S))
    return policy(save=Save(every=(SaveEvery(1),), in_flight=in_flight, **save))


class Stateful:
    """An object that may have no state, or one that cannot be copied."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.value, BaseException):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        raise NotImplementedError


def committed(root: str) -> list[str]:
    return sorted(path.parent.name for path in Path(root).glob("*/.metadata"))


def said(call: Callable[[], Any]) -> str:
    """Return how a call ended, as text."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (what the test looks at)
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return "done"


@contextlib.contextmanager
def failing_copy(fails: bool) -> Iterator[None]:
    copies = mock.patch.object(stager, "run_copies", side_effect=MemoryError("no room"))
    with copies if fails else contextlib.nullcontext():
        yield


def save_where_one_rank_fails(rank: int, world: int, root: str, bad: int, beside: bool) -> Any:
    """At step 2 a rank has no state, at step 3 it cannot be copied, at step 4 it has a value that cannot be."""
    staging = StagingOptions(use_async_staging=beside)
    with CheckpointManager(root, policy=policy(), staging=staging) as manager:
        outcomes = []
        for step in range(1, 6):
            fails = rank == bad
            own: Any = RuntimeError("no state") if step == 2 and fails else torch.ones(4)
            if step == 4 and fails:
                own = threading.Lock()
            with failing_copy(step == 3 and fails):

                def save(step: int = step, own: Any = own) -> None:
                    handle = manager.save(step, {**state(step, world), "own": Stateful(own)})
                    assert handle is not None
                    handle.result()

                outcomes.append(said(save))
    return outcomes, committed(root)


def async_save_where_one_rank_fails(rank: int, world: int, root: str, beside: bool) -> Any:
    """The last rank cannot copy its state: the others learn of it from their handles, and the next save works."""
    writer = BucketWriter(staging=StagingOptions(use_async_staging=beside))

    def save(step: int) -> None:
        handle = bucketpoint.async_save(state(step, world), checkpoint_id=f"{root}/step-{step}", storage_writer=writer)
        handle.result()

    with failing_copy(rank == world - 1):
        first = said(lambda: save(1))
    save(2)
    writer.close()
    return first, committed(root)


def construct_without_a_policy(rank: int, world: int, root: str, bad: int) -> Any:
    file = Path(root).parent / f"policy-{rank}.yaml"
    file.write_text(f"version: 1\nroot: {root}\nkeep: {{latest: 1}}\n")
    if rank == bad:
        file = file.with_name("not-there.yaml")
    outcomes = said(lambda: CheckpointManager(policy=file))
    # The ranks are together still.
    with CheckpointManager(root, policy=policy()) as manager:
        return outcomes, manager.steps()


class Logged(logging.Handler):
    """The lines that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    handler, logger = Logged(), logging.getLogger("bucketpoint")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def save_on_one_rank(rank: int, world: int, root: str) -> Any:
    """Only rank 0 saves. The last rank then makes a call that rank 0 does not make at that time."""
    patience = (mock.patch.object(module, "PATIENCE_S", 0.3) for module in (meeting, ranks))
    noted = mock.patch.object(ranks, "_NOTES_AFTER_S", 0.1)
    with contextlib.ExitStack() as stack, logged() as lines:
        for patch in (*patience, noted):
            stack.enter_context(patch)
        manager = CheckpointManager(root, policy=impatient())
        if rank == 0:
            outcome = said(lambda: manager.save(1, state(1)))
        else:
            time.sleep(2 * TIMEOUT_S)
            outcome = said(manager.steps)
        # All ranks have had an error, and are together again.
        manager.save(2, state(2, world))
        manager.close()
    return outcome, [line for line in lines if "has waited" in line], committed(root)


def make_different_calls(rank: int, world: int, root: str) -> Any:
    with CheckpointManager(root, policy=impatient(on=("sigusr1",))) as manager:
        call = (lambda: manager.save(1, state(1))) if rank == 0 else (lambda: manager.should_save(1))
        outcome = said(call)
        manager.save(2, state(2, world))
    return outcome, committed(root)


class Interrupted(LoadPlanner):
    def create_local_plan(self) -> Any:
        raise KeyboardInterrupt


class InterruptedState(Stateful):
    def load_state_dict(self, given: dict[str, Any]) -> None:
        if self.value:
            raise SystemExit


def interrupt_a_load(rank: int, world: int, root: str, where: str) -> Any:
    """The last rank is interrupted where DCP tells the others, or where it does not."""
    with CheckpointManager(root, policy=policy()) as manager:
        manager.save(1, {"own": Stateful(7)})
        manager.wait()
        bad = rank == world - 1
        planner = Interrupted() if bad and where == "plan" else None
        try:
            manager.restore({"own": InterruptedState(bad and where == "state")}, 1, planner=planner)
        except (KeyboardInterrupt, SystemExit) as error:
            outcome = type(error).__name__
        except BucketpointError as error:
            outcome = str(error)
        manager.save(2, state(2, world))
    return outcome, committed(root)


def lose_a_rank_as_a_save_begins(rank: int, world: int, root: str, how: str) -> Any:
    """The last rank is interrupted as it begins a save, or copies its state for longer than the others wait."""

    def copies_slowly(*args: Any, **options: Any) -> Any:
        time.sleep(1.4 * TIMEOUT_S)
        return run_copies(*args, **options)

    def begins(*args: Any, **options: Any) -> Any:
        begin_together(*args, **options)
        raise KeyboardInterrupt

    run_copies, begin_together, interrupt = stager.run_copies, managing.begin_together, KeyboardInterrupt()
    patch = {
        "state": mock.patch.object(Stateful, "state_dict", side_effect=interrupt),
        "copies": mock.patch.object(stager, "run_copies", side_effect=interrupt),
        "begins": mock.patch.object(dcp, "async_save", side_effect=interrupt),
        "has begun": mock.patch.object(managing, "begin_together", begins),
        "is late": mock.patch.object(stager, "run_copies", copies_slowly),
    }[how]
    own = {"own": Stateful(torch.ones(4))}
    with CheckpointManager(root, policy=impatient()) as manager:
        with patch if rank == world - 1 else contextlib.nullcontext():
            try:
                first = said(lambda: manager.save(1, own))
            except KeyboardInterrupt:
                first = "interrupted"
        outcomes = [said(lambda step=step: manager.save(step, own)) for step in (2, 3)]
    status = manager.status()
    return first, (outcomes, status.committed, status.failed), committed(root)


@contextlib.contextmanager
def full_disk(fails: bool) -> Iterator[None]:
    put = LocalStore.put

    def full(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if key.endswith(".distcp"):
            raise OSError("the disk is full")
        return put(self, key, *args, **kwargs)

    with mock.patch.object(LocalStore, "put", full) if fails else contextlib.nullcontext():
        yield


def receive_an_error(rank: int, world: int, root: str, how: str) -> Any:
    """Step 1 fails on all ranks; one of them looks at the error, and all save step 2."""
    with CheckpointManager(root, policy=policy()) as manager:
        with full_disk(rank == world - 1):
            handle = manager.save(1, state(1, world))
            assert handle is not None
            handle.wait()
        outcomes = []
        if rank == 0:
            looks: dict[str, Callable[[], Any]] = {
                "result": handle.result,
                "exception": handle.exception,
                "wait": manager.wait,
                "nobody": lambda: None,
            }
            outcomes.append(said(looks[how]))
        outcomes.append(said(lambda: manager.save(2, state(2, world))))
        outcomes.append(said(lambda: manager.save(3, state(3, world))))
    return [outcome.split(":")[0] for outcome in outcomes], committed(root)


def go_on_after_failures(rank: int, world: int, root: str) -> Any:
    """Steps 2 and 3 fail where the policy warns: 2 in the background, 3 as its state cannot be copied on a rank."""
    with logged() as lines, CheckpointManager(root, policy=policy(save=Save(on_failure="warn"))) as manager:
        made = []
        for step in (1, 2, 3, 4):
            with full_disk(step == 2 and rank == world - 1), failing_copy(step == 3 and rank == world - 1):
                handle = manager.save(step, state(step, world))
                made.append(handle is not None)
                manager.wait()
        status = manager.status()
    return made, (status.committed, status.failed), lines, committed(root)


def disagree_under_warn(rank: int, world: int, root: str) -> Any:
    with CheckpointManager(root, policy=policy(save=Save(on_failure="warn"))) as manager:
        handle = manager.save(1, {"w": torch.zeros(4 + rank)})
        assert handle is not None
        handle.wait()
        try:
            manager.save(2, state(2, world))
        except RanksDisagreeError:
            return "raised"


def fail_in_together(rank: int, world: int, root: str) -> Any:
    """Ranks 1 and 2 fail, each in its own way: all raise the error of rank 1."""
    group = Ranks("a test")

    def attempt() -> int:
        if rank == 1:
            raise BucketpointError("of rank 1")
        return rank

    outcomes = [said(lambda: group.together("a test", attempt)), group.together("a test", lambda: rank)]
    group.close()
    return outcomes
