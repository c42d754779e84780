"""Loads hold on to the objects that were committed: by ETag or generation where they lie, by checksum in a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import TransferOptions
from bucketpoint.errors import CorruptDataError
from bucketpoint.stores.gcs import GCSStore
from bucketpoint.stores.s3 import S3Store
from dcp.states import assert_loads
from dcp.test_compat import SlicePlanner
from kit.failures import failure_of
from services import Service

pytestmark = pytest.mark.contract

FULL = torch.arange(600_000.0).reshape(600, 1000)
STATE = {"w": FULL, "b": torch.ones(7), "step": 5}


@pytest.fixture
def saved(service: Service) -> str:
    """The URL of a checkpoint."""
    url = service.url("run/step-1")
    dcp.save(STATE, storage_writer=service.writer(url), no_dist=True)
    return url


def data_keys(service: Service) -> list[str]:
    return [key for key in service.listed() if key.endswith(".distcp")]


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The key of every ranged read, and what it insisted on."""
    seen: list[tuple[str, str | None]] = []
    for kind in (S3Store, GCSStore):
        original = kind.open_range

        def open_range(self: Any, key: str, *args: Any, if_match: str | None = None, original: Any = original) -> Any:
            seen.append((key, if_match))
            return original(self, key, *args, if_match=if_match)

        monkeypatch.setattr(kind, "open_range", open_range)
    return seen


def test_asks_every_range_of_the_object_that_was_committed(
    service: Service, saved: str, pins: list[tuple[str, str | None]]
) -> None:
    options = TransferOptions(part_bytes=256 << 10)
    assert_loads(STATE, service.reader(saved, transfer=options))
    # A box, for which the checksums of blocks are read too.
    target = {"w": torch.zeros(10, 20)}
    planner = SlicePlanner((300, 500), (10, 20))
    dcp.load(target, storage_reader=service.reader(saved, transfer=options), planner=planner, no_dist=True)
    assert torch.equal(target["w"], FULL[300:310, 500:520])
    etags = {key: service.etag(key) for key in data_keys(service)}
    ranges = [(key, etag) for key, etag in pins if key.endswith(".distcp")]
    assert len(ranges) >= 8
    assert all(etag == etags[key] for key, etag in ranges)


def test_raises_for_an_object_that_is_replaced_between_two_ranges(
    service: Service, saved: str, pins: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, body = max(((key, bytearray(service.read(key))) for key in data_keys(service)), key=lambda one: len(one[1]))
    body[-1] ^= 1

    kind = type(service.reader(saved)._open(saved)[0])
    counting = kind.open_range

    def replacing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(pins) == 3:
            service.write(key, bytes(body))
        return counting(self, *args, **kwargs)

    monkeypatch.setattr(kind, "open_range", replacing)
    reader = service.reader(saved, transfer=TransferOptions(part_bytes=256 << 10, connections=1))
    error = failure_of(lambda: assert_loads(STATE, reader))
    assert isinstance(error, CorruptDataError)
    assert "replaced" in str(error)


def test_accepts_a_checkpoint_that_was_replicated_byte_by_byte(
    service: Service, saved: str, pins: list[tuple[str, str | None]]
) -> None:
    other = Service.on(service.server)
    for key in service.listed():
        other.write(key, service.read(key))
    assert_loads(STATE, service.reader(other.url("run/step-1")))
    assert {etag for _, etag in pins} == {None}
