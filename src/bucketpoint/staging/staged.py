"""The dict that `stage()` returns. It knows its lease, and tells it who reads. Nothing of DCP's is imported here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from bucketpoint.staging.lease import Lease
from bucketpoint.staging.process import check_picklable, crossing, dead_checkpoint_process


class StagedState(dict[Any, Any]):
    """A state dict in staging memory, which stays its own until it is dropped or its save has ended.

    DCP reads the top level once, on the thread that saves, before that save's first collective: that is where a save
    learns which lease is its own. In a checkpoint process it arrives over the same memory, with a lease of its own.
    """

    def __init__(self, state: dict[Any, Any], lease: Lease, on_pickle: Callable[[], None] | None = None) -> None:
        super().__init__(state)
        self._lease = lease
        self._hold = lease.held_by_state()
        self._on_pickle = on_pickle

    @property
    def lease(self) -> Lease:
        return self._lease

    def items(self) -> Any:
        self._lease.enter()
        return super().items()

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return {copy.deepcopy(key, memo): copy.deepcopy(self[key], memo) for key in self}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """On its way to DCP's checkpoint process: its save takes its turn here, before that process sees it."""
        self._lease.enter()
        self._lease.wait_for_turn()
        dead = dead_checkpoint_process()
        if dead is not None:
            raise dead
        plain = {key: self[key] for key in self}
        check_picklable(plain)
        if self._on_pickle is not None:
            self._on_pickle()
        return _arrived, (crossing(plain), self._lease.label)


def _arrived(state: dict[Any, Any], label: str) -> StagedState:
    """In the checkpoint process: what the thread that unpickles it saves next, beside training as a thread would."""
    lease = Lease(unread_timeout_s=math.inf)
    lease.label = label
    return StagedState(state, lease)
