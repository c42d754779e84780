"""A plain blocking copy of a state dict to host memory: a mutation after it returns never reaches the checkpoint.

No networks. Tensors that are the same object stay the same object; wrapper subclasses (DTensor and others that flatten)
keep their type around copied inner tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from bucketpoint.errors import BucketpointError


def copy_to_host(value: Any, *, path: str = "", memo: dict[int, Any] | None = None) -> Any:
    """Copy nested dicts, lists and tuples of tensors and objects.

    Args:
        value: any tree; tensors of any dtype and device.

    Returns:
        The same tree on the CPU, sharing no memory with `value`.

    Raises:
        BucketpointError: an object cannot be copied; names its key.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, dict):
        copied: Any = {key: copy_to_host(item, path=f"{path}.{key}", memo=memo) for key, item in value.items()}
    elif isinstance(value, list):
        copied = [copy_to_host(item, path=f"{path}.{index}", memo=memo) for index, item in enumerate(value)]
    elif type(value) is tuple:
        copied = tuple(copy_to_host(item, path=f"{path}.{index}", memo=memo) for index, item in enumerate(value))
    elif isinstance(value, ShardedTensor):
        copied = _copy_sharded(value)
    elif isinstance(value, torch.Tensor):
        copied = _copy_tensor(value)
    else:
        try:
            copied = copy.deepcopy(value)
        except Exception as error:  # noqa: BLE001 (whatever a user's __deepcopy__ raises)
            raise BucketpointError(
                f"An object of type {type(value).__qualname__} cannot be copied for an asynchronous save: {error}",
                key=path.lstrip("."),
                remedy="Save it with dcp.save, or leave it out of the state",
            ) from None
    memo[id(value)] = copied
    return copied


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, context = flatten()
        # Newer versions of torch name a DTensor's device mesh beside its local tensor.
        inner = {name: getattr(tensor, name) for name in names}
        inner = {name: _copy_tensor(part) if isinstance(part, torch.Tensor) else part for name, part in inner.items()}
        unflatten = getattr(type(tensor), "__tensor_unflatten__")  # noqa: B009 (not on torch.Tensor itself)
        rebuilt: torch.Tensor = unflatten(inner, context, tensor.size(), tensor.stride())
        return rebuilt
    source = tensor.detach()
    if source.device.type == "cpu":
        return source.clone(memory_format=torch.preserve_format)
    return source.to("cpu", copy=True)


def _copy_sharded(value: ShardedTensor) -> ShardedTensor:
    shards = [Shard(_copy_tensor(shard.tensor), shard.metadata) for shard in value.local_shards()]
    copied: ShardedTensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, value.metadata(), process_group=value._process_group, init_rrefs=False
    )
    return copied
