"""`Stager`, which copies states for DCP. It connects layout, memory, copies and leases."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from typing_extensions import Self

from bucketpoint.errors import BucketpointError, StagingError, first_fault
from bucketpoint.forks import renew_in_child
from bucketpoint.staging import lease as leases
from bucketpoint.staging.flatten import FlatState
from bucketpoint.staging.layout import ArenaLayout, Movers, Ordering, lay_out, run_copies
from bucketpoint.staging.lease import Lease, StagedState
from bucketpoint.staging.pool import GRACE_S, Arena, ArenaPool, StagingOptions, as_staging_options, overlap

logger = logging.getLogger(__name__)

_EARLIEST_FAILURE_S = 0.05
"""Least seconds from the start of a copy to the report of its failure. DCP, in every version up to torch 2.15, reports
a copy as completed if it fails before DCP's first check."""


class Stager:
    """An `AsyncStager` that copies states to host memory, which is kept between saves and not overwritten while in use.

    Pass it as `async_stager=` to `dcp.async_save`, for any number of saves through any writers. A `BucketWriter` needs
    no other stager. The memory is held until `close()`.

    Args:
        config: `bucketpoint.StagingOptions`, or torch's class of that name.

    Raises:
        BucketpointError: `config` is of neither type.
    """

    # Both are attributes of torch's protocol.
    should_synchronize_after_execute = _synchronize_after_execute = True

    def __init__(self, config: StagingOptions | Any = None) -> None:
        self.options = as_staging_options(config)
        self._pool = ArenaPool(self.options)
        self._warned = False
        self._streams: dict[torch.device, torch.Stream] = {}
        self._movers = Movers()
        self._closed = False
        self._begin()
        renew_in_child(self, Stager._begin)
        if not torch.accelerator.is_available():
            logger.debug("no accelerator: staging memory is not pinned, and copies are plain ones")

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        # A weak reference: a future holds the staged state, and the state holds its lease.
        self._latest: weakref.ref[Future[StagedState]] | None = None

    @property
    def staged_bytes(self) -> int:
        """Host memory held for staging, in bytes, whether a save reads it or not."""
        return self._pool.nbytes

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> StagedState | Future[StagedState]:
        """Copy a state to host memory.

        Args:
            state_dict: nested state of tensors (any shape, dtype and device) and Python objects.

        Returns:
            The copy, or with `use_async_staging` a future of it. Until the copy is complete, the state must not change.

        Raises:
            StagingOverlapError: an earlier save still reads the memory, and `when_busy="error"`.
            StagingError: the stager is closed, the cap is too small, or a value cannot be copied (the error has its
                key).
        """
        begun = time.monotonic()
        leases.end_own_save()
        if self.options.when_busy == "error":
            # Saves of other stagers count too: stagers share the collectives, though not the memory.
            earlier = leases.last_staged()
            if earlier is not None and earlier.begun and not earlier.ended_within(GRACE_S):
                raise overlap(earlier)
        flat, layout = self._plan(state_dict)
        arena, lease = self._pool.lease(layout.nbytes)
        lease.nbytes = layout.nbytes
        try:
            copy = functools.partial(self._copy, state_dict, flat, layout, arena, lease, Ordering.of(layout.devices))
            if not self.options.use_async_staging:
                staged = copy()
                lease.blocked_s = time.monotonic() - begun
                return staged
            with self._lock:
                if self._worker is None:
                    # One thread, so that copies are made in the order in which they were requested.
                    self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bucketpoint-staging")
                future = self._worker.submit(_beside_training, copy)
        except BaseException:
            lease.end()
            raise
        # Otherwise the lease of a copy that was cancelled before it began would never end.
        future.add_done_callback(lambda done: lease.end() if done.cancelled() else None)
        self._latest = weakref.ref(future)
        lease.blocked_s = time.monotonic() - begun
        return future

    def synchronize_staging(self) -> None:
        """Wait until the latest copy is complete. Then the state may change.

        Raises:
            StagingError: the copy failed.
        """
        future = self._latest() if self._latest is not None else None
        if future is not None:
            future.result()

    def prefault(self, state_dict: dict[str, Any]) -> None:
        """Allocate and pin the memory that saves of this state will need, so that the first save is not slow.

        Args:
            state_dict: any state of the same shapes and dtypes.

        Raises:
            StagingError: as `stage`.
        """
        _, layout = self._plan(state_dict)

        def make_ready(arena: Arena) -> None:
            arena.populate()
            self._pin_if_useful(arena, layout)

        self._pool.prepare(layout.nbytes, make_ready)

    def close(self) -> None:
        """Wait for running copies and saves, and free all memory. Closing twice is allowed."""
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        leases.end_own_save()
        if worker is not None:
            worker.shutdown(wait=True)
        self._pool.close()
        self._movers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plan(self, state_dict: dict[str, Any]) -> tuple[FlatState, ArenaLayout]:
        if self._closed:
            raise StagingError("The stager is closed", remedy="Make a new stager")
        flat = FlatState(state_dict)
        try:
            # With asynchronous staging, one torch call without the GIL delays training less than the faster byte copy.
            return flat, lay_out(flat.sources, by_bytes=not self.options.use_async_staging)
        except (RuntimeError, StagingError) as error:
            # Nested tensors and wrappers report a strided layout but have no strides.
            raise _fault(error, state_dict) from error

    def _copy(
        self,
        state_dict: dict[str, Any],
        flat: FlatState,
        layout: ArenaLayout,
        arena: Arena,
        lease: Lease,
        ordering: Ordering,
    ) -> StagedState:
        try:
            if ordering.caller is not None:
                # Before any other request of this thread to the driver.
                torch.accelerator.set_device_index(ordering.caller)
            self._pin_if_useful(arena, layout)
            # The caller may be in inference mode, and the worker thread never is: make plain tensors in both cases.
            with torch.inference_mode(False), torch.no_grad():
                non_blocking = self.options.use_non_blocking_copy and arena.pinned
                how = {"non_blocking": non_blocking, "beside": self.options.use_async_staging}
                views = run_copies(layout, arena, self._streams, self._movers, ordering, **how)
                state = flat.assemble(views, arena.memory)
        except BaseException as error:
            lease.end()
            if isinstance(error, BucketpointError) or not isinstance(error, Exception):
                raise
            raise _fault(error, state_dict) from error
        lease.memory = arena.shared_memory
        lease.copied()
        # The staged state must not keep any of the caller's state alive, so it gets no reference to `flat`.
        on_pickle = None if arena.shared else functools.partial(self._pool.surrender, arena)
        return StagedState(state, lease, on_pickle)

    def _pin_if_useful(self, arena: Arena, layout: ArenaLayout) -> None:
        """Pin the arena if the layout copies from a CUDA device. Other copies would not become faster."""
        from_cuda = any(device.type == "cuda" for device in layout.devices)
        if from_cuda and self.options.use_pinned_memory and not arena.pin() and not self._warned:
            self._warned = True
            warnings.warn(
                f"The driver does not pin {arena.nbytes} bytes of host memory (see ulimit -l); copies from the device "
                "will be slower",
                RuntimeWarning,
                stacklevel=2,
            )


def _fault(error: Exception, state_dict: dict[str, Any]) -> Exception:
    """Return the error for a state that could not be copied, with the key of the value at fault."""
    fault = first_fault(error, flatten_state_dict(state_dict)[0].items(), _copy_alone, StagingError)
    if isinstance(fault, BucketpointError):
        return fault
    return StagingError(f"Copying the state to host memory failed: {error}")


def _copy_alone(key: str, value: Any) -> None:
    flat = FlatState({key: value})
    lay_out(flat.sources)
    with torch.inference_mode(False), torch.no_grad():
        flat.assemble([source.to("cpu", copy=True) for source in flat.sources])


def _beside_training(copy: Callable[[], StagedState]) -> StagedState:
    started = time.monotonic()
    leases.let_caller_go()
    try:
        return copy()
    except BaseException:
        time.sleep(max(0.0, _EARLIEST_FAILURE_S - (time.monotonic() - started)))
        raise
