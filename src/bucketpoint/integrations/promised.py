"""Promised tensors: tensors of a checkpoint that are sliced and copied into parameters before their bytes are read.

A view of a promised tensor is a promised tensor. A copy of a promised tensor into a tensor with memory is recorded, and
all recorded boxes are read together. Two rules keep the values correct:

1. Any other operation on a promised tensor first reads the whole saved tensor, which is used from then on. In-place
   views such as `t_()`, which give the tensor other elements, are refused.
2. All recorded copies are made before an operation, other than a view, on elements that wait for such a copy; before a
   function that accesses the elements' memory without an operation; and before another thread starts. A copy into
   memory that was accessed like this, as by `numpy()`, is made at once.

Accesses through an address that the program took before the copy, or through `numpy()` before the block, are not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.boxes import SavedBox
from bucketpoint.integrations.other_threads import before_other_threads
from bucketpoint.integrations.strided_views import Regions, box_of, in_rounds, is_plain_view, overlap

_aten = torch.ops.aten

Load = Callable[..., None]
"""Function that reads a list of `SavedBox`es into their targets. Arguments: `last`, True for the last load, in which
all ranks take part; and `failure`, this rank's error, with which the last load fails."""

_READ_MEMORY = {
    *("numpy", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "is_shared"),
    *("__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__", "resize_"),
}
"""Methods of tensors that access memory without an operation that a dispatch mode sees."""

_SHARE_MEMORY = {"numpy", "__array__", "__dlpack__", "__get__"}
"""Methods whose results can access the memory later. Addresses do not count: loaders only compare them."""


class Promised(torch.Tensor):
    """A view of the saved tensor `saved`, whose bytes have not been read.

    `meta` is the same view of a tensor without memory, with its strides and its offset in the saved tensor.
    """

    saved: _Saved
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, saved: _Saved, meta: torch.Tensor) -> Any:
        promise = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=saved.device,
        )
        promise.saved, promise.meta = saved, meta
        return promise

    def __init__(self, saved: _Saved, meta: torch.Tensor) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Promised({self.saved.key!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse_other_memory(func, args)
        if _reaches_memory(func):
            args, kwargs = _with_real((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(map(_is_wrapper, types)):
            return NotImplemented
        if _is_composite(func):
            return func.decompose(*args, **(kwargs or {}))
        promise = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Promised))
        return promise.saved.promises.run(func, args, kwargs or {})


class _Saved:
    """A saved tensor, read at most once as a whole."""

    def __init__(self, promises: Promises, key: str, meta: torch.Tensor, device: torch.device) -> None:
        self.promises, self.key, self.meta, self.device = promises, key, meta, device
        self.real: torch.Tensor | None = None


class Promises:
    """The promised tensors of one checkpoint. Outside of `noting`, and on other threads, a copy reads at once."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._notes: list[SavedBox] = []
        self._waiting = Regions()
        self._shared = Regions()
        self._failure: Exception | None = None
        self._written: dict[Any, dict[Any, int]] = {}
        self._thread: int | None = None
        self._lock = threading.RLock()

    def promise(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> Promised:
        """Return a promised tensor for the saved tensor `key`."""
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return Promised(_Saved(self, key, meta, torch.device("cpu")), meta)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the copies that this thread asks for in the block, and make them at the end of the block."""
        self._thread = threading.get_ident()
        try:
            with before_other_threads(self._hand_over), _WatchMemory(self), _Watch(self):
                yield
        except GeneratorExit:
            # The block is in a generator, and its consumer ended before the last tensor.
            self.read_noted(last=True)
            raise
        except Exception as error:
            self._notes.clear()
            self._waiting.clear()
            self._fail(error)
            raise
        finally:
            self._thread = None
        self.read_noted(last=True)

    def read_noted(self, *, last: bool = False) -> None:
        """Make the recorded copies. Where two of them overlap, the later one determines the values."""
        with self._lock:
            notes, self._notes = self._notes, []
            self._waiting.clear()
            *early, final = in_rounds(notes)
            try:
                if last and self._failure is not None:
                    # The program caught the error and continued.
                    raise self._failure
                for boxes in early:
                    self._load_now(boxes)
            except Exception as error:
                if last:
                    self._fail(error)
                raise
            if last:
                self._load(final, last=True)
            elif final:
                self._load_now(final)

    def _load_now(self, boxes: list[SavedBox]) -> None:
        """Read boxes, and keep an error: even if the program catches it, the last load fails."""
        try:
            self._load(boxes)
        except Exception as error:
            self._failure = error
            raise

    def _hand_over(self) -> None:
        """Make the recorded copies before the recording thread gives work to another thread, which no mode watches."""
        if threading.get_ident() == self._thread and self._notes:
            self.read_noted()

    def _fail(self, error: Exception) -> None:
        """Make the last load, in which all ranks wait for each other, fail with this rank's error."""
        with suppress(Exception):
            self._load([], last=True, failure=error)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation by the rules of this module."""
        with self._lock, torch._C.DisableTorchFunction():
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            promises = [leaf for leaf in leaves if isinstance(leaf, Promised)]
            makes_view = torch.Tag.inplace_view in getattr(func, "tags", ())
            if makes_view and isinstance(args[0], Promised):
                raise _refusal(args[0], func.overloadpacket.__name__)
            if len(promises) == 1:
                result = self._without_reading(func, promises[0], leaves, args, kwargs)
                if result is not NotImplemented:
                    return result
            if promises:
                args, kwargs = _with_real((args, kwargs))
            if not getattr(func, "is_view", False):
                self.settle(leaves, whole=makes_view)
                self._note_all_written(func._schema.arguments, args, kwargs)
            return func(*args, **kwargs)

    def written(self, tensor: torch.Tensor) -> int:
        """Return the number of bytes of a tensor written in `noting`. Bytes of overlapping views count twice."""
        # The look-up of the address must not count as access to the memory.
        with torch._C.DisableTorchFunction():
            return sum(self._written.get(_place(tensor), {}).values())

    def _note_all_written(self, arguments: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                for leaf in tree_leaves(written):
                    if isinstance(leaf, torch.Tensor):
                        self._note_written(leaf)

    def _note_written(self, view: torch.Tensor) -> None:
        if (place := _place(view)) is not None:
            self._written.setdefault(place, {})[view.storage_offset(), view.shape, view.stride()] = view.nbytes

    def settle(self, tensors: Sequence[torch.Tensor], *, whole: bool = False) -> None:
        """Make all recorded copies if elements of a tensor, or with `whole` of its memory, wait for one of them."""
        if not self._waiting:
            return
        for tensor in tensors:
            if _place(tensor) is not None and any(
                whole or overlap(tensor, target) for target in self._waiting.find(tensor, whole=whole)
            ):
                self.read_noted()
                return

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make later copies into these tensors' memory at once, because others access it without operations."""
        for tensor in filter(_place, tensors):
            self._shared.add(tensor, None, whole=True)

    def _without_reading(self, func: Any, promise: Promised, leaves: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Return the result of a view, or of a copy that can be recorded; otherwise NotImplemented."""
        saved = promise.saved
        if getattr(func, "is_view", False) and len(leaves) == 1:
            views = func(*tree_map_only(Promised, lambda leaf: leaf.meta, args), **kwargs)
            if not all(is_plain_view(view, saved.meta) for view in tree_leaves(views)):
                return NotImplemented
            return tree_map_only(torch.Tensor, lambda view: Promised(saved, view), views)
        if saved.real is not None:
            return NotImplemented
        if func is _aten.copy_.default and args[1] is promise and self._thread == threading.get_ident():
            return self._note(args[0], promise)
        if func in (_aten._to_copy.default, _aten.clone.default) and len(leaves) == 1 and _keeps(promise, kwargs):
            device = torch.device(kwargs.get("device") or saved.device)
            return Promised(_Saved(self, saved.key, saved.meta, device), promise.meta)
        return NotImplemented

    def _note(self, target: torch.Tensor, promise: Promised) -> Any:
        if target.is_meta:
            return target
        place = _place(target)
        repeated = any(not stride and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True))
        odd = place is None or repeated or target.is_conj() or target.is_neg() or target.is_quantized
        if odd or any(True for _ in self._shared.find(target)):
            return NotImplemented
        try:
            source = promise.meta.expand(target.shape)
        except RuntimeError:
            return NotImplemented
        box = box_of(promise.saved.key, promise.saved.meta, source, target.detach())
        if box is None:
            return NotImplemented
        self._note_written(target)
        if target.numel():
            self._notes.append(box)
            self._waiting.add(target, box.target)
        return target

    def read(self, saved: _Saved) -> torch.Tensor:
        """Return the whole saved tensor on its device. The first call reads it."""
        with self._lock, torch._C.DisableTorchFunction():
            if saved.real is None:
                real = torch.empty(saved.meta.shape, dtype=saved.meta.dtype, device="cpu")
                self._load_now([SavedBox(saved.key, (0,) * real.dim(), real)])
                saved.real = real.to(saved.device)
            return saved.real


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that passes every operation of this thread to the promises."""

    def __init__(self, promises: Promises) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._promises = promises

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_wrapper, types)):
            # The operations inside the wrapper come here next.
            return NotImplemented
        if _is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self._promises.run(func, args, kwargs or {})


class _WatchMemory(TorchFunctionMode):
    """Function mode that watches the methods that access a tensor's memory without an operation."""

    def __init__(self, promises: Promises) -> None:
        super().__init__()
        self._promises = promises

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        _refuse_other_memory(func, args)
        if name == "__set__":
            # `param.data = promise` gives the parameter the promise's memory, which must be read first.
            args = (args[0], *_with_real(args[1:]))
        elif _reaches_memory(func):
            args, kwargs = _with_real((args, kwargs))
            with torch._C.DisableTorchFunction():
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                self._promises.settle(tensors, whole=True)
                if name in _SHARE_MEMORY:
                    self._promises.share(tensors)
        return func(*args, **kwargs)


def _refuse_other_memory(func: Any, args: Any) -> None:
    """Raise an error if a function would give a promised tensor other elements."""
    others = (torch.Tensor.resize_, torch.Tensor.data.__set__)  # type: ignore[attr-defined]
    if args and isinstance(args[0], Promised) and func in others:
        raise _refusal(args[0], "resize_" if func is torch.Tensor.resize_ else "data =")


def _refusal(promise: Promised, name: str) -> BucketpointError:
    return BucketpointError(
        f"{name} gives a tensor other elements in place, which is impossible before the tensor is read",
        key=promise.saved.key,
        remedy="Use an operation that returns another tensor, such as t() instead of t_()",
    )


def _reaches_memory(func: Any) -> bool:
    """Return True for a function that may access its tensors' memory without an operation that `_Watch` sees.

    These include operations of extensions: a kernel for all dispatch keys, such as vLLM's that packs a weight for a
    CPU, is called before any mode. No mode sees functions that an extension binds to Python directly.
    """
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        return packet._qualified_op_name.partition("::")[0] not in ("aten", "prim", "prims")
    return getattr(func, "__name__", "") in _READ_MEMORY or func == torch.Tensor.__cuda_array_interface__.__get__


def _with_real(values: Any) -> Any:
    """Replace promised tensors in the values by tensors that are read from the checkpoint."""

    def real(promise: Promised) -> torch.Tensor:
        meta, tensor = promise.meta, promise.saved.promises.read(promise.saved)
        return tensor.as_strided(meta.shape, meta.stride(), meta.storage_offset())

    return tree_map_only(Promised, real, values)


def _is_wrapper(kind: type) -> bool:
    return kind is not Promised and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _is_composite(func: Any) -> bool:
    """Return True for an operation that torch composes of others. Dispatch modes see these in inference mode only."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch.is_inference_mode_enabled() and hasattr(func, "decompose") and func.has_kernel_for_dispatch_key(key)


def _keeps(promise: Promised, kwargs: Any) -> bool:
    """Return True if a copy with these arguments has the dtype and the strides of the promised tensor."""
    order = kwargs.get("memory_format") or torch.preserve_format
    return (
        promise.meta.clone(memory_format=order).stride() == promise.meta.stride()
        and kwargs.get("dtype") in (None, promise.dtype)
        and kwargs.get("layout") in (None, torch.strided)
        and not kwargs.get("pin_memory")
    )


def _place(tensor: torch.Tensor) -> tuple[torch.device, int] | None:
    """Return the device and the address of a tensor's memory; None if it has no memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or type(tensor) is Promised or _is_wrapper(type(tensor)):
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()
