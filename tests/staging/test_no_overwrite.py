"""Nothing ever overwrites what a save still reads, however training, saves and their failures fall together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketpoint.staging import StagedState, Stager, StagingOptions, lease, take_turn
from staging.helpers import Beside, finished

pytestmark = pytest.mark.contract

LOOKS = 4

UNREAD_TIMEOUT_S = 0.05
"""Short, so that saves which are late or never begin are passed over in these tests: that must do no harm either."""


@pytest.fixture(autouse=True, scope="module")
def impatient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "_POLL_S", 0.01)
        yield


@dataclass(frozen=True)
class Save:
    """One save: how it ends, how long it takes and how soon it begins."""

    ends: Literal["committed", "failed", "failed before it read", "dropped"]
    pause_s: float
    begins_after_s: float
    turn: bool


saves = st.builds(
    Save,
    ends=st.sampled_from(["committed", "committed", "committed", "failed", "failed before it read", "dropped"]),
    pause_s=st.sampled_from([0.0, 0.001, 0.004]),
    begins_after_s=st.sampled_from([0.0, 0.0, 0.003]),
    turn=st.booleans(),
)


def upload(held: list[StagedState], step: int, save: Save) -> None:
    """Read a staged state as DCP does, slowly. An error keeps it with the traceback, as a future does."""
    staged = held.pop()
    time.sleep(save.begins_after_s)
    assert_of_step({key: staged[key] for key in staged}, step)
    if save.ends == "failed before it read":
        raise RuntimeError("no process group")
    read = dict(staged.items())
    if save.turn:
        take_turn(f"step {step}")
    for _ in range(LOOKS):
        assert_of_step(read, step)
        time.sleep(save.pause_s)
    assert_of_step(read, step)
    assert not staged.lease.ended
    if save.ends == "failed":
        raise RuntimeError("503 Slow Down")


def assert_of_step(read: dict[str, Any], step: int) -> None:
    for key, value in read.items():
        for one in value if isinstance(value, list) else [value]:
            same = (one == step).all() if isinstance(one, torch.Tensor) else one == step
            assert same, f"{key} of step {step} is {one}"


class Training:
    """A state that is changed in place, and is made of tensors of several kinds."""

    def __init__(self, elements: int) -> None:
        self.buffer = torch.zeros(elements + 32)
        self.weight = torch.zeros(elements, dtype=torch.bfloat16)
        self.matrix = torch.zeros(16, 16)

    def set_to(self, value: int) -> None:
        for tensor in (self.buffer, self.weight, self.matrix):
            tensor.fill_(value)

    def state(self, step: int) -> dict[str, Any]:
        return {
            "w": self.weight,
            "views": [self.buffer[:20], self.buffer[10:30], self.buffer],
            "column": self.matrix[:, 3],
            "step": step,
        }


@settings(max_examples=40)
@given(
    plan=st.lists(saves, min_size=2, max_size=6),
    when_busy=st.sampled_from(["wait", "double_buffer"]),
    beside=st.booleans(),
    shared=st.booleans(),
    elements=st.lists(st.sampled_from([64, 64, 50_000]), min_size=6, max_size=6),
)
def test_reads_its_own_step_from_beginning_to_end_in_every_upload(
    plan: list[Save], when_busy: Any, beside: bool, shared: bool, elements: list[int]
) -> None:
    stager = Stager(
        StagingOptions(
            when_busy=when_busy, use_async_staging=beside, use_shared_memory=shared, unread_timeout_s=UNREAD_TIMEOUT_S
        )
    )
    uploads: list[tuple[Save, Beside]] = []
    for step, (save, size) in enumerate(zip(plan, elements, strict=False), start=1):
        training = Training(size)
        training.set_to(step)
        answer = stager.stage(training.state(step))
        staged = finished(answer)
        training.set_to(-step)
        held = [staged]
        if save.ends != "dropped":
            uploads.append((save, Beside(partial(upload, held, step, save))))
        del staged, answer, held
    for save, uploading in uploads:
        error = uploading.outcome.exception(60)
        assert (error is None) == (save.ends == "committed"), error
        assert error is None or isinstance(error, RuntimeError), error
    stager.close()
    assert stager.staged_bytes == 0
