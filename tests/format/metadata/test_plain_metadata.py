"""Metadata read without torch says what metadata read with torch says, and refuses the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.summary import summarise
from bucketpoint.errors import BucketpointError
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import record_of
from bucketpoint.format.metadata.plain import Dtype, read_metadata, read_record
from bucketpoint.format.pickles.vocabulary import DTYPE_NAMES
from bucketpoint.format.record import CommitRecord
from security.corpus import bombs, crashes, programs


def state() -> dict[str, Any]:
    kinds = (torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool, torch.float8_e4m3fn)
    return {
        "model": {str(kind): torch.zeros(3, 4).to(kind) for kind in kinds},
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 4),
        "optim": {"lr": 0.1, "names": ["a"]},
        "step": 5,
    }


@pytest.fixture(scope="module", params=["bucketpoint", "torch"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / request.param
    writer = BucketWriter(str(path)) if request.param == "bucketpoint" else dcp.FileSystemWriter(path)
    dcp.save(state(), storage_writer=writer, no_dist=True)
    return path


@pytest.mark.parametrize("name", [name for name in DTYPE_NAMES if hasattr(torch, name)])
def test_gives_each_data_type_the_size_that_torch_gives_it(name: str) -> None:
    assert Dtype(name).itemsize == getattr(torch, name).itemsize
    assert str(Dtype(name)) == str(getattr(torch, name))


def test_summarises_alike_with_torch_and_without(saved: Path) -> None:
    with_torch, without = (summarise(open_checkpoint(saved, plain=plain)) for plain in (False, True))
    assert without == with_torch
    assert without.by_dtype() == with_torch.by_dtype()


def record_with_torch(data: bytes) -> CommitRecord:
    return record_of(decode_metadata(data), data, metadata_etag=None)


def outcome(read: Any, data: bytes) -> Any:
    try:
        return read(data)
    except BucketpointError as error:
        return type(error)


def test_refuses_damaged_metadata_alike(saved: Path) -> None:
    data = (saved / ".metadata").read_bytes()
    assert read_record(data) == record_with_torch(data)
    assert type(read_metadata(data)).__name__ == type(decode_metadata(data)).__name__
    chance = random.Random(5)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        cut = bytes(damaged[: chance.choice([len(damaged), chance.randrange(len(damaged))])])
        assert outcome(read_record, cut) == outcome(record_with_torch, cut)


def test_refuses_hostile_pickles_and_runs_nothing_of_them(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name, data in {**programs(str(canary)), **bombs(), **crashes()}.items():
        refused = outcome(read_metadata, data)
        assert isinstance(refused, type), name
        assert refused == outcome(decode_metadata, data), name
        assert not canary.exists(), name
