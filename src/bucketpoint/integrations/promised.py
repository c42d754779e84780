"""Promised tensors: tensors of a checkpoint that a program slices and copies into its parameters before they are read.

A view of a promised tensor is a promised tensor. A copy of one into a tensor with memory is noted, and all noted boxes
are read together. Two rules keep the values right:

1. Any other operation on a promised tensor reads the whole saved tensor first, and uses it from then on. Operations
   that make the tensor itself a view of other elements, such as `t_()`, are refused.
2. Any operation but a view on elements that wait for a noted copy makes all noted copies happen first, as does a
   function that reaches their memory without an operation, and the start of another thread. Copies into memory that
   was reached so, as by `numpy()`, are made at once.

What a program does to memory with an address that it asked for before the copy, or by `numpy()` before the block, is
not seen.
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
"""Function that reads a list of `SavedBox`es into their targets. Arguments: `last`, True for the last load, which all
ranks reach; and `failure`, the error that ended this rank's program instead."""

_READ_MEMORY = {
    *("numpy", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "is_shared"),
    *("__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__", "resize_"),
}
"""Methods of tensors that reach their memory without an operation that a dispatch mode sees."""

_SHARE_MEMORY = {"numpy", "__array__", "__dlpack__", "__get__"}
"""Those of them whose results reach the memory later, too. Loaders ask for addresses only to compare them."""


class Promised(torch.Tensor):
    """A tensor of a checkpoint that has not been read: a view of the saved tensor `saved`.

    `meta` is the same view of a tensor without memory: its strides and storage offset are those in the saved tensor.
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
    """The promised tensors of one checkpoint. Outside of `noting`, and on other threads, each copy reads at once.

    Args:
        load: reads boxes of saved tensors.

    Attributes:
        used: keys of the saved tensors that were copied or read.
    """

    def __init__(self, load: Load) -> None:
        self.used: set[str] = set()
        self._load = load
        self._notes: list[SavedBox] = []
        self._waiting = Regions()
        self._shared = Regions()
        self._failure: Exception | None = None
        self._written: dict[Any, dict[Any, int]] = {}
        self._thread: int | None = None
        self._lock = threading.RLock()

    def promise(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> Promised:
        """Return the promised tensor of a saved one."""
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return Promised(_Saved(self, key, meta, torch.device("cpu")), meta)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the copies that this thread makes in the block, and make them at its end."""
        self._thread = threading.get_ident()
        try:
            with before_other_threads(self._hand_over), _WatchMemory(self), _Watch(self):
                yield
        except GeneratorExit:
            # A generator held the block, and its consumer has left the rest of the tensors.
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
        """Make the noted copies, in an order that leaves the values of the later of two that overlap."""
        with self._lock:
            notes, self._notes = self._notes, []
            self._waiting.clear()
            *early, final = in_rounds(notes)
            try:
                if last and self._failure is not None:
                    # The program has caught it, and went on.
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
        """Read boxes, and keep the error: a program that catches it must not end with parameters that lack values."""
        try:
            self._load(boxes)
        except Exception as error:
            self._failure = error
            raise

    def _hand_over(self) -> None:
        """Make the noted copies if it is the noting thread that gives work to another one: modes watch one thread."""
        if threading.get_ident() == self._thread and self._notes:
            self.read_noted()

    def _fail(self, error: Exception) -> None:
        """End the last load with this rank's error on all ranks, which wait for each other there."""
        with suppress(Exception):
            self._load([], last=True, failure=error)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation by the module's rules."""
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
        """Return the bytes of the tensor that this thread wrote in `noting`; those of overlapping views count twice."""
        # Finding its memory must not count as reading it.
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
        """Make all noted copies if one of the tensors has elements that wait for one.

        Args:
            whole: the memory behind the tensors counts, not only their elements.
        """
        if not self._waiting:
            return
        for tensor in tensors:
            if _place(tensor) is not None and any(
                whole or overlap(tensor, target) for target in self._waiting.find(tensor, whole=whole)
            ):
                self.read_noted()
                return

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make copies into the memory of these tensors at once from now on, as others reach it without operations."""
        for tensor in filter(_place, tensors):
            self._shared.add(tensor, None, whole=True)

    def _without_reading(self, func: Any, promise: Promised, leaves: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Return the result of a view, or of a copy that can be noted; otherwise NotImplemented."""
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
        self.used.add(box.key)
        self._note_written(target)
        if target.numel():
            self._notes.append(box)
            self._waiting.add(target, box.target)
        return target

    def read(self, saved: _Saved) -> torch.Tensor:
        """Return the whole saved tensor, in memory on its device."""
        with self._lock, torch._C.DisableTorchFunction():
            if saved.real is None:
                real = torch.empty(saved.meta.shape, dtype=saved.meta.dtype, device="cpu")
                self.used.add(saved.key)
                self._load_now([SavedBox(saved.key, (0,) * real.dim(), real)])
                saved.real = real.to(saved.device)
            return saved.real


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every operation of this thread to the promises."""

    def __init__(self, promises: Promises) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._promises = promises

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_wrapper, types)):
            # The operations that the wrapper is made of come here next.
            return NotImplemented
        if _is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self._promises.run(func, args, kwargs or {})


class _WatchMemory(TorchFunctionMode):
    """Watches the methods that reach the memory of a tensor without an operation."""

    def __init__(self, promises: Promises) -> None:
        super().__init__()
        self._promises = promises

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        _refuse_other_memory(func, args)
        if name == "__set__":
            # `param.data = promise` gives the parameter the memory of the promise.
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
    """Raise an error if a function gives a promised tensor other elements."""
    others = (torch.Tensor.resize_, torch.Tensor.data.__set__)  # type: ignore[attr-defined]
    if args and isinstance(args[0], Promised) and func in others:
        raise _refusal(args[0], "resize_" if func is torch.Tensor.resize_ else "data =")


def _refusal(promise: Promised, name: str) -> BucketpointError:
    return BucketpointError(
        f"{name} changes which elements a tensor is, which a tensor that is not read yet cannot follow",
        key=promise.saved.key,
        remedy="Use an operation that returns another tensor, as t() for t_()",
    )


def _reaches_memory(func: Any) -> bool:
    """Return True for a function that may read the memory of its tensors without an operation of `_Watch`.

    Among them are operations of extensions: one kernel for all keys is called before any mode, as that of vLLM that
    packs a weight for a CPU. Functions that an extension binds to Python directly are seen by no mode.
    """
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        return packet._qualified_op_name.partition("::")[0] not in ("aten", "prim", "prims")
    return getattr(func, "__name__", "") in _READ_MEMORY or func == torch.Tensor.__cuda_array_interface__.__get__


def _with_real(values: Any) -> Any:
    """Return the values with the tensors that were read in place of promised ones."""

    def real(promise: Promised) -> torch.Tensor:
        meta, tensor = promise.meta, promise.saved.promises.read(promise.saved)
        return tensor.as_strided(meta.shape, meta.stride(), meta.storage_offset())

    return tree_map_only(Promised, real, values)


def _is_wrapper(kind: type) -> bool:
    return kind is not Promised and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _is_composite(func: Any) -> bool:
    """Return True for an operation that torch has as a sum of others. Only inference mode passes such ones."""
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
    """Return the memory of a tensor; None if it has none of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta or type(tensor) is Promised or _is_wrapper(type(tensor)):
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()
