"""`UploadHelper`: the trainer's side of the process that uploads for it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bucketpoint.errors import BucketpointError, HelperProcessError, HelperUnavailableError
from bucketpoint.forks import renew_in_child
from bucketpoint.stores import Store
from bucketpoint.stores.retry import deadline, process_budget
from bucketpoint.transfer.helper.messages import (
    SIGN_OF_LIFE_S,
    Begun,
    Done,
    Failed,
    Given,
    Logged,
    MappableMemory,
    Moved,
    OrderRefused,
    UploadOrder,
    Wanted,
    described,
    this_bucketpoint,
)
from bucketpoint.transfer.helper.start import start_process
from bucketpoint.transfer.options import Meter, TransferOptions
from bucketpoint.transfer.pieces import ABORT_DEADLINE_S, abort
from bucketpoint.transfer.upload import ObjectSource, Uploaded

logger = logging.getLogger(__name__)

READY_S = 60.0
"""Seconds within which a helper must start. A start takes several seconds on a busy machine with a slow disk."""

SILENT_WAITS = 12
"""Number of waits of `SIGN_OF_LIFE_S` without a message after which a helper counts as hanging: a minute in all. Within
a minute a helper gets CPU time even if processes of lower niceness keep all cores busy."""

_MAY_PASS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors after which a later attempt to start a process may succeed."""


@dataclass(frozen=True)
class Upload:
    """Objects to upload, and the store for them in both processes.

    Attributes:
        store: the store in this process, to clean up after a helper that died.
        url, storage_options: arguments with which the helper opens the same store, as in `UploadOrder`. The URL names
            the save in messages.
    """

    store: Store
    url: str
    storage_options: bytes = field(repr=False)
    sources: Sequence[ObjectSource]
    options: TransferOptions
    memory: MappableMemory


class UploadHelper:
    """A process that uploads objects from shared memory, started on first use and kept until `close()`.

    The process runs one upload at a time. If it dies during an upload, a new process repeats the upload, once.

    Args:
        nice: niceness of the process as a whole, on Linux 0 to 19.
    """

    _running: _Running | None
    _starter: threading.Thread | None
    _copying: tuple[_Running, Upload, Meter] | None

    def __init__(self, nice: int = 0) -> None:
        self._nice = nice
        self._forget()
        renew_in_child(self, UploadHelper._forget)

    def start_soon(self) -> None:
        """Start the process on another thread, so that it is ready when the first upload needs it."""
        with self._lock:
            if self._running is not None or self._starter is not None:
                return
            starter = threading.Thread(target=self._start_quietly, name="bucketpoint-helper-start")
            # If no thread can be started, the first upload starts the process.
            with contextlib.suppress(RuntimeError):
                starter.start()
                self._starter = starter

    def upload(self, work: Upload, meter: Meter) -> list[Uploaded]:
        """Upload all objects, as `upload_objects` does.

        Raises:
            HelperUnavailableError: no helper can do this upload. Nothing was sent.
            HelperProcessError: two helpers died during this upload.
        """
        with self._uploading:
            self._wait_for_copy()
            for last in (False, True):
                running = self._start()
                try:
                    answer = running.exchange(work, meter)
                except HelperUnavailableError:
                    # No request was made.
                    self._drop(running)
                    raise
                except BaseException:
                    # The caller was interrupted. The helper aborts the upload before it ends, if it can.
                    self._drop(running)
                    _abort_left(work, running.begun)
                    raise
                if isinstance(answer, OrderRefused):
                    raise HelperUnavailableError(answer.reason)
                if last and answer is not None:
                    # A late request of the first helper may have reached the store after its uploads were aborted.
                    _abort_left(work, ())
                if isinstance(answer, Failed):
                    process_budget().add(answer.counts)
                    raise answer.error
                if answer is not None:
                    process_budget().add(answer.counts)
                    if work.options.node_copy is not None:
                        self._copying = running, work, meter
                    return list(answer.uploaded)
                self._drop(running)
                fate = _fate(running.process.returncode)
                _abort_left(work, running.begun)
                meter.begin_again()
                if not last:
                    logger.warning("the process that uploaded %s %s; a new one repeats it", work.url, fate)
        raise HelperProcessError(
            f"Two processes that uploaded {work.url} died: the second {fate}",
            remedy="Look for the out-of-memory killer in the kernel's log (dmesg), or upload on threads: "
            'TransferOptions(background="thread")',
        )

    def wait_for_copy(self) -> None:
        """Wait until the process has copied what it sent on this node, and no longer reads the shared memory."""
        with self._uploading:
            self._wait_for_copy()

    def _wait_for_copy(self) -> None:
        if self._copying is None:
            return
        (running, work, meter), self._copying, answer = self._copying, None, None
        try:
            # An OSError: the process died while this one was sending.
            with contextlib.suppress(OSError):
                answer = running.answer_all(work, meter)
        except Exception as error:  # noqa: BLE001 (logged)
            answer = Failed(error, {})
        finally:
            if not isinstance(answer, Done):
                self._drop(running)
                why = answer.error if isinstance(answer, Failed) else _fate(running.process.returncode)
                logger.warning("the process that copies %s on this node failed: %s", work.url, why)

    def close(self) -> None:
        """Wait for the current upload and end the process. A later upload starts a new process."""
        with self._uploading:
            self._end()

    def close_if_idle(self) -> None:
        """End the process unless it uploads or copies."""
        if self._uploading.acquire(blocking=False):
            try:
                if self._copying is None:
                    self._end()
            finally:
                self._uploading.release()

    @property
    def process_id(self) -> int | None:
        """Process id of the helper; None if none is running."""
        running = self._running
        return running.process.pid if running is not None and running.process.poll() is None else None

    def _end(self) -> None:
        self._wait_for_copy()
        starter, self._starter = self._starter, None
        if starter is not None:
            starter.join()
        running = self._running
        if running is not None:
            self._drop(running)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._uploading = threading.Lock()
        self._running = None
        self._starter = None
        self._copying = None

    def _start_quietly(self) -> None:
        try:
            self._start()
        except HelperProcessError as error:
            # The first upload tries again, and reports the error.
            logger.debug("%s", error)

    def _start(self) -> _Running:
        with self._lock:
            if self._running is None or self._running.process.poll() is not None:
                self._running = _Running(self._nice)
            return self._running

    def _drop(self, running: _Running) -> None:
        # Before `end`: if an interrupt ends this function, nobody may use the closed channel.
        with self._lock:
            if self._running is running:
                self._running = None
        running.end()


class _Running:
    """One helper process, and the channel to it.

    Attributes:
        begun: key and id of each multipart upload that the process has begun in its latest order.

    Raises:
        HelperUnavailableError: no process can be started.
        HelperProcessError: no process can be started now, but a later attempt may succeed.
    """

    def __init__(self, nice: int) -> None:
        # The executable of a frozen program is the program itself: starting it would start training once more.
        if not sys.executable or getattr(sys, "frozen", False):
            raise HelperUnavailableError(
                "this program is not run by an interpreter that can be started again (frozen, or no sys.executable)"
            )
        self.begun: list[tuple[str, str]] = []
        self._ready = False
        try:
            self._helper = start_process(_environment(), nice=nice, answers_within_s=SILENT_WAITS * SIGN_OF_LIFE_S)
        except (OSError, ValueError, RuntimeError) as error:
            kind = HelperProcessError if getattr(error, "errno", None) in _MAY_PASS else HelperUnavailableError
            raise kind(f"no process can be started: {error}") from error
        self._channel, self.process = self._helper.channel, self._helper.process
        self._finalizer = weakref.finalize(self, self._helper.end_unattended)
        renew_in_child(self, _Running._leave_to_parent)

    def _leave_to_parent(self) -> None:
        if self._finalizer.detach() is not None:
            self._helper.leave_to_parent()

    def end(self) -> None:
        """Close the channel and wait for the end of the process."""
        if self._finalizer.detach() is not None:
            self._helper.end()

    def exchange(self, work: Upload, meter: Meter) -> Done | Failed | OrderRefused | None:
        """Send the order, and serve the helper until its answer. None if the helper died or hangs."""
        self.begun.clear()
        if not self._becomes_ready():
            return None
        try:
            while True:
                # A local folder's identity changes once another rank creates the folder.
                identity = work.store.identity
                self._send(work, identity)
                answer = self.answer_all(work, meter)
                if not isinstance(answer, OrderRefused) or identity == work.store.identity:
                    return answer
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            # The helper died while this process was sending, or read nothing for too long (BlockingIOError).
            return None

    def _send(self, work: Upload, identity: str) -> None:
        for segments in described(work.sources, work.memory):
            self._channel.send(segments)
        order = UploadOrder(
            work.url,
            work.storage_options,
            identity,
            work.options,
            work.memory.nbytes,
            _environment(),
            _folder(),
            _umask(),
            logger.getEffectiveLevel(),
        )
        try:
            self._channel.send(order, [work.memory.descriptor])
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise HelperUnavailableError(f"the options cannot be pickled ({type(error).__name__})") from error

    def answer_all(self, work: Upload, meter: Meter) -> Done | Failed | OrderRefused | None:
        """Handle the helper's messages, and return its answer. None if the helper died or hangs."""
        while (message := self._next_message()) is not None:
            if isinstance(message, Done | Failed | OrderRefused):
                return message
            if isinstance(message, Moved):
                meter.add(message.nbytes, requests=message.requests)
            elif isinstance(message, Begun):
                self.begun.append((message.key, message.upload_id))
            elif isinstance(message, Logged):
                record = message.record
                target = logging.getLogger(record.name)
                if target.isEnabledFor(record.levelno):
                    target.handle(record)
            elif isinstance(message, Wanted):
                segment = work.sources[message.number].segments[message.segment]
                data = segment.read(message.start, message.start + message.nbytes)
                self._channel.send(Given(message.request, bytes(data)))
        return None

    def _next_message(self) -> object | None:
        """Wait for a message. None if the helper died, or sent nothing in each of `SILENT_WAITS` waits."""
        for _ in range(SILENT_WAITS):
            # Several short waits: if both processes are suspended, a single long wait could expire in that time.
            if not self._channel.is_quiet(self._helper.alive, SIGN_OF_LIFE_S):
                received = self._channel.receive(until_end_of=self._helper.alive)
                return received[0] if received is not None else None
        logger.warning(
            "process %d, which uploads for this one, has sent no message for %.0f s, and is killed",
            self.process.pid,
            SILENT_WAITS * SIGN_OF_LIFE_S,
        )
        self.process.kill()
        return None

    def _becomes_ready(self) -> bool:
        """Wait for the first message. Return False if the process was killed before it sent one."""
        if self._ready:
            return True
        in_time = not self._channel.is_quiet(self._helper.alive, READY_S)
        received = self._channel.receive(until_end_of=self._helper.alive) if in_time else None
        if received is None:
            self.end()
            status = self.process.returncode
            if in_time and status is not None and status < 0:
                return False
            fate = _fate(status) if in_time else f"was not ready after {READY_S:.0f} s"
            raise HelperUnavailableError(f"a process of {sys.executable} was started and {fate}; see standard error")
        own = this_bucketpoint()
        if received[0] != own:
            raise HelperUnavailableError(
                f"a new process imports bucketpoint {received[0]}, and this one {own}; after an upgrade, "
                "start the program again"
            )
        self._ready = True
        logger.info("process %d uploads during training", self.process.pid)
        return True


def _fate(status: int | None) -> str:
    """Describe how a process ended, from its return code in `subprocess`."""
    if status is None:
        return "did not end"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended with exit status {status}"


def _abort_left(work: Upload, begun: Sequence[tuple[str, str]]) -> None:
    """Abort the uploads of a helper that died, within `ABORT_DEADLINE_S`, because the save waits."""
    with deadline(ABORT_DEADLINE_S):
        for key, upload_id in begun:
            abort(work.store, key, upload_id)
        if not work.store.capabilities.multipart:
            return
        for source in work.sources:
            # The helper may have died before it reported an upload. In a local folder, an unfinished file is one.
            # Permission to list uploads may be missing.
            with contextlib.suppress(BucketpointError):
                for upload in work.store.list_multipart(source.key):
                    abort(work.store, upload.key, upload.upload_id)


def _environment() -> dict[str, str]:
    while True:
        # The copy fails if another thread sets a variable meanwhile.
        with contextlib.suppress(KeyError, RuntimeError):
            return dict(os.environ)


def _umask() -> int | None:
    """Return the umask; None without `/proc`, because `os.umask` would change it for a moment."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["Umask"], 8)
    except (OSError, KeyError, ValueError):
        return None


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None
