"""Upload of one rank's items. Unchanged objects of an earlier save are copied inside the store, all others are sent.

They are sent on threads, or by a separate process beside training, if a process can be started.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.saving.earlier_saves import EarlierSave, SavedItem, Written
from bucketpoint.dcp.saving.object_layout import (
    ItemBytes,
    ObjectNames,
    PlannedObject,
    default_object_bytes,
    group_items,
    item_bytes,
    plan_objects,
    results_of,
)
from bucketpoint.dcp.saving.unchanged import (
    LEAST_COPIED_BYTES,
    ObjectCopy,
    OpenUrl,
    copy_object,
    find_unchanged,
    plan_copies,
    results_of_copy,
    sample_of,
)
from bucketpoint.dcp.session import SaveSession
from bucketpoint.errors import (
    BucketpointError,
    CredentialsError,
    EndpointError,
    HelperProcessError,
    HelperUnavailableError,
    first_fault,
)
from bucketpoint.forks import process_lock
from bucketpoint.format.catalog_keys import GroupRule
from bucketpoint.format.item_info import read_item
from bucketpoint.location import Location
from bucketpoint.staging import Lease
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import (
    BufferPool,
    Meter,
    ObjectSource,
    TaskGroup,
    TransferOptions,
    Uploaded,
    upload_objects,
)
from bucketpoint.transfer.upload import keep_uploaded

if TYPE_CHECKING:
    from bucketpoint.catalog.save_log import SaveLog
    from bucketpoint.transfer.helper.process import UploadHelper

logger = logging.getLogger(__name__)

COPIES_AT_ONCE = 4
"""Limit on concurrent copies of a rank. In a MinIO with one drive, copies time out if all clients together make about
16 or more at once."""


@dataclass(frozen=True)
class RankUpload:
    """The upload of one rank's items in one save.

    Attributes:
        options: options for transfers by this process: copies, and reads of items that are compared.
        open_url: opens the store of any URL with the writer's options.
        announced: records uploads to the given paths while they run: see `announce_uploads`.
        digests: compute digests of the items, which the next save compares.
    """

    place: Location
    store: Store
    names: ObjectNames
    rules: Sequence[GroupRule]
    uploads: Uploads
    lease: Lease | None
    options: TransferOptions
    meter: Meter
    target_object_bytes: int | None
    open_url: OpenUrl
    announced: Callable[[Sequence[str]], AbstractContextManager[None]]
    digests: bool

    def write(
        self, items: Sequence[WriteItem], planner: SavePlanner, last: EarlierSave | None, extensions: Sequence[Any]
    ) -> Written:
        """Upload the items, and return once all of them are stored.

        Args:
            last: earlier save whose unchanged objects are copied; None to send everything.
            extensions: stream transforms for all items.
        """
        try:
            if extensions:
                written = self._write_transformed(items, planner, extensions)
            else:
                written = self._write(items, planner, last)
        except BucketpointError:
            raise
        except Exception as error:
            named = ((item.index.fqn, item) for item in items)
            raise first_fault(error, named, lambda _, item: item_bytes(item, planner)) from error
        if len(written.results) != len(items):
            raise BucketpointError(f"{len(items)} items were planned, but {len(written.results)} were written")
        return written

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner, last: EarlierSave | None) -> Written:
        names = self.names
        most = self.target_object_bytes or default_object_bytes(self.store.capabilities, self.options)
        groups = {
            group: [item_bytes(item, planner, digests=self.digests) for item in members]
            for group, members in group_items(items, self.rules).items()
        }
        unchanged: Mapping[MetadataIndex, SavedItem] = {}
        copies: list[ObjectCopy] = []
        if last is not None:
            unchanged = find_unchanged([entry for members in groups.values() for entry in members], last, self.options)
            copies = plan_copies(groups, unchanged, last, names)
        copied = {entry.item.index for copy in copies for entry, _ in copy.items}
        planned: list[PlannedObject] = []
        for group, members in groups.items():
            for batch in _by_steadiness([entry for entry in members if entry.item.index not in copied], unchanged):
                planned += plan_objects(group, batch, names, target_object_bytes=most)
        self.meter.total_bytes = sum(entry.source.nbytes for entry in planned)
        written = Written()
        refused = self._send(planned, copies, last, written)
        if refused:
            planned = []
            for copy in refused:
                batch = [entry for entry, _ in copy.items]
                planned += plan_objects(copy.group, batch, names, target_object_bytes=most)
            self.meter.total_bytes += sum(entry.source.nbytes for entry in planned)
            self._send(planned, [], None, written)
        return written

    def _write_transformed(
        self, items: Sequence[WriteItem], planner: SavePlanner, extensions: Sequence[Any]
    ) -> Written:
        from bucketpoint.dcp.saving.transformed import write_transformed

        groups = {self.names.next(group): members for group, members in group_items(items, self.rules).items()}
        with self.announced(list(groups)):
            results = write_transformed(
                groups,
                planner,
                extensions,
                self.names.prefix,
                store=self.store,
                options=self.options,
                meter=self.meter,
            )
        return Written(results)

    def _send(
        self, planned: Sequence[PlannedObject], copies: Sequence[ObjectCopy], last: EarlierSave | None, written: Written
    ) -> list[ObjectCopy]:
        """Upload objects while the store copies others. Return the copies that failed."""
        done: dict[str, ObjectInfo | None] = {}

        def copy(one: ObjectCopy) -> None:
            assert last is not None
            done[one.path] = copy_object(one, last, self.place.url, self.open_url)

        large = [entry.path for entry in planned if entry.source.nbytes > self.options.single_put_bytes]
        # The copy of an object of more than 5 GiB is a multipart upload, too.
        large += [one.path for one in copies if one.source.size > self.options.single_put_bytes]
        at_once = min(COPIES_AT_ONCE, self.options.connections)
        tasks = TaskGroup(at_once, name="bucketpoint-copy", nice=self.options.nice)
        with self.announced(large), tasks as group:
            for one in copies:
                group.start(functools.partial(copy, one))
            sources = [entry.source for entry in planned]
            uploaded = self.uploads.upload(self.place, self.store, sources, self.lease, self.meter) if sources else []
        for entry, stored in zip(planned, uploaded, strict=True):
            items = [(placed.entry, stored.digests[placed.payload]) for placed in entry.items]
            self._note(entry.path, stored.info, results_of(entry, stored), items, written)
        refused = []
        for one in copies:
            info = done[one.path]
            if info is None:
                refused.append(one)
            else:
                results = results_of_copy(one, info)
                self._note(one.path, info, results, [(item, saved.digest) for item, saved in one.items], written)
                written.copied_nbytes += sum(result.size_in_bytes for result in results)
        return refused

    def _note(
        self,
        path: str,
        stored: ObjectInfo,
        results: Sequence[WriteResult],
        items: Sequence[tuple[ItemBytes, bytes | None]],
        written: Written,
    ) -> None:
        """Add an object to `written`, with those of its items that have a digest."""
        written.results.extend(results)
        if self.digests:
            written.objects[path] = stored
            for (entry, digest), result in zip(items, results, strict=True):
                if digest is not None:
                    saved = SavedItem(read_item(result.storage_data), digest, sample_of(entry.body))
                    written.items[result.index] = saved


def _by_steadiness(
    entries: Sequence[ItemBytes], unchanged: Mapping[MetadataIndex, SavedItem]
) -> Iterator[Sequence[ItemBytes]]:
    """Yield changed and unchanged items separately, if the unchanged are large enough for a copy at the next save."""
    steady = [entry for entry in entries if entry.item.index in unchanged]
    if sum(entry.nbytes for entry in steady) < LEAST_COPIED_BYTES:
        yield entries
        return
    yield [entry for entry in entries if entry.item.index not in unchanged]
    yield steady


@contextlib.contextmanager
def announce_uploads(log: SaveLog | None, session: SaveSession, store: Store, paths: Sequence[str]) -> Iterator[None]:
    """Record a rank's uploads to these paths in the log while they run, if the store lists uploads only by exact key.

    Without the record, a sweep could not find the unfinished uploads of a killed rank.
    """
    limits = store.capabilities
    if log is None or not paths or limits.lists_uploads or not limits.multipart:
        yield
        return
    log.uploading(str(session.url), session.token, session.rank, paths)
    yield
    try:
        log.uploaded(str(session.url), session.token, session.rank)
    except BucketpointError as error:
        logger.warning("the note of completed uploads was not deleted, and stays until the next sweep: %s", error)


# -- on threads, or by a process --------------------------------------------------------------------------------------

LEAST_BYTES = 16 << 20
"""Least staged bytes for which an upload process is worth its cost: 1 s of CPU time at its start, 70 MB of memory."""


_NOT_OF_THE_STORE = (HelperProcessError, CredentialsError, EndpointError)
"""Errors that may occur only in the upload process, for example with credentials that can be used only once, or if a
library is patched in this process."""


class Uploads:
    """The uploads of one writer, or of all writers of a manager, and the process that makes them beside training."""

    def __init__(self, options: TransferOptions) -> None:
        self._options = options
        self._lock = process_lock()
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
        from bucketpoint.transfer.helper.process import Upload

        work = Upload(
            store=store,
            url=place.url,
            storage_options=storage_options,
            sources=sources,
            options=replace(self._options, nice=0),
            memory=lease.memory,
        )
        return self._helper.upload(work, meter)
