"""`BucketWriter`, the `StorageWriter` that DCP calls to save: plans and uploads objects, and commits the checkpoint."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bucketpoint.catalog.deletion.fence import AttemptFence
from bucketpoint.dcp import process_groups
from bucketpoint.dcp.error_boundary import dcp_call
from bucketpoint.dcp.planning.agreement import agree_on_plans, agree_on_results, make_statement, reports_of
from bucketpoint.dcp.planning.global_plan import PlanCache, PlannedMetadata, WriterMeta
from bucketpoint.dcp.planning.results import Results, reported
from bucketpoint.dcp.progress_bar import describe, noted, progress_callback
from bucketpoint.dcp.saving.commit import commit
from bucketpoint.dcp.saving.commit_put import Commit, prior_commit, refuse_existing, refuse_hidden
from bucketpoint.dcp.saving.earlier_saves import (
    Announcement,
    EarlierSaves,
    newest_commit,
    read_earlier_save,
)
from bucketpoint.dcp.saving.object_layout import ObjectNames
from bucketpoint.dcp.saving.uploads import RankUpload, Uploads, announce_uploads
from bucketpoint.dcp.session import Located, SaveSession, SaveSessions, as_url
from bucketpoint.dcp.stats import SaveStats, begin_save, end_save
from bucketpoint.errors import BucketpointError
from bucketpoint.format import keys
from bucketpoint.format.catalog_keys import DEFAULT_RULES, GroupRule
from bucketpoint.location import Location
from bucketpoint.staging import (
    SavingRanks,
    StagedState,
    Stager,
    StagingOptions,
    as_staging_options,
    current_lease,
    take_turn,
)
from bucketpoint.transfer import Meter, ProgressCallback, TransferOptions

if TYPE_CHECKING:
    from bucketpoint.catalog.deletion.worker import PruneWorker
    from bucketpoint.catalog.save_log import RunRetention, SaveLog
    from bucketpoint.retention import RetentionPolicy

logger = logging.getLogger(__name__)

Unchanged = Literal["send", "copy"]


class BucketWriter(Located, StorageWriter, AsyncStager):
    """Writer of DCP checkpoints to an object store. A checkpoint is saved completely or not at all.

    Usable with `dcp.save` and `dcp.async_save`, for any number of saves, with or without `checkpoint_id`. The writer is
    also the `AsyncStager`: `async_save` returns once the state has been copied to host memory. This memory is kept for
    the next save until `close()`. Overlapping saves run one after the other.

    Args:
        path: URL of the checkpoint, such as `"s3://bucket/run/step-500"`; None if each save passes `checkpoint_id=`.
        storage_options: credentials, endpoint and settings, named as in fsspec's filesystem for the scheme.
        fs: an fsspec filesystem, which then serves every URL.
        overwrite: replace the checkpoint that the URL has when the save begins (DCP's default). The old checkpoint
            stays loadable until the new one commits. A checkpoint that another job commits meanwhile is not replaced.
        thread_count: raises the limit on concurrent requests to at least this number. Named as in `FileSystemWriter`.
        transfer: sizes and limits of the transfer.
        target_object_bytes: bytes of a group after which the next object is begun. The default is 4 GiB. Without
            multipart uploads it is 64 MiB, or a quarter of `max_inflight_bytes` if this is less and an upload holds a
            copy of the object in memory.
        groups: rules that put an item into a group of objects by the segments of its name.
        progress: True for a bar on the terminal (needs `rich`), a callable that gets `Progress` events, or None: no
            bar unless the standard error stream is an interactive terminal and this is rank 0.
        single_file_per_rank, sync_files, per_thread_copy_ahead, cache_staged_state_dict: ignored; accepted for
            compatibility with `FileSystemWriter`. Staging memory is always kept between saves.
        staging: options of the copy to host memory in `async_save`; torch's `StagingOptions` are accepted too.
        retention: a policy, or the path of its file. Each commit is then recorded in the catalog of its run, and the
            policy is applied after the commit, on a thread of the coordinator. The run is the policy's `root`, or else
            the folder that contains the checkpoint's folder. The name of the checkpoint's folder must contain the step,
            in the policy's `layout`. Without a policy, the record of a commit is stored next to its `.metadata`.
        unchanged: treatment of items with the same bytes as in the last checkpoint of the run: `"send"` uploads them
            again, `"copy"` lets the store copy them. See docs/saving.md.
        _extensions: torch's stream transforms (compression, encryption), applied to each item.

    Raises:
        BucketpointError: an option is unknown or has a wrong type.
    """

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
        unchanged: Unchanged = "send",
    ) -> None:
        if unchanged not in get_args(Unchanged):
            raise BucketpointError(f"unchanged={unchanged!r} is invalid", remedy='Choose "send" or "copy"')
        # Transformed items are always sent.
        self._copies = unchanged == "copy" and not _extensions
        self._log: SaveLog | None = None
        self.transfer = transfer or TransferOptions()
        if thread_count is not None and thread_count > self.transfer.connections:
            self.transfer = replace(self.transfer, connections=thread_count)
        self.overwrite = overwrite
        self.replaces_only: frozenset[str] | None = None
        self.target_object_bytes = target_object_bytes
        self.groups = tuple(groups)
        self.progress = progress
        self.staging = as_staging_options(staging)
        self._extensions = tuple(_extensions or ())
        self._sessions = SaveSessions()
        self._stager: Stager | None = None
        self.uploads = Uploads(self.transfer)
        self.plans = PlanCache()
        self.earlier_saves = EarlierSaves()
        super().__init__(path, storage_options, fs)
        self._keeping: RunRetention | None = None
        if retention is not None:
            from bucketpoint.catalog.save_log import RunRetention

            self._keeping = RunRetention(retention, storage_options=self._storage_options, fs=fs)
            if self._keeping.policy.root is not None:
                self._open(self._keeping.policy.root)

    @classmethod
    def of_run(
        cls,
        url: str | None,
        log: SaveLog | None,
        uploads: Uploads | None = None,
        earlier_saves: EarlierSaves | None = None,
        *,
        replaces_only: frozenset[str] | None = None,
        **options: Any,
    ) -> BucketWriter:
        """Make the writer of one save of a run.

        Args:
            log: log of each attempt and each commit; None to store the record next to `.metadata`.
            uploads, earlier_saves: shared by all saves of the run.
            replaces_only: marks of the commits that may be replaced (hashes of their ETags); None for any commit.
        """
        writer = cls(url, **options)
        writer._log, writer.replaces_only = log, replaces_only
        writer.uploads = uploads or writer.uploads
        writer.earlier_saves = earlier_saves or writer.earlier_saves
        return writer

    # -- methods in the order in which DCP calls them -----------------------------------------------------------------

    @dcp_call
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the URL of the next save. Called on all ranks, on the thread that runs the save."""
        url = as_url(checkpoint_id)
        self._sessions.begin(url if url is not None else self._url)

    @dcp_call
    def storage_meta(self) -> StorageMeta | None:
        """Return the URL and the id of this thread's save, which `set_up_storage_writer` begins."""
        session = self._sessions.current
        token = session.token if session is not None else self._sessions.next_token()
        return WriterMeta(checkpoint_id=self.url, save_id=keys.save_id(token))

    @dcp_call
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin the save, and check that it may begin. Called on all ranks. DCP passes `rank` and `use_collectives`."""
        session = self._session()
        if session.planned:
            # Without a `checkpoint_id` DCP never calls `reset` between saves.
            session = self._sessions.begin(self._url)
        session.planned = True
        # Two saves whose collectives interleave on one process group wait for each other until a timeout.
        take_turn(f"the save of {session.url}")
        session.times.turn = time.monotonic()
        session.rank = int(kwargs.get("rank") or 0)
        session.use_collectives = bool(kwargs.get("use_collectives", True))
        session.ranks, lease = self._ranks(), current_lease()
        session.times.begin(session.ranks.rank, lease)
        process_groups.refuse_other_ranks(session.ranks, session.url)
        process_groups.refuse_a_rank_alone("A save", session.url, first_may=True)
        if process_groups.is_initialized():
            from bucketpoint.dcp import meshes

            # Called only after `take_turn`, because earlier saves use the same mesh.
            meshes.leave_default_group()
        # If this writer has not staged the state, the upload process starts here, while the ranks plan.
        memory = lease.memory if lease is not None and lease.beside_training else None
        self._prepare_uploads(memory.nbytes if memory is not None else 0)
        if session.use_collectives and not is_coordinator:
            return
        # Check before terabytes are uploaded. A later commit of another job is never replaced.
        seen = prior_commit(*self._open(session.url), keys.METADATA)
        if session.use_collectives:
            session.seen = seen
            refuse_existing(seen, session.url, overwrite=self.overwrite, replaces_only=self.replaces_only)
        else:
            refuse_hidden(seen, session.url)

    @dcp_call
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add this rank's statement to the plan: place, options and world size, which must be equal on all ranks."""
        session = self._session()
        rules = [(rule.group, sorted(rule.segments)) for rule in self.groups]
        options = (rules, self.target_object_bytes, [type(each).__qualname__ for each in self._extensions])
        store, prefix = self._open(session.url)
        session.statement = make_statement(
            store, prefix, str(session.url), options=options, world=process_groups.world_size(), rank=session.ranks.rank
        )
        # A custom planner may use `storage_data` of the plan. Then only the results contain the statement.
        return replace(plan, storage_data=session.statement) if plan.storage_data is None else plan

    @dcp_call
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all ranks agree, and add the save to compare with to the plans. Called on the coordinator.

        Raises:
            RanksDisagreeError: the ranks save to different places, or different states.
        """
        session = self._session()
        # DCP does not pass `no_dist` to a writer. In a job of several ranks, a single plan means `no_dist` or a group
        # of one rank; without a process group, it may also mean that the group is gone.
        known = session.use_collectives and (session.ranks.together is not None or len(plans) > 1)
        alone = session.ranks.alone or (not known and process_groups.world_size() > 1)
        session.count_ranks(len(plans))
        session.ranks = replace(session.ranks, alone=alone)
        plans = agree_on_plans(plans, session.url, since=session.times.begun)
        log = self._log_of(session)
        if log is not None:
            # Ranks upload once they receive the plans that this method returns, so no rank has sent data yet.
            log.begin(str(session.url), session.token)
        said = Announcement(session.token)
        if self._copies:
            newest = functools.partial(newest_commit, self._place(session))
            said = self.earlier_saves.announcement(str(session.url), session.token, newest)
        return replace(said, span=begin_save(session.times, str(session.url))).put_on(plans)

    @dcp_call
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's items, and return the location of each item once all are stored. Called on all ranks."""
        session = self._session()
        session.times.planned = time.monotonic()
        results = self._upload(session, plan, planner)
        session.times.uploaded = time.monotonic()
        if session.use_collectives and session.rank and current_lease() is None:
            end_save(session.times, session.times.stats(), str(session.url))
        future: Future[list[WriteResult]] = Future()
        future.set_result(cast(Any, Results.of(results, plan, session.statement, session.times.report())))
        return future

    @dcp_call
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint. Called on the coordinator, or on every rank in a save without collectives.

        Raises:
            RanksDisagreeError: as `prepare_global_plan`, for cached plans, which DCP does not send to the coordinator.
        """
        session = self._session()
        times = session.times
        times.committing, times.reports = time.monotonic(), reports_of(results)
        session.count_ranks(len(results))
        agree_on_results(results, metadata, session.url)
        store, prefix = self._open(session.url)
        said = reported(results, metadata)
        request = Commit(
            store=store,
            prefix=prefix,
            url=str(session.url),
            token=session.token,
            name=keys.METADATA if session.use_collectives else keys.rank_metadata(session.rank),
            overwrite=self.overwrite,
            log=self._log_of(session),
            facts={"seconds": round(time.monotonic() - times.called, 3)},
            seen=session.seen,
            partial=session.ranks.alone,
            ranks=process_groups.ranks_expected() if len(results) == 1 else 1,
            fence=AttemptFence(store, prefix, session.since),
        )
        committed = commit(
            request,
            metadata,
            said,
            world_size=len(results) if session.use_collectives else process_groups.world_size(),
            created=time.time(),
            endpoint=store.identity,
        )
        times.committed, times.nbytes = time.monotonic(), committed.bytes
        url, lease, seconds = str(session.url), current_lease(), times.committed - times.called
        if lease is None:
            end_save(times, times.stats(), url)
        self.earlier_saves.note_committed(session.token, url)
        about = (committed.bytes, committed.step, dict(committed.metrics), seconds)
        vars(metadata).update(committed=about)
        if isinstance(metadata, PlannedMetadata):
            metadata.url = url
            metadata.committed_at = session.url if session.use_collectives and len(results) > 1 else None
        # On another thread without a lease, the save is asynchronous, with a stager of another package.
        beside = threading.current_thread() is not threading.main_thread()
        blocked_s = lease.blocked_s if lease is not None else None if beside else seconds
        megabytes = committed.bytes / 1e6
        blocked = "" if blocked_s is None else f", blocked {1000 * blocked_s:.0f} ms"
        speed = f"{megabytes:.1f} MB in {seconds:.2f} s ({megabytes / max(seconds, 1e-6):.0f} MB/s){blocked}"
        items, objects = committed.items, committed.objects
        logger.info("saved %s: %s, %d items of %d ranks in %d objects", url, speed, items, len(results), objects)
        if session.use_collectives:
            self.earlier_saves.watch_moments(url, said)

    # -- AsyncStager --------------------------------------------------------------------------------------------------

    @dcp_call
    def stage(  # type: ignore[override]
        self, state_dict: dict[str, Any], **kwargs: Any
    ) -> StagedState | concurrent.futures.Future[StagedState]:
        """Copy the state to host memory: see `Stager.stage`."""
        # torch 2.9 calls `reset` on this thread too, although another thread runs the save: discard this session.
        session = self._sessions.current
        if session is not None and not session.planned:
            self._sessions.current = None
        staged = self._own_stager().stage(state_dict, **kwargs)
        self._prepare_uploads(self._own_stager().staged_bytes)
        return staged

    @dcp_call
    def prefault(self, state_dict: dict[str, Any]) -> None:
        """Allocate the memory that an asynchronous save of this state will need: see `Stager.prefault`."""
        self._own_stager().prefault(state_dict)
        self._prepare_uploads(self._own_stager().staged_bytes)

    def synchronize_staging(self) -> None:
        """Wait until the last copy is complete."""
        if self._stager is not None:
            self._stager.synchronize_staging()

    def close(self) -> None:
        """Wait for running saves, free the staging memory, and end the upload process.

        A later save on this writer allocates memory and starts a process again.
        """
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.close()
        self.uploads.close()

    def _own_stager(self) -> Stager:
        if self._stager is None:
            self._stager = Stager(self.staging)
        return self._stager

    def _prepare_uploads(self, staged_bytes: int) -> None:
        shared = self.staging.use_shared_memory and self._fs is None and not self._extensions
        if staged_bytes and shared:
            self.uploads.prepare(staged_bytes)

    # -- properties that DCP reads ------------------------------------------------------------------------------------

    @property
    def url(self) -> str | None:
        """URL of this thread's latest save, or else the URL from the constructor."""
        session = self._sessions.current
        return session.url if session is not None else self._url

    @property
    def stats(self) -> SaveStats | None:
        """Figures of this thread's latest `dcp.save` until now; None before the first. For an asynchronous save, see
        `SaveHandle.stats`.
        """
        session = self._sessions.current
        return session.times.stats() if session is not None else None

    @property
    def pruning(self) -> PruneWorker | None:
        """Outcome of pruning by `retention` on the coordinator, in `last` and `failure`. None before the first save,
        and always with a checkpoint process, which only logs the outcome.
        """
        return self._keeping.pruning if self._keeping is not None else None

    @property
    def unwatched(self) -> bool:
        """True if this thread saves in the background: its errors are logged, as programs often discard the future."""
        return current_lease() is not None

    @property
    def rank(self) -> int | None:
        session = self._sessions.current
        return session.rank if session is not None else None

    def __getstate__(self) -> dict[str, Any]:
        # Only the configuration is pickled for a checkpoint process, without running saves.
        self.uploads.leave()
        try:
            pickle.dumps(self.progress)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            # The error of pickle does not name the argument.
            raise BucketpointError(
                f"progress cannot be sent to DCP's checkpoint process: {error}",
                remedy="Give progress a function of a module, or save on a thread",
            ) from error
        return {name: value for name, value in self.__dict__.items() if name not in ("_sessions", "_stager", "uploads")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sessions = SaveSessions()
        self._stager = None
        self.uploads = Uploads(self.transfer)

    def _log_of(self, session: SaveSession) -> SaveLog | None:
        """Return the log for a save; None for a save without collectives, which has no common commit to record."""
        if not session.use_collectives:
            return None
        return self._keeping.log_of(str(session.url)) if self._keeping is not None else self._log

    def _ranks(self) -> SavingRanks:
        lease = current_lease()
        return lease.ranks if lease is not None else SavingRanks.of_job()

    # -- one save -----------------------------------------------------------------------------------------------------

    def _session(self) -> SaveSession:
        return self._sessions.current or self._sessions.begin(self._url)

    def _place(self, session: SaveSession) -> Location:
        return Location.of(session.url, self._storage_options, self._fs)

    def _upload(self, session: SaveSession, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        store, prefix = self._open(session.url)
        lease = current_lease()
        said = Announcement.received(plan.storage_data)
        session.times.link = said.span if said is not None else None
        last = None
        if self._copies:
            read = functools.partial(read_earlier_save, plan.items, self.transfer, self._open)
            last = self.earlier_saves.compared_with(str(session.url), said, read)
        with progress_callback(self.progress, session.rank, session.ranks.rank) as callback:
            meter = Meter("save", str(session.url), 0, noted(callback))
            upload = RankUpload(
                place=self._place(session),
                store=store,
                names=ObjectNames(prefix, session.token, session.rank),
                rules=self.groups,
                uploads=self.uploads,
                lease=lease,
                options=self.uploads.options(lease),
                meter=meter,
                target_object_bytes=self.target_object_bytes,
                open_url=self._open,
                announced=functools.partial(announce_uploads, self._log_of(session), session, store),
                digests=self._copies,
            )
            written = upload.write(plan.items, planner, last, self._extensions)
            meter.finish()
        session.times.sent_bytes, session.times.copied_bytes = meter.done_bytes, written.copied_nbytes
        if self._copies:
            self.earlier_saves.keep(said, str(session.url), written)
        describe(
            logger,
            logging.DEBUG,
            f"rank {process_groups.this_rank()} uploaded",
            session.url,
            meter,
            session.times.begun,
        )
        return written.results
