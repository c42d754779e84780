"""`LoadPlanner`: DCP's default load planner, extended to report all mismatches at once and to track arrived data."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_read_items
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
        if not is_initialized():
            _refuse_meta(state_dict, metadata)
        self.pending = Counter()
        self.skipped = ()
        before = _containers(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        _put_back(state_dict, before)

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads.

        Raises:
            MismatchError: lists all mismatches: keys that the checkpoint lacks; tensors that were saved with another
                shape or only in part; tensors whose placement or chunks cannot be loaded into.
        """
        assert self.metadata is not None
        plan, refusal = None, None
        state = self.state_dict
        # Replace tensors of several chunks by descriptions that every version of DCP understands.
        described = {fqn: chunks for fqn, value in state.items() if (chunks := chunks_in(value)) is not None}
        with _replaced(state, described):
            wanted = self._wanted()
            items = read_items(list(wanted.values()))
            try:
                with _replaced(state, wanted), self._original_flattened():
                    plan = super().create_local_plan()
            except (RuntimeError, ValueError) as error:
                refusal = error
            if plan is not None and self.state_dict is state:
                plan = _joined(plan, items, state)
            misfits = list(self._misfits(plan, items))
        if misfits:
            named = first_of([f"{fqn} {why}" for fqn, why in misfits], _NAMED_AT_MOST, "; ", "; and ")
            alike, remedy = self._alike([fqn for fqn, _ in misfits])
            raise MismatchError(
                f"The checkpoint and the state to load into do not fit: {named}{alike}",
                url=url_of(self.metadata),
                rank=this_rank(),
                remedy=remedy,
            )
        if plan is None:
            assert refusal is not None
            raise refusal
        unmatched = find_unmatched(state, self.original_state_dict, self.metadata.state_dict_metadata)
        self._unmatched = replace(unmatched, strict=self.strict)
        self.skipped = unmatched.lacking
        # The coordinator compares the keys of all ranks.
        told = self._unmatched != Unmatched() and plan.planner_data is None
        return replace(plan, planner_data=self._unmatched) if told else plan

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

    @contextmanager
    def _original_flattened(self) -> Iterator[None]:
        """Remove ShardedTensors without a local shard from `original_state_dict`, as from `state_dict`.

        If only one of the two has FSDP1's keys, torch takes the checkpoint for one of torch 2.3, and requests old keys.
        """
        whole = self.original_state_dict
        if self.flatten_sharded_tensors:
            self.original_state_dict = _flatten_sharded_tensors(whole)
        try:
            yield
        finally:
            self.original_state_dict = whole

    def _note(self, item: ReadItem) -> None:
        fqn = item.dest_index.fqn
        left = self.pending[fqn] - _amount(item)
        if left < 0:
            raise BucketpointError("The reader passed an item to the planner twice", key=fqn)
        if left:
            self.pending[fqn] = left
        else:
            del self.pending[fqn]

    def _wanted(self) -> dict[str, WantedChunks]:
        """Return by key the tensors that match an entry of an index. They are planned here, all others by DCP."""
        assert self.metadata is not None
        wanted = {}
        for fqn, value in self.state_dict.items():
            entry: Any = self.metadata.state_dict_metadata.get(fqn)
            if isinstance(getattr(entry, "chunks", None), Chunks) and _unfit(entry, value) is None:
                wanted[fqn] = WantedChunks(fqn, entry.chunks, [] if _is_elsewhere(value) else _create_chunk_list(value))
        return wanted

    # -- mismatches ---------------------------------------------------------------------------------------------------

    def _misfits(self, plan: LoadPlan | None, indexed: Mapping[str, list[ReadItem]]) -> Iterator[tuple[str, str]]:
        """Yield each key that does not match, with the reason. `plan` is None if DCP's planner raised an error."""
        assert self.metadata is not None
        planned: dict[str, list[ReadItem]] = {}
        for item in plan.items if plan is not None else ():
            planned.setdefault(item.dest_index.fqn, []).append(item)
        for fqn, value in self.state_dict.items():
            entry = self.metadata.state_dict_metadata.get(fqn)
            if entry is None and not self.allow_partial_load:
                yield fqn, "is not in the checkpoint"
            if not isinstance(entry, TensorStorageMetadata):
                continue
            misfit = _unfit(entry, value)
            if misfit is None:
                if plan is not None:
                    own = planned.get(fqn, [])
                elif fqn in indexed:
                    own = indexed[fqn]
                else:
                    own = [] if _is_elsewhere(value) else _create_read_items(fqn, entry, value)
                misfit = _gap(value, own)
            if misfit is not None:
                yield fqn, misfit


@contextmanager
def _replaced(state: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    before = {fqn: state[fqn] for fqn in values}
    state.update(values)
    try:
        yield
    finally:
        state.update(before)


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


def _refuse_meta(state: dict[str, Any], metadata: Metadata | None) -> None:
    empty: list[str] = []

    def visit(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_meta:
            empty.append(".".join(map(str, path)))

    # The nested state is traversed, because two values may have the same flat name.
    traverse_state_dict(state, visit)
    if empty:
        raise MismatchError(
            f"{len(empty)} tensors to load into are on the meta device and have no memory, such as {empty[0]}",
            url=url_of(metadata) if metadata is not None else None,
            rank=this_rank(),
            remedy='Allocate them first: call model.to_empty(device="cpu"), or with the device to load to, before '
            "model.state_dict()",
        )


def url_of(metadata: Metadata) -> str | None:
    """Return the URL at which the checkpoint of this metadata was saved; None if the metadata has no URL."""
    meta = metadata.storage_meta
    return str(meta.checkpoint_id) if meta is not None and meta.checkpoint_id else None


def _amount(item: ReadItem) -> int:
    return 1 if item.type == LoadItemType.BYTE_IO else math.prod(item.lengths)


def _joined(plan: LoadPlan, indexed: Mapping[str, list[ReadItem]], state: Mapping[str, Any]) -> LoadPlan:
    """Return DCP's plan with the items of the tensors in `indexed` added, in the order of the state."""
    if not indexed:
        return plan
    items: dict[str, list[ReadItem]] = {fqn: list(indexed.get(fqn, ())) for fqn in state}
    for item in plan.items:
        items[item.dest_index.fqn].append(item)
    return replace(plan, items=[item for fqn in state for item in items[fqn]])


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


def _gap(value: Any, items: list[ReadItem]) -> str | None:
    """Describe the part of a local tensor that no saved chunk covers; None if all of it is covered."""
    arriving: Counter[int | None] = Counter()
    for item in items:
        arriving[item.dest_index.index] += math.prod(item.lengths)
    # Number of elements of each chunk, in DCP's order.
    if _is_elsewhere(value):
        counts = []
    elif isinstance(value, DTensor) and not hasattr(value._local_tensor, "__create_chunk_list__"):
        # Faster than DCP's function, which computes shapes and offsets of a DTensor at each call.
        counts = [value._local_tensor.numel()]
    else:
        counts = [math.prod(chunk.sizes) for chunk in _create_chunk_list(value)]
    for number, wanted in enumerate(counts):
        if arriving[number] < wanted:
            return f"has only {arriving[number]} of the {wanted} elements in the checkpoint that the state needs"
    return None


def _containers(value: Any) -> Any:
    """Copy the dicts and lists of a state (tuples become lists); the leaves stay the same objects."""
    if isinstance(value, dict):
        return {key: _containers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_containers(item) for item in value]
    return value


def _put_back(after: Any, before: Any) -> Any:
    """Restore the leaves of `before` where `after` has None: DCP puts None in place of unknown objects."""
    if isinstance(after, (dict, list)):
        for key in list(after) if isinstance(after, dict) else range(len(after)):
            after[key] = _put_back(after[key], before[key])
        return after
    if isinstance(after, tuple):
        return tuple(_put_back(*pair) for pair in zip(after, before, strict=True))
    return before if after is None else after
