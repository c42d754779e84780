"""Nothing ever overwrites what a save still reads, however training, saves and their failures fall together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketpoint.staging import StagedState, Stager, StagingOptions, lease, take_turn
from staging.helpers import finished

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


class SlowUpload(threading.Thread):
    """Reads a staged state as DCP does, slowly, and notes whatever is not of its own step."""

    def __init__(self, staged: StagedState, step: int, save: Save) -> None:
        super().__init__(daemon=True)
        self.wrong: list[str] = []
        self.looks = 0
        self.failure: Exception | None = None
        self._staged: StagedState | None = staged
        self._step, self._save = step, save
        self.start()

    def run(self) -> None:
        try:
            self._upload()
        except RuntimeError as error:
            # Kept with its traceback, and so with its staged state, as a future keeps it.
            self.failure = error

    def _upload(self) -> None:
        staged, self._staged = self._staged, None
        time.sleep(self._save.begins_after_s)
        self._look("before it begins", {key: staged[key] for key in staged})
        if self._save.ends == "failed before it read":
            raise RuntimeError("no process group")
        read = dict(staged.items())
        if self._save.turn:
            take_turn(f"step {self._step}")
        for look in range(LOOKS):
            self._look(f"at look {look}", read)
            time.sleep(self._save.pause_s)
        self._look("at the end", read)
        if staged.lease.ended:
            self.wrong.append("the lease ended before the upload")
        if self._save.ends == "failed":
            raise RuntimeError("503 Slow Down")

    def _look(self, when: str, read: dict[str, Any]) -> None:
        self.looks += 1
        expected = float(self._step)
        for key, value in read.items():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor) and not bool((tensor == expected).all()):
                    self.wrong.append(f"{key} of step {self._step} is {tensor.unique().tolist()} {when}")
                if isinstance(tensor, int) and tensor != self._step:
                    self.wrong.append(f"{key} of step {self._step} is {tensor} {when}")


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
    uploads: list[SlowUpload] = []
    for step, (save, size) in enumerate(zip(plan, elements, strict=False), start=1):
        training = Training(size)
        training.set_to(step)
        answer = stager.stage(training.state(step))
        staged = finished(answer)
        training.set_to(-step)
        if save.ends != "dropped":
            uploads.append(SlowUpload(staged, step, save))
        del staged, answer
    for upload in uploads:
        upload.join(60)
        assert not upload.is_alive()
    assert [wrong for upload in uploads for wrong in upload.wrong] == []
    committed = sum(save.ends in ("committed", "failed") for save in plan)
    assert sum(upload.looks for upload in uploads) == len(uploads) + committed * (LOOKS + 1)
    stager.close()
    assert stager.staged_bytes == 0
