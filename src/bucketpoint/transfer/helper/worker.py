"""Main program of the helper process: it carries out one upload order after another until the channel closes.

The process usually ends within seconds of the trainer's end, whatever the cause, and aborts open uploads.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import logging
import mmap
import os
import pickle
import queue
import signal
import socket
import threading
import time
from collections import Counter

from bucketpoint.errors import BucketpointError, HelperProcessError, HelperUnavailableError
from bucketpoint.stores import Store, open_store
from bucketpoint.stores.cutoff import RequestCanceller
from bucketpoint.stores.redact import describe
from bucketpoint.stores.retry import process_budget
from bucketpoint.transfer.helper.messages import (
    SIGN_OF_LIFE_S,
    Alive,
    Begun,
    Channel,
    Done,
    Failed,
    Given,
    Logged,
    Moved,
    OrderRefused,
    RemoteSegment,
    SegmentsToUpload,
    UploadOrder,
    Wanted,
    descriptor_of,
    this_bucketpoint,
)
from bucketpoint.transfer.helper.start import LEFT_TO_TRAINER
from bucketpoint.transfer.options import Meter
from bucketpoint.transfer.pieces import ABORT_DEADLINE_S, abort
from bucketpoint.transfer.tasks import BufferPool
from bucketpoint.transfer.upload import ObjectSource, Segment, Uploaded, keep_uploaded, upload_objects

_POLL_S = 0.1


def main(descriptor: int, trainer: int) -> None:
    """Serve the process `trainer` over the socket `descriptor`, which this process has inherited."""
    # A separate process group, because a terminal sends Ctrl-C to the trainer's group. Not a separate session: Linux
    # first divides cores among sessions (autogroup, see sched(7)), and niceness counts only within a session.
    os.setpgid(0, 0)
    for number in LEFT_TO_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_TRAINER)
    channel = Channel(socket.socket(fileno=descriptor))
    # A process that native code has forked from the trainer may keep the channel open after the trainer's end.
    end = descriptor_of(trainer)
    if os.getppid() != trainer:
        os._exit(0)
    logging.getLogger().addHandler(_Forwarder(channel))
    job: _Job | None = None
    objects: list[tuple[str, list[RemoteSegment]]] = []
    for provider in ("gcs", "s3"):
        # Imported while the trainer stages, so that the first order does not wait for a provider's library.
        importlib.import_module(f"bucketpoint.stores.{provider}")
    with contextlib.suppress(OSError):
        channel.send(this_bucketpoint())
    while True:
        try:
            received = channel.receive(until_end_of=end)
        except Exception as error:  # noqa: BLE001 (a class of the program may raise anything when unpickled)
            objects = []
            channel.send(OrderRefused(f"the options cannot be unpickled in another process ({type(error).__name__})"))
            continue
        if received is None:
            break
        message, descriptors = received
        if isinstance(message, SegmentsToUpload):
            if message.begins:
                objects.append((message.key, []))
            objects[-1][1].extend(map(RemoteSegment._make, message.segments))
        elif isinstance(message, UploadOrder):
            job = _Job(channel, message, objects, *descriptors)
            job.start()
            objects = []
        elif isinstance(message, Given) and job is not None:
            job.take(message)
    # Otherwise threads of the job that send would wait for a trainer that no longer reads.
    channel.close()
    if job is not None:
        job.give_up()
    # The interpreter's normal exit would wait for threads that hang in a request.
    os._exit(0)


class _Forwarder(logging.Handler):
    """Handler that sends each log record to the trainer, which has the program's handlers."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        # A record that cannot be sent is no reason to fail the upload.
        try:
            record.msg, record.args = record.getMessage(), None
            if record.exc_info:
                record.exc_text, record.exc_info = logging.Formatter().formatException(record.exc_info), None
            self._channel.send(Logged(record))
        except OSError:
            return
        except Exception:  # noqa: BLE001 (as every handler of logging's does)
            self.handleError(record)


class _Reporter(Meter):
    """Meter that sends each addition to the trainer."""

    def __init__(self, channel: Channel) -> None:
        super().__init__("save", "", 0, None)
        self._channel = channel

    def add(self, nbytes: int, *, requests: int = 1, from_node: int = 0) -> None:
        super().add(nbytes, requests=requests)
        self._channel.send(Moved(nbytes, requests))


class _Job:
    """Execution of one order, on a separate thread, so that the main thread notices the end of the trainer."""

    def __init__(
        self,
        channel: Channel,
        order: UploadOrder,
        objects: list[tuple[str, list[RemoteSegment]]],
        descriptor: int,
    ) -> None:
        self._channel = channel
        self._order = order
        self._objects = objects
        self._descriptor = descriptor
        self._open: dict[str, str] = {}
        self._requests = itertools.count()
        self._asked: dict[int, queue.SimpleQueue[bytes]] = {}
        self._canceller = RequestCanceller(threading.TIMEOUT_MAX)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bucketpoint-job", daemon=True)

    def start(self) -> None:
        self._thread.start()
        threading.Thread(target=self._show_life, name="bucketpoint-alive", daemon=True).start()

    def take(self, message: Given) -> None:
        """Pass the trainer's bytes to the thread that asked for them."""
        self._asked.pop(message.request).put(message.data)

    def give_up(self) -> None:
        """Cancel running requests and abort open uploads: the trainer has ended or has closed the channel."""
        ends = time.monotonic() + ABORT_DEADLINE_S
        while not self._over.is_set() and time.monotonic() < ends:
            # Repeated, because the cancellation misses requests whose connection is still being opened.
            self._canceller.make()
            self._thread.join(_POLL_S)
        self._thread.join(ABORT_DEADLINE_S)

    def _show_life(self) -> None:
        with contextlib.suppress(OSError):
            while not self._over.wait(SIGN_OF_LIFE_S):
                self._channel.send(Alive())

    def _run(self) -> None:
        answer: Done | Failed | OrderRefused
        before = Counter(process_budget().counts)
        store: Store | None = None
        try:
            store = self._store()
            with self._canceller.over_here():
                sources = self._sources()
                uploaded = self._upload(store, sources)
                answer = Done(uploaded, _counted_since(before))
                if self._order.options.node_copy is not None:
                    # The commit does not wait for the copy.
                    self._channel.send(answer)
                    keep_uploaded(store, sources, uploaded, self._order.options)
                    answer = Done((), {})
        except HelperUnavailableError as error:
            answer = OrderRefused(error.message)
        except BaseException as error:  # noqa: BLE001 (sent to the trainer, which raises it)
            answer = Failed(_as_ours(error, self._order.url), _counted_since(before))
        finally:
            # A mapping needs no descriptor. After a refused order an open one would keep the trainer's memory alive.
            os.close(self._descriptor)
        self._over.set()
        # The process may be idle for long, and the segments hold bytes of the state.
        self._objects.clear()
        if store is not None and self._canceller.is_made:
            # `upload_objects` could not abort these uploads, because its requests were cancelled.
            for key, upload_id in self._open.items():
                abort(store, key, upload_id)
        try:
            self._channel.send(answer)
        except OSError:
            # The trainer has ended.
            return
        except BaseException:  # noqa: BLE001 (the trainer would wait for an answer for ever)
            os._exit(1)
        if isinstance(answer, Failed):
            # Free the reference cycles of the error and its frames, which hold mappings of the trainer's memory.
            gc.collect()

    def _store(self) -> Store:
        order = self._order
        # Not rewritten if unchanged: threads of an earlier order may be reading variables.
        if os.environ != order.environment:
            os.environ.clear()
            os.environ.update(order.environment)
        logging.getLogger("bucketpoint").setLevel(order.log_level)
        try:
            if order.folder is not None:
                os.chdir(order.folder)
            if order.umask is not None:
                os.umask(order.umask)
            options = pickle.loads(order.storage_options)
            store, _ = open_store(order.url, storage_options=options)
        except Exception as error:
            # A class of the program may raise anything. The message omits the error's text, which may quote a secret.
            raise HelperUnavailableError(
                f"the store cannot be opened in another process ({type(error).__name__})"
            ) from error
        if store.identity != order.identity:
            raise HelperUnavailableError(f"another process opens another store: {store.identity}, not {order.identity}")
        return store

    def _sources(self) -> list[ObjectSource]:
        # Unmapped once no segment refers to the memory any more.
        memory = memoryview(mmap.mmap(self._descriptor, self._order.memory_nbytes, prot=mmap.PROT_READ))
        return [
            ObjectSource(key, [self._segment(number, index, each, memory) for index, each in enumerate(segments)])
            for number, (key, segments) in enumerate(self._objects)
        ]

    def _upload(self, store: Store, sources: list[ObjectSource]) -> list[Uploaded]:
        def acknowledged(number: int, _: Uploaded) -> None:
            self._open.pop(sources[number].key, None)

        return upload_objects(
            store,
            sources,
            self._order.options,
            pool=BufferPool(self._order.options.max_inflight_bytes),
            meter=_Reporter(self._channel),
            begun=self._begun,
            acknowledged=acknowledged,
        )

    def _begun(self, key: str, upload_id: str) -> None:
        self._open[key] = upload_id
        self._channel.send(Begun(key, upload_id))

    def _segment(self, number: int, index: int, remote: RemoteSegment, memory: memoryview) -> Segment:
        data, fill = None, None
        if remote.offset is not None:
            data = memory[remote.offset : remote.offset + remote.nbytes]
        elif remote.inline is not None:
            data = memoryview(remote.inline)
        elif not remote.table_of and not remote.digests_of:
            fill = functools.partial(self._ask, number, index)
        # The remaining fields are the same in both classes.
        return Segment(remote.nbytes, data, fill, *remote[3:])

    def _ask(self, number: int, segment: int, start: int, out: memoryview) -> None:
        """Request from the trainer the bytes of a segment that only the trainer can read."""
        given: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        request = next(self._requests)
        self._asked[request] = given
        self._channel.send(Wanted(request, number, segment, start, len(out)))
        while not self._canceller.is_made:
            with contextlib.suppress(queue.Empty):
                out[:] = given.get(timeout=_POLL_S)
                return
        raise BucketpointError("the trainer has ended")


def _counted_since(before: Counter[str]) -> dict[str, int]:
    return dict(process_budget().counts - before)


def _as_ours(error: BaseException, url: str) -> BucketpointError:
    """Return a copy of the error without the traceback, whose frames refer to the shared memory.

    An error of another library, which may raise anything when pickled, becomes a `HelperProcessError`.
    """
    if isinstance(error, BucketpointError):
        copy: BucketpointError = pickle.loads(pickle.dumps(error))
        return copy
    return HelperProcessError(f"The process that uploaded {url} failed: {describe(error)}")
