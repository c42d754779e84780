"""What the process holds: the same over any number of saves, and nothing more after `close()`."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketpoint.staging import Stager, StagingOptions
from staging.helpers import Upload, both_kinds, finished, sync_and_async

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes that the process has in memory, shared ones included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def give_back() -> None:
    """Return what earlier tests left to the kernel, so that no later `free` does it and is taken for ours."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def save(stager: Stager, source: dict[str, torch.Tensor], step: int) -> None:
    # New tensors over old memory: what the C library's heap keeps of freed tensors is not measured here.
    state: dict[str, Any] = {"model": {key: value.fill_(step).detach() for key, value in source.items()}, "step": step}
    upload = Upload(finished(stager.stage(state)))
    upload.finish()


@both_kinds
@sync_and_async
def test_keeps_resident_memory_and_descriptors_over_fifty_saves(shared: bool, beside: bool) -> None:
    source = {str(index): torch.ones(MIB // 4) for index in range(16)}
    stager = Stager(StagingOptions(use_shared_memory=shared, use_async_staging=beside))
    for step in range(5):
        save(stager, source, step)
    gc.collect()
    resident_before, descriptors_before = resident(), descriptors()
    for step in range(50):
        save(stager, source, step)
    gc.collect()
    assert abs(resident() - resident_before) < 0.01 * resident_before
    assert descriptors() == descriptors_before
    assert stager.staged_bytes == 16 * MIB
    stager.close()


@both_kinds
@sync_and_async
@pytest.mark.parametrize(("when_busy", "count"), [("wait", 1), ("double_buffer", 2)])
def test_returns_all_memory_by_close(shared: bool, beside: bool, when_busy: Any, count: int) -> None:
    state = {"w": torch.ones(64 * MIB, dtype=torch.uint8)}
    give_back()
    resident_before, descriptors_before = resident(), descriptors()
    stager = Stager(StagingOptions(use_shared_memory=shared, use_async_staging=beside, when_busy=when_busy))
    stager.prefault(state)
    prefaulted = resident()
    assert prefaulted - resident_before >= 0.8 * count * 64 * MIB
    copies = [finished(stager.stage(state)) for _ in range(count)]
    assert resident() - prefaulted < 4 * MIB
    copies.clear()
    assert resident() - resident_before >= 0.95 * count * 64 * MIB
    stager.close()
    gc.collect()
    assert resident() - resident_before < 4 * MIB
    assert descriptors() == descriptors_before


@both_kinds
def test_returns_a_state_that_was_never_saved_when_it_is_dropped(shared: bool) -> None:
    """Its arena was given up after the deadline: only the state itself keeps it."""
    state = {"w": torch.ones(64 * MIB, dtype=torch.uint8)}
    stager = Stager(StagingOptions(use_shared_memory=shared, unread_timeout_s=0.05))
    held = finished(stager.stage(state))
    finished(stager.stage(state))
    both = resident()
    del held
    gc.collect()
    assert both - resident() >= 0.95 * 64 * MIB
    assert stager.staged_bytes == 64 * MIB
