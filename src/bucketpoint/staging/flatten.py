"""Split of a state into its tensors and a skeleton of everything else, and assembly around the tensors' copies.

Values other than tensors are copied here, at once. No memory is allocated for tensors, except for those that strides
over a storage cannot describe (sparse, quantised, on unusual devices): they are copied here too.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorBase
from torch.distributed.remote_device import _remote_device

from bucketpoint.errors import UNSAVEABLE, BucketpointError, StagingError

ADDRESSED_DEVICES = frozenset({"cpu", "cuda", "xpu"})
"""Device types whose `data_ptr()` is an address, by which overlapping tensors are found."""

_IMMUTABLE = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range}
)

SHARD_OF_A_WHOLE = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Attributes that mark a plain tensor as a shard to DCP (`CheckpointableTensor`, torch 2.15). No others are saved."""


class FlatState:
    """A state dict without its tensors.

    Attributes:
        sources: the tensors to copy: strided, not of a subclass, in the order of the visit, each once per Python
            object. They still share memory with the caller's state.
    """

    def __init__(self, state_dict: dict[Any, Any]) -> None:
        self.sources: list[torch.Tensor] = []
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._fills: list[tuple[Any, Any, _Node]] = []
        self._path: list[Any] = []
        # The last device that was found usable. Reading a tensor's device type is the slowest step here, so skip
        # repeats.
        self._device: torch.device | None = None
        try:
            with torch.no_grad():
                self._root = self._mapping(state_dict)
        except BucketpointError as error:
            error.key = error.key or ".".join(map(str, self._path))
            raise
        except RecursionError as error:
            raise StagingError("The state contains itself, or is nested too deeply") from error
        finally:
            self._memo, self._alive = {}, []

    def assemble(self, copies: Sequence[torch.Tensor]) -> dict[Any, Any]:
        """Rebuild the state, with `copies[i]` for `sources[i]`.

        Call it once only: the skeleton itself becomes the result.
        """
        for container, key, node in self._fills:
            container[key] = node.build(copies)
        return self._root  # type: ignore[no-any-return]

    # -- one visit per kind of value ----------------------------------------------------------------------------------

    def _visit(self, value: Any) -> Any:
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            made = self._tensor(value)
        elif isinstance(value, dict):
            made = self._mapping(value)
        elif kind is list:
            made = self._list(value)
        elif isinstance(value, tuple) and (kind is tuple or hasattr(value, "_fields")):
            made = self._tuple(value)
        elif isinstance(value, ShardedTensor):
            # Checked before torch.Tensor, of which ShardedTensor is a subclass in name only.
            made = self._sharded(value)
        elif isinstance(value, torch.Tensor):
            made = self._subclass(value)
        else:
            made = self._object(value)
        self._memo[id(value)] = made
        # Keep the value alive: if a temporary were freed, another object could get its id and its entry in the memo.
        self._alive.append(value)
        return made

    def _mapping(self, value: dict[Any, Any]) -> Any:
        out: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        visit, fills, memo = self._visit, self._fills, self._memo
        key = None
        try:
            for key, item in value.items():
                if type(item) is torch.Tensor:
                    # Plain tensors are nearly all of a large state, so they skip the call of `visit`.
                    made = memo.get(id(item))
                    if made is None:
                        made = memo[id(item)] = self._tensor(item)
                else:
                    made = visit(item)
                out[key] = made
                if isinstance(made, _Node):
                    fills.append((out, key, made))
        except BaseException:
            self._path.insert(0, key)
            raise
        return out

    def _list(self, value: list[Any]) -> list[Any]:
        out: list[Any] = []
        index = 0
        try:
            for index, item in enumerate(value):
                made = self._visit(item)
                out.append(made)
                if isinstance(made, _Node):
                    self._fills.append((out, index, made))
        except BaseException:
            self._path.insert(0, index)
            raise
        return out

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        parts = self._list(list(value))
        make = getattr(type(value), "_make", tuple)
        if not any(isinstance(part, _Node) for part in parts):
            return make(parts)
        return _Composite(lambda: make(parts))

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.device != self._device:
            if value.device.type not in ADDRESSED_DEVICES:
                return self._foreign(value)
            self._device = value.device
        if value.layout is not torch.strided or value.is_quantized:
            return self._foreign(value)
        leaf = _Leaf(len(self.sources))
        self.sources.append(value)
        if type(value) is torch.nn.Parameter:
            leaf.finish = functools.partial(torch.nn.Parameter, requires_grad=value.requires_grad)
        elif value.requires_grad:
            leaf.finish = torch.Tensor.requires_grad_
        if "global_shape" in value.__dict__:
            described = {name: value.__dict__[name] for name in SHARD_OF_A_WHOLE if name in value.__dict__}
            leaf.finish = _with_attributes(leaf.finish, described)
        return leaf

    def _foreign(self, value: torch.Tensor) -> torch.Tensor:
        if value.device.type == "meta":
            raise StagingError(
                "A tensor on the meta device has no data to save",
                remedy="Materialise it (module.to_empty, then initialise) or leave it out of the state",
            )
        # `sources` keeps the other tensors alive. While the memo has this one's id, no other object may get that id.
        self._alive.append(value)
        try:
            return value.detach().to("cpu", copy=True).requires_grad_(value.requires_grad)
        except Exception as error:
            raise StagingError(
                f"A {value.dtype} tensor on {value.device} cannot be copied to host memory: {error}"
            ) from error

    def _subclass(self, value: torch.Tensor) -> Any:
        if isinstance(value, AsyncCollectiveTensor):
            # A collective may still be writing this tensor: wait for it, on the caller's stream.
            return self._visit(value.wait())
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            return self._relabelled(value)
        names, context = flatten()
        # Newer versions of torch list a DTensor's device mesh beside its local tensor.
        inner = {name: getattr(value, name) for name in names}
        parts: dict[str, Any] = {}
        for name, part in inner.items():
            parts[name] = self._visit(part) if isinstance(part, torch.Tensor) else part
            if isinstance(parts[name], _Node):
                self._fills.append((parts, name, parts[name]))
        unflatten = getattr(type(value), "__tensor_unflatten__")  # noqa: B009 (not on torch.Tensor itself)
        size, stride = value.size(), value.stride()
        return _Composite(lambda: unflatten(parts, context, size, stride))

    def _relabelled(self, value: torch.Tensor) -> Any:
        kind, attributes, requires_grad = type(value), self._object(dict(value.__dict__)), value.requires_grad
        try:
            plain = value.as_subclass(torch.Tensor)
            addressed = plain.device.type in ADDRESSED_DEVICES and plain.layout is torch.strided
            if addressed and plain.nbytes and not plain.data_ptr():
                raise StagingError(
                    f"A {kind.__qualname__} holds no memory of its own, and does not say what it wraps",
                    remedy="Give the class __tensor_flatten__ and __tensor_unflatten__",
                )
            node = self._tensor(plain)
        except BucketpointError:
            raise
        except Exception as error:
            raise StagingError(f"A {kind.__qualname__} cannot be copied to host memory: {error}") from error
        self._alive.append(plain)

        def finish(copied: torch.Tensor) -> torch.Tensor:
            labelled: torch.Tensor = copied.as_subclass(kind).requires_grad_(requires_grad)
            labelled.__dict__.update(attributes)
            return labelled

        if isinstance(node, _Leaf):
            node.finish = finish
            return node
        return finish(node)

    def _sharded(self, value: ShardedTensor) -> Any:
        parts = self._list([shard.tensor for shard in value.local_shards()])
        metadata = [_on_cpu(shard.metadata) for shard in value.local_shards()]
        whole, group = value.metadata(), value._process_group

        def build() -> Any:
            shards = [Shard(tensor, meta) for tensor, meta in zip(parts, metadata, strict=True)]
            # The base class's method, since ShardedTensor's own refuses shards that left the device of their placement.
            rebuilt: Any = ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, whole)
            rebuilt._prepare_init(process_group=group, init_rrefs=False)
            return rebuilt

        return _Composite(build)

    def _object(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise StagingError(
                f"An object of type {type(value).__qualname__} cannot be copied for an asynchronous save: {error}",
                remedy=UNSAVEABLE,
            ) from error


def _on_cpu(shard: ShardMetadata) -> ShardMetadata:
    """Return the metadata with a CPU placement: torch refuses a shard whose tensor is on another device."""
    placement = shard.placement
    if not isinstance(placement, _remote_device) or placement.device() == torch.device("cpu"):
        return shard
    return ShardMetadata(shard.shard_offsets, shard.shard_sizes, _remote_device(f"rank:{placement.rank()}/cpu"))


def _with_attributes(
    inner: Callable[[torch.Tensor], torch.Tensor] | None, attributes: dict[str, Any]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def finish(copied: torch.Tensor) -> torch.Tensor:
        made = copied if inner is None else inner(copied)
        made.__dict__.update(attributes)
        return made

    return finish


class _Node:
    """A place in the skeleton that is filled in once the tensors are copied."""

    __slots__ = ("_built",)

    _built: Any

    def build(self, copies: Sequence[torch.Tensor]) -> Any:
        raise NotImplementedError


class _Leaf(_Node):
    """One tensor. A Python object that occurs in two places stays one object."""

    __slots__ = ("finish", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    def build(self, copies: Sequence[torch.Tensor]) -> Any:
        copied = copies[self.index]
        if self.finish is None:
            return copied
        try:
            return self._built
        except AttributeError:
            self._built = self.finish(copied)
            return self._built


class _Composite(_Node):
    """A value made of parts that are filled in before it: fills run in the order of the visits, inner ones first."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def build(self, copies: Sequence[torch.Tensor]) -> Any:
        try:
            return self._built
        except AttributeError:
            self._built = self._make()
            return self._built
