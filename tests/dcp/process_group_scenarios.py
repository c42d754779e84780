"""What ranks do to see on which process groups saves talk. Each function runs on every rank at once."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint import staging as torch_staging
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import bucketpoint
from bucketpoint import BucketpointError, BucketWriter, Stager, StagingOptions
from bucketpoint.dcp import meshes, process_groups
from dcp.saving.async_scenarios import SLOW_S, SlowFileSystem, Training, assert_holds, wait


def messages(group: Any = None) -> int:
    """Number of collectives that this rank has taken part in on a group."""
    pg: Any = group if group is not None else dist.group.WORLD
    return int(pg._get_backend(torch.device("cpu"))._get_sequence_number_for_group())


def kept() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def talk_until(done: Callable[[], bool], world: int, group: Any = None) -> int:
    """Training's collectives of some size, until the upload is done on all ranks. Return their number."""
    going, said = torch.ones(1), 0
    while going.item():
        gradient = torch.ones(65_696)
        dist.all_reduce(gradient, group=group)
        assert gradient.unique().tolist() == [world]
        going.fill_(not done())
        dist.all_reduce(going, group=group)
        said += 2
    return said


def training_talks_beside_saves(rank: int, world: int, root: str, how: str) -> tuple[int, list[int]]:
    """Training talks for as long as an upload takes on the group that the save is for, where the save says nothing.

    Returns the number of its collectives, and that of the groups after each save and at the end.
    """
    meshes.group_beside(None)
    group = dist.new_group() if how == "a group" else None
    writer, training, talked, groups = BucketWriter(fs=SlowFileSystem(SLOW_S)), Training(rank, world), 0, []
    torchs = torch_staging.StagingOptions(False, False, False, False)
    stager = torch_staging.DefaultStager(torchs) if how == "stock, staged by torch" else None
    for step in range(2):
        before, url = (messages(group), messages()), f"{root}/{step}"
        given: dict[str, Any] = {"checkpoint_id": url, "storage_writer": writer}
        if how.startswith("stock"):
            saving = dcp.async_save(training.run(step), **given, async_stager=stager)
        else:
            saving = bucketpoint.async_save(training.run(step), **given, process_group=group)
            training.spoil()
        said = talk_until(getattr(saving, "upload_completion", saving).done, world, group)
        wait(saving)
        assert messages(group) - before[0] == said
        assert messages() - before[1] == (0 if group else said)
        assert_holds(url, step, world)
        talked += said
        groups.append(kept())
    writer.close()
    if group is not None:
        dist.destroy_process_group(group)
    return talked, [*groups, kept()]


def drop_mesh() -> None:
    """The next call that talks makes another one."""
    mesh = meshes.mesh_of(None)
    if mesh is not None:
        mesh.drop()


@contextlib.contextmanager
def groups_made() -> Iterator[list[str]]:
    """Backends of the groups that are made within."""
    real, made = c10d._new_process_group_helper, []

    def make(*args: Any, **named: Any) -> Any:
        made.append(args[3])
        return real(*args, **named)

    with mock.patch.object(c10d, "_new_process_group_helper", make):
        yield made


def calls_of_all_kinds(rank: int, world: int, root: str) -> list[int]:
    """Groups that were made after saves and loads of each kind, and after a call that fails and further ones."""
    drop_mesh()
    training, counts = Training(rank, world), []
    own = dist.new_group()
    with groups_made() as made:
        for step in range(2):
            bucketpoint.save(training.run(step), f"{root}/now-{step}")
            bucketpoint.async_save(training.run(step), checkpoint_id=f"{root}/{step}", process_group=own).result()
            bucketpoint.load(training.run(step), f"{root}/{step}")
            wait(dcp.async_save(training.run(step), checkpoint_id=f"{root}/b{step}", storage_writer=BucketWriter()))
        counts.append(len(made))
        with contextlib.suppress(BucketpointError):
            bucketpoint.save({"w": Unsaveable()} if rank == 0 else training.run(5), f"{root}/fails")
        for step in (6, 7):
            bucketpoint.async_save(training.run(step), checkpoint_id=f"{root}/{step}").result()
            bucketpoint.save(training.run(step), f"{root}/now-{step}")
            assert_holds(f"{root}/{step}", step, world)
        counts.append(len(made))
    dist.destroy_process_group(own)
    return counts


class Unsaveable:
    def __reduce__(self) -> Any:
        raise ValueError("not this one")


def calls_of_a_large_group(rank: int, world: int, root: str) -> tuple[list[str], str | None]:
    """The same with a mesh in which not all ranks are connected, and a call that fails in the middle."""
    drop_mesh()
    training, text = Training(rank, world), None
    with mock.patch.object(process_groups, "MOST_CONNECTED", 1), groups_made() as made:
        for step in range(2):
            bucketpoint.save(training.run(step), f"{root}/{step}")
            assert_holds(f"{root}/{step}", step, world)
            if step == 0:
                try:
                    bucketpoint.save({"w": Unsaveable()} if rank == 2 else training.run(5), f"{root}/fails")
                except BucketpointError as error:
                    text = str(error)
    drop_mesh()
    return made, text


def save_in_a_fork(rank: int, world: int, root: str) -> str:
    """What a fork of a rank is told that saves on the rank's mesh."""
    bucketpoint.save(Training(rank, world).run(1), f"{root}/1")
    read, write = os.pipe()
    if os.fork() == 0:
        text = "saved"
        try:
            bucketpoint.save({}, f"{root}/{rank}-fork", deadline_s=5)
        except BaseException as error:  # noqa: BLE001 (told to the test)
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.wait()
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()


class DyingFileSystem(SlowFileSystem):
    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        os._exit(1)


def lose_the_last(rank: int, world: int, root: str) -> tuple[str, str, int | None] | None:
    """The last rank of a part of the job dies in the upload, during which the one before it works on."""
    group = dist.new_group(range(1, world))
    if rank == 0:
        return None
    fs = DyingFileSystem() if rank == world - 1 else SlowFileSystem(SLOW_S * (rank - 1))
    error = bucketpoint.async_save(
        Training(rank, world).run(1), f"{root}/1", storage_writer=BucketWriter(fs=fs), process_group=group
    ).exception()
    assert isinstance(error, BucketpointError)
    return type(error).__name__, str(error), error.rank


class FailsToStage(Stager):
    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        failed: Future[Any] = Future()
        failed.set_exception(OSError("no memory left"))
        return failed


class FailsToPlan(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        raise OSError("no memory left")


def fail_in_a_half(rank: int, world: int, root: str) -> list[str]:
    """The last rank of a half cannot copy its state, then cannot plan; then the half saves, all ranks, and one alone.

    Returns the errors of the half.
    """
    meshes.group_beside(None)
    before, group, texts = kept(), dist.new_group([2, 3]), []
    if rank >= 2:
        stager = FailsToStage(StagingOptions(use_async_staging=True)) if rank == 3 else None
        planner = FailsToPlan() if rank == 3 else DefaultSavePlanner()
        for given in ({"async_stager": stager}, {"planner": planner}, {}):
            url = f"{root}/{len(texts)}"
            state = Training(rank - 2, 2).run(2)
            texts.append(str(bucketpoint.async_save(state, url, process_group=group, **given).exception()))
        assert_holds(url, 2, 2)
    bucketpoint.async_save(Training(rank, world).run(7), checkpoint_id=f"{root}/all").result()
    assert_holds(f"{root}/all", 7, world)
    if rank >= 2:
        dist.destroy_process_group(group)
    del group
    assert kept() == before, "what is made for a group goes with it"
    if rank == 3:
        # No other need know.
        bucketpoint.async_save(Training(0, 1).run(8), checkpoint_id=f"{root}/alone", no_dist=True).result()
        assert_holds(f"{root}/alone", 8)
    return texts


def disagree_in_a_half(rank: int, world: int, root: str, kind: str) -> list[str]:
    """The ranks of the second half save to two places, and hold two shapes; returns the errors."""
    group = dist.new_group([2, 3])
    if rank < 2:
        return []
    given = {"process_group": group, "async_checkpointer_type": AsyncCheckpointerType(kind)}
    places = bucketpoint.async_save({"w": torch.ones(4)}, f"{root}/{rank}", **given).exception()
    shapes = bucketpoint.async_save({"w": torch.ones(2 + rank)}, f"{root}/half", **given).exception()
    target, stored = {"w": torch.ones(4)}, f"{root}/of-{rank}"
    dcp.save(target, checkpoint_id=stored, storage_writer=BucketWriter(), no_dist=True)
    try:
        dcp.load(target, checkpoint_id=stored, storage_reader=bucketpoint.BucketReader(), process_group=group)
    except dcp.CheckpointException as error:
        return [str(places), str(shapes), str(error.failures[0][0])]
    raise AssertionError("loaded two checkpoints in one call")


def calls_with_too_few_descriptors(rank: int, world: int, root: str) -> list[str]:
    """Errors of calls that connect the ranks; the last rank may open too few files, and in the last call the first."""
    drop_mesh()
    url, limit, found = f"{root}/1", resource.getrlimit(resource.RLIMIT_NOFILE), []
    state = {"w": torch.ones(8)}
    calls = (
        lambda: bucketpoint.async_save(state, checkpoint_id=url).result(),
        lambda: bucketpoint.save(state, url, deadline_s=60),
        lambda: dcp.load(state, storage_reader=bucketpoint.BucketReader(url, cooperative="group")),
        # The other ranks learn of this refusal when their attempt to connect ends, which the deadline limits.
        lambda: bucketpoint.save(state, url, deadline_s=6),
    )
    for number, call in enumerate(calls):
        last = number == len(calls) - 1
        if last:
            # Only the others need a new mesh.
            bucketpoint.save(state, url, deadline_s=60)
            if rank:
                meshes.mesh_of(None).cut()
        if rank == (0 if last else world - 1):
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit[1]))
        try:
            call()
            found.append("none")
        except (BucketpointError, CheckpointException) as error:
            found.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    return found
