"""Checkpoints through `BucketWriter(fs=...)` and `BucketReader(fs=...)`, on every filesystem that tests reach."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from bucketpoint import (
    BucketReader,
    BucketWriter,
    CheckpointExistsError,
    CorruptDataError,
    TransferOptions,
    latest_checkpoint,
)
from fsspec_backends import IN_PROCESS, SERVED, Backend, backend

pytestmark = pytest.mark.contract

MIB = 1 << 20


# A `LocalStore` serves "file".
@pytest.fixture(params=[name for name in (*IN_PROCESS, *SERVED) if name != "file"])
def found(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with backend(request.param, request, tmp_path) as one:
        yield one


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    # Above what goes up in one request, so that there are parts where a filesystem has them.
    large = torch.rand(3 * MIB // 2, 4, generator=generator)
    return {"large": large, "small": torch.arange(10), "half": torch.ones(5, dtype=torch.bfloat16), "step": 3}


def blank() -> dict[str, Any]:
    return {name: torch.zeros_like(value) if torch.is_tensor(value) else 0 for name, value in state().items()}


def save(found: Backend, url: str, what: dict[str, Any], **settings: Any) -> None:
    dcp.save(what, checkpoint_id=url, storage_writer=BucketWriter(fs=found.fs, **settings), no_dist=True)


def load(found: Backend, url: str) -> dict[str, Any]:
    target = blank()
    dcp.load(target, checkpoint_id=url, storage_reader=BucketReader(fs=found.fs), no_dist=True)
    return target


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = [(value, other[name]) for name, value in one.items()]
    return all(torch.equal(left, right) if torch.is_tensor(left) else left == right for left, right in pairs)


def test_what_was_saved_comes_back_and_an_overwrite_replaces_it(
    found: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{found.root}/step-1"
    options = TransferOptions(single_put_bytes=4 * MIB, max_inflight_bytes=40 * MIB)
    with caplog.at_level(logging.WARNING, logger="bucketpoint"):
        save(found, url, state(), transfer=options)
        save(found, url, {**state(), "step": 4}, transfer=options)
    assert same({**state(), "step": 4}, load(found, url))
    # Said once, and only where a commit has no condition to rely on.
    told = sum("no conditional writes" in record.getMessage() for record in caplog.records)
    assert told == (not found.creates)
    with pytest.raises(CheckpointException) as caught:
        save(found, url, state(), overwrite=False)
    assert isinstance(next(iter(caught.value.failures.values()))[0], CheckpointExistsError)
    assert not [name for name in found.left_behind() if "probe" in name or "tmp-" in name]


def test_the_newest_is_found(found: Backend) -> None:
    for step in (1, 2):
        save(found, f"{found.root}/step-{step}", {"w": torch.full((3,), float(step))})
    newest = latest_checkpoint(found.root, fs=found.fs)
    assert newest is not None
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=newest, storage_reader=BucketReader(fs=found.fs), no_dist=True)
    assert target["w"].tolist() == [2.0, 2.0, 2.0]


def test_a_flipped_bit_is_found(found: Backend) -> None:
    url = f"{found.root}/step-1"
    save(found, url, state())
    name = next(one for one in found.fs.find(url) if one.endswith(".distcp"))
    data = bytearray(found.fs.cat_file(name))
    data[len(data) // 2] ^= 1
    found.fs.pipe_file(name, bytes(data))
    with pytest.raises(CheckpointException) as caught:
        load(found, url)
    failure = next(iter(caught.value.failures.values()))[0]
    assert isinstance(failure, CorruptDataError)
    # In memory loads are pinned to what was committed.
    assert ("was replaced" if found.name == "memory" else "Checksum mismatch") in str(failure)
