"""Memory, threads and open files that a process keeps after many saves and loads through many writers and readers."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketReader, BucketWriter, async_save
from kit.servers import S3Server

OBJECTS_OF_A_CLIENT = 6_000
"""A client that parses botocore's description of S3 for itself has 36,000 objects, in 13 MB."""


def grown(step: Callable[[int], None], times: int) -> tuple[int, ...]:
    """Objects, threads and open files that `times` steps add, once the first ones have filled every cache."""

    def count() -> tuple[int, ...]:
        gc.collect()
        return len(gc.get_objects()), threading.active_count(), len(os.listdir("/dev/fd"))

    for number in range(3):
        step(number)
    before = count()
    for number in range(3, 3 + times):
        step(number)
    return tuple(now - then for now, then in zip(count(), before, strict=True))


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    """pytest keeps every log record of a test until its end."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def save_and_load(url: str, options: dict[str, Any]) -> None:
    state = {"weight": torch.arange(1000.0)}
    async_save(state, checkpoint_id=url, storage_writer=BucketWriter(storage_options=options)).result()
    loaded = {"weight": torch.zeros(1000)}
    dcp.load(loaded, checkpoint_id=url, storage_reader=BucketReader(storage_options=options))
    assert torch.equal(loaded["weight"], state["weight"])


def test_leaves_nothing_behind_a_hundred_saves_and_loads(tmp_path: Path) -> None:
    objects, threads, files = grown(lambda number: save_and_load(f"file://{tmp_path}/{number}", {}), 100)

    assert objects < 1000
    assert threads <= 0
    assert files <= 0


def test_leaves_one_small_client_for_each_other_set_of_options(minio: S3Server) -> None:
    bucket, times = minio.make_bucket(), 10

    def step(number: int) -> None:
        save_and_load(minio.url(bucket, f"{number}"), {**minio.options, "connections": 10 + number})

    objects, threads, _ = grown(step, times)

    assert objects < OBJECTS_OF_A_CLIENT * times
    assert threads <= 0
