"""Uploads of a writer: on threads, or by a separate process beside training, if a process can be started."""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bucketpoint.errors import (
    BucketpointError,
    CredentialsError,
    EndpointError,
    HelperProcessError,
    HelperUnavailableError,
)
from bucketpoint.forks import ProcessLock
from bucketpoint.location import Location
from bucketpoint.staging import Lease
from bucketpoint.stores import Store
from bucketpoint.transfer import BufferPool, Meter, ObjectSource, TransferOptions, Uploaded, upload_objects
from bucketpoint.transfer.node_bytes import keep_uploaded

if TYPE_CHECKING:
    from bucketpoint.transfer.helper.process import UploadHelper

logger = logging.getLogger(__name__)

LEAST_BYTES = 16 << 20
"""Least staged bytes for which an upload process is worth its cost: 1 s of CPU time at its start, 70 MB of memory."""


_NOT_OF_THE_STORE = (HelperProcessError, CredentialsError, EndpointError)
"""Errors that may occur only in the upload process, for example with credentials that can be used only once, or if a
library is patched in this process."""


def bytes_beside_training(lease: Lease | None) -> int:
    """Return the size of the shared memory of a state that is saved beside training; 0 without one."""
    memory = lease.memory if lease is not None and lease.beside_training else None
    return memory.nbytes if memory is not None else 0


class Uploads:
    """The uploads of one writer, or of all writers of a manager, and the process that makes them beside training."""

    def __init__(self, options: TransferOptions) -> None:
        self._options = options
        self._lock = ProcessLock()
        self._made: UploadHelper | None = None
        # True if the options exclude a process, or once a process was refused; never reset.
        self._on_threads = options.background == "thread"
        self._left = False
        self._told = False

    @property
    def _helper(self) -> UploadHelper:
        from bucketpoint.transfer.helper.process import UploadHelper

        with self._lock:
            self._made = self._made or UploadHelper(self._options.in_background(shares_lock=False).nice)
        return self._made

    @property
    def process_id(self) -> int | None:
        """Id of the upload process; None if no process runs."""
        return self._made.process_id if self._made is not None else None

    def prepare(self, staged_bytes: int) -> None:
        """Start the upload process on another thread, if saves of this size will use a process."""
        if not self._left and self._wants_process(staged_bytes):
            self._helper.start_soon()

    def options(self, lease: Lease | None) -> TransferOptions:
        """Return the options for threads of this process. `lease`: of the staged state, if training continues."""
        return self._options if lease is None else self._options.in_background(shares_lock=lease.beside_training)

    def upload(
        self, place: Location, store: Store, sources: Sequence[ObjectSource], lease: Lease | None, meter: Meter
    ) -> list[Uploaded]:
        """Upload all objects, as `upload_objects` does.

        Args:
            place: location of the save in `store`.
            lease: lease of the staged state, if training continues meanwhile.

        Raises:
            HelperUnavailableError: with `background="process"`, no process can upload. Nothing was sent.
            HelperProcessError: two processes died during this upload.
        """
        # Without shared memory a process is refused, which is logged once.
        staged_bytes = lease.memory.nbytes if lease is not None and lease.memory is not None else LEAST_BYTES
        if lease is not None and lease.beside_training and self._wants_process(staged_bytes):
            try:
                uploaded = self._by_process(place, store, sources, lease, meter)
                self._after_commit(lease, self._helper.wait_for_copy)
                return uploaded
            except _NOT_OF_THE_STORE as error:
                # A helper that has sent bytes had credentials and reached the store, so the store is down for this
                # process, too.
                if self._options.background == "process" or (isinstance(error, EndpointError) and meter.done_bytes):
                    error.url = error.url or place.url
                    raise
                self._go_on_without(error)
                meter.begin_again()
        options = self.options(lease)
        pool = BufferPool(options.max_inflight_bytes)
        uploaded = upload_objects(store, sources, options, pool=pool, meter=meter)
        self._after_commit(lease, functools.partial(keep_uploaded, store, sources, uploaded, options))
        return uploaded

    def _after_commit(self, lease: Lease | None, copy: Callable[[], object]) -> None:
        """Copy what was sent on this node, once the save has ended. Without a handle the memory may change then."""
        if self._options.node_copy is None:
            return
        if lease is None or lease.after_commit is None:
            copy()
        else:
            lease.after_commit.append(copy)

    def _wants_process(self, staged_bytes: int) -> bool:
        large = staged_bytes >= LEAST_BYTES
        return not self._on_threads and (large or self._options.background == "process")

    def _go_on_without(self, error: BucketpointError) -> None:
        """Log once why threads upload. After a refusal, only threads upload for the rest of the writer's life."""
        refused = isinstance(error, HelperUnavailableError)
        if refused:
            self._on_threads = True
            self._close_if_idle()
        if not self._told:
            self._told = True
            if refused:
                logger.info("uploads run on threads of this process, during training: %s", error.message)
            else:
                # A warning, because the process was expected to work.
                logger.warning("this upload runs on threads of this process, during training: %s", error)

    def leave(self) -> None:
        """Record that a checkpoint process saves and uploads: end the upload process here, and prepare no new one."""
        self._left = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._made is not None:
            self._made.close_if_idle()

    def close(self) -> None:
        """End the process once a running upload has ended."""
        if self._made is not None:
            self._made.close()

    def _by_process(
        self, place: Location, store: Store, sources: Sequence[ObjectSource], lease: Lease, meter: Meter
    ) -> list[Uploaded]:
        if lease.memory is None:
            why = "the staging memory is not shared (use_shared_memory=False, or a system without memfd)"
            raise HelperUnavailableError(why)
        if place.fs is not None:
            raise HelperUnavailableError(
                "the filesystem object passed as fs= cannot be sent to another process; a URL with storage_options can"
            )
        if not store.capabilities.shared:
            raise HelperUnavailableError(f"another process may not reach the same files at {store.url}")
        try:
            storage_options = pickle.dumps(dict(place.storage_options))
        except Exception as error:
            # Pickling a class of the program may raise any error, and the text of the error may quote a secret.
            raise HelperUnavailableError(f"storage_options cannot be pickled ({type(error).__name__})") from error
        from bucketpoint.transfer.helper.messages import StoreConfig
        from bucketpoint.transfer.helper.process import Upload

        work = Upload(
            store=store,
            config=StoreConfig(place.url, storage_options),
            sources=sources,
            options=replace(self._options, nice=0),
            memory=lease.memory,
        )
        return self._helper.upload(work, meter)
