"""Functions that make tensors over an archive's storages, after checks of shape, strides, offset and indices."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.storage import TypedStorage

from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.pickles.plain import set_attributes
from bucketpoint.format.pickles.vocabulary import (
    DTYPE_NAMES,
    STORAGE_TYPE_NAMES,
    Deferred,
    Function,
    ObjectionError,
    Registered,
    Vocabulary,
    only,
    unfit,
    whole,
)

_MAX_DIMS, _MAX_NAME = 64, 64
_MAX_NUMBER = 1 << 62
_TENSOR_BYTES = 256
_GENERATOR_BYTES = 5056
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_QSCHEMES = (
    *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"),
    "per_channel_affine_float_qparams",
)

VALUES = Vocabulary()
"""Vocabulary of tensors, which are checked to lie within the storages of the item, and of torch's constants."""


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > _MAX_DIMS:
        raise unfit("a tensor shape")
    if any(type(value) is not int or not 0 <= value < _MAX_NUMBER for value in values):
        raise unfit("a tensor shape")
    return tuple(values)


_dtype = only("a tensor dtype", torch.dtype)
_flag = only("a flag of a tensor", bool)
_plain = only("an argument of a tensor", torch.Tensor, torch.nn.Parameter)
_number = only("a quantised tensor", int, float)


def _check_hooks(hooks: Any) -> None:
    if hooks is not None and (type(hooks) is not OrderedDict or hooks):
        raise ObjectionError("a tensor with hooks")


def _place(machine: Machine, storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> tuple[Any, ...]:
    """Check that a tensor lies within its storage. Returns storage, data type, offset, shape and strides."""
    machine.pay(_TENSOR_BYTES)
    size, steps = _numbers(shape), _numbers(strides)
    (first,) = _numbers((offset,))
    if type(storage) is not TypedStorage or len(size) != len(steps) or math.prod(size) >= _MAX_NUMBER:
        raise unfit("a tensor shape")
    untyped = storage._untyped_storage
    kind = storage.dtype if dtype is None else _dtype(dtype)
    if 0 not in size:
        last = first + sum((count - 1) * step for count, step in zip(size, steps, strict=True))
        if (last + 1) * kind.itemsize > untyped.nbytes():
            raise ObjectionError("a tensor that does not lie within its storage")
    else:
        first = min(first, untyped.nbytes() // kind.itemsize)
    return untyped, kind, first, size, steps


def _laid(machine: Machine, storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> torch.Tensor:
    untyped, kind, first, size, steps = _place(machine, storage, dtype, offset, shape, strides)
    return torch.empty((0,), dtype=kind, device=untyped.device).set_(untyped, first, size, steps)


@VALUES.function("torch._utils._rebuild_tensor_v2")
def _tensor_v2(machine: Machine, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> torch.Tensor:
    return _finished(_laid(machine, storage, None, offset, shape, strides), *rest)


@VALUES.function("torch._utils._rebuild_tensor_v3")
def _tensor_v3(machine: Machine, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> torch.Tensor:
    requires_grad, hooks, dtype, *bits = rest
    return _finished(_laid(machine, storage, _dtype(dtype), offset, shape, strides), requires_grad, hooks, *bits)


def _finished(made: torch.Tensor, requires_grad: Any, hooks: Any, bits: Any = None) -> torch.Tensor:
    _check_hooks(hooks)
    if bits is not None and (type(bits) is not dict or not bits.keys() <= {"conj", "neg"}):
        raise unfit("a tensor with properties")
    if bits and _flag(bits.get("conj", False)):
        made = made.conj()
    if bits and _flag(bits.get("neg", False)):
        made = torch._neg_view(made)
    return made.requires_grad_() if _flag(requires_grad) else made


@VALUES.function("torch._utils._rebuild_parameter")
@VALUES.function("torch._utils._rebuild_parameter_with_state")
def _parameter(machine: Machine, data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> torch.nn.Parameter:
    machine.pay(_TENSOR_BYTES)
    _check_hooks(hooks)
    parameter = torch.nn.Parameter(_plain(data), _flag(requires_grad))
    set_attributes(machine, parameter, state)
    return parameter


@VALUES.function("torch._tensor._rebuild_from_type_v2")
def _from_type(machine: Machine, function: Any, kind: Any, given: Any, state: Any) -> Any:
    if not (type(function) is Function and function.__name__.startswith("torch._utils.")) or type(given) is not tuple:
        raise ObjectionError("torch._tensor._rebuild_from_type_v2 of another function")
    tensor = machine.call(function, given)
    if isinstance(tensor, Deferred):
        if type(kind) is not Registered or kind.value is not tensor.arguments[0]:
            raise ObjectionError("torch._tensor._rebuild_from_type_v2 of another class")
        return Deferred(torch._tensor._rebuild_from_type_v2, (tensor.function, kind.value, tensor.arguments, state))
    if type(tensor) is not kind:
        if kind is not torch.nn.Parameter and kind is not torch.Tensor:
            raise ObjectionError("torch._tensor._rebuild_from_type_v2 of another class")
        tensor = tensor.as_subclass(kind)
    return set_attributes(machine, tensor, state)


@VALUES.function("torch._utils._rebuild_wrapper_subclass")
def _wrapper(machine: Machine, kind: Any, dtype: Any, shape: Any, strides: Any, *rest: Any) -> Deferred:
    offset, layout, device, requires_grad = rest
    _dtype(dtype), _numbers(shape), _numbers(strides), _numbers((offset,)), _flag(requires_grad)
    if type(kind) is not Registered or type(layout) is not torch.layout or type(device) is not torch.device:
        raise unfit("a tensor subclass")
    return Deferred(torch._utils._rebuild_wrapper_subclass, (kind.value, dtype, shape, strides, *rest))


@VALUES.function("torch._utils._rebuild_qtensor")
def _quantised(
    machine: Machine, storage: Any, offset: Any, shape: Any, strides: Any, how: Any, requires_grad: Any, hooks: Any
) -> torch.Tensor:
    untyped, dtype, first, size, steps = _place(machine, storage, None, offset, shape, strides)
    if math.prod(size) * dtype.itemsize > untyped.nbytes():
        raise ObjectionError("a tensor that repeats its elements")
    machine.pay(untyped.nbytes() >> 3)
    _check_hooks(hooks)
    scheme, *how = how
    if scheme is torch.per_tensor_affine:
        scale, zero = how
        tensor = torch._empty_affine_quantized(
            size, scale=_number(scale), zero_point=_number(zero), dtype=dtype, device=untyped.device
        )
    elif scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        scales, zeros, axis = how
        scales, zeros = _plain(scales), _plain(zeros)
        axis = _numbers((axis,))[0]
        wanted = size[axis : axis + 1]
        if not wanted or tuple(scales.shape) != wanted or tuple(zeros.shape) != wanted:
            raise unfit("a quantised tensor")
        tensor = torch._empty_per_channel_affine_quantized(
            size, scales=scales, zero_points=zeros, axis=axis, dtype=dtype, device=untyped.device
        )
    else:
        raise unfit("a quantised tensor")
    tensor.set_(untyped, first, size, steps)
    return tensor.requires_grad_() if _flag(requires_grad) else tensor


def _check_owned(machine: Machine, tensor: torch.Tensor) -> None:
    """Refuse a tensor that repeats elements of its storage: checking or copying it could take any time and memory."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > tensor.untyped_storage().nbytes():
        raise ObjectionError("a tensor that repeats its elements")
    machine.pay(nbytes >> 3)


@VALUES.function("torch._utils._rebuild_sparse_tensor")
def _sparse(machine: Machine, layout: Any, data: Any) -> torch.Tensor:
    machine.pay(4 * _TENSOR_BYTES)
    if type(data) is not tuple or not 3 <= len(data) <= 4:
        raise unfit("a sparse tensor")
    *parts, shape = data[:3] if layout is torch.sparse_coo else data
    coalesced = data[3] if layout is torch.sparse_coo and len(data) > 3 else None
    size = _numbers(shape)
    if math.prod(size) >= _MAX_NUMBER or not (coalesced is None or type(coalesced) is bool):
        raise unfit("a sparse tensor")
    for part in parts:
        if _plain(part).layout is not torch.strided or part.is_quantized or part.is_nested:
            raise unfit("a sparse tensor")
        _check_owned(machine, part)
    # Tensors on the meta device have no values that could be checked.
    check = not any(part.is_meta for part in parts)
    try:
        if layout is torch.sparse_coo:
            indices, values = parts
            return torch.sparse_coo_tensor(indices, values, size, check_invariants=check, is_coalesced=coalesced)
        if layout in _COMPRESSED:
            outer, inner, values = parts
            return torch.sparse_compressed_tensor(outer, inner, values, size, layout=layout, check_invariants=check)
    except RuntimeError as error:
        raise ObjectionError(f"a sparse tensor whose indices do not fit: {str(error).splitlines()[0]}") from None
    raise unfit("a sparse tensor")


@VALUES.function("torch._utils._rebuild_nested_tensor")
def _nested(machine: Machine, *arguments: Any) -> torch.Tensor:
    buffer, sizes, strides, offsets = (_plain(part) for part in arguments)
    for part in (buffer, sizes, strides, offsets):
        _check_owned(machine, part)
    if buffer.is_meta:
        raise unfit("a nested tensor")
    if sizes.dim() != 2 or sizes.shape != strides.shape or tuple(offsets.shape) != tuple(sizes.shape[:1]):
        raise unfit("a nested tensor")
    if not buffer.is_contiguous() or buffer.dim() != 1 or any(part.dtype != torch.int64 for part in (sizes, strides)):
        raise unfit("a nested tensor")
    for size, step, first in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        _numbers((*size, *step, first))
        if 0 not in size and first + sum((n - 1) * s for n, s in zip(size, step, strict=True)) >= buffer.numel():
            raise unfit("a nested tensor")
        if math.prod(size) > buffer.numel():
            raise ObjectionError("a tensor that repeats its elements")
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


@VALUES.function("torch._utils._rebuild_meta_tensor_no_storage")
def _meta(machine: Machine, dtype: Any, shape: Any, strides: Any, requires_grad: Any) -> torch.Tensor:
    size, steps = _numbers(shape), _numbers(strides)
    if math.prod(size) >= _MAX_NUMBER or len(size) != len(steps):
        raise unfit("a tensor shape")
    machine.pay(_TENSOR_BYTES)
    tensor = torch.empty_strided(size, steps, dtype=_dtype(dtype), device="meta")
    return tensor.requires_grad_() if _flag(requires_grad) else tensor


@VALUES.function("torch._utils._rebuild_device_tensor_from_numpy")
@VALUES.function("torch._utils._rebuild_device_tensor_from_cpu_tensor")
def _on_device(machine: Machine, data: Any, dtype: Any, device: Any, requires_grad: Any) -> Any:
    """Defer the making of a tensor on a device without storages, such as XLA, saved as a CPU tensor or an array."""
    if type(device) is str:
        device = torch.device(device)
    if type(device) is not torch.device or not isinstance(_dtype(dtype), torch.dtype):
        raise unfit("a tensor on a device")
    if not isinstance(data, torch.Tensor):
        import numpy as np

        if type(data) is not np.ndarray:
            raise unfit("a tensor on a device")
        data = torch.from_numpy(data)
    _check_owned(machine, _plain(data))
    machine.pay(data.numel() * data.element_size())
    if dtype.itemsize > data.dtype.itemsize:
        raise unfit("a tensor on a device")
    return Deferred(_to_device, (data, dtype, device, _flag(requires_grad)))


def _to_device(data: torch.Tensor, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> torch.Tensor:
    return data.to(device=device, dtype=dtype).requires_grad_(requires_grad)


@VALUES.makes(torch.Size)
def _size(machine: Machine, numbers: Any) -> torch.Size:
    return torch.Size(_numbers(numbers))


@VALUES.makes(torch.device)
def _device(machine: Machine, name: Any, *index: Any) -> torch.device:
    if type(name) is not str or len(name) > _MAX_NAME or any(type(number) is not int for number in index):
        raise unfit("a torch.device")
    return torch.device(name, *index)


@functools.cache
def _layouts() -> dict[str, torch.layout]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


@VALUES.function("torch.serialization._get_layout")
def _layout(machine: Machine, name: Any) -> torch.layout:
    if type(name) is not str or len(name) > _MAX_NAME:
        raise unfit("a layout")
    return _layouts()[name]


@VALUES.makes(torch.Generator)
def _generator(machine: Machine, device: Any) -> torch.Generator:
    if type(device) is not torch.device or device.type != "cpu":
        raise ObjectionError("a random generator that is not on the CPU")
    machine.pay(_GENERATOR_BYTES)
    return torch.Generator()


@VALUES.changes(torch.Generator)
def _set_generator(machine: Machine, target: torch.Generator, state: Any) -> torch.Generator:
    # torch itself checks the content of this state: length, and the position in it.
    _, offset, words = state
    if offset is not None or _plain(words).dtype != torch.uint8 or tuple(words.shape) != (_GENERATOR_BYTES,):
        raise unfit("a state of a random generator")
    return target.set_state(words.contiguous())


class StorageType(Function):
    """Stand-in for a storage class in a pickle: only the data type matters."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name)
        self.dtype = dtype


def storage(pid: Any, find: Callable[[str, int, str], torch.UntypedStorage]) -> TypedStorage:
    """Return the storage for a persistent id of torch.save; `find` takes key, length in bytes and device name."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise ObjectionError("a reference that torch.save does not write")
    _, kind, key, location, numel = pid
    if type(key) is not str or type(location) is not str or type(kind) is not StorageType:
        raise ObjectionError("a reference that torch.save does not write")
    (count,) = _numbers((numel,))
    (nbytes,) = _numbers((count * kind.dtype.itemsize,))
    found = find(key, nbytes, location)
    return TypedStorage(wrap_storage=found, dtype=kind.dtype, _internal=True)  # type: ignore[no-untyped-call]


VALUES.add(torch.Tensor)
VALUES.add(torch.nn.Parameter)
for _name in (*DTYPE_NAMES, *_QSCHEMES):
    # Some versions of torch lack some of these names.
    if hasattr(torch, _name):
        VALUES.add(getattr(torch, _name), names=[f"torch.{_name}"])
for _name, _dtype_name in STORAGE_TYPE_NAMES.items():
    VALUES.add(StorageType(f"torch.{_name}", getattr(torch, _dtype_name)))
for _name in ("UntypedStorage", "TypedStorage"):
    VALUES.add(StorageType(f"torch.storage.{_name}", torch.uint8))
VALUES.parts |= dict.fromkeys(
    (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.layout, torch.qscheme), whole
)
VALUES.parts[torch.Size] = tuple
