"""What the staging tests share: one staged copy of a state, and uploads that read one the way DCP does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from bucketpoint.staging import StagedState, Stager, StagingOptions, stager

both_kinds = pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
sync_and_async = pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])


def finished(staged: StagedState | Future[StagedState]) -> StagedState:
    """The staged state, whichever of the two `stage()` returned."""
    return staged.result(timeout=60) if isinstance(staged, Future) else staged


def staged_copy(state: dict[str, Any], **options: Any) -> StagedState:
    """A copy by a stager that is used for nothing else."""
    return finished(Stager(StagingOptions(**options)).stage(state))


@contextmanager
def held_copies() -> Iterator[threading.Event]:
    """Hold copies to host memory back until the event is set, at the end of the block at the latest."""
    opened, run_copies = threading.Event(), stager.run_copies

    def run_later(*args: Any, **kwargs: Any) -> Any:
        assert opened.wait(240)
        return run_copies(*args, **kwargs)

    with mock.patch.object(stager, "run_copies", run_later):
        yield opened
        opened.set()


def memory_of(staged: StagedState, key: str = "w") -> int:
    """Address of the storage that a staged tensor lies in: its arena's."""
    address: int = staged[key].untyped_storage().data_ptr()
    return address


class Upload(threading.Thread):
    """A thread that reads a staged state, as DCP's does, and holds it until it is told to go on."""

    def __init__(self, staged: StagedState) -> None:
        super().__init__(daemon=True)
        self.reads = threading.Event()
        self.go_on = threading.Event()
        self._staged: StagedState | None = staged
        self.start()

    def run(self) -> None:
        staged, self._staged = self._staged, None
        staged.items()
        self.reads.set()
        self.go_on.wait(60)

    def finish(self) -> None:
        self.go_on.set()
        self.join(60)
        assert not self.is_alive()


class Beside(threading.Thread):
    """Runs something that is expected to block, and keeps what became of it."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.outcome: Future[Any] = Future()
        self._action = action
        self.start()

    def run(self) -> None:
        try:
            self.outcome.set_result(self._action())
        except BaseException as error:  # noqa: BLE001 (handed to whoever asks for the outcome)
            self.outcome.set_exception(error)

    def is_blocked(self, for_s: float = 0.1) -> bool:
        self.join(for_s)
        return not self.outcome.done()
