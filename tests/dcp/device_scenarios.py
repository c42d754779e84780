"""Loads in which bytes go from device to device, with host memory in place of a device's and gloo in place of NCCL."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

from bucketpoint import BucketReader, TransferOptions
from bucketpoint.dcp.cooperative import carrier as carriers
from bucketpoint.dcp.cooperative import device_assembly
from bucketpoint.dcp.cooperative import devices as cooperative_devices
from bucketpoint.dcp.cooperative import peers as exchanges
from bucketpoint.dcp.cooperative.carrier import Device, Parcel
from bucketpoint.dcp.cooperative.peers import Message, Peers
from bucketpoint.dcp.loading.read_plan import ReadPlan
from bucketpoint.errors import BucketpointError
from bucketpoint.format.keys import new_token
from dcp import scenarios
from dcp.cooperative_scenarios import SMALL, counted, expected_tensor, failure_of, load_placed, read_without_dcp
from dcp.test_compat import SlicePlanner

CPU = torch.device("cpu")


class GlooCarrier:
    """A carrier whose device is the host."""

    device = CPU

    def __init__(self, token: str, rank: int, size: int, device: torch.device, within: timedelta) -> None:
        assert device == CPU
        self._backend: Any = exchanges._gloo(f"{token}/device", rank, size, within)
        self._under_way: list[Any] = []
        self.received = 0

    def move(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> None:
        tags: Counter[tuple[bool, int]] = Counter()
        for start, parcels in ((self._backend.recv, receives), (self._backend.send, sends)):
            for parcel in parcels:
                assert parcel.data.is_contiguous()
                which = (start == self._backend.recv, parcel.peer)
                self._under_way.append(start([parcel.data], parcel.peer, tags[which]))
                tags[which] += 1
        self.received += sum(parcel.data.numel() for parcel in receives)

    def wait(self, within: timedelta, meanwhile: Callable[[], None]) -> None:
        works, self._under_way = self._under_way, []
        for work in works:
            work.wait(within)

    def abort(self) -> None:
        backend, self._backend = self._backend, None
        if backend is None or not self._under_way:
            return
        for peer in range(backend.size()):
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.zeros(1)], peer, 1 << 20).wait(timedelta(milliseconds=1))


class StagedCarrier(GlooCarrier):
    """A carrier between CUDA devices, or parts of one, that takes the detour which NCCL saves."""

    def __init__(self, token: str, rank: int, size: int, device: torch.device, within: timedelta) -> None:
        super().__init__(token, rank, size, CPU, within)
        self.device = device
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> None:
        assert all(parcel.data.device == self.device for parcel in (*receives, *sends))
        here = [Parcel(parcel.peer, torch.empty_like(parcel.data, device="cpu")) for parcel in receives]
        self._staged = [(parcel.data, mine.data) for parcel, mine in zip(receives, here, strict=True)]
        super().move(here, [Parcel(parcel.peer, parcel.data.cpu()) for parcel in sends])

    def wait(self, within: timedelta, meanwhile: Callable[[], None]) -> None:
        super().wait(within, meanwhile)
        staged, self._staged = self._staged, []
        for there, here in staged:
            there.copy_(here)


class Traffic:
    """What this rank received, and how."""

    def __init__(self) -> None:
        self.by_host = 0
        self.fetched_back = 0
        self.carriers: list[GlooCarrier] = []

    @property
    def by_device(self) -> int:
        return sum(each.received for each in self.carriers)


@contextlib.contextmanager
def devices(
    rank: int,
    on_host: Callable[[torch.Tensor], bool] = lambda target: False,
    carrier: Callable[..., GlooCarrier] = GlooCarrier,
    device: torch.device = CPU,
) -> Iterator[Traffic]:
    """Every rank has a device of its own, on which all targets are but those that `on_host` says otherwise of."""
    traffic = Traffic()
    is_there, move, on_its_host = ReadPlan._is_there, Peers.move, device_assembly._on_host

    def open_carrier(*args: Any) -> GlooCarrier:
        traffic.carriers.append(carrier(*args))
        return traffic.carriers[-1]

    def counting(self: Peers, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        traffic.by_host += sum(len(message.data) for message in receives)
        move(self, receives, sends)

    def there(self: ReadPlan, target: torch.Tensor) -> bool:
        return is_there(self, target) and not on_host(target)

    def fetching_back(data: torch.Tensor) -> memoryview:
        traffic.fetched_back += data.numel()
        return on_its_host(data)

    with (
        mock.patch.object(carriers, "device_here", return_value=Device(device, rank + 1)),
        mock.patch.object(device_assembly, "_on_host", fetching_back),
        mock.patch.object(carriers, "open_carrier", open_carrier),
        mock.patch.object(Peers, "move", counting),
        mock.patch.object(ReadPlan, "_is_there", there),
    ):
        yield traffic


def reader_of(options: TransferOptions | None = None, **kwargs: Any) -> BucketReader:
    return BucketReader(transfer=options, cooperative="group", exchange="device", **kwargs)


def load_sharded(rank: int, world: int, url: str, options: TransferOptions | None) -> dict[str, Any]:
    state = scenarios.sharded_state(world, fill=False)
    reader = reader_of(options)
    with devices(rank) as traffic, counted() as count:
        dcp.load(state, checkpoint_id=url, storage_reader=reader)
    scenarios.assert_state(state)
    return {"read": count.read, "gets": count.gets, "by_device": traffic.by_device, "text": reader.explain()}


def load_replicas(
    rank: int,
    world: int,
    url: str,
    shapes: dict[str, Sequence[int]],
    dtypes: tuple[str, str],
    options: TransferOptions | None,
) -> dict[str, Any]:
    """Saved in the first dtype, loaded in the second."""
    saved, wanted = (getattr(torch, name) for name in dtypes)
    state = {name: torch.zeros(*shape, dtype=wanted) for name, shape in shapes.items()}
    reader = reader_of(options)
    with devices(rank) as traffic, counted() as count:
        dcp.load(state, checkpoint_id=url, storage_reader=reader)
    for name, shape in shapes.items():
        assert torch.equal(state[name], expected_tensor(shape, saved).to(wanted)), name
    cooperation = reader._cooperation
    return {
        "read": count.read,
        "by_host": traffic.by_host,
        "by_device": traffic.by_device,
        "fetched_back": traffic.fetched_back,
        "peak": cooperation.peak_bytes,
        "device_peak": cooperation.device_peak_bytes,
        "text": reader.explain(),
    }


def load_placed_on_devices(rank: int, world: int, url: str, shape: Sequence[int], layout: str) -> dict[str, Any]:
    def reader(**kwargs: Any) -> BucketReader:
        return reader_of()

    with devices(rank) as traffic, mock.patch("dcp.cooperative_scenarios.BucketReader", reader):
        answer = load_placed(rank, world, url, shape, layout)
    return {**answer, "by_device": traffic.by_device, "fetched_back": traffic.fetched_back}


def load_boxes(
    rank: int, world: int, url: str, shape: Sequence[int], boxes: Any, options: TransferOptions, host: Sequence[int]
) -> int:
    """Any box of one tensor on each rank, and the whole of another; the ranks of `host` take the first one there."""
    at, size = boxes[rank]
    state = {"w": torch.full(size, -1.0)}
    other = {"v": torch.zeros(*shape)}
    with devices(rank, lambda target: rank in host and target.shape == tuple(size)) as traffic:
        reader = reader_of(options)
        dcp.load(state, checkpoint_id=url, storage_reader=reader, planner=SlicePlanner(at, size))
        dcp.load(other, checkpoint_id=url, storage_reader=reader)
    index = tuple(slice(low, low + width) for low, width in zip(at, size, strict=True))
    assert torch.equal(state["w"], expected_tensor(shape)[index])
    assert torch.equal(other["v"], expected_tensor(shape))
    return traffic.by_device


def load_mixed(rank: int, world: int, url: str, shape: Sequence[int]) -> dict[str, Any]:
    """Each rank keeps something else in host memory; beside that byte items, tied tensors and strided targets."""
    tied = torch.zeros(300, 300)
    state = {
        "step": 0,
        "config": {"name": ""},
        "one": tied,
        "two": tied,
        "strided": torch.zeros(200, 400)[:, ::2],
        "none": torch.zeros(0, 5),
        "big": torch.zeros(*shape),
        "wide": torch.zeros(*shape, dtype=torch.float64),
    }
    hosted = torch.float64 if rank % 2 else torch.float32
    with devices(rank, lambda target: target.dtype == hosted) as traffic, counted() as count:
        dcp.load(state, checkpoint_id=url, storage_reader=reader_of(SMALL))
    assert torch.equal(tied, expected_tensor((300, 300)))
    assert torch.equal(state["strided"], expected_tensor((200, 200)))
    assert torch.equal(state["big"], expected_tensor(shape))
    assert torch.equal(state["wide"], expected_tensor(shape, torch.float64))
    assert (state["step"], state["config"]["name"]) == (41, "llama")
    return {"by_device": traffic.by_device, "read": count.read}


def load_damaged(rank: int, world: int, url: str, shape: Sequence[int]) -> Any:
    with devices(rank) as traffic:
        try:
            dcp.load({"w": torch.zeros(*shape)}, checkpoint_id=url, storage_reader=reader_of(SMALL))
        except dcp.CheckpointException as error:
            return failure_of(error), traffic.by_device
    raise AssertionError("damaged bytes were loaded")


def load_where_devices_are(rank: int, world: int, url: str, shape: Sequence[int], found: Sequence[int]) -> Any:
    """`found`: the identity of each rank's device, 0 for none. If each has one, the target is elsewhere."""
    state = {"w": torch.zeros(*shape)}
    reader = reader_of()
    device = Device(CPU, found[rank]) if found[rank] else None
    here = mock.patch.object(carriers, "device_here", return_value=device)
    elsewhere = all(found) and len(set(found)) == world
    with devices(rank, lambda target: elsewhere) as traffic, here:
        dcp.load(state, checkpoint_id=url, storage_reader=reader)
    assert torch.equal(state["w"], expected_tensor(shape))
    return traffic.by_device, reader.explain()


def load_with(rank: int, world: int, url: str, shape: Sequence[int], exchange: Sequence[str]) -> Any:
    state = {"w": torch.zeros(*shape)}
    reader = BucketReader(cooperative="group", exchange=exchange[rank])
    with devices(rank) as traffic:
        try:
            dcp.load(state, checkpoint_id=url, storage_reader=reader)
        except dcp.CheckpointException as error:
            return failure_of(error)
    return traffic.by_device, reader.explain()


class Troubled(GlooCarrier):
    """Calls `trouble` with the number of the round before it moves anything; True: the device learns of nothing."""

    trouble: Callable[[int], bool]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rounds = 0
        self._deaf = False

    def move(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> None:
        self._rounds += 1
        self._deaf = self.trouble(self._rounds)
        if not self._deaf:
            super().move(receives, sends)

    def wait(self, within: timedelta, meanwhile: Callable[[], None]) -> None:
        until = time.monotonic() + within.total_seconds()
        while self._deaf and time.monotonic() < until:
            meanwhile()
            time.sleep(0.01)
        if self._deaf:
            raise RuntimeError("the device is not done")
        super().wait(within, meanwhile)


def one_rank_in_trouble(
    rank: int, world: int, url: str, shape: Sequence[int], victim: int, what: str, within_s: float
) -> Any:
    """In the second round the victim is killed, or its device fails, or it stands still."""

    def trouble(number: int) -> bool:
        if rank != victim or number != 2:
            return number == 2 and "unnoticed" in what
        if "killed" in what:
            os.kill(os.getpid(), signal.SIGKILL)
        if "failed" in what:
            raise RuntimeError("the device is on fire")
        time.sleep(2 * within_s)
        return False

    class InTrouble(Troubled):
        pass

    InTrouble.trouble = staticmethod(trouble)  # type: ignore[assignment]
    reader = BucketReader(url, transfer=SMALL, cooperative="group", exchange="device")
    limit = mock.patch.object(cooperative_devices, "ARRIVE_WITHIN", timedelta(seconds=within_s))
    started = time.monotonic()
    try:
        with devices(rank, carrier=InTrouble), limit:
            read_without_dcp(reader, rank, shape)
    except BucketpointError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError("a load without one of its ranks reported success")


def load_again(rank: int, world: int, url: str, shape: Sequence[int]) -> int:
    state = {"w": torch.zeros(*shape)}
    with devices(rank) as traffic:
        dcp.load(state, checkpoint_id=url, storage_reader=reader_of(SMALL), planner=DefaultLoadPlanner())
    assert torch.equal(state["w"], expected_tensor(shape))
    return traffic.by_device


def load_on_gpus(rank: int, world: int, url: str, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """The real thing: rank r's targets are on GPU r, and NCCL hands on what others read."""
    torch.cuda.set_device(rank)
    kind = getattr(torch, dtype)
    state = {"w": torch.zeros(*shape, dtype=kind, device="cuda"), "host": torch.zeros(*shape)}
    reader = reader_of(SMALL)
    with counted() as count:
        dcp.load(state, checkpoint_id=url, storage_reader=reader)
    assert torch.equal(state["w"].cpu(), expected_tensor(shape).to(kind))
    assert torch.equal(state["host"], expected_tensor(shape))
    return {"read": count.read, "text": reader.explain(), "device_peak": reader._cooperation.device_peak_bytes}


def load_on_one_gpu(rank: int, world: int, url: str, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """All ranks on one GPU, whose memory, streams and pinned buffers are real; only NCCL is not, as it refuses that."""
    there, kind = torch.device("cuda", 0), getattr(torch, dtype)
    state = {"w": torch.zeros(*shape, dtype=kind, device=there), "host": torch.zeros(*shape)}
    reader = reader_of(SMALL)
    with devices(rank, carrier=StagedCarrier, device=there) as traffic, counted() as count:
        dcp.load(state, checkpoint_id=url, storage_reader=reader)
    assert torch.equal(state["w"].cpu(), expected_tensor(shape).to(kind))
    assert torch.equal(state["host"], expected_tensor(shape))
    return {"read": count.read, "by_device": traffic.by_device, "peak": reader._cooperation.device_peak_bytes}


def meet_alone_over_nccl(rank: int, world: int) -> None:
    """A communicator of one rank: what our group of NCCL calls, without another rank."""
    carrier = carriers.open_carrier(new_token(), 0, 1, torch.device("cuda", 0), timedelta(seconds=200))
    carrier.move([], [])
    carrier.wait(timedelta(seconds=200), lambda: None)
    carrier.abort()
    carrier.abort()
