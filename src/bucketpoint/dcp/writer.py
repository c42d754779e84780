"""What DCP calls to save: the `StorageWriter`. Plans objects, hands them to `transfer`, and commits.

No details of any cloud, and no thread of its own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bucketpoint.catalog.fence import AttemptFence
from bucketpoint.catalog.keeping import Keeping
from bucketpoint.catalog.pruning import PruneWorker
from bucketpoint.dcp import process_groups
from bucketpoint.dcp.agreement import agree_on_plans, agree_on_results, make_statement
from bucketpoint.dcp.boundary import dcp_call
from bucketpoint.dcp.commit import commit
from bucketpoint.dcp.commit_log import CommitLog
from bucketpoint.dcp.commit_put import Commit, look
from bucketpoint.dcp.console import describe, noted, progress_callback
from bucketpoint.dcp.planned import PlannedMetadata, WriterMeta, reported
from bucketpoint.dcp.results import Results
from bucketpoint.dcp.session import Location, SaveSession, SaveState, Seen, as_url, world_size
from bucketpoint.dcp.transformed import transformed_paths, write_transformed
from bucketpoint.dcp.upload_plan import Place, plan_objects, results_of
from bucketpoint.errors import BucketpointError, CheckpointExistsError
from bucketpoint.format import keys
from bucketpoint.format.catalogue import mark_of
from bucketpoint.format.groups import DEFAULT_RULES, GroupRule
from bucketpoint.retention import RetentionPolicy
from bucketpoint.staging import StagedState, Stager, StagingOptions, as_staging_options, current_lease, take_turn
from bucketpoint.stores import Capabilities, Store, accepts_url
from bucketpoint.stores.s3_options import with_engine
from bucketpoint.transfer import BufferPool, Meter, ProgressCallback, TransferOptions, upload_objects

logger = logging.getLogger(__name__)

DEFAULT_OBJECT_BYTES = 4 << 30
"""Objects stay below 5 GiB, the most that one server-side CopyObject moves (Amazon S3 service limit)."""

WHOLE_OBJECT_BYTES = 64 << 20
"""The same for stores that take an object in one piece only."""


class BucketWriter(StorageWriter):
    """Saves DCP checkpoints into an object store, whole or not at all.

    Usable with `dcp.save` and `dcp.async_save`, for any number of saves, with or without `checkpoint_id`. It is its own
    `AsyncStager`: `async_save` returns once the state has been copied to host memory, which is kept for the next save
    until `close()`. Saves that overlap are put in order.

    Args:
        path: URL of the checkpoint, such as `"s3://bucket/run/step-500"`; or none, with `checkpoint_id=` on each save.
        storage_options: credentials, endpoint and settings, spelt as fsspec's filesystem for that scheme spells them.
        fs: an fsspec filesystem of your own, which then serves every URL.
        overwrite: replace a checkpoint that is committed at the same URL when the save begins (DCP's default). The old
            one stays loadable until the new one commits. One that another job commits meanwhile is not replaced.
        thread_count: a hint, as in `FileSystemWriter`: at least this many requests are in flight.
        transfer: sizes and limits of the transfer.
        target_object_bytes: how much of a group one object holds before another is begun: 4 GiB by default, 64 MiB
            where the store takes an object in one piece only, and a quarter of `max_inflight_bytes` at most where a
            copy of that piece is held.
        groups: which name segments put an item into which group of objects.
        progress: True for a bar on the terminal (needs `rich`), a callable that gets `Progress` events, or None: no
            bar unless the standard error stream is an interactive terminal and this is rank 0.
        single_file_per_rank, sync_files, per_thread_copy_ahead: accepted for `FileSystemWriter`'s sake; they have no
            meaning for objects.
        cache_staged_state_dict: accepted for `FileSystemWriter`'s sake: staging memory is kept between saves anyway.
        staging: how `async_save` copies the state to host memory; torch's own `StagingOptions` will do.
        retention: a policy, or its file: each commit is recorded in the catalogue of its run, and the policy carried
            out after it, on a thread of the coordinator's. The run is the policy's `root`, or else what is above the
            checkpoint's folder, whose name says the step, by the policy's `layout`.
        log: told of each attempt and each commit, in place of `retention`. With neither, the record of a commit lies
            beside its `.metadata`.
        _extensions: torch's stream transforms (compression, encryption), applied to each item.
    """

    schemes: tuple[str, ...] = ()

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 0,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        fs: Any = None,
        transfer: TransferOptions | None = None,
        target_object_bytes: int | None = None,
        groups: Sequence[GroupRule] = DEFAULT_RULES,
        progress: ProgressCallback | bool | None = None,
        staging: StagingOptions | Any = None,
        retention: RetentionPolicy | str | os.PathLike[str] | None = None,
        log: CommitLog | None = None,
    ) -> None:
        super().__init__()
        if log is not None and retention is not None:
            raise BucketpointError("A writer takes retention= or log=, not both", remedy="Leave out log=")
        self.log = log
        self.transfer = _with_connections(transfer or TransferOptions(), thread_count)
        self.overwrite = overwrite
        # Marks of the commits that may be replaced; None for any.
        self.replaces_only: frozenset[str] | None = None
        self.target_object_bytes = target_object_bytes
        self.groups = tuple(groups)
        self.progress = progress
        self.cache_staged_state_dict = cache_staged_state_dict
        self.staging = as_staging_options(staging)
        self._location = Location(self.schemes, dict(storage_options or {}), fs)
        self._extensions = tuple(_extensions or ())
        self._synchronize_after_execute = True
        self._url = as_url(path)
        self._saves = threading.local()
        self._stager: Stager | None = None
        if self._url is not None:
            self._location.open(self._url)
        self._keeping = self._made_keeping(retention)

    # -- DCP, in the order in which it calls --------------------------------------------------------------------------

    @dcp_call
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save to a URL, on the thread that DCP runs it on. All ranks."""
        self._begin(as_url(checkpoint_id))

    @dcp_call
    def storage_meta(self) -> StorageMeta | None:
        """The URL and the token of this attempt. All ranks, first of all."""
        session = self._session()
        if session.planned or session.state is not SaveState.OPEN:
            # Without a `checkpoint_id` DCP never calls `reset` between saves.
            session = self._begin()
        session.planned = True
        # Two saves whose collectives interleave on one process group wait for each other until it times out.
        take_turn(f"the save of {session.url}")
        return WriterMeta(checkpoint_id=session.url, save_id=session.token)

    @dcp_call
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All ranks. `rank` and `use_collectives` come as keywords from torch 2.9 on."""
        session = self._session()
        session.rank = int(kwargs.get("rank") or 0)
        session.use_collectives = bool(kwargs.get("use_collectives", True))
        process_groups.refuse_to_save_as_one_of_many(session.url)
        if session.rank == 1 and self.unwatched:
            # Rank 0 cannot tell yet whether it saves alone, and a job may end before it can.
            process_groups.warn_of_a_shared_group()
        if not session.use_collectives:
            self._refuse_to_hide(session)
        elif is_coordinator:
            session.seen = self._look(session)
            if session.seen is not None and session.seen.there and not self._may_replace(session.seen):
                # Before terabytes are sent for nothing.
                raise CheckpointExistsError("Checkpoint already exists here", url=session.url)

    @dcp_call
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """All ranks: state on the plan what this rank takes the save for."""
        session = self._session()
        rules = [(rule.group, sorted(rule.segments)) for rule in self.groups]
        options = (rules, self.target_object_bytes, [type(each).__qualname__ for each in self._extensions])
        store, prefix = self._location.open(session.url)
        session.statement = make_statement(store, prefix, str(session.url), options=options, world=world_size())
        # A planner of the user's own may need the place on the plan: then the results alone say it.
        return replace(plan, storage_data=session.statement) if plan.storage_data is None else plan

    @dcp_call
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator. Nothing is put on the plans: with plan caching, that outlives this save.

        Raises:
            RanksDisagreeError: the ranks do not save to one place, or not one state.
        """
        session = self._session()
        if len(plans) > 1 and self.unwatched:
            process_groups.warn_of_a_shared_group()
        plans = agree_on_plans(plans, session.url, since=session.started)
        log = self._log_of(session)
        if log is not None:
            # The last moment at which no rank has sent anything yet: ranks upload once they have their plan from here.
            log.begin(str(session.url), session.token)
        return plans

    @dcp_call
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """All ranks: upload this rank's items, and report where each lies once all are acknowledged."""
        session = self._session()
        session.move(SaveState.UPLOADING)
        try:
            results = self._upload(session, plan, planner)
        except BaseException:
            session.move(SaveState.ABORTED)
            raise
        session.move(SaveState.UPLOADED)
        if len(results) != len(plan.items):
            raise BucketpointError(f"{len(plan.items)} items were planned and {len(results)} written")
        future: Future[list[WriteResult]] = Future()
        future.set_result(Results(results, plan, session.statement))
        return future

    @dcp_call
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator (every rank without collectives): commit.

        Raises:
            RanksDisagreeError: as `prepare_global_plan`, where kept plans did not cross.
        """
        session = self._session()
        agree_on_results(results, metadata, session.url)
        store, prefix = self._location.open(session.url)
        request = Commit(
            store=store,
            prefix=prefix,
            url=str(session.url),
            token=session.token,
            name=keys.METADATA if session.use_collectives else keys.rank_metadata(session.rank),
            overwrite=self.overwrite,
            log=self._log_of(session),
            seen=session.seen,
            fence=AttemptFence(store, prefix, session.since),
        )
        committed = commit(
            request,
            metadata,
            reported(results, metadata),
            world_size=len(results) if session.use_collectives else world_size(),
            created=time.time(),
            endpoint=store.identity,
        )
        if isinstance(metadata, PlannedMetadata) and session.use_collectives and len(results) > 1:
            metadata.committed_at = session.url
        session.move(SaveState.COMMITTED)
        logger.info(
            "saved %s: %.1f MB in %.2f s, %d items of %d ranks in %d objects",
            session.url,
            committed.nbytes / 1e6,
            time.monotonic() - session.started,
            committed.items,
            len(results),
            committed.objects,
        )

    # -- AsyncStager --------------------------------------------------------------------------------------------------

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    @dcp_call
    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> StagedState | concurrent.futures.Future[StagedState]:
        """Copy the state to host memory: see `Stager.stage`."""
        # Torch 2.9 calls `reset` on this thread too, for a save that another one runs.
        session: SaveSession | None = getattr(self._saves, "session", None)
        if session is not None and not session.planned:
            del self._saves.session
        return self._own_stager().stage(state_dict, **kwargs)

    @dcp_call
    def prefault(self, state_dict: dict[str, Any]) -> None:
        """Make ready the memory that an asynchronous save of this state will need: see `Stager.prefault`."""
        self._own_stager().prefault(state_dict)

    def synchronize_staging(self) -> None:
        """Wait until the last copy is complete."""
        if self._stager is not None:
            self._stager.synchronize_staging()

    def close(self) -> None:
        """Wait for the saves under way, and return the staging memory. The writer stays usable, and makes it anew."""
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.close()

    def _own_stager(self) -> Stager:
        stager = self._stager
        if stager is None:
            stager = self._stager = Stager(self.staging)
        return stager

    # -- what DCP looks at --------------------------------------------------------------------------------------------

    @property
    def checkpoint_id(self) -> str:
        """The URL of this thread's latest save, or else the constructor's; an empty string where there is neither."""
        return self.url or ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this class serves the URL by its scheme.

        `BucketWriter` serves paths and all schemes that fsspec knows, whether their libraries are installed or not.
        """
        return accepts_url(checkpoint_id, cls.schemes)

    @property
    def url(self) -> str | None:
        session: SaveSession | None = getattr(self._saves, "session", None)
        return session.url if session is not None else self._url

    @property
    def pruning(self) -> PruneWorker | None:
        """What pruning by `retention` came to on the coordinator: `last` and `failure`. None before the first save, and
        where a checkpoint process saves, which logs it alone.
        """
        return self._keeping.pruning if self._keeping is not None else None

    @property
    def unwatched(self) -> bool:
        """Whether this thread saves beside training, where the future that holds an error is often dropped."""
        return current_lease() is not None

    @property
    def rank(self) -> int | None:
        session: SaveSession | None = getattr(self._saves, "session", None)
        return session.rank if session is not None else None

    def __getstate__(self) -> dict[str, Any]:
        # A writer crosses to the checkpoint process as configuration; saves under way stay where they are.
        return {name: value for name, value in self.__dict__.items() if name not in ("_saves", "_stager")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._saves = threading.local()
        self._stager = None

    def _made_keeping(self, retention: RetentionPolicy | str | os.PathLike[str] | None) -> Keeping | None:
        if retention is None:
            return None
        where = self._location
        made = Keeping(retention, storage_options=where.storage_options, fs=where.fs)
        if made.policy.root is not None:
            where.open(made.policy.root)
        return made

    def _log_of(self, session: SaveSession) -> CommitLog | None:
        """Who is told of a save; nobody of one without collectives, which has no common commit."""
        if not session.use_collectives:
            return None
        return self._keeping.log_of(str(session.url)) if self._keeping is not None else self.log

    # -- one save -----------------------------------------------------------------------------------------------------

    def _begin(self, url: str | None = None) -> SaveSession:
        # Per thread: DCP runs each save on one thread, and two saves in flight must not share a token or a URL.
        session = SaveSession(url if url is not None else self._url)
        self._saves.session = session
        return session

    def _session(self) -> SaveSession:
        session: SaveSession | None = getattr(self._saves, "session", None)
        return session if session is not None else self._begin()

    def _upload(self, session: SaveSession, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        store, prefix = self._location.open(session.url)
        options = self.transfer if current_lease() is None else self.transfer.in_background()
        with progress_callback(self.progress, session.rank) as callback:
            meter = Meter("save", str(session.url), 0, noted(callback))
            place = Place(prefix, session.token, session.rank, self.groups)
            if self._extensions:
                with self._announced(session, store, transformed_paths(plan.items, place)):
                    results = write_transformed(
                        plan.items, planner, self._extensions, place, store=store, options=options, meter=meter
                    )
            else:
                size = self.target_object_bytes or _object_bytes(store.capabilities, options)
                planned = plan_objects(plan.items, planner, place, target_object_bytes=size)
                meter.total_bytes = sum(entry.source.nbytes for entry in planned)
                pool = BufferPool(options.max_inflight_bytes)
                sources = [entry.source for entry in planned]
                large = [entry.path for entry in planned if entry.source.nbytes > options.single_put_bytes]
                with self._announced(session, store, large):
                    uploaded = upload_objects(store, sources, options, pool=pool, meter=meter)
                results = [
                    result for entry, done in zip(planned, uploaded, strict=True) for result in results_of(entry, done)
                ]
            meter.finish()
        describe(logger, logging.DEBUG, f"rank {session.rank} uploaded", session.url, meter, session.started)
        return results

    @contextlib.contextmanager
    def _announced(self, session: SaveSession, store: Store, paths: Sequence[str]) -> Iterator[None]:
        """Where an upload is found by its exact key only, nobody would find those of a rank that is killed."""
        limits = store.capabilities
        log = self._log_of(session)
        if log is None or not paths or limits.lists_uploads or not limits.multipart:
            yield
            return
        log.uploading(str(session.url), session.token, session.rank, paths)
        yield
        try:
            log.uploaded(str(session.url), session.token, session.rank)
        except BucketpointError as error:
            logger.warning("a note of uploads that are complete stays until the next sweep: %s", error)

    def _refuse_to_hide(self, session: SaveSession) -> None:
        """Readers take `.metadata` before `__{rank}.metadata`: beside one, a save without collectives is never read."""
        seen = self._look(session)
        if seen is not None and seen.there:
            raise CheckpointExistsError(
                "Checkpoint already exists here: saved with collectives, it would hide one that is saved without",
                url=session.url,
                remedy="Choose another checkpoint_id",
            )

    def _may_replace(self, seen: Seen) -> bool:
        """Whether this save may replace what is committed there now. The commit then replaces this alone."""
        return self.overwrite and (self.replaces_only is None or mark_of(seen.etag) in self.replaces_only)

    def _look(self, session: SaveSession) -> Seen | None:
        """What is committed when the attempt begins: another job's commit from now on is not ours to replace."""
        store, prefix = self._location.open(session.url)
        return look(store, prefix, keys.METADATA)


class S3Writer(BucketWriter):
    """`BucketWriter` for `s3://` URLs: Amazon S3, MinIO and every other store that speaks its protocol.

    Args:
        engine: what moves large bodies: "boto3", "crt" or "auto"; the storage option of that name.
        everything else: as for `BucketWriter`.
    """

    schemes = ("s3", "s3a")

    def __init__(self, *args: Any, engine: str | None = None, **settings: Any) -> None:
        super().__init__(*args, **with_engine(settings, engine))


class GCSWriter(BucketWriter):
    """`BucketWriter` for `gs://` URLs: Google Cloud Storage."""

    schemes = ("gs", "gcs")


def _object_bytes(store: Capabilities, options: TransferOptions) -> int:
    if store.multipart:
        return DEFAULT_OBJECT_BYTES
    # Where a copy of the whole object is held while it goes up, several should fit the budget.
    return min(WHOLE_OBJECT_BYTES, 2 * options.copied_part_bytes) if store.copies_bodies else WHOLE_OBJECT_BYTES


def _with_connections(options: TransferOptions, thread_count: int | None) -> TransferOptions:
    if thread_count is None or thread_count <= options.connections:
        return options
    return replace(options, connections=thread_count)
