"""The dict that `stage()` returns: it holds a lease on its memory, and records which thread reads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from bucketpoint.staging.lease import Lease, SavingRanks, StateHold


class StagedState(dict[Any, Any]):
    """A state dict in staging memory, which no other state gets until this one is dropped or its save has ended.

    DCP reads the top level once, on the saving thread, before the first collective of that save. At this point the
    thread enters the state's lease. In a checkpoint process the state arrives over the same memory, with a new lease.
    """

    def __init__(self, state: dict[Any, Any], lease: Lease, on_pickle: Callable[[], None] | None = None) -> None:
        super().__init__(state)
        self._lease = lease
        self._hold = StateHold(lease)
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
        """Pickle the state for DCP's checkpoint process. The save takes its turn before that process sees it."""
        from bucketpoint.staging.process import crossing, dead_checkpoint_process

        self._lease.enter()
        self._lease.wait_for_turn()
        dead = dead_checkpoint_process()
        if dead is not None:
            raise dead
        plain = crossing({key: self[key] for key in self})
        if self._on_pickle is not None:
            self._on_pickle()
        return _arrived, (plain, self._lease.label, self._lease.ranks.in_checkpoint_process())


def _arrived(state: dict[Any, Any], label: str, ranks: SavingRanks) -> StagedState:
    """Rebuild the state in the checkpoint process, with a lease for the thread that unpickles it and saves it next."""
    lease = Lease(unread_timeout_s=math.inf)
    lease.label = label
    lease.beside_training = False
    lease.ranks = ranks
    return StagedState(state, lease)
