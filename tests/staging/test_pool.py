"""Options of a stager, and its memory: when it is made, waited for and given up."""

from __future__ import annotations

import collections
import itertools
import logging
import math
import warnings
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import StagingOptions as TorchStagingOptions

from bucketpoint.errors import BucketpointError, StagingError
from bucketpoint.staging import Stager, StagingOptions, as_staging_options
from bucketpoint.staging import pool as pool_module
from bucketpoint.staging.pool import Arena
from staging.helpers import Beside, Upload, both_kinds, finished, memory_of, sync_and_async

pytestmark = pytest.mark.contract

KIB = 1 << 10


def state_of(kib: int, step: float = 0) -> dict[str, Any]:
    return {"w": torch.full((kib * KIB // 4,), float(step)), "step": step}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the arenas that are allocated, in order."""
    sizes: list[int] = []

    class CountedArena(Arena):
        def __init__(self, nbytes: int, *, shared: bool) -> None:
            super().__init__(nbytes, shared=shared)
            sizes.append(self.nbytes)

    monkeypatch.setattr(pool_module, "Arena", CountedArena)
    return sizes


# -- reuse ------------------------------------------------------------------------------------------------------------


@sync_and_async
@both_kinds
def test_reuses_the_memory_of_the_last_save_for_states_made_afresh(shared: bool, beside: bool, made: list[int]) -> None:
    stager = Stager(StagingOptions(use_shared_memory=shared, use_async_staging=beside))
    kept: list[Any] = []
    addresses = set()
    for step in range(6):
        # Kept, so that no object's id comes back.
        kept.append({"model": {"w": torch.full((500,), float(step))}, "ema": torch.ones(20, dtype=torch.bfloat16)})
        copied = finished(stager.stage(kept[-1]))
        assert copied["model"]["w"].tolist() == [step] * 500
        addresses.add(memory_of(copied, "ema"))
        del copied
    assert len(made) == len(addresses) == 1
    assert stager.staged_bytes == made[0]
    stager.close()
    assert stager.staged_bytes == 0


def test_uses_the_same_memory_for_other_tensors_of_the_same_size() -> None:
    stager = Stager()
    addresses = set()
    for state in ({"w": torch.ones(16, 16)}, {"x": torch.ones(256)}, {"a": torch.ones(128), "b": torch.zeros(128)}):
        copied = finished(stager.stage(state))
        assert all(torch.equal(copied[key], tensor) for key, tensor in state.items())
        addresses.add(memory_of(copied, next(iter(state))))
        del copied
    assert len(addresses) == 1


@pytest.mark.parametrize(
    ("saved", "expected", "held"),
    [
        pytest.param([64, 128, 32, 96], [64, 128, 32, 96], 96, id="layout that changes"),
        pytest.param([64, 32] * 4, [64, 32, 64], 64 + 32, id="two that come back in turn"),
        pytest.param([64, 32, 64, 32, 16, 16, 16, 16, 8], [64, 32, 64, 16, 8], 8, id="one that no longer comes"),
    ],
)
def test_keeps_memory_of_sizes_that_come_back(
    saved: list[int], expected: list[int], held: int, made: list[int]
) -> None:
    stager = Stager()
    for kib in saved:
        finished(stager.stage(state_of(kib)))
    assert made == [kib * KIB for kib in expected]
    assert stager.staged_bytes == held * KIB


def test_serves_plain_and_double_buffered_use_by_one_stager_in_the_needed_memory(made: list[int]) -> None:
    stager = Stager(StagingOptions(when_busy="double_buffer"))
    for _ in range(5):
        finished(stager.stage(state_of(64)))
    assert made == [64 * KIB]
    for _ in range(5):
        upload = Upload(finished(stager.stage(state_of(64))))
        upload.reads.wait(60)
        finished(stager.stage(state_of(64)))
        upload.finish()
    assert made == [64 * KIB] * 2
    stager.close()
    assert stager.staged_bytes == 0


# -- cap --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["stage", "prefault"])
def test_says_how_much_is_needed_under_a_cap_below_the_state(call: str, made: list[int]) -> None:
    stager = Stager(StagingOptions(max_bytes=64 * KIB))
    with pytest.raises(StagingError, match=rf"needs {128 * KIB} bytes.*max_bytes is {64 * KIB}.*{128 * KIB} or more"):
        getattr(stager, call)(state_of(128))
    assert not made
    assert finished(stager.stage(state_of(64, 5)))["w"].unique().tolist() == [5]


def test_waits_in_double_buffering_under_a_cap_without_room_for_two(made: list[int]) -> None:
    stager = Stager(StagingOptions(when_busy="double_buffer", max_bytes=100 * KIB))
    upload = Upload(finished(stager.stage(state_of(64))))
    assert upload.reads.wait(60)
    second = Beside(lambda: memory_of(finished(stager.stage(state_of(64)))))
    assert second.is_blocked()
    assert stager.staged_bytes == 64 * KIB
    upload.finish()
    second.outcome.result(60)
    assert made == [64 * KIB]


def test_makes_room_under_the_cap_from_idle_memory_of_other_sizes() -> None:
    stager = Stager(StagingOptions(max_bytes=100 * KIB))
    for kib in (64, 32, 64, 32, 80, 64):
        finished(stager.stage(state_of(kib)))
        assert stager.staged_bytes <= 100 * KIB


def test_counts_states_never_saved_under_the_cap_as_long_as_they_are_kept() -> None:
    stager = Stager(StagingOptions(max_bytes=100 * KIB, unread_timeout_s=0.01))
    unsaved = finished(stager.stage(state_of(64, 5)))
    with pytest.raises(StagingError, match=rf"needs {64 * KIB} bytes.*never saved hold {64 * KIB} of the {100 * KIB}"):
        stager.stage(state_of(64))
    assert unsaved["w"].unique().tolist() == [5]
    del unsaved
    assert finished(stager.stage(state_of(64, 6)))["w"].unique().tolist() == [6]


def test_counts_private_memory_that_another_process_saves_under_the_cap() -> None:
    stager = Stager(StagingOptions(use_shared_memory=False, max_bytes=100 * KIB))
    staged: Any = finished(stager.stage(state_of(64)))
    sent = ForkingPickler.dumps(staged)
    second = Beside(lambda: finished(stager.stage(state_of(64, 6)))["w"].unique().tolist())
    assert second.is_blocked()
    staged.lease.end()
    assert second.outcome.result(60) == [6]
    assert sent


# -- prefault ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("when_busy", "count"), [("wait", 1), ("double_buffer", 2), ("error", 1)])
def test_makes_by_prefault_what_the_next_saves_use(when_busy: Any, count: int, made: list[int]) -> None:
    stager = Stager(StagingOptions(when_busy=when_busy))
    for _ in range(3):
        stager.prefault(state_of(64))
    assert made == [64 * KIB] * count
    copies = [finished(stager.stage(state_of(64, step))) for step in range(count)]
    assert [copied["w"].unique().tolist() for copied in copies] == [[step] for step in range(count)]
    assert len(made) == count


def test_touches_no_memory_that_a_save_reads_in_prefault() -> None:
    stager = Stager()
    copied = finished(stager.stage(state_of(64, 5)))
    stager.prefault(state_of(64))
    assert copied["w"].unique().tolist() == [5]


def test_gives_nobody_memory_that_prefault_still_writes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save on another thread, while the pages are being made."""
    stager = Stager()
    saves = collections.deque[Beside]()
    populate = Arena.populate

    def save_meanwhile(arena: Arena) -> None:
        saves.append(Beside(lambda: finished(stager.stage(state_of(64, 5)))))
        saves[-1].join(0.2)
        populate(arena)

    monkeypatch.setattr(Arena, "populate", save_meanwhile)
    stager.prefault(state_of(64))
    assert saves.pop().outcome.result(60)["w"].unique().tolist() == [5]


SWITCHES = ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy")
COMBINATIONS = [dict(zip(SWITCHES, values, strict=True)) for values in itertools.product((False, True), repeat=4)]


def _name(switches: dict[str, bool]) -> str:
    return "+".join(name.removeprefix("use_") for name, on in switches.items() if on) or "none"


@pytest.mark.parametrize("switches", COMBINATIONS, ids=_name)
def test_stages_without_an_accelerator_in_every_combination(
    switches: dict[str, bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"w": weight, "column": weight[:, 1], "step": 3}
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG, logger="bucketpoint"):
        warnings.simplefilter("error")
        stager = Stager(TorchStagingOptions(**switches))
        assert stager.options == StagingOptions(**switches)
        for step in range(3):
            weight.fill_(step)
            answer = stager.stage(state)
            assert isinstance(answer, Future) == switches["use_async_staging"]
            copied = finished(answer)
            weight.fill_(-1)
            assert copied["w"].tolist() == [[step] * 4] * 3
            assert copied["column"].tolist() == [step] * 3
            assert copied["step"] == 3
            assert copied["w"].is_shared() == switches["use_shared_memory"]
            assert not copied["w"].is_pinned()
            del answer, copied
        stager.close()
    told = [record for record in caplog.records if "no accelerator" in record.message]
    assert [record.levelno for record in told] == [logging.DEBUG]
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_takes_options_of_ours_and_none() -> None:
    assert as_staging_options(None) == StagingOptions()
    assert not StagingOptions().use_async_staging
    options = StagingOptions(when_busy="error", max_bytes=1 << 20, unread_timeout_s=math.inf)
    assert as_staging_options(options) is options


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"when_busy": "sometimes"}, "wait, double_buffer, error"),
        ({"when_busy": None}, "wait, double_buffer, error"),
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"max_bytes": -1}, "max_bytes=-1"),
        ({"unread_timeout_s": 0}, "unread_timeout_s=0"),
        ({"unread_timeout_s": -1.0}, "unread_timeout_s=-1.0"),
        ({"unread_timeout_s": math.nan}, "unread_timeout_s=nan"),
    ],
)
def test_refuses_a_value_that_cannot_work(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(BucketpointError, match=said):
        StagingOptions(**wrong)


@pytest.mark.parametrize("wrong", [{"use_pinned_memory": True}, "fast", 1, True, SimpleNamespace(use_pinned_memory=1)])
def test_refuses_anything_else_by_name(wrong: Any) -> None:
    with pytest.raises(BucketpointError, match=f"^{type(wrong).__qualname__} does not describe staging options"):
        Stager(wrong)
