"""`BucketReader`, the `StorageReader` that DCP calls to load: plans ranges, reads them, and fills tensors."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.futures import Future

from bucketpoint.checkpoint.metadata_source import MetadataSource, committed_etags
from bucketpoint.dcp.error_boundary import dcp_call
from bucketpoint.dcp.loading.extents import load_extents
from bucketpoint.dcp.loading.read_plan import ReadPlan
from bucketpoint.dcp.planning.agreement import agree_on_commit, commit_read
from bucketpoint.dcp.planning.unused_keys import compare_keys, find_unmatched
from bucketpoint.dcp.process_groups import this_rank, world_size
from bucketpoint.dcp.progress_bar import describe, progress_callback
from bucketpoint.dcp.session import LoadSession, Located, as_url
from bucketpoint.dcp.stats import LoadStats, note_load, requests_of
from bucketpoint.errors import (
    BucketpointError,
    CheckpointDeletedError,
    CheckpointNotFoundError,
    CorruptDataError,
    MismatchError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from bucketpoint.format import keys
from bucketpoint.format.index.ref import is_index
from bucketpoint.format.index.view import ChunkShapes, decode_index
from bucketpoint.format.keys import new_token
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import QUANTIZATION, extra, token_of
from bucketpoint.staging import take_turn
from bucketpoint.stores import Store, retry
from bucketpoint.transfer import (
    BufferPool,
    Extent,
    Meter,
    ProgressCallback,
    Request,
    TransferOptions,
    fetch,
    plan_requests,
)

if TYPE_CHECKING:
    from bucketpoint.dcp.cooperative.load import Cooperation

logger = logging.getLogger(__name__)


class BucketReader(Located, StorageReader):
    """Reader of DCP checkpoints in an object store.

    Reads checkpoints of `BucketWriter`, of torch's `FileSystemWriter` and `FsspecWriter`, and of s3torchconnector.

    Only the byte ranges that this rank needs are read, in parallel: directly into contiguous CPU tensors of the saved
    dtype, and through buffers of limited size into all other tensors. Data of `BucketWriter` is verified by checksum
    before the planner receives it.

    Args:
        path: URL of the checkpoint; None if each load passes `checkpoint_id=`.
        storage_options, fs, transfer, progress: as for `BucketWriter`.
        trusted: read byte items whose pickles name things outside the allow-list. Such items can run any code, so use
            this option only for checkpoints from a source whose programs you would run.
        cooperative: ranks that read for each other, so that shared bytes are read only once: `"off"`, no ranks;
            `"node"`, the ranks of one node; `"group"`, all ranks of the group. Pass the same mode on all ranks of the
            group. Except with `"off"`, all ranks must load at the same time.
        process_group: torch's group of the ranks that read together; None for all ranks of the job.
        dequantize: for a folder of safetensors, load weights that config.json declares as quantized (`fp8` in blocks,
            `mxfp4`) as bfloat16, or as other floats of the state. False: load the stored values and scales.
        _extension_registry: torch's registry of stream transforms; by default a registry with zstd.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        _extension_registry: Any = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        fs: Any = None,
        transfer: TransferOptions | None = None,
        trusted: bool = False,
        progress: ProgressCallback | bool | None = None,
        cooperative: str = "off",
        process_group: Any = None,
        dequantize: bool = True,
    ) -> None:
        super().__init__(path, storage_options, fs)
        self.dequantize = dequantize
        self.transfer = transfer or TransferOptions()
        self.trusted = trusted
        self.progress = progress
        self.rank: int | None = None
        self._cooperation: Cooperation | None = None
        if cooperative != "off":
            from bucketpoint.dcp.cooperative.load import Cooperation

            self._cooperation = Cooperation(cooperative, process_group)
        self._registry = ExtensionRegistry() if _extension_registry is None else _extension_registry
        self._load = LoadSession()
        self._stats: LoadStats | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_load"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load = LoadSession()

    @property
    def url(self) -> str | None:
        """URL of this thread's latest load, or else the URL from the constructor."""
        return self._load.url or self._url

    # -- methods in the order in which DCP calls them -----------------------------------------------------------------

    @dcp_call
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, from `checkpoint_id` if it is given. Called on all ranks."""
        if checkpoint_id is not None:
            self._load.url = as_url(checkpoint_id)
        load = self._load
        load.metadata, load.commit, load.plans, load.failure, load.in_load = None, None, (), None, True
        self._begin()
        self._leave()
        self._wait_for_saves()

    @dcp_call
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`, or with `rank=` the `__{rank}.metadata` of a save without collectives. Called on all ranks.

        Within a load (after `reset`), this method returns an `Unread` instead of raising an error; the `Unread` raises
        the error once DCP accesses the metadata. The error is raised at once only if the checkpoint may have been saved
        without collectives: DCP then reads the metadata of each rank.

        Raises:
            CheckpointNotFoundError: the URL has no checkpoint.
            IncompleteCheckpointError: the URL has data without a commit.
            MetadataError, UnsafeDataError: the metadata cannot, or must not, be read.
            BucketpointError: ranks of a cooperative load are missing, or load another checkpoint.
        """
        rank = kwargs.get("rank")
        if rank is not None:
            return self._after_failure(int(rank))
        in_load, self._load.in_load = self._load.in_load, False
        if not in_load:
            # Without a `checkpoint_id` DCP never calls `reset`.
            self._begin()
        self._wait_for_saves()
        self._load.failure = None

        def read() -> bytes:
            # Opens the store, so it is called after the ranks have met: a rank that fails here keeps no other waiting.
            return self._source().read(indexed=not self.trusted)

        try:
            if self._cooperation is None:
                return self._decode(read())
            self._cooperation.connect(self.url)
            return self._decode(self._cooperation.read_once(read))
        except Exception as error:
            self._load.failure = error
            self._leave()
            if not in_load or self._may_be_by_rank(error):
                raise
            # If the error were raised here, DCP would log this traceback and that of its second call.
            return Unread(self._reason(error))

    def _leave(self) -> None:
        """Report to the other ranks of a cooperative load that this rank has aborted its load."""
        if self._cooperation is not None:
            self._cooperation.close()

    def _may_be_by_rank(self, failure: Exception) -> bool:
        """Return True if the checkpoint may have been saved without collectives, with metadata of each rank."""
        if not isinstance(failure, CheckpointNotFoundError):
            return False
        store, prefix = self._open(self.url)
        try:
            store.head(keys.join(prefix, keys.rank_metadata(0)))
        except ObjectNotFoundError:
            return False
        except StoreError:
            # DCP's second call will have the same error and report it.
            return True
        return True

    def _after_failure(self, rank: int) -> Metadata:
        failure = self._load.failure
        if failure is None:
            return self._read_of_rank(rank)
        # After a failure DCP reads the metadata again, and turns a second error into an assertion. So the reason is
        # kept, and raised as soon as DCP accesses the metadata.
        if isinstance(failure, CheckpointNotFoundError):
            try:
                return self._read_of_rank(rank)
            except CheckpointNotFoundError:
                failure = self._reason(failure)
            except Exception as error:  # noqa: BLE001 (kept, and raised once DCP accesses the metadata)
                failure = error
        return Unread(failure)

    def _reason(self, failure: Exception) -> Exception:
        """Return the failure; if there is no commit, a more precise error that names the objects at the URL."""
        if isinstance(failure, CheckpointNotFoundError) and not isinstance(failure, CheckpointDeletedError):
            return self._source().nothing_here()
        return failure

    def _wait_for_saves(self) -> None:
        """Wait for background saves of this thread, so that their collectives do not mix with those of the load."""
        if world_size() > 1:
            take_turn(f"the load of {self.url}")

    @dcp_call
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set the metadata, or raise the error of `read_metadata`. Called on all ranks."""
        self.rank = int(kwargs.get("rank") or 0)
        if isinstance(metadata, Unread):
            raise metadata.__dict__["_reason"]
        self._load.metadata = metadata
        self._load.read_metadata_at = time.monotonic()

    @dcp_call
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan a statement with the commit that this rank has read. Called on all ranks."""
        # A custom planner may use `storage_data` of the plan.
        return replace(plan, storage_data=self._load.commit) if plan.storage_data is None else plan

    @dcp_call
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks load the same commit. Called on the coordinator.

        Raises:
            RanksDisagreeError: the ranks load different commits, because their URLs differ or another job has replaced
                the checkpoint. No data has been read into the state.
        """
        self._load.plans = agreed = agree_on_commit(plans, self.url)
        return agreed

    @dcp_call
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the planner's tensors; return when all have arrived. Called on all ranks."""
        started = time.monotonic()
        if self._load.metadata is None:
            raise BucketpointError(
                "This thread has begun no load",
                url=self.url,
                remedy="Call the methods of a reader, for each load, on one thread",
            )
        plans, self._load.plans = self._load.plans, ()
        if plans and type(planner) is DefaultLoadPlanner:
            # `LoadPlanner` compares the keys of all ranks. torch's planner reports no unmatched keys of other ranks.
            flat = planner.state_dict
            unmatched = find_unmatched(flat, planner.original_state_dict, self._load.metadata.state_dict_metadata)
            compare_keys(self._load.metadata, plans, flat, unmatched).log(self.url, losses_only=True)
        pool = BufferPool(self.transfer.max_inflight_bytes)
        # In a cooperative load, any error in this context is reported to the other ranks.
        group = contextlib.nullcontext() if self._cooperation is None else self._cooperation.taking_part()
        with group, progress_callback(self.progress, self.rank or 0, this_rank()) as callback:
            store, prefix = self._open(self.url)
            meter = Meter("load", str(self.url), 0, callback)

            plan_here = functools.partial(self._requests, plan, planner, store, prefix, pool, meter)
            try:
                if self._cooperation is None:
                    requests = plan_here()
                else:
                    requests = self._cooperation.fetch(store, plan_here, self.transfer, meter=meter)
                meter.expect(sum(request.nbytes for request in requests))
                fetch(store, requests, self.transfer, pool=pool, meter=meter)
            except (ObjectNotFoundError, PreconditionFailedError) as error:
                raise CorruptDataError(
                    f"The checkpoint is damaged: a data object is missing or was replaced: {error.message}",
                    url=self.url,
                    # Stores name the object by its URL.
                    key=(error.url or "").removeprefix(f"{store.url.rstrip('/')}/") or None,
                ) from error
            meter.finish()
        ended = time.monotonic()
        self._stats = stats = LoadStats(
            rank=this_rank(),
            metadata_s=self._load.read_metadata_at - self._load.begun,
            planning_s=started - self._load.read_metadata_at,
            read_s=ended - started,
            total_s=ended - self._load.begun,
            read_bytes=meter.done_bytes - meter.node_bytes,
            node_bytes=meter.node_bytes,
            requests=requests_of(self._load.counts),
            retried=self._load.counts["retried"],
            throttled=self._load.counts["throttled"],
        )
        # Later requests of this thread do not belong to this load, but perhaps to a save whose planner made this load.
        retry.count_into(self._load.former_counts)
        note_load(stats, str(self.url))
        level = logging.INFO if not self.rank else logging.DEBUG
        describe(logger, level, "loaded", self.url, meter, started)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def stats(self) -> LoadStats | None:
        """Figures of the last load on this rank; None until its end."""
        return self._stats

    def explain(self) -> str:
        """Return a text, with figures, that explains whether and why the last load was cooperative."""
        return 'Plain: cooperative="off"' if self._cooperation is None else self._cooperation.explanation

    # -- one load -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        load, self._stats = self._load, None
        load.begun = load.read_metadata_at = time.monotonic()
        load.counts = Counter()
        load.former_counts = retry.count_into(load.counts)

    def _source(self) -> MetadataSource:
        # Once decoded, a byte of `.metadata` takes at least 16 bytes of memory.
        most = self.transfer.max_metadata_bytes >> 4
        place = *self._open(self.url), str(self.url)
        return MetadataSource(*place, self.transfer.read_attempts, most, self.dequantize)

    def _decode(self, data: bytes) -> Metadata:
        if is_index(data):
            metadata = decode_index(data, url=self.url)
        else:
            most = self.transfer.max_metadata_bytes
            metadata = decode_metadata(data, trusted=self.trusted, url=self.url, most=most)
        self._load.commit = commit_read(token_of(metadata), data, *self._open(self.url), str(self.url))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = new_token()
        return metadata

    def _read_of_rank(self, rank: int) -> Metadata:
        metadata = self._decode(self._source().get(keys.rank_metadata(rank))[0])
        # Each rank has different metadata with a different token, so only the place can be compared.
        self._load.commit = commit_read(None, b"", *self._open(self.url), str(self.url))
        saved, here = extra(metadata).get("world_size"), world_size()
        if saved is not None and saved != here:
            raise MismatchError(
                f"The checkpoint was saved by {saved} ranks without collectives (no_dist), but {here} ranks load it",
                url=self.url,
                rank=rank,
                remedy="Load it on as many ranks as saved it: each rank has only its own metadata",
            )
        return metadata

    def _requests(
        self, plan: LoadPlan, planner: LoadPlanner, store: Store, prefix: str, pool: BufferPool, meter: Meter
    ) -> list[Request]:
        metadata = self._load.metadata
        assert metadata is not None
        quantization = None
        if (fact := extra(metadata).get(QUANTIZATION)) is not None:
            from bucketpoint.checkpoint.safetensors_folder import Quantization

            quantization = Quantization.of(fact)
        reads = ReadPlan(
            metadata,
            planner,
            prefix=prefix,
            etags=committed_etags(metadata, store, self.url),
            options=self.transfer,
            transforms=self._registry,
            trusted=self.trusted,
            shapes=ChunkShapes(metadata),
            quantization=quantization,
        )

        def read_now(extents: Iterable[Extent]) -> None:
            fetch(store, plan_requests(extents, self.transfer), self.transfer, pool=pool, meter=meter)

        return plan_requests(load_extents(reads, plan.items, read_now), self.transfer)


class Unread(Metadata):
    """Stand-in for metadata that could not be read, which raises the reason once DCP accesses a field."""

    def __init__(self, reason: Exception) -> None:
        self.__dict__["_reason"] = reason

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta"):
            raise object.__getattribute__(self, "__dict__")["_reason"]
        return object.__getattribute__(self, name)
