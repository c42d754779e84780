"""Memory is made in the needed size, registered with the driver once, and given back whole."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import sys
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketpoint.errors import StagingError
from bucketpoint.staging import Stager, StagingOptions
from bucketpoint.staging.layout import Ordering
from bucketpoint.staging.pool import Arena
from staging.helpers import both_kinds, finished, memory_of, sync_and_async

MIB = 1 << 20


@dataclass
class Driver:
    """What of the CUDA runtime is called: registrations, and whether it takes them."""

    refuses: bool = False
    registered: dict[int, int] = field(default_factory=dict)
    resident: list[float] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", pointer, nbytes, flags))
        self.resident.append(_resident(pointer, nbytes))
        if self.refuses or pointer in self.registered:
            return 2
        self.registered[pointer] = nbytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        self.calls.append(("unregister", pointer))
        return 0 if self.registered.pop(pointer, None) else 1


def _resident(pointer: int, nbytes: int) -> float:
    """The fraction of the pages that the kernel has backed (mincore(2))."""
    pages = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes), found) == 0
    return sum(page & 1 for page in found) / pages


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


@pytest.fixture
def from_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are taken to come from a CUDA device, though this machine may have none: they are copied all the same."""

    plan = Stager._plan

    def plan_from_cuda(stager: Stager, state_dict: dict[str, Any]) -> Any:
        flat, layout = plan(stager, state_dict)
        layout.devices = [torch.device("cuda", 0)]
        return flat, layout

    monkeypatch.setattr(Stager, "_plan", plan_from_cuda)
    monkeypatch.setattr(Ordering, "of", classmethod(lambda cls, devices: cls({}, None)))


# -- size -------------------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 4097, 3 * MIB + 1])
def test_rounds_an_arena_up_to_a_cache_line_and_no_further(nbytes: int, shared: bool) -> None:
    arena = Arena(nbytes, shared=shared)
    assert nbytes <= arena.nbytes < nbytes + 64
    assert arena.memory.untyped_storage().nbytes() == arena.nbytes
    assert arena.memory.is_shared() == shared
    assert arena.memory.data_ptr() % 64 == 0


@both_kinds
def test_says_how_much_was_wanted_of_memory_that_is_not_to_be_had(shared: bool) -> None:
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(StagingError, match=f"{1 << 60} bytes of host memory"):
        Arena(1 << 60, shared=shared)
    assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.skipif(sys.platform != "linux", reason="madvise and /proc are Linux's")
@both_kinds
def test_leaves_staged_states_out_of_core_dumps(shared: bool) -> None:
    arena = Arena(MIB, shared=shared)
    address, mapping = arena.memory.data_ptr(), range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            mapping = range(*(int(bound, 16) for bound in bounds.groups()))
        elif line.startswith("VmFlags:") and address in mapping:
            assert "dd" in line.split()
            return
    pytest.fail("the arena is in no mapping")


@both_kinds
def test_keeps_a_tensor_after_the_arena_that_it_lies_in(shared: bool) -> None:
    arena = Arena(1 << 20, shared=shared)
    gone = weakref.ref(arena)
    view = arena.view((torch.float32, (1 << 18,), (1,), 0))
    view.fill_(3)
    del arena
    assert gone() is None
    assert bool((view == 3).all())


# -- registration -----------------------------------------------------------------------------------------------------


@both_kinds
def test_registers_an_arena_once_in_prefault_over_any_number_of_saves(
    driver: Driver, from_cuda: None, shared: bool
) -> None:
    stager = Stager(StagingOptions(use_shared_memory=shared))
    stager.prefault({"w": torch.ones(1000)})
    assert len(driver.registered) == 1
    for step in range(5):
        copied = finished(stager.stage({"w": torch.full((1000,), float(step))}))
        address = memory_of(copied)
        assert copied["w"].unique().tolist() == [step]
        del copied
    assert driver.calls == [("register", address, 4032, 1)]
    stager.close()
    assert driver.calls[1:] == [("unregister", address)]
    stager.close()
    del stager
    gc.collect()
    assert len(driver.calls) == 2


@both_kinds
def test_leaves_no_registration_of_a_layout_or_a_stager_that_has_gone(
    driver: Driver, from_cuda: None, shared: bool
) -> None:
    stager = Stager(StagingOptions(use_shared_memory=shared))
    for size in (MIB, 2 * MIB, 3 * MIB):
        finished(stager.stage({"w": torch.ones(size)}))
        assert len(driver.registered) == 1
    # The driver would back the pages itself, slowly, and kernels of training would wait for it.
    assert driver.resident == [1, 1, 1]
    # Nobody closes it.
    del stager
    gc.collect()
    assert not driver.registered
    assert [call[0] for call in driver.calls].count("unregister") == 3


@pytest.mark.filterwarnings("always")
@sync_and_async
def test_warns_once_of_a_driver_that_refuses_and_asks_it_no_more(
    driver: Driver, from_cuda: None, beside: bool, recwarn: pytest.WarningsRecorder
) -> None:
    driver.refuses = True
    stager = Stager(StagingOptions(use_async_staging=beside))
    for step in range(4):
        assert finished(stager.stage({"w": torch.full((100,), float(step))}))["w"].tolist() == [step] * 100
    assert len(driver.calls) == 1
    assert finished(stager.stage({"w": torch.full((200,), 5.0)}))["w"].tolist() == [5] * 200
    told = [str(warning.message) for warning in recwarn if warning.category is RuntimeWarning]
    assert len(told) == 1
    assert told[0].startswith("The driver does not pin 448 bytes of host memory (see ulimit -l)")
    stager.close()
    assert [call[0] for call in driver.calls] == ["register"] * len(driver.calls)


def test_asks_no_driver_without_pinning_or_for_a_state_of_the_processors(
    driver: Driver, request: pytest.FixtureRequest
) -> None:
    finished(Stager().stage({"w": torch.ones(100)}))
    request.getfixturevalue("from_cuda")
    stager = Stager(StagingOptions(use_pinned_memory=False))
    stager.prefault({"w": torch.ones(100)})
    finished(stager.stage({"w": torch.ones(100)}))
    stager.close()
    assert not driver.calls


@sync_and_async
def test_sets_the_callers_device_before_the_driver_is_asked(
    driver: Driver, from_cuda: None, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """The first call on a new thread makes a context, of half a GiB, on whatever device is current."""
    monkeypatch.setattr(Ordering, "of", classmethod(lambda cls, devices: cls({}, 3)))
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: driver.calls.append(("device", index)), raising=True
    )
    finished(Stager(StagingOptions(use_async_staging=beside)).stage({"w": torch.ones(100)}))
    assert [call[0] for call in driver.calls[:2]] == ["device", "register"]
    assert driver.calls[0] == ("device", 3)
