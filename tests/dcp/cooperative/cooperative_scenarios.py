"""What ranks do that load together. Each function runs on every rank at once, and returns what the test compares."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

from bucketpoint import BucketReader, BucketWriter, LoadPlanner, TransferOptions
from bucketpoint.dcp.cooperative import load as loads
from bucketpoint.dcp.cooperative import rounds
from bucketpoint.dcp.cooperative.load import Cooperation
from bucketpoint.dcp.cooperative.rounds import FIRST_TAG, Peers
from bucketpoint.dcp.process_groups import disconnect
from bucketpoint.errors import AccessDeniedError, BucketpointError, PeerFailedError
from bucketpoint.stores.local import LocalStore
from bucketpoint.transfer import BufferPool
from dcp import scenarios
from dcp.test_compat import SlicePlanner

SMALL = TransferOptions(part_bytes=64 << 10, connections=4, max_inflight_bytes=256 << 10)
PLANNERS = {"stock": DefaultLoadPlanner, "ours": LoadPlanner}


class Counted:
    """Bytes of data and GETs of whole objects that this process asked the store for."""

    def __init__(self) -> None:
        self.read = 0
        self.gets = 0
        self.lock = threading.Lock()


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """Every read of a local store by this process is counted."""
    count = Counted()
    read_into, get = LocalStore.read_into, LocalStore.get

    def counting_read(self: Any, key: str, offset: int, buffers: Any, **kwargs: Any) -> None:
        with count.lock:
            count.read += sum(len(view) for view in buffers)
        read_into(self, key, offset, buffers, **kwargs)

    def counting_get(self: Any, key: str, **kwargs: Any) -> Any:
        with count.lock:
            count.gets += 1
        return get(self, key, **kwargs)

    with mock.patch.object(LocalStore, "read_into", counting_read), mock.patch.object(LocalStore, "get", counting_get):
        yield count


@contextlib.contextmanager
def reads_go_through(action: Any) -> Iterator[None]:
    """`action(number)` is called before each read of data by this process."""
    read_into, lock, numbers = LocalStore.read_into, threading.Lock(), iter(range(1 << 30))

    def read(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            number = next(numbers)
        action(number)
        read_into(self, *args, **kwargs)

    with mock.patch.object(LocalStore, "read_into", read):
        yield


def failures_of(error: Any) -> dict[int, tuple[str, str]]:
    return {rank: (type(each).__name__, str(each)) for rank, (each, _) in error.failures.items()}


def together(**options: Any) -> BucketReader:
    return BucketReader(cooperative="group", **options)


def load_counted(state: dict[str, Any], reader: BucketReader, url: str, planner: Any = None) -> Counted:
    with counted() as count:
        dcp.load(state, checkpoint_id=url, storage_reader=reader, planner=planner)
    return count


def save(rank: int, world: int, url: str) -> None:
    dcp.save(scenarios.sharded_state(world, fill=True), checkpoint_id=url, storage_writer=BucketWriter())


def load(
    rank: int,
    world: int,
    url: str,
    planner: str,
    options: TransferOptions | None,
    mode: str,
    storage_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    state = scenarios.sharded_state(world, fill=False)
    reader = BucketReader(transfer=options, cooperative=mode, storage_options=storage_options)
    count = load_counted(state, reader, url, PLANNERS[planner]())
    scenarios.assert_state(state)
    return {"read": count.read, "gets": count.gets, "explain": reader.explain()}


def expected_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(int(torch.tensor(shape).prod())) % 251).reshape(*shape).to(dtype)


def load_replicas(
    rank: int, world: int, url: str, shapes: dict[str, Sequence[int]], dtype: str, options: TransferOptions | None
) -> dict[str, Any]:
    """Plain tensors on every rank, as DDP has them, of the saved dtype or another."""
    state = {name: torch.zeros(*shape, dtype=getattr(torch, dtype)) for name, shape in shapes.items()}
    pools = []

    def pool(*args: Any, **kwargs: Any) -> BufferPool:
        pools.append(BufferPool(*args, **kwargs))
        return pools[-1]

    with mock.patch.object(rounds, "BufferPool", pool):
        count = load_counted(state, together(transfer=options), url)
    for name, shape in shapes.items():
        assert torch.equal(state[name], expected_tensor(shape).to(getattr(torch, dtype))), name
    return {"read": count.read, "peak": sum(pool.peak_bytes for pool in pools)}


def load_on_device(rank: int, world: int, url: str, shape: Sequence[int], device: str) -> int:
    """One tensor on the device, and one in host memory."""
    state = {"there": torch.zeros(*shape, device=device), "host": torch.zeros(*shape)}
    count = load_counted(state, together(transfer=SMALL), url)
    assert all(torch.equal(tensor.cpu(), expected_tensor(shape)) for tensor in state.values())
    return count.read


def load_boxes(rank: int, world: int, url: str, shape: Sequence[int], boxes: Any, options: TransferOptions) -> int:
    """Any box of one tensor on each rank; None: this rank wants nothing."""
    box = boxes[rank]
    state = {"w": torch.full(box[1], -1.0)} if box is not None else {}
    planner = SlicePlanner(*box) if box is not None else DefaultLoadPlanner()
    count = load_counted(state, together(transfer=options), url, planner)
    if box is not None:
        index = tuple(slice(at, at + size) for at, size in zip(*box, strict=True))
        assert torch.equal(state["w"], expected_tensor(shape)[index])
    return count.read


def load_tied_on_the_first_rank(rank: int, world: int, url: str, shape: Sequence[int]) -> list[float]:
    """Two tensors of one value each, which are one tensor on rank 0; the values that each rank finds in them."""
    state = {"one": torch.zeros(*shape), "two": torch.zeros(*shape)}
    if rank == 0:
        state["two"] = state["one"]
    options = TransferOptions(part_bytes=64 << 10, connections=16, max_inflight_bytes=1 << 20)
    dcp.load(state, checkpoint_id=url, storage_reader=together(transfer=options))
    return [value for tensor in state.values() for value in tensor.unique().tolist()]


def load_every_second(rank: int, world: int, url: str, count: int) -> int:
    """Load all of many small tensors on rank 0, and every second on the others; the number of reads."""
    state = {f"w{at:03}": torch.zeros(1000) for at in range(0, count, 1 if rank == 0 else 2)}
    reads: list[int] = []
    options = TransferOptions(coalesce_gap_bytes=2000, free_gap_bytes=2000)
    with reads_go_through(reads.append):
        dcp.load(state, checkpoint_id=url, storage_reader=together(transfer=options))
    assert all(torch.equal(tensor, torch.full((1000,), float(name[1:]))) for name, tensor in state.items())
    return len(reads)


def load_whole(
    rank: int, world: int, url: str, shape: Sequence[int], mode: str, per_node: int, groups: Sequence[list[int]] = ()
) -> dict[str, Any]:
    """As if every `per_node` ranks were on a machine of their own, in the first or second of some groups."""
    made = [dist.new_group(ranks) for ranks in groups]
    state = {"w": torch.zeros(*shape)}
    reader = BucketReader(cooperative=mode, process_group=made[rank % 2] if made else None)
    with mock.patch.dict(os.environ, GROUP_RANK=str(rank // per_node)):
        count = load_counted(state, reader, url)
    assert torch.equal(state["w"], expected_tensor(shape))
    return {"read": count.read, "gets": count.gets, "explain": reader.explain()}


def load_from(
    rank: int, world: int, urls: Sequence[str], shape: Sequence[int], modes: Sequence[str], members: int | None = None
) -> Any:
    """Each rank a checkpoint and a mode of its own, in a group of the first `members`, if given.

    Returns how that failed, and how many whole objects were asked for.
    """
    group = dist.new_group(range(members)) if members else None
    state, reader = {"w": torch.zeros(*shape)}, BucketReader(cooperative=modes[rank], process_group=group)
    with counted() as count:
        try:
            dcp.load(state, checkpoint_id=urls[rank], storage_reader=reader)
        except dcp.CheckpointException as error:
            return failures_of(error), count.gets
    raise AssertionError("a load that must fail reported success")


def one_rank_fails_alone(rank: int, world: int, url: str, shape: Sequence[int]) -> Any:
    """The last rank shares no bytes with the others, and fails when they are done; what each rank is told."""

    def deny(number: int) -> None:
        if rank == world - 1:
            dist.barrier()
            raise AccessDeniedError("the door is closed", url=url)

    reader = BucketReader(url, cooperative="group")
    with reads_go_through(deny):
        try:
            reader.read_data(*planned(reader, rank, shape, "alone" if rank == world - 1 else "w"))
        except BucketpointError as error:
            return type(error).__name__, str(error)
    dist.barrier()
    return None


def one_planner_fails_at(
    rank: int, world: int, url: str, shape: Sequence[int], step: str, within_s: float, no_dist: bool
) -> Any:
    """Rank 1's planner raises in `step`; what each rank is told."""
    planner = DefaultLoadPlanner()
    if rank == 1:
        setattr(planner, step, mock.Mock(side_effect=ValueError(f"no such {step}")))
    reader = together()
    try:
        with mock.patch.object(loads, "ARRIVE_WITHIN", timedelta(seconds=within_s)):
            dcp.load(
                {"w": torch.zeros(*shape)}, checkpoint_id=url, storage_reader=reader, planner=planner, no_dist=no_dist
            )
    except dcp.CheckpointException as error:
        found = failures_of(error)
    except ValueError as error:
        found = {0: (type(error).__name__, str(error))}
    else:
        raise AssertionError("a failed load reported success")
    dist.barrier()
    # The same ranks and the same reader load well afterwards.
    state = {"w": torch.zeros(*shape)}
    dcp.load(state, checkpoint_id=url, storage_reader=reader)
    assert torch.equal(state["w"], expected_tensor(shape))
    return found


def one_rank_gives_up(rank: int, world: int, url: str, shape: Sequence[int], how: str) -> Any:
    """Rank 1 stops between planning and reading; what the others are told."""
    reader = BucketReader(url, cooperative="group")
    plan, planner = planned(reader, rank, shape)
    if rank == 1:
        if how == "reset":
            reader.reset()
        del reader
        gc.collect()
        dist.barrier()
        return None
    try:
        reader.read_data(plan, planner)
    except BucketpointError as error:
        found = type(error).__name__, str(error)
    else:
        raise AssertionError("went on without a rank")
    dist.barrier()
    return found


def planned(reader: BucketReader, rank: int, shape: Sequence[int], name: str = "w") -> tuple[Any, Any]:
    """A load of one tensor without DCP, whose own collective after a failure waits for its group's timeout."""
    reader.reset()
    planner = DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner({name: torch.zeros(*shape)}, metadata, rank == 0)
    reader.set_up_storage_reader(metadata, rank == 0, rank=rank)
    return planner.finish_plan(planner.create_local_plan()), planner


def one_rank_is_killed(rank: int, world: int, url: str, shape: Sequence[int], victim: int, at: int) -> Any:
    """The victim is killed before its read number `at`; the others say what they raised."""

    def die(number: int) -> None:
        if rank == victim and number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    reader = BucketReader(url, transfer=SMALL, cooperative="group")
    try:
        with reads_go_through(die):
            reader.read_data(*planned(reader, rank, shape))
    except BucketpointError as error:
        return type(error).__name__, str(error)
    raise AssertionError("a load without one of its ranks reported success")


def one_rank_stands_still(rank: int, world: int, url: str, shape: Sequence[int], timeout_s: float, when: str) -> Any:
    """The last rank does not come, or sleeps in a read; what the others raise."""

    def sleep(number: int) -> None:
        if rank == world - 1 and number == 0:
            time.sleep(2 * timeout_s)

    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    if rank == world - 1 and when == "at the start":
        return None
    reader = BucketReader(url, transfer=SMALL, cooperative="group", process_group=group)
    try:
        with reads_go_through(sleep):
            reader.read_data(*planned(reader, rank, shape))
    except BucketpointError as error:
        return str(error)
    raise AssertionError("a load without one of its ranks reported success")


def connected(url: str) -> tuple[Cooperation, Peers]:
    cooperation = Cooperation("group", None)
    cooperation.connect(url)
    assert cooperation._exchange is not None
    return cooperation, cooperation._exchange


def give_up_without_a_process_group(rank: int, world: int, url: str) -> str:
    """The job destroys its process group while a load has begun, and the reader is used again."""
    cooperation, _ = connected(url)
    dist.barrier()
    dist.destroy_process_group()
    cooperation.connect(url)
    # The ranks go on with another test.
    store = dist.FileStore(f"{url.removeprefix('file://')}-store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return cooperation.explanation


def one_rank_leaves_after_another_was_lost(rank: int, world: int, url: str) -> None:
    """Rank 0 is gone. Rank 1 leaves then, and keeps what refers to its connections; rank 2 waits for its bytes."""
    cooperation, exchange = connected(url)
    kept = exchange._backend
    dist.barrier()
    if rank == 0:
        cooperation.close()
    dist.barrier()
    if rank == 1:
        cooperation.close()
    elif rank == 2:
        # Not yet aware of rank 0: this rank has waited for nothing from it.
        with contextlib.suppress(PeerFailedError):
            exchange.move([(1, FIRST_TAG, memoryview(bytearray(100)))], [])
            raise AssertionError("received what nobody sent")
    dist.barrier()
    del kept


def one_rank_is_known_to_be_lost(rank: int, world: int, url: str) -> list[str]:
    """Rank 1 is gone, and gloo knows of it, when the others send and receive; what they raise."""
    cooperation, exchange = connected(url)
    dist.barrier()
    if rank == 1:
        disconnect(exchange._backend, [peer for peer in range(world) if peer != rank])
    dist.barrier()
    uses: list[Callable[[], object]] = [
        lambda: exchange.agree(range(world)),
        lambda: exchange.move([], [(1, FIRST_TAG, memoryview(bytearray(1)))]),
    ]
    texts = []
    for use in 3 * uses if rank != 1 else []:
        try:
            use()
        except PeerFailedError as error:
            texts.append(str(error))
    dist.barrier()
    cooperation.close()
    return texts


def one_rank_leaves(rank: int, world: int, url: str) -> tuple[str, str]:
    """Rank 1 goes while rank 2 waits for its bytes and all others for its word."""
    cooperation, exchange = connected(url)
    try:
        with cooperation.taking_part():
            if rank == 1:
                raise BucketpointError("I have had enough")
            if rank == 2:
                exchange.move([(1, FIRST_TAG, memoryview(bytearray(100)))], [])
            exchange.agree(range(world))
    except BucketpointError as error:
        return type(error).__name__, str(error)
    raise AssertionError("went on without a rank")
