"""Write items of a rank, the signature of a state, and the rows of a tensor that belong to an item."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeGuard

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_tensor, _create_write_items
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_plain(value: Any) -> bool:
    """Return True for a tensor of torch's class without added attributes, which is certainly not a shard.

    From torch 2.15 on, DCP checks each tensor against the `Protocol` of shards. This takes most of the time of
    planning, during which the GIL is held.
    """
    return type(value) in _PLAIN and not value.__dict__


def is_partial(value: Any) -> TypeGuard[DTensor]:
    """Return True for a DTensor that is a partial sum, of which each rank holds an addend."""
    return isinstance(value, DTensor) and any(isinstance(placement, Partial) for placement in value.placements)


def write_items(state: dict[str, Any], is_coordinator: bool) -> list[WriteItem]:
    """Return the items of a rank's flat state, as DCP makes them."""
    items: list[WriteItem] = []
    for name, value in state.items():
        if is_plain(value):
            items.append(_create_write_item_for_tensor(name, value))
        else:
            items += create_default_local_save_plan({name: value}, is_coordinator).items
    return items


def signature_of(state: dict[str, Any]) -> Hashable:
    """Return the facts on which a plan depends: names, types, shapes, dtypes and placements, but no values."""
    return tuple([(name, *_facts(value)) for name, value in state.items()])


def _facts(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    if isinstance(value, DTensor):
        return (value.shape, value.dtype, value.device_mesh, value.placements)
    if isinstance(value, ShardedTensor):
        shards = value.metadata().shards_metadata
        return (value.size(), value.dtype, tuple((*shard.shard_offsets, *shard.shard_sizes) for shard in shards))
    described = getattr(value, "__create_chunk_list__", None)
    if described is not None or hasattr(value, "global_shape"):
        # The tensor holds several chunks of a larger tensor (CheckpointableTensor); DCP's items describe the chunks.
        chunks = (item.tensor_data.chunk for item in _create_write_items("", value) if item.tensor_data is not None)
        return (value.dtype, *((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks))
    return (value.shape, value.dtype)


def rows_of_item(value: Any, item: WriteItem) -> torch.Tensor | None:
    """Return the item's rows of this rank's tensor; None if the item is not a slice."""
    if item.type != WriteItemType.SHARD or item.tensor_data is None or isinstance(value, ShardedTensor):
        return None
    if not isinstance(value, torch.Tensor) or hasattr(value, "global_shape"):
        return None
    chunk = item.tensor_data.chunk
    local = value.to_local() if isinstance(value, DTensor) else value
    if hasattr(local, "__get_tensor_shard__"):
        return _rows_of_piece(value, item.index.fqn, chunk)
    if isinstance(value, DTensor):
        _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    else:
        offsets = (0,) * value.dim()
    if tuple(local.shape) == tuple(chunk.sizes):
        return None
    rows: torch.Tensor = local.detach().narrow(0, chunk.offsets[0] - offsets[0], chunk.sizes[0])
    return rows


def _rows_of_piece(value: Any, fqn: str, chunk: ChunkStorageMetadata) -> torch.Tensor | None:
    """Like `rows_of_item`, for a tensor of several pieces (torchrec's wrapper)."""
    for piece in value.__create_chunk_list__():
        first = chunk.offsets[0] - piece.offsets[0] if chunk.offsets else 0
        beside = (tuple(piece.offsets[1:]), tuple(piece.sizes[1:])) != (
            tuple(chunk.offsets[1:]),
            tuple(chunk.sizes[1:]),
        )
        if beside or first < 0 or (chunk.sizes and first + chunk.sizes[0] > piece.sizes[0]):
            continue
        if tuple(piece.sizes) == tuple(chunk.sizes):
            return None
        whole: torch.Tensor = value.__get_tensor_shard__(MetadataIndex(fqn, piece.offsets))
        return whole.detach().narrow(0, first, chunk.sizes[0])
    return None
