"""What ranks do with a manager. Each function runs on every rank at once, and returns what the test compares."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bucketpoint.errors import BucketpointError, CheckpointNotFoundError
from bucketpoint.manager.manager import CheckpointManager
from bucketpoint.retention import Best, Keep, MaxDelete, Prune, RetentionPolicy, Save, SaveEvery, SaveEveryMinutes
from bucketpoint.stores.local import LocalStore


def policy(latest: int = 100, **more: Any) -> RetentionPolicy:
    keep = {name: more.pop(name) for name in ("best", "every", "steps") if name in more}
    prune = more.pop("prune", Prune(grace=timedelta(0), max_delete=MaxDelete(fraction=1.0)))
    return RetentionPolicy(Keep(latest, **keep), prune=prune, **more)


BEST = policy(best=(Best("eval/loss", "min"),))


def state(value: float, world: int = 1) -> dict[str, Any]:
    """A sharded tensor, a plain one, and a number."""
    whole = torch.full((64, 32), float(value))
    if world > 1:
        whole = distribute_tensor(whole, init_device_mesh("cpu", (world,)), [Shard(0)])
    return {"model": {"w": whole, "b": torch.full((8,), float(value))}, "step": int(value)}


def value_of(given: dict[str, Any]) -> float:
    tensor = given["model"]["w"]
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    values = {*local.flatten().tolist(), *given["model"]["b"].tolist(), float(given["step"])}
    assert len(values) == 1, values
    return values.pop()


def saved(manager: CheckpointManager, *steps: int, drain: bool = False, **arguments: Any) -> None:
    """Save steps, each of which is committed, and with `drain` pruned for, before the next one begins."""
    for step in steps:
        manager.save(step, state(step), **arguments)
        manager.wait()
        if drain:
            manager.pruning.drain()


def save_and_restore(rank: int, world: int, root: str) -> Any:
    listed = []
    with count_lists(listed), CheckpointManager(root, policy=policy(2)) as manager:
        for step in (10, 20, 30):
            manager.save(step, state(step, world))
        manager.wait()
    target = state(0, world)
    listed.clear()
    with CheckpointManager(root, policy=policy(2)) as manager:
        with count_lists(listed):
            restored = manager.restore(target)
        assert restored is not None
        return restored.step, value_of(target), manager.steps(), len(listed)


class count_lists:
    """Every listing that this process asks a local store for is noted."""

    def __init__(self, into: list[Any]) -> None:
        listing = LocalStore.list

        def noting(self: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
            into.append(prefix)
            return listing(self, prefix, *args, **kwargs)

        self._patch = mock.patch.object(LocalStore, "list", noting)

    def __enter__(self) -> None:
        self._patch.start()

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


def restore_past_damage(rank: int, world: int, root: str, which: Any) -> Any:
    target = state(0, world)
    with CheckpointManager(root, policy=BEST) as manager:
        try:
            restored = manager.restore(target, which)
        except BucketpointError as error:
            return type(error).__name__, str(error)
        assert restored is not None
        return restored.step, value_of(target), [step for step, _ in restored.passed]


def save_steps(rank: int, world: int, root: str, steps: list[int]) -> None:
    with CheckpointManager(root, policy=policy()) as manager:
        for step in steps:
            manager.save(step, state(step, world))


def minutes_are_the_coordinators(rank: int, world: int, root: str) -> Any:
    manager = CheckpointManager(root, policy=policy(save=Save(every=(SaveEveryMinutes(5),))))
    now = time.monotonic()
    # Every clock but the coordinator's says that it is time.
    ahead = {"late": 301 if rank else 0, "due": 301}
    answers = []
    for which in ("late", "due"):
        with mock.patch("bucketpoint.manager.triggers.time.monotonic", return_value=now + ahead[which]):
            answers.append(manager.should_save(1))
    manager.close()
    return answers


def go_on_over_damage(rank: int, world: int, root: str) -> Any:
    """The newest is damaged for one rank: all go back, and save its step again."""
    target = state(0, world)
    with CheckpointManager(root, policy=policy()) as manager:
        found = manager.restore(target)
        assert found is not None
        manager.save(30, {**state(31, world), "step": 31})
    with CheckpointManager(root, policy=policy()) as manager:
        again = manager.restore(target)
        assert again is not None
        return found.step, [step for step, _ in found.passed], again.step, value_of(target), again.passed


def wait_unequally(rank: int, world: int, root: str) -> Any:
    """One rank knows that a save has ended, and the other has not asked."""
    with CheckpointManager(root, policy=policy()) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step, world))
            if rank == step % 2:
                manager.wait()
        manager.wait()
        return manager.steps()


class Hooked:
    """Raises on one rank as its state is loaded."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.zeros(2)}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error


class WithoutMemory:
    """An object whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise MemoryError("no memory")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Agreeing:
    """An object whose `state_dict` is a collective call, as that of a sharded model may be."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.value = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, self.name)
        assert names == [self.name] * len(names), names
        return {"value": self.value}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        self.value = given["value"]


def restore_in_another_order(rank: int, world: int, root: str) -> Any:
    """The keys of the state come in another order on each rank, and each object's state is a collective call."""
    with CheckpointManager(root, policy=policy()) as manager:
        manager.save(1, {name: Agreeing(name) for name in ("a", "b")})
    with CheckpointManager(root, policy=policy()) as manager:
        restored = manager.restore({name: Agreeing(name) for name in ("ab", "ba")[rank]})
        return restored.step if restored is not None else None


def restore_without_memory(rank: int, world: int, root: str) -> Any:
    """The last rank cannot make the state to load into; the others must not wait for it in a collective."""
    given = state(1, world)
    with CheckpointManager(root, policy=policy()) as manager:
        manager.save(1, given)
    with CheckpointManager(root, policy=policy()) as manager:
        try:
            manager.restore({**given, "model": WithoutMemory()} if rank == world - 1 else given)
        except (BucketpointError, MemoryError) as error:
            return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return None


def restore_with_a_hook_that_raises(rank: int, world: int, root: str) -> Any:
    said = []
    with CheckpointManager(root, policy=policy()) as manager:
        manager.save(1, {"hooked": Hooked()})
        manager.wait()
        for error in (ValueError("a hook of the caller's"), CheckpointNotFoundError("no other checkpoint")):
            try:
                manager.restore({"hooked": Hooked(error if rank == 1 else None)})
            except (BucketpointError, ValueError) as raised:
                said.append(type(raised).__name__)
    return said


def policies_differ(rank: int, world: int, root: str) -> Any:
    """The last rank has an older copy of the policy's file."""
    every = SaveEvery(10 if rank < world - 1 else 20)
    try:
        CheckpointManager(root, policy=policy(save=Save(every=(every,))))
    except BucketpointError as error:
        return type(error).__name__, str(every.steps) in str(error)
    return None
