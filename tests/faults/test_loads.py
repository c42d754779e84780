"""A load that survives: each request in turn meets each fault once, alone and in a group of ranks that read together.

What is loaded is what was saved, or the load raises an error of ours on every rank. It never gives other values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketpointError, BucketReader, TransferOptions
from bucketpoint.errors import (
    AccessDeniedError,
    CorruptDataError,
    CredentialsError,
    PeerFailedError,
    StoreError,
    TransientStoreError,
)
from dcp.ranks import Ranks
from kit import CutReply, ExpireCredentials, Fault, FaultProxy, FlipReply, Refuse, Reset, Script, Stale, Stall, always
from kit.servers import s3_attempts
from kit.tally import Tally
from services import Server, Service

KIB = 1 << 10
OPTIONS = TransferOptions(part_bytes=64 * KIB, connections=2, max_inflight_bytes=512 * KIB, read_attempts=3)
WORLD = 2

PASSING = [
    Reset(),
    Reset(acted=True),
    CutReply(0.0),
    CutReply(0.7),
    Refuse(500, "InternalError"),
    Refuse(503, "SlowDown"),
    Stall(0.2),
]
"""What a load survives at any request."""


def state(value: int, *, of: torch.dtype = torch.float32) -> dict[str, Any]:
    """All of one value: received in place, cast, strided, small, and no tensor."""
    return {
        "model": {
            "in_place": torch.full((50_000,), float(value)),
            "cast": torch.full((30_000,), float(value), dtype=of),
            "columns": torch.full((100, 300), float(value), dtype=of).t().contiguous().t(),
        },
        "step": value,
        "history": [value] * 3,
    }


def values_in(loaded: dict[str, Any]) -> set[float]:
    found = {float(one) for tensor in loaded["model"].values() for one in tensor.unique()}
    return found | {float(loaded["step"])} | {float(one) for one in loaded["history"]}


PLACE, VALUE = "run/step-7", 1


def save(service: Service, value: int) -> None:
    dcp.save(state(value), storage_writer=service.writer(service.url(PLACE)), no_dist=True)


@pytest.fixture(scope="module")
def saved(server: Server) -> Service:
    """A checkpoint of one value."""
    made = Service.on(server)
    save(made, VALUE)
    return made


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


# One load, and what came of it: on this rank alone, or on all ranks of a group that reads together


@dataclass(frozen=True)
class Outcome:
    values: set[float]
    errors: tuple[BaseException, ...] = ()


def load(url: str, options: dict[str, Any], mode: str = "off") -> Outcome:
    # Of another dtype than was saved, so that not everything is received in place.
    target = state(0, of=torch.float64)
    tries = {"max_attempts": 3} if url.startswith("gs:") else s3_attempts(3)
    reader = BucketReader(url, storage_options={**options, **tries}, transfer=OPTIONS, cooperative=mode)
    try:
        dcp.load(target, storage_reader=reader, no_dist=mode == "off")
    except dcp.CheckpointException as failure:
        return Outcome(values_in(target), tuple(error for error, _ in failure.failures.values()))
    if mode != "off":
        assert reader.explain().startswith("Cooperative")
    return Outcome(values_in(target))


def load_together(rank: int, world: int, url: str, options: dict[str, Any]) -> Outcome:
    return load(url, options, mode="group")


class Loads:
    """Loads of one checkpoint through a proxy, by one rank or several."""

    def __init__(self, service: Service, proxy: FaultProxy, ranks: Ranks | None) -> None:
        self.proxy, self.ranks = proxy, ranks
        self.place = service.url(PLACE), service.at(proxy.url).options

    def load(self, script: Script) -> list[Outcome]:
        self.proxy.clear()
        self.proxy.play(script)
        if self.ranks is None:
            return [load(*self.place)]
        return self.ranks.run(load_together, *self.place)

    def struck(self) -> str:
        """The request that met the fault; empty if none did."""
        return next((f"{one.request.kind} {one.request.key}" for one in self.proxy.exchanges if one.fault), "")

    def requests(self) -> int:
        """How many a load makes that nobody disturbs."""
        assert self.load(Script()) == [Outcome({float(VALUE)})] * (WORLD if self.ranks else 1)
        return len(self.proxy.exchanges)


@pytest.fixture(params=["alone", "together"])
def loads(request: pytest.FixtureRequest, saved: Service, proxy: FaultProxy) -> Loads:
    ranks = request.getfixturevalue("ranks") if request.param == "together" else None
    return Loads(saved, proxy, ranks)


def assert_right(found: list[Outcome], value: int, where: str) -> None:
    for outcome in found:
        assert not outcome.errors, (where, outcome.errors)
        assert outcome.values == {float(value)}, where


def assert_all_raise(found: list[Outcome], *kinds: type[BaseException], where: str = "") -> None:
    for outcome in found:
        assert outcome.errors, where
        for error in outcome.errors:
            assert isinstance(error, BucketpointError), (where, error)
    # Whose request it was says what is wrong, and the others name that rank.
    every = [error for outcome in found for error in outcome.errors]
    assert any(isinstance(error, kinds) for error in every), (where, every)
    assert all(isinstance(error, (*kinds, PeerFailedError)) for error in every), (where, every)


# Each request meets each fault


@pytest.mark.contract
@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: f"{fault.name}-{getattr(fault, 'at', '')}")
def test_loads_through_a_fault_at_each_request(loads: Loads, bucketpoint_tally: Tally, fault: Fault) -> None:
    number = 0
    while True:
        found = loads.load(always(fault, skip=number, times=1))
        where = f"{fault.name} at request {number + 1}, {loads.struck()}"
        assert_right(found, VALUE, where)
        if not loads.struck():
            break
        bucketpoint_tally.made("requests of a load that each met a fault once")
        number += 1
    assert number >= 4


@pytest.mark.contract
@pytest.mark.parametrize("at", [0.1, 0.6])
def test_takes_no_flipped_bit_at_each_request_for_a_value(loads: Loads, bucketpoint_tally: Tally, at: float) -> None:
    count = loads.requests()
    for number in range(count):
        found = loads.load(always(FlipReply(at), skip=number, times=1))
        struck = loads.struck()
        where = f"a bit flipped at request {number + 1}, {struck}"
        assert struck, where
        bucketpoint_tally.made("requests of a load that each met a fault once")
        if found[0].errors:
            # What one rank reads alone is read once more, and is right then. What it has handed on is not.
            assert struck.endswith(".metadata") or loads.ranks, where
            for outcome in found:
                assert outcome.errors, where
                assert all(isinstance(error, BucketpointError) for error in outcome.errors), (where, outcome.errors)
        else:
            assert_right(found, VALUE, where)


@pytest.mark.contract
def test_tells_every_rank_of_credentials_that_expire_at_each_request(loads: Loads, bucketpoint_tally: Tally) -> None:
    for number in range(loads.requests()):
        found = loads.load(always(ExpireCredentials(), skip=number, times=1))
        where = f"expired at request {number + 1}, {loads.struck()}"
        bucketpoint_tally.made("requests of a load that each met a fault once")
        assert_all_raise(found, CredentialsError, where=where)


@pytest.mark.contract
def test_mixes_no_answer_of_before_an_overwrite_at_each_request(
    server: Server, proxy: FaultProxy, bucketpoint_tally: Tally
) -> None:
    """A cache between the store and the job that nobody tells of the overwrite."""
    old, new = 3, 4
    service = Service.on(server)
    loads = Loads(service, proxy, None)
    save(service, old)
    count = len(loads.load(Script()) and loads.proxy.exchanges)
    for number in range(count):
        # The first load is seen by the cache, and the second gets one answer of it.
        save(service, old)
        assert_right(loads.load(always(Stale(), skip=count + number, times=1)), old, "before the overwrite")
        save(service, new)
        outcome = load(*loads.place)
        assert "stale" in {one.fault for one in loads.proxy.exchanges}
        bucketpoint_tally.made("requests of a load that each met a fault once")
        if outcome.errors:
            assert all(isinstance(error, BucketpointError) for error in outcome.errors)
        else:
            assert outcome.values == {float(new)}, number


# What does not pass


@pytest.mark.contract
@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (Refuse(500, "InternalError"), (StoreError,)),
        (CutReply(0.5), (TransientStoreError,)),
        (FlipReply(0.5), (CorruptDataError,)),
        (Refuse(403, "AccessDenied"), (AccessDeniedError,)),
        (Refuse(404, "NoSuchKey"), (CorruptDataError,)),
        # The proxy has another address than the save had, so these reads have no condition that could have failed.
        (Refuse(412, "PreconditionFailed"), (StoreError,)),
    ],
    ids=["500", "cut", "flipped", "403", "404", "412"],
)
def test_raises_on_every_rank_for_a_range_that_is_bad_for_good(
    loads: Loads, bucketpoint_tally: Tally, fault: Fault, kinds: tuple[type[BaseException], ...]
) -> None:
    for skip in (0, 2):
        found = loads.load(always(fault, kinds=["GetObject"], keys="*.distcp", skip=skip))
        bucketpoint_tally.made("loads of which a range was bad for good")
        assert_all_raise(found, *kinds, where=f"{fault.name} from data request {skip + 1} on")
    # The same ranks load well afterwards.
    assert_right(loads.load(Script()), VALUE, "afterwards")


@pytest.mark.contract
def test_raises_on_every_rank_for_an_object_that_was_replaced(
    server: Server, proxy: FaultProxy, request: pytest.FixtureRequest
) -> None:
    service = Service.on(server)
    save(service, VALUE)
    for key in [key for key in service.listed() if key.endswith(".distcp")]:
        body = bytearray(service.read(key))
        body[-1] ^= 1
        service.write(key, bytes(body))
    for ranks in (None, request.getfixturevalue("ranks")):
        found = Loads(service, proxy, ranks).load(Script())
        assert_all_raise(found, CorruptDataError)
        assert all("replaced" in str(error) for outcome in found for error in outcome.errors)
