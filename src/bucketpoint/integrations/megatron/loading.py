"""`BucketLoadStrategy`, megatron's strategy that loads through a `BucketReader`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from bucketpoint.dcp.error_boundary import errors_of_dcp
from bucketpoint.dcp.planning.agreement import CommitRead, refuse_two_commits
from bucketpoint.dcp.reader import BucketReader
from bucketpoint.errors import BucketpointError, CommitConflictError, MismatchError
from bucketpoint.integrations.megatron.saving import url_of
from bucketpoint.integrations.training_state import job_ranks

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
        if self._commits is None or reader._commit is None:
            return
        self._commits[reader._commit.commit] = reader._commit
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
