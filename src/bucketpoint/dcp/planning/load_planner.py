"""`LoadPlanner`: DCP's default load planner, extended to report all mismatches at once and to track arrived data."""

from __future__ import annotations

import io
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata, TensorStorageMetadata, _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import (
    _create_chunk_list,
    _create_read_items,
    _init_state_dict,
    create_read_items_for_chunk_list,
)
from torch.distributed.tensor import DTensor

from bucketpoint.dcp.planning.agreement import refuse_saves
from bucketpoint.dcp.planning.local_chunks import LocalChunks, WantedChunks, chunks_in, read_items
from bucketpoint.dcp.planning.nested_state import put
from bucketpoint.dcp.planning.rank_state import rank_state_name, saved_ranks
from bucketpoint.dcp.planning.save_planner import is_partial
from bucketpoint.dcp.planning.unused_keys import (
    Unmatched,
    compare_keys,
    find_renaming,
    find_unmatched,
    in_words,
    nearest_keys,
)
from bucketpoint.dcp.process_groups import is_initialized, this_rank
from bucketpoint.errors import BucketpointError, MismatchError, first_of
from bucketpoint.format.index.view import Chunks

_NAMED_AT_MOST = 3


class LoadPlanner(DefaultLoadPlanner):
    """Load planner that reports every mismatch before any data is read, and tracks the data that has arrived.

    DCP's `DefaultLoadPlanner` differs in three ways. It stops at the first key or shape that does not match, and names
    neither the checkpoint nor a remedy. It silently leaves elements unchanged that no saved chunk covers. It replaces
    every object but tensors, numbers, strings and bytes by None, permanently if the checkpoint lacks the key.

    With every version of torch, a plain tensor may hold several chunks of a larger tensor. Its attributes describe
    them: `global_shape`, `global_offsets`, `local_offsets`, `local_sizes`, as in torch 2.15's `CheckpointableTensor`.

    One log line counts the keys of the checkpoint that no rank requests, and the keys that the checkpoint lacks.

    Args:
        flatten_state_dict, flatten_sharded_tensors: as in `DefaultLoadPlanner`.
        allow_partial_load: skip keys that the checkpoint lacks; their values stay unchanged.
        strict: refuse checkpoints with keys that no rank requests.

    Attributes:
        pending: by key, the planned elements of a tensor that have not arrived, or 1 for a value that is not a tensor.
            Empty once the load is complete.
        skipped: keys of the state that the checkpoint lacks, with `allow_partial_load`.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        strict: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.strict = strict
        self.pending: Counter[str] = Counter()
        self.skipped: tuple[str, ...] = ()
        self._unmatched = Unmatched()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the state to load into. Called on all ranks.

        In a process group, tensors on the meta device are allocated on the device of the group.

        Raises:
            MismatchError: there are tensors on the meta device and no process group.
        """
        self.pending = Counter()
        self.skipped = ()
        _allocate(state_dict, metadata)
        self.original_state_dict = state_dict
        if self.flatten_sharded_tensors:
            state_dict = _flatten_sharded_tensors(state_dict)
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads.

        Raises:
            MismatchError: lists all mismatches: keys that the checkpoint lacks; tensors that were saved with another
                shape or only in part; tensors whose placement or chunks cannot be loaded into.
        """
        assert self.metadata is not None
        if self.flatten_state_dict:
            self._take_old_keys()
        state = self.state_dict
        items, misfits = self._items_and_misfits()
        if misfits:
            named = first_of([f"{fqn} {why}" for fqn, why in misfits.items()], _NAMED_AT_MOST, "; ", "; and ")
            alike, remedy = self._alike(list(misfits))
            raise MismatchError(
                f"The checkpoint and the state to load into do not fit: {named}{alike}",
                url=url_of(self.metadata),
                rank=this_rank(),
                remedy=remedy,
            )
        unmatched = find_unmatched(state, self.original_state_dict, self.metadata.state_dict_metadata)
        self._unmatched = replace(unmatched, strict=self.strict)
        self.skipped = unmatched.lacking
        # The coordinator compares the keys of all ranks.
        return LoadPlan(items, planner_data=self._unmatched if self._unmatched != Unmatched() else None)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the keys that all ranks request with those of the checkpoint. Called on the coordinator.

        Raises:
            RanksDisagreeError: a rank has sent the plan of a save.
            MismatchError: a rank sets `strict`, and no rank requests some keys of the checkpoint.
        """
        refuse_saves(global_plan, url_of(self.metadata) if self.metadata is not None else None)
        self._compare(global_plan)
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        return plans

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Set `pending` from the final plan of this rank. Called on all ranks."""
        plan = super().finish_plan(new_plan)
        self.pending = Counter()
        for item in plan.items:
            self.pending[item.dest_index.fqn] += _amount(item)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Replace an object of the state by the saved object."""
        if self.flatten_state_dict:
            path = self.mappings[read_item.dest_index.fqn]
            put(self.original_state_dict, path, torch.load(value, weights_only=False))
        else:
            super().load_bytes(read_item, value)
        self._note(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Remove an item from `pending`: all its elements are in the tensor that `resolve_tensor` returned."""
        super().commit_tensor(read_item, tensor)
        self._note(read_item)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the local tensor, or the chunk in it, that an item of this rank's plan fills."""
        chunks = chunks_in(self.state_dict.get(index.fqn))
        if chunks is not None:
            return chunks.find(index)
        tensor: torch.Tensor = super().lookup_tensor(index)
        return tensor

    def _compare(self, plans: list[LoadPlan]) -> None:
        assert self.metadata is not None
        # The keys of the state are passed too: an empty tensor is requested, but has no read item.
        difference = compare_keys(self.metadata, plans, self.state_dict, self._unmatched)
        url = url_of(self.metadata)
        if difference.unused and (self.strict or any(getattr(plan.planner_data, "strict", False) for plan in plans)):
            raise MismatchError(
                "; ".join([f"The checkpoint has {in_words(difference.unused)}", *difference.losses]),
                url=url,
                rank=this_rank(),
                remedy="Add these keys to the state, or load without strict",
            )
        difference.log(url)

    def _alike(self, misfits: list[str]) -> tuple[str, str]:
        """Return text for an error, with keys of the checkpoint that are similar to missing keys, and the remedy."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        lacking = [fqn for fqn in misfits if fqn not in saved and rank_state_name(fqn) is None]
        unused = [fqn for fqn in saved if fqn not in self.state_dict]
        remedy = _remedy(misfits, self.metadata)
        if not lacking or not unused:
            return self._other_sizes(misfits), remedy
        renaming = find_renaming(lacking, unused)
        if renaming is None:
            return f"; {nearest_keys(lacking, unused)}", remedy
        return f"; {renaming}", f"{renaming.remedy}. {remedy}"

    def _other_sizes(self, misfits: list[str]) -> str:
        """Return text for an error, with the most frequent difference in size; empty if only one tensor has it."""
        assert self.metadata is not None
        sizes: Counter[tuple[int, int]] = Counter()
        for fqn in misfits:
            entry, value = self.metadata.state_dict_metadata.get(fqn), self.state_dict[fqn]
            if isinstance(entry, TensorStorageMetadata) and isinstance(value, torch.Tensor):
                sizes.update(
                    {(there, here) for there, here in zip(entry.size, value.shape, strict=False) if there != here}
                )
        for (there, here), count in sizes.most_common(1):
            if count > 1:
                return f"; {count} of {len(misfits)} have {there} in the checkpoint where the state has {here}"
        return ""

    def _take_old_keys(self) -> None:
        """Use the keys that torch 2.3 gave to values if the checkpoint has some of them, as DCP's planner does."""
        assert self.metadata is not None
        whole = self.original_state_dict
        if self.flatten_sharded_tensors:
            # FSDP1's tensors without a local shard have no key here either, and must not be taken for old keys.
            whole = _flatten_sharded_tensors(whole)
        unused = self.metadata.state_dict_metadata.keys() - self.state_dict.keys()
        if unused:
            try:
                _version._derived_version = "2_3"
                old, mappings = flatten_state_dict(whole)
            finally:
                _version._derived_version = None
            if old.keys() & unused:
                self.state_dict, self.mappings = old, mappings

    def _note(self, item: ReadItem) -> None:
        fqn = item.dest_index.fqn
        left = self.pending[fqn] - _amount(item)
        if left < 0:
            raise BucketpointError("The reader passed an item to the planner twice", key=fqn)
        if left:
            self.pending[fqn] = left
        else:
            del self.pending[fqn]

    def _items_and_misfits(self) -> tuple[list[ReadItem], dict[str, str]]:
        """Return the items that this rank reads, in the order of the state, and by key the reasons for mismatches."""
        assert self.metadata is not None
        misfits: dict[str, str] = {}
        items: dict[str, list[ReadItem]] = {}
        local: dict[str, list[ChunkStorageMetadata]] = {}
        indexed: list[WantedChunks] = []
        for fqn, value in self.state_dict.items():
            entry: Any = self.metadata.state_dict_metadata.get(fqn)
            if entry is None:
                if not self.allow_partial_load:
                    misfits[fqn] = "is not in the checkpoint"
                continue
            if not isinstance(entry, TensorStorageMetadata):
                items[fqn] = _create_read_items(fqn, entry, value)
                continue
            # Every version of DCP understands this description of a tensor of several chunks.
            described: Any = chunks_in(value) or value
            misfit = _unfit(entry, described)
            if misfit is not None:
                misfits[fqn] = misfit
                continue
            local[fqn] = [] if _is_elsewhere(value) else _create_chunk_list(described)
            if isinstance(entry.chunks, Chunks):
                indexed.append(WantedChunks(fqn, entry.chunks, local[fqn]))
            else:
                items[fqn] = create_read_items_for_chunk_list(fqn, entry, local[fqn])
        items |= read_items(indexed)
        for fqn, chunks in local.items():
            gap = _gap(chunks, items[fqn])
            if gap is not None:
                misfits[fqn] = gap
        listed = [item for fqn in self.state_dict for item in items.get(fqn, ())]
        return listed, {fqn: misfits[fqn] for fqn in self.state_dict if fqn in misfits}


def _remedy(misfits: list[str], metadata: Metadata) -> str:
    lacking = [fqn for fqn in misfits if fqn not in metadata.state_dict_metadata]
    by_rank = sorted({name for fqn in lacking if (name := rank_state_name(fqn)) is not None})
    remedies = []
    if by_rank:
        ranks = ", ".join(map(str, saved_ranks(metadata, by_rank[0]))) or "none"
        remedies.append(
            f"{by_rank[0]} was saved by ranks: {ranks}. Leave it out of the state, and read these values "
            f"with bucketpoint.load(url, keys={by_rank[0]!r})"
        )
    if any(rank_state_name(fqn) is None for fqn in lacking):
        remedies.append(
            "Load into the model that was saved; strict=False of bucketpoint.load, or "
            "planner=LoadPlanner(allow_partial_load=True) of dcp.load and CheckpointManager.restore, skips missing keys"
        )
    if len(lacking) < len(misfits):
        remedies.append(
            "Build the model as it was saved, or read the saved tensors with bucketpoint.load(url, keys=...) and "
            "convert them"
        )
    return ". ".join(remedies)


def _allocate(state: dict[str, Any], metadata: Metadata | None) -> None:
    """Allocate the tensors on the meta device; without a process group, which has the device, raise MismatchError."""
    empty: list[tuple[tuple[Any, ...], torch.Tensor]] = []

    def visit(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            empty.append((path, value))

    # The nested state is traversed, because two values may have the same flat name.
    traverse_state_dict(state, visit)
    if empty and not is_initialized():
        named = ".".join(map(str, empty[0][0]))
        raise MismatchError(
            f"{len(empty)} tensors to load into are on the meta device and have no memory, such as {named}",
            url=url_of(metadata) if metadata is not None else None,
            rank=this_rank(),
            remedy='Allocate them first: call model.to_empty(device="cpu"), or with the device to load to, before '
            "model.state_dict()",
        )
    for path, value in empty:
        # Given the whole state, DCP would put None in place of unknown objects.
        only = {"": value}
        _init_state_dict(only)
        put(state, path, only[""])


def url_of(metadata: Metadata) -> str | None:
    """Return the URL at which the checkpoint of this metadata was saved; None if the metadata has no URL."""
    meta = metadata.storage_meta
    return str(meta.checkpoint_id) if meta is not None and meta.checkpoint_id else None


def _amount(item: ReadItem) -> int:
    return 1 if item.type == LoadItemType.BYTE_IO else math.prod(item.lengths)


def _is_elsewhere(value: Any) -> bool:
    """Return True for a DTensor whose mesh does not include this rank, which then holds no chunk."""
    return isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None


def _unfit(entry: TensorStorageMetadata, value: Any) -> str | None:
    if not isinstance(value, (torch.Tensor, LocalChunks)):
        return "is a tensor in the checkpoint but not in the state"
    if entry.size != value.size():
        return f"is {list(entry.size)} in the checkpoint and {list(value.size())} in the state"
    if isinstance(value, LocalChunks):
        return value.fault()
    if is_partial(value):
        return f"has the placements {list(value.placements)} in the state, and a partial sum cannot be loaded into"
    return None


def _gap(chunks: list[ChunkStorageMetadata], items: list[ReadItem]) -> str | None:
    """Describe the part of a rank's chunks that no saved chunk covers; None if all of it is covered."""
    arriving: Counter[int | None] = Counter()
    for item in items:
        arriving[item.dest_index.index] += math.prod(item.lengths)
    for number, chunk in enumerate(chunks):
        wanted = math.prod(chunk.sizes)
        if arriving[number] < wanted:
            return f"has only {arriving[number]} of the {wanted} elements in the checkpoint that the state needs"
    return None
