"""`TaskGroup`, bounded parallel tasks, and `BufferPool`, their buffers with a limit on the total size.

The first error cancels the other tasks, and leaving the block of a `TaskGroup` waits for all.
`TaskGroup` uses plain threads, not an executor: `concurrent.futures` refuses new work once the interpreter begins to
exit, and a training script that ends while its last asynchronous save is still uploading must not lose that save. If no
thread can be started, tasks run on the caller's thread: Python 3.12.0 and 3.12.1 start no threads once the main program
has ended, and no version does at the system's limit of threads.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from bucketpoint.errors import BucketpointError
from bucketpoint.forks import Event, Monitor
from bucketpoint.stores import retry

logger = logging.getLogger(__name__)

_IDLE_S = 2.0
"""Seconds after which a thread without a task ends. Interrupts may keep a group's owner from closing the group, and the
interpreter's exit waits for its threads."""


class TaskGroup:
    """A group of tasks on up to `workers` threads. Tasks may start further tasks.

    Use as a context manager: leaving the block waits until no task runs any more, and raises the first error of a task.
    After an error, or when the block itself raises, tasks not yet begun are dropped; running tasks continue to their
    end and may check `cancelled` to end sooner.

    Args:
        nice: niceness of the threads (Linux), at most 19: the higher, the less CPU time they get when cores are busy.
    """

    def __init__(self, workers: int, *, name: str = "bucketpoint", nice: int = 0) -> None:
        self._workers = workers
        self._name = name
        self._nice = nice
        self._state = Monitor()
        self._queue: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._running = 0
        self._running_here = False
        self._closing = False
        self._error: BaseException | None = None
        self._failed = Event()

    @property
    def cancelled(self) -> bool:
        return self._error is not None

    def start(self, task: Callable[[], None]) -> None:
        """Queue a task. After a failure the task is dropped silently: leaving the group raises the first error."""
        with self._state:
            if self._error is not None:
                return
            self._queue.append(task)
            # A notified thread counts as idle until it has the lock again, but takes only one task.
            if len(self._queue) <= self._idle:
                # Two threads, because one may be the thread that leaves the group, which takes no task.
                self._state.notify(2)
            elif len(self._threads) < self._workers:
                self._start_thread()
            # A task on this thread only queues further tasks: the loop in `_work_here` runs them afterwards.
            here = not self._threads and not self._running_here
            self._running_here |= here
        if here:
            contextvars.copy_context().run(self._work_here)

    def cancel(self, error: BaseException) -> None:
        """Drop the tasks that have not begun. Leaving the group raises the error of the first call."""
        with self._state:
            if self._error is None:
                self._error = error
            self._failed.set()
            self._queue.clear()
            self._state.notify_all()

    def abandon(self, error: BaseException) -> None:
        """Cancel the tasks and end the threads, without waiting for them.

        For the finalizer of the group's owner, which may run on one of the threads and cannot wait for that thread.
        """
        self.cancel(error)
        with self._state:
            self._closing = True
            self._state.notify_all()

    def __enter__(self) -> TaskGroup:  # noqa: PYI034 (Self needs Python 3.11)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.cancel(error)
            with self._state:
                self._state.wait_for(lambda: not self._queue and not self._running)
        except BaseException as interrupt:
            self.cancel(interrupt)
            raise
        finally:
            with self._state:
                self._closing = True
                self._state.notify_all()
            for thread in self._threads:
                thread.join()
        first, self._error = self._error, self._error or RuntimeError("the task group has ended")
        if first is not None and error is None:
            try:
                raise first
            finally:
                # Break the cycle of this frame, the error and its traceback, which would keep all staged buffers alive.
                del first

    def _start_thread(self) -> None:
        """Add a worker thread if the system and the interpreter allow it. Fewer workers do the same work."""
        # The thread copies the context of its starter, because the deadline and the canceller of requests are in it.
        work = functools.partial(contextvars.copy_context().run, self._work)
        thread = threading.Thread(target=work, name=f"{self._name}-{len(self._threads)}")
        try:
            thread.start()
        except RuntimeError as error:
            logger.debug("%s continues with %d threads: %s", self._name, len(self._threads), error)
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        stand_back(self._nice)
        while self._run_next(wait=True):
            pass

    def _work_here(self) -> None:
        try:
            while self._run_next(wait=False):
                pass
        except BaseException:
            self._running_here = False
            raise

    def _run_next(self, *, wait: bool) -> bool:
        """Run one task. Return False if none is queued; with `wait`, wait for one unless the group is closing."""
        # Once the group has failed, no task waits for a retry: a throttled request could otherwise wait for minutes.
        retry.stop_waiting_on(self._failed)
        with self._state:
            if wait:
                self._idle += 1
                self._state.wait_for(lambda: bool(self._queue) or self._closing, _IDLE_S)
                self._idle -= 1
            if not self._queue:
                self._running_here &= wait
                if not self._closing:
                    self._threads = [thread for thread in self._threads if thread is not threading.current_thread()]
                return False
            task = self._queue.popleft()
            # Not counted on the thread that leaves the group, which an interrupt may stop before it counts down.
            self._running += wait
        try:
            task()
        except BaseException as error:  # noqa: BLE001 (raised where the group is left)
            self.cancel(error)
        finally:
            del task
            with self._state:
                self._running -= wait
                self._state.notify_all()
        return True


def stand_back(nice: int) -> None:
    """Raise the calling thread's niceness on Linux. Elsewhere niceness belongs to the whole process (see sched(7))."""
    if sys.platform != "linux" or not nice:
        return
    thread = threading.get_native_id()
    try:
        if nice > os.getpriority(os.PRIO_PROCESS, thread):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError as error:
        # A sandbox may forbid the call. If the error ended the thread, queued tasks would wait forever.
        logger.debug("the niceness of a thread was not raised to %d: %s", nice, error)


class BufferPool:
    """A pool of writable buffers. The total size of leased and cached buffers stays within `limit_bytes`.

    A single lease above the limit is granted only while nothing else is leased. Refusing such a lease would make a
    large item of another writer unloadable, and granting it beside other leases would leave memory unbounded.

    Args:
        grain: buffers of at least `grain` bytes are rounded up to a multiple of it, and cached for reuse: the first
            write to a memory page costs 20 times as much as later writes.
    """

    def __init__(self, limit_bytes: int, *, grain: int = 1 << 20) -> None:
        self._limit = limit_bytes
        self._grain = grain
        self._state = Monitor()
        self._taken = 0
        self._kept = 0
        self._free: dict[int, list[mmap.mmap | bytearray]] = {}
        self.peak_bytes = 0
        """Maximum of the bytes held at once, cached free buffers included."""

    @contextmanager
    def lease(self, nbytes: int) -> Iterator[memoryview]:
        """Lease a buffer of `nbytes`, with undefined content, in a `with` block. Waits until the limit allows it."""
        size = self._rounded(nbytes)
        with self._state:
            self._state.wait_for(lambda: not nbytes or not self._taken or self._taken + size <= self._limit)
            view = self.take(nbytes)
        try:
            yield view
        finally:
            self.give(view)

    def take(self, nbytes: int) -> memoryview:
        """Return a buffer of `nbytes`, with undefined content. Never waits: the caller must bound the memory."""
        if not nbytes:
            return memoryview(b"")
        size = self._rounded(nbytes)
        with self._state:
            kept = self._free.get(size)
            if kept:
                buffer = kept.pop()
                self._kept -= size
            else:
                self._let_go(size)
                try:
                    # The system gets the memory of a freed map back, but not always that of the heap. Small buffers
                    # are heap memory: a load may hold 100,000 of them, and the number of maps is limited.
                    buffer = mmap.mmap(-1, size) if size >= mmap.PAGESIZE else bytearray(size)
                except (OSError, OverflowError, ValueError) as error:
                    # Metadata of another writer may contain any number as a length.
                    raise BucketpointError(
                        f"{size} bytes of memory for an item could not be allocated: {error}"
                    ) from None
            # Counted only after the allocation, because the system may refuse it.
            self._taken += size
            self.peak_bytes = max(self.peak_bytes, self._taken + self._kept)
        return memoryview(buffer)[:nbytes]

    def give(self, view: memoryview) -> None:
        """Return a buffer from `take` to the pool, once it is no longer read or written."""
        buffer = view.obj
        if not isinstance(buffer, mmap.mmap | bytearray):
            return
        size = len(buffer)
        with self._state:
            self._taken -= size
            if size >= self._grain and self._taken + self._kept + size <= self._limit:
                self._kept += size
                self._free.setdefault(size, []).append(buffer)
            self._state.notify_all()

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._grain) * self._grain if nbytes >= self._grain else nbytes

    def _let_go(self, nbytes: int) -> None:
        """Free cached buffers until `nbytes` more fit the limit, or the cache is empty."""
        while self._free and self._taken + nbytes + self._kept > self._limit:
            size, buffers = next(iter(self._free.items()))
            if buffers:
                buffers.pop()
                self._kept -= size
            if not buffers:
                del self._free[size]
