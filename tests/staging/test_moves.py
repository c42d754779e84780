"""Memory of this process is copied by bytes from several threads: all of it, once, and by nobody afterwards."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketpoint.staging import Stager
from bucketpoint.staging.layout import ArenaLayout, Movers, Ordering, run_copies
from bucketpoint.staging.pool import Arena
from staging.helpers import finished

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few kilobytes are many pieces, and each thread has some."""
    monkeypatch.setattr("bucketpoint.staging.layout._PIECE", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 5000), min_size=2, max_size=20, unique=True),
    skipped=st.sets(st.integers(0, 19)),
    threads=st.integers(1, 5),
)
def test_copies_every_byte_of_every_region_and_touches_no_other(
    cuts: list[int], skipped: set[int], threads: int
) -> None:
    source = torch.randint(1, 255, (5000,), dtype=torch.uint8)
    target = torch.zeros(5000 + 64, dtype=torch.uint8)
    edges = sorted(cuts)
    spans = [span for number, span in enumerate(itertools.pairwise(edges)) if number not in skipped]
    expected = target.clone()
    for low, high in spans:
        expected[low + 64 : high + 64] = source[low:high]
    movers = Movers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        at = source.data_ptr()
        movers.move([(at + low, at + high, low + 64) for low, high in spans], target.data_ptr(), iter(()))
    movers.close()
    assert torch.equal(target, expected)


def test_joins_tensors_that_touch_to_one_region_in_their_places() -> None:
    buffer = torch.arange(1000.0)
    state = {"a": buffer[:300], "b": buffer[300:700], "c": buffer[700:]}
    with Stager() as stager:
        staged = finished(stager.stage(state))
        assert all(torch.equal(staged[name], state[name]) for name in state)
        assert staged["b"].data_ptr() - staged["a"].data_ptr() == 1200
        assert stager.staged_bytes <= 4000 + 64


class Moves:
    """Copies of bytes that take a while, or that fail on the main thread or on those that help it."""

    def __init__(self) -> None:
        self.writing: list[int] = []
        self.on_main: BaseException | None = None
        self.on_helper: BaseException | None = None
        self._memmove = ctypes.memmove

    def __call__(self, target: int, source: int, size: int) -> None:
        error = self.on_main if threading.current_thread() is threading.main_thread() else self.on_helper
        if error is not None:
            raise error
        self.writing.append(size)
        time.sleep(0.05)
        self._memmove(target, source, size)
        self.writing.pop()


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    moves = Moves()
    monkeypatch.setattr(ctypes, "memmove", moves)
    return moves


def test_leaves_no_thread_that_writes_after_an_interrupt(moves: Moves) -> None:
    moves.on_main = KeyboardInterrupt()
    with Stager() as stager:
        with pytest.raises(KeyboardInterrupt):
            stager.stage({"w": torch.ones(5000)})
        assert not moves.writing
        moves.on_main = None
        assert finished(stager.stage({"w": torch.ones(5000)}))["w"].sum() == 5000


def test_fails_the_save_by_a_failure_on_a_helping_thread(moves: Moves) -> None:
    moves.on_helper = MemoryError("no room")
    with Stager() as stager, pytest.raises(Exception, match="no room"):
        stager.stage({"w": torch.ones(5000)})


def test_ends_the_threads_that_copied_in_close() -> None:
    def copying_threads() -> int:
        return sum(thread.name.startswith("bucketpoint-copy") for thread in threading.enumerate())

    before = copying_threads()
    with Stager() as stager:
        finished(stager.stage({"w": torch.ones(5000)}))
        assert copying_threads() > before
    assert copying_threads() == before


def test_stages_a_tensor_as_it_is_now_whatever_was_done_to_the_last_copy() -> None:
    w = torch.ones(100)
    with Stager() as stager:
        staged = finished(stager.stage({"w": w}))
        staged["w"].requires_grad_().note = 1
        del staged
        again = finished(stager.stage({"w": w}))["w"]
        assert not again.requires_grad
        assert not hasattr(again, "note")
        assert finished(stager.stage({"w": w.requires_grad_()}))["w"].requires_grad
        assert not finished(stager.stage({"w": w.detach()}))["w"].requires_grad


def test_leaves_no_thread_that_writes_if_the_system_refuses_one(monkeypatch: pytest.MonkeyPatch, moves: Moves) -> None:
    refused: list[str] = []
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("bucketpoint-copy") and not thread.name.endswith("_0"):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with Stager() as stager:
        staged = finished(stager.stage({"w": torch.ones(5000)}))
        assert refused
        assert not moves.writing
        assert staged["w"].sum() == 5000


class Stream:
    """A device's stream whose copies are under way until `synchronize`."""

    under_way = False

    def wait_event(self, event: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def synchronize(self) -> None:
        self.under_way = False


DEVICE = torch.device("meta")


def run_on(stream: Any, sources: list[torch.Tensor], *, beside: bool = False) -> None:
    """Copy sources of eight bytes each, those of the device on its stream."""
    places = [(torch.uint8, (8,), (1,), 8 * index) for index in range(len(sources))]
    layout = ArenaLayout(8 * len(sources), places, [(source, index) for index, source in enumerate(sources)])
    ordering = Ordering({DEVICE: None}, None)  # type: ignore[dict-item]
    arena = Arena(layout.nbytes, shared=False)
    run_copies(layout, arena, {DEVICE: stream}, Movers(), ordering, non_blocking=True, beside=beside)


@pytest.mark.parametrize("failing", ["cpu", "meta"])
def test_ends_copies_of_a_device_when_a_later_copy_fails(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """The arena goes to the next save: a copy still under way would write to its state."""
    stream = Stream()

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor], **how: Any) -> None:
        kind = sources[0].device.type
        if kind != "cpu":
            stream.under_way = True
        if kind == failing:
            raise RuntimeError("refused")

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    with pytest.raises(RuntimeError, match="refused"):
        run_on(stream, [torch.empty(8, dtype=torch.uint8, device=kind) for kind in ("cpu", DEVICE)])
    assert not stream.under_way


@pytest.mark.parametrize(("beside", "expected"), [(True, [64, 0, 64, 0, 22, 0]), (False, [150, 0])])
def test_leaves_room_in_the_drivers_queue_beside_training(
    monkeypatch: pytest.MonkeyPatch, beside: bool, expected: list[int]
) -> None:
    """Copies that are queued together, and a 0 for each wait for them."""
    asked: list[int] = []
    stream = Stream()
    monkeypatch.setattr(stream, "synchronize", lambda: asked.append(0))
    monkeypatch.setattr(torch, "_foreach_copy_", lambda targets, sources, non_blocking: asked.append(len(targets)))
    run_on(stream, [torch.empty(8, dtype=torch.uint8, device=DEVICE)] * 150, beside=beside)
    assert asked == expected
