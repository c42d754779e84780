"""Strategies of megatron that save through a `BucketWriter` and load through a `BucketReader`, and folders for URLs.

megatron makes a `Path` of its folder argument, which would turn `s3://bucket` into the local `s3:/bucket`, and reads
and writes side files in that folder. So a local folder represents the URL.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter, LoadPlan, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import AsyncStager

from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.error_boundary import errors_of_dcp
from bucketpoint.dcp.planning.agreement import CommitRead, refuse_two_commits
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.dcp.reader import BucketReader
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError, CommitConflictError, MismatchError
from bucketpoint.format import keys
from bucketpoint.integrations.training_state import job_ranks
from bucketpoint.manager.saving import begin_together
from bucketpoint.stores import open_store

_urls: dict[str, str] = {}
"""URL of each folder that represents a URL in this process. Its subfolders represent URLs below that URL."""


def let_stand(folder: str | os.PathLike[str], url: str) -> None:
    """Make a folder and its subfolders represent a URL for the rest of this process."""
    _urls[os.path.realpath(folder)] = url.rstrip("/")


@contextmanager
def stand_in(url: str) -> Iterator[str]:
    """Make an empty folder that represents a URL, and delete the folder at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="bucketpoint-") as folder:
        let_stand(folder, url)
        try:
            yield folder
        finally:
            del _urls[os.path.realpath(folder)]


def url_of(checkpoint_dir: Any) -> str:
    """Return the URL that a folder represents; the folder itself if it represents none."""
    folder: str = os.fspath(checkpoint_dir)
    if "://" in folder:
        return folder
    # megatron may spell the path of the folder in another way, and uses subfolders at several levels.
    whole = Path(os.path.realpath(folder))
    for each in (whole, *whole.parents):
        if str(each) in _urls:
            return "/".join((_urls[str(each)], *whole.relative_to(each).parts))
    return folder


def write_side_files(folder: str | os.PathLike[str], name: str, item: Any) -> None:
    """Write a checkpoint with one item into a folder, because megatron reads that item without a strategy."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with errors_of_dcp(os.fspath(folder)):
        dcp.save({name: item}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    save_config(CheckpointingConfig("torch_dist"), os.fspath(folder))


_POLL_S = 0.05


class BucketSaveStrategy(torch_dist.TorchDistSaveShardedStrategy):
    """megatron's `torch_dist` strategy that saves through a `BucketWriter`. Use one object for all saves.

    Usable with `bucketpoint.integrations.megatron.save`, alone or in `FullyParallelSaveStrategyWrapper`, and for a
    local folder with `dist_checkpointing.save`.

    Args:
        storage_writer: writer to save with, such as one with a retention policy.
        storage_options: as for `BucketWriter`, if there is no writer.
        options: as for megatron's strategy. Options about files, threads and cached metadata have no effect.
    """

    def __init__(
        self,
        *,
        storage_writer: BucketWriter | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._writer = storage_writer or BucketWriter(storage_options=storage_options)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save the sharded part of a state. All ranks.

        Raises:
            BucketpointError: nothing was committed.
        """
        url = url_of(checkpoint_dir)
        call = f"the save of {url}"
        ranks = job_ranks(call)
        state = ranks.together(call, lambda: self._state(sharded_state_dict))
        with ranks.calling_dcp(call, url):
            dcp.save(
                state,
                checkpoint_id=url,
                storage_writer=self._writer,
                planner=self._planner(checkpoint_dir),
                process_group=ranks.group,
            )

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "nvrx") -> Any:
        """Begin to save the sharded part of a state in the background. All ranks.

        Returns:
            megatron's `AsyncRequest`, once the state is copied and training may change it. bucketpoint uploads the
            data: megatron's process only waits for the end of the save. If the save failed, the request's first
            finalizing function raises the error.
        """
        _, modules = torch_dist.get_async_strategy(async_strategy)
        url = url_of(checkpoint_dir)
        call = f"the save of {url}"
        handle = begin_together(
            job_ranks(call),
            call,
            lambda: self._state(sharded_state_dict),
            url,
            storage_writer=self._writer,
            planner=self._planner(checkpoint_dir),
            async_stager=_Stager(self._writer),
        )
        return modules["AsyncRequest"](_wait_for_end, (_sign_of(handle), os.getpid()), [handle.result])

    def _state(self, sharded_state_dict: Any) -> dict[str, Any]:
        flat, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        state: dict[str, Any] = torch_dist.mcore_to_pyt_state_dict(flat)
        return state

    def _planner(self, checkpoint_dir: Any) -> SavePlanner:
        # No plan cache: a cached plan depends on the dtype, which megatron's sharded tensors do not expose to DCP.
        planner = _Planner(False, False, enable_plan_caching=False)
        url = url_of(checkpoint_dir)
        if url != os.fspath(checkpoint_dir):
            planner.write_side_file = functools.partial(self._write_config, url)
        return planner

    def _write_config(self, url: str) -> None:
        """Write the configuration file that megatron's own readers need. It is the same at each save."""
        store, prefix = open_store(url, storage_options=self._writer._storage_options, fs=self._writer._fs)
        config = json.dumps(dataclasses.asdict(CheckpointingConfig(self.backend, self.version))).encode()
        store.put(keys.join(prefix, CONFIG_FNAME), [memoryview(config)])


class _Planner(SavePlanner):
    """Planner for states of megatron, whose objects are serialized already."""

    write_side_file: Callable[[], None] | None = None
    """Called on the coordinator before anything is uploaded. Its errors are raised on all ranks."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self.write_side_file is not None:
            self.write_side_file()
        return super().create_global_plan(all_plans)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 (torch's name)
        return object


class _Stager(AsyncStager):
    """Stager for megatron's sharded tensors, whose classes hide the tensors inside them."""

    def __init__(self, writer: BucketWriter) -> None:
        self._writer = writer

    def stage(self, state_dict: dict[str, Any]) -> Any:
        shards = {name: _shards_of(value) for name, value in state_dict.items()}
        staged = self._writer.stage(
            {name: [each.data for each in of] if of else state_dict[name] for name, of in shards.items()}
        )
        if isinstance(staged, Future):
            staged = staged.result()
        for name, of in shards.items():
            if of:
                copies = [dataclasses.replace(each, data=data) for each, data in zip(of, staged[name], strict=True)]
                staged[name] = LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(each) for each in copies])
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` returns when the copy is complete."""

    def close(self) -> None:
        """Do nothing: the writer owns the memory."""


def _shards_of(value: Any) -> list[Any]:
    """Return megatron's sharded tensors in a value; an empty list for a value of another class."""
    if isinstance(value, LocalShardsContainer):
        return [each._sh_ten for each in value._local_shards]
    return [value._sh_ten] if isinstance(value, CheckpointableShardedTensor) else []


def _sign_of(handle: SaveHandle) -> str:
    """Return the path of a file that exists while a save is under way."""
    number, path = tempfile.mkstemp(prefix="bucketpoint-save-")
    os.close(number)
    handle.add_done_callback(lambda _: Path(path).unlink(missing_ok=True))
    return path


def _wait_for_end(path: str, trainer: int) -> None:
    """Wait until the file of a save is deleted, or the trainer is dead. megatron calls this in a separate process."""
    parent = os.getppid()
    # Compare the parent, too: `os.kill` finds a dead trainer until its parent, which may wait for us, reaps it.
    while Path(path).exists() and os.getppid() == parent:
        try:
            os.kill(trainer, 0)
        except ProcessLookupError:
            return
        time.sleep(_POLL_S)


# -- loading -----------------------------------------------------------------------------------------------------------

COMMON: str = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""Name of the item with all unsharded values of a state."""


class BucketLoadStrategy(torch_dist.TorchDistLoadShardedStrategy):
    """megatron's `torch_dist` strategy that loads through a `BucketReader`.

    Usable with `bucketpoint.integrations.megatron.load`, alone or in `FullyParallelLoadStrategyWrapper`, and for a
    local folder with `dist_checkpointing.load`.

    Args:
        storage_options, trusted: as for `BucketReader`. Classes that megatron has registered with
            `torch.serialization.add_safe_globals` need no `trusted`.
        options: as for megatron's strategy. Options about cached metadata have no effect.
    """

    def __init__(
        self, *, storage_options: Mapping[str, Any] | None = None, trusted: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self._options: dict[str, Any] = {"storage_options": storage_options, "trusted": trusted}
        self._commits: dict[str, CommitRead] | None = None

    @contextmanager
    def one_commit(self, checkpoint_dir: Any) -> Iterator[io.BytesIO]:
        """Read the common item. Until the block ends, refuse megatron's later reads of another commit. All ranks.

        Raises:
            RanksDisagreeError: the ranks have read different commits.
            BucketpointError: the error of the first rank that cannot read the item, on all ranks.
        """
        self._commits = {}
        call = "the load of a checkpoint"
        try:
            ranks = job_ranks(call)
            item = ranks.together(call, lambda: self.load_common_item(checkpoint_dir))
            mine = next(iter(self._commits.values()), None)
            read = {0: ranks.shared(0, mine, call), ranks.rank: mine}
            ranks.together(call, lambda: refuse_two_commits(read, url_of(checkpoint_dir)))
            yield item
        finally:
            self._commits = None

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        """Load the sharded part of a state into its tensors, and return it. Each rank loads independently."""
        wanted = [each for each in nested_values(sharded_state_dict) if isinstance(each, ShardedTensor)]
        flat, paths, names = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = torch_dist.mcore_to_pyt_state_dict(flat, True)
        planner = torch_dist.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[each for each in wanted if not each.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={each.key: each for each in wanted if each.allow_shape_mismatch},
            stream_ckpt_dequant=self.stream_ckpt_dequant,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        self._read(state, checkpoint_dir, planner)
        loaded = {name: torch_dist._unwrap_pyt_sharded_tensor(value) for name, value in state.items()}
        nested = torch_dist._replace_sharded_keys_with_state_dict_keys(loaded, paths, names)
        torch_dist._restore_dict_types(nested, sharded_state_dict)
        return nested

    def load_common_item(self, checkpoint_dir: Any) -> io.BytesIO:
        """Return the unsharded values of a state, as megatron serializes them.

        Raises:
            CheckpointNotFoundError: there is no whole checkpoint.
            MismatchError: the checkpoint was not saved by megatron-core, or by a version before 0.19.
        """
        state: dict[str, Any] = {COMMON: io.BytesIO()}
        self._read(state, checkpoint_dir, _CommonPlanner(False, False))
        item = io.BytesIO()
        torch.save(state[COMMON], item)
        return item

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Metadata | None = None) -> Any:
        """Return sharded tensors without data, as megatron's strategy does."""
        # megatron's own method fails on the properties that tensors have in torch 2.15.
        metadata = metadata or self._metadata(checkpoint_dir)
        saved = {name: of for name, of in metadata.state_dict_metadata.items() if isinstance(of, TensorStorageMetadata)}
        return {
            name: ShardedTensor.from_rank_offsets(
                name, torch.empty(of.size, dtype=of.properties.dtype, device="meta")
            ).without_data()
            for name, of in saved.items()
        }

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        """Return sharded tensors and objects without data, as megatron's strategy does."""
        metadata = self._metadata(checkpoint_dir)
        names = [name for name, of in metadata.state_dict_metadata.items() if isinstance(of, BytesStorageMetadata)]
        objects = {name: ShardedObject.empty_from_unique_key(name) for name in names}
        return {**objects, **self.load_tensors_metadata(checkpoint_dir, metadata)}

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        """Raise a BucketpointError: a committed checkpoint is never changed."""
        raise BucketpointError(
            "Tensors cannot be removed from a committed checkpoint",
            url=url_of(checkpoint_dir),
            remedy="Load it without them and save it again, at another URL",
        )

    def _metadata(self, checkpoint_dir: Any) -> Metadata:
        reader = BucketReader(url_of(checkpoint_dir), **self._options)
        metadata = reader.read_metadata()
        self._note_commit(reader)
        return metadata

    def _read(self, state: dict[str, Any], checkpoint_dir: Any, planner: Any) -> None:
        reader = BucketReader(url_of(checkpoint_dir), **self._options)
        with errors_of_dcp(reader.url, "The load"):
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
        self._note_commit(reader)

    def _note_commit(self, reader: BucketReader) -> None:
        if self._commits is None or reader._load.commit is None:
            return
        self._commits[reader._load.commit.commit] = reader._load.commit
        if len(self._commits) > 1:
            raise CommitConflictError(
                "Another checkpoint was committed here during the load, so it has read parts of both",
                url=reader.url,
                remedy="Load again, and save each checkpoint at its own URL, such as iter_0000500",
            )


class _CommonPlanner(DefaultLoadPlanner):
    """Load planner for the common item, with an error for checkpoints of other writers."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        if COMMON not in self.metadata.state_dict_metadata:
            raise MismatchError(
                "The checkpoint has no common state of megatron-core",
                remedy="Load a checkpoint that bucketpoint.integrations.megatron or megatron-core 0.19 has saved",
            )
        return super().create_local_plan()
