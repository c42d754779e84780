"""Split of a state into its tensors and a skeleton of everything else, and assembly with copies of the tensors.

The split copies values that are not tensors, and tensors that cannot be described by strides over a storage (sparse,
quantized, on unusual devices).
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorBase
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor

from bucketpoint.errors import UNSAVEABLE, BucketpointError, StagingError
from bucketpoint.format.tensor_bytes import ADDRESSED_DEVICES, refuse_freed
from bucketpoint.format.torch_zip import FRAMEABLE

_IMMUTABLE = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range}
)

SHARD_OF_A_WHOLE = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Attributes by which DCP recognises a plain tensor as a shard (`CheckpointableTensor`, torch 2.15). Other attributes
of plain tensors are not saved."""


class FlatState:
    """A state dict without its tensors.

    Attributes:
        sources: the tensors to copy, which share memory with the caller's state. They are strided, not of a subclass,
            and in the order of the visit. A tensor object occurs once, and once more in each value (leaf) that DCP
            pickles as a whole.
    """

    def __init__(self, state_dict: dict[Any, Any]) -> None:
        self.sources: list[torch.Tensor] = []
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []
        # For each value that DCP pickles as a whole (a leaf), the indices of its tensors in `sources`.
        self._leaves: list[list[int]] = []
        self._leaf: list[int] | None = None
        self._fills: list[tuple[Any, Any, _Node]] = []
        self._path: list[Any] = []
        # The last device that was checked. A check reads the device's type, which is the slowest step here.
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

    def assemble(self, copies: list[torch.Tensor], memory: torch.Tensor | None = None) -> dict[Any, Any]:
        """Rebuild the state, with `copies[i]` for `sources[i]`.

        Can be called only once: the skeleton itself becomes the result.

        Args:
            memory: the staging memory that holds the copies, as bytes; None if each copy has a separate storage.
        """
        if memory is not None:
            for leaf in self._leaves:
                _set_apart(copies, leaf, memory)
        for container, key, node in self._fills:
            container[key] = node.build(copies)
        return self._root  # type: ignore[no-any-return]

    def _visit(self, value: Any) -> Any:
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            entry = self._tensor(value)
        elif isinstance(value, dict):
            # For a dict that DCP pickles, the class and the attributes are saved, too; for any other, only the entries.
            plain = self._leaf is None or (kind in (dict, OrderedDict) and not getattr(value, "__dict__", None))
            entry = self._mapping(value) if plain else self._object(value)
        elif kind is list:
            # DCP pickles such a list as a whole, and saves the entries of any other list separately.
            whole = not any(isinstance(item, (torch.Tensor, dict, list)) for item in value)
            entry = self._as_leaf(self._list, value) if whole else self._list(value)
        elif isinstance(value, tuple) and (kind is tuple or hasattr(value, "_fields")):
            entry = self._as_leaf(self._tuple, value)
        elif isinstance(value, ShardedTensor):
            # Checked before torch.Tensor: ShardedTensor is a subclass of it, but does not behave like a tensor.
            entry = self._sharded(value)
        elif isinstance(value, (DTensor, AsyncCollectiveTensor)):
            entry = self._subclass(value)
        elif isinstance(value, torch.Tensor):
            entry = self._as_leaf(self._subclass, value)
        else:
            entry = self._object(value)
        self._memo[id(value)] = entry
        # Keep the value alive: if a temporary were freed, another object could get its id and its entry in the memo.
        self._alive.append(value)
        return entry

    def _as_leaf(self, visit: Callable[[Any], Any], value: Any) -> Any:
        if self._leaf is not None:
            return visit(value)
        # A separate memo, because a tensor that also occurs elsewhere in the state needs separate memory here.
        memo, self._memo, self._leaf = self._memo, {}, []
        try:
            return visit(value)
        finally:
            if self._leaf:
                self._leaves.append(self._leaf)
            self._memo, self._leaf = memo, None

    def _mapping(self, value: dict[Any, Any]) -> Any:
        out: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        visit, fills, memo = self._visit, self._fills, self._memo
        key = None
        try:
            for key, item in value.items():
                if type(item) is torch.Tensor:
                    # Nearly all values of a large state are plain tensors, so they skip the call of `visit`.
                    entry = memo.get(id(item))
                    if entry is None:
                        entry = memo[id(item)] = self._tensor(item)
                else:
                    entry = visit(item)
                out[key] = entry
                if isinstance(entry, _Node):
                    fills.append((out, key, entry))
        except BaseException:
            self._path.insert(0, key)
            raise
        return out

    def _list(self, value: list[Any]) -> list[Any]:
        out: list[Any] = []
        index = 0
        try:
            for index, item in enumerate(value):
                entry = self._visit(item)
                out.append(entry)
                if isinstance(entry, _Node):
                    self._fills.append((out, index, entry))
        except BaseException:
            self._path.insert(0, index)
            raise
        return out

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        parts = self._list(list(value))
        make = getattr(type(value), "_make", tuple)
        if not any(isinstance(part, _Node) for part in parts):
            return make(parts)
        return _Node(lambda copies: make(parts))

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.device != self._device:
            if value.device.type not in ADDRESSED_DEVICES:
                return self._foreign(value)
            self._device = value.device
        if value.layout is not torch.strided or value.is_quantized:
            return self._foreign(value)
        index = len(self.sources)
        self.sources.append(value)
        if self._leaf is not None:
            self._leaf.append(index)
        elif value.dtype not in FRAMEABLE:
            # DCP pickles a tensor of this dtype, too.
            self._leaves.append([index])
        kind, requires_grad = type(value), value.requires_grad
        if kind is torch.Tensor and not requires_grad and "global_shape" not in value.__dict__:
            return _Node(operator.itemgetter(index))
        described = {name: value.__dict__[name] for name in SHARD_OF_A_WHOLE if name in value.__dict__}

        def make(copies: Sequence[torch.Tensor]) -> torch.Tensor:
            copied = copies[index]
            if kind is torch.nn.Parameter:
                copied = torch.nn.Parameter(copied, requires_grad=requires_grad)
            elif requires_grad:
                copied.requires_grad_()
            if "global_shape" in described:
                copied.__dict__.update(described)
            return copied

        return _Node(make)

    def _foreign(self, value: torch.Tensor) -> torch.Tensor:
        if value.device.type == "meta":
            raise StagingError(
                "A tensor on the meta device has no data to save",
                remedy="Materialise it (module.to_empty, then initialise) or leave it out of the state",
            )
        refuse_freed(value, kind=StagingError)
        # Kept alive, as other tensors are by `sources`: while the memo has its id, no other object may get the id.
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
        return _Node(lambda copies: unflatten(parts, context, size, stride))

    def _relabelled(self, value: torch.Tensor) -> Any:
        kind, attributes, requires_grad = type(value), self._object(dict(value.__dict__)), value.requires_grad
        try:
            plain = value.as_subclass(torch.Tensor)
            addressed = plain.device.type in ADDRESSED_DEVICES and plain.layout is torch.strided
            if addressed and plain.nbytes and not plain.data_ptr():
                raise StagingError(
                    f"A {kind.__qualname__} has no memory, and no __tensor_flatten__ for the tensors that it wraps",
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

        return _Node(lambda copies: finish(node.build(copies))) if isinstance(node, _Node) else finish(node)

    def _sharded(self, value: ShardedTensor) -> Any:
        parts = self._list([shard.tensor for shard in value.local_shards()])
        metadata = [_on_cpu(shard.metadata) for shard in value.local_shards()]
        whole, group = value.metadata(), value._process_group

        def build(copies: Sequence[torch.Tensor]) -> Any:
            shards = [Shard(tensor, meta) for tensor, meta in zip(parts, metadata, strict=True)]
            # The base class's method: that of ShardedTensor refuses shards that left the device of their placement.
            rebuilt: Any = ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, whole)
            rebuilt._prepare_init(process_group=group, init_rrefs=False)
            return rebuilt

        return _Node(build)

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


class _Node:
    """A value of the skeleton that contains copied tensors. It is built only once, so that its identity is preserved.

    Values are built in the order of the visits, so the parts of a value come before the value.
    """

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[Sequence[torch.Tensor]], Any]) -> None:
        self._make: Callable[[Sequence[torch.Tensor]], Any] | None = make
        self._value: Any = None

    def build(self, copies: Sequence[torch.Tensor]) -> Any:
        # No `try` instead: an exception for each of thousands of tensors takes a millisecond.
        if self._make is not None:
            self._value = self._make(copies)
            self._make = None
        return self._value


def _set_apart(copies: list[torch.Tensor], leaf: Sequence[int], memory: torch.Tensor) -> None:
    """Replace the tensors of a leaf (indices in `copies`) by tensors over the same bytes, with separate storages.

    The pickle of a tensor holds its whole storage, and all staged tensors have a common storage, `memory`. Overlapping
    tensors of the leaf share a new storage, unless copies of them are smaller.
    """
    members: list[tuple[int, int]] = []
    start = end = 0
    for index in sorted(leaf, key=lambda index: copies[index].data_ptr()):
        copied = copies[index]
        if not copied.nbytes:
            # An empty tensor gets another address, because the pickler refuses two dtypes at one address.
            copies[index] = torch.empty_strided(copied.shape, copied.stride(), dtype=copied.dtype, device="cpu")
            continue
        address = copied.data_ptr()
        if address >= end:
            _share(copies, members, start, end, memory)
            members, start, end = [], address, address
        members.append((index, address))
        # From the first element to the end of the last.
        steps = sum((size - 1) * step for size, step in zip(copied.shape, copied.stride(), strict=True))
        end = max(end, address + (steps + 1) * copied.element_size())
    _share(copies, members, start, end, memory)


def _share(
    copies: list[torch.Tensor], members: Sequence[tuple[int, int]], start: int, end: int, memory: torch.Tensor
) -> None:
    if not members:
        return
    offset = start - memory.data_ptr()
    # Sliced with NumPy: a slice made by torch would have the storage of the whole.
    shared = torch.from_numpy(memory.numpy()[offset : offset + end - start])
    dtype = copies[members[0][0]].dtype
    gaps = end - start > sum(copies[index].nbytes for index, _ in members)
    for index, address in members:
        copied = copies[index]
        if gaps or copied.dtype != dtype:
            # The pickler refuses two dtypes at one address. Cloned as bytes: torch cannot clone every one-byte dtype.
            bits = copied.view(torch.uint8) if copied.element_size() == 1 else copied
            copies[index] = bits.clone().view(copied.dtype)
        else:
            # Not a view of `shared`, whose length may not be a multiple of the dtype's size.
            offset = (address - start) // dtype.itemsize
            own = torch.empty(0, dtype=dtype, device="cpu")
            copies[index] = own.set_(shared.untyped_storage(), offset, copied.shape, copied.stride())
