"""Promised tensors: tensors of a checkpoint that are sliced and copied into parameters before their bytes are read.

A view of a promised tensor is a promised tensor. A copy of a promised tensor into a tensor with memory is recorded, and
all recorded boxes are read together. Two rules keep the values correct:

1. Any other operation on a promised tensor first reads the whole saved tensor, which is used from then on. In-place
   views such as `t_()`, which give the tensor other elements, are refused.
2. All recorded copies are made before an operation, other than a view, on elements that wait for such a copy; before a
   function that accesses the elements' memory without an operation; before an operation of an extension; and before
   another thread gets work. A copy is made at once if it is made where torch's modes do not act, as in the kernel of
   an operation; or if others may see its target's memory, such as arrays, files and shared memory.

Not seen: an address taken before the copy; code that turns off torch's modes; work given to a thread by a lock,
`Condition` or `SimpleQueue`; `tolist()` and the like in functions that torch calls within an operation, as hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.boxes import Regions, SavedBox, box_of, in_rounds, is_plain_view, overlap
from bucketpoint.integrations.promised_calls import (
    SHARE_MEMORY,
    before_other_threads,
    has_own_dispatch,
    has_own_function,
    in_order,
    is_composite,
    is_of_extension,
    place_of,
    reaches_memory,
)

_aten = torch.ops.aten

Load = Callable[..., None]
"""Function that reads a list of `SavedBox`es into their targets. Arguments: `last`, True for the last load, in which
all ranks take part; and `failure`, this rank's error, with which the last load fails."""


class Promised(torch.Tensor):
    """A view of the saved tensor `saved`, whose bytes have not been read.

    `meta` is the same view of a tensor without memory, with its strides and its offset in the saved tensor.
    """

    saved: _Saved
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, saved: _Saved, meta: torch.Tensor) -> Any:
        with torch.inference_mode(saved.inference):
            promise = torch.Tensor._make_wrapper_subclass(
                cls,
                meta.shape,
                strides=meta.stride(),
                storage_offset=meta.storage_offset(),
                dtype=meta.dtype,
                device=saved.device,
            )
        # Functions that access the memory without an operation fail, where they would crash.
        torch._C._set_throw_on_mutable_data_ptr(promise)
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
        if reaches_memory(func):
            args, kwargs = with_real((args, kwargs))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except Exception as error:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Promised) and leaf.saved.real is None:
                    leaf.saved.promises.refusal = error
            raise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(has_own_dispatch(kind) for kind in types if kind is not Promised):
            return NotImplemented
        if is_composite(func):
            return func.decompose(*args, **(kwargs or {}))
        promise = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Promised))
        return promise.saved.promises.run(func, args, kwargs or {}, seen=False)


class _Saved:
    """A saved tensor, or a copy of a view of it, which begins at the element `start`. Read at most once as a whole.

    `meta` is a tensor without memory, of which the promised tensors are views.
    """

    def __init__(
        self, promises: Promises, key: str, whole: torch.Tensor, device: torch.device, meta: Any = None, start: int = 0
    ) -> None:
        self.promises, self.key, self.whole, self.device = promises, key, whole, device
        self.meta, self.start = whole if meta is None else meta, start
        self.real: torch.Tensor | None = None
        # The inference mode may begin and end before the read.
        self.inference = torch.is_inference_mode_enabled()


class Promises:
    """The promised tensors of one checkpoint. Outside of `noting`, and on other threads, a copy reads at once.

    Attributes:
        refusal: the last error with which torch refused a view or a copy of a tensor before its bytes were read.
    """

    def __init__(self, load: Load) -> None:
        self._load = load
        self._notes: list[SavedBox] = []
        self._waiting = Regions()
        self._shared = Regions()
        self._failure: BaseException | None = None
        self._written: dict[Any, dict[Any, int]] = {}
        self.refusal: Exception | None = None
        self._thread: int | None = None
        self._loading: int | None = None
        self._lock = threading.RLock()

    def promise(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> Promised:
        """Return a promised tensor for the saved tensor `key`."""
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return Promised(_Saved(self, key, meta, torch.device("cpu")), meta)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the copies that this thread asks for in the block, and make them at the end of the block.

        In the block of other promises, copies are made at once.
        """
        recording: list[Any] = []
        if not any(isinstance(mode, _Watch) for mode in _get_current_dispatch_mode_stack()):
            recording = [before_other_threads(self._hand_over), in_order(_WatchMemory(self), _Watch(self))]
            self._thread = threading.get_ident()
        try:
            with ExitStack() as stack:
                for context in recording:
                    stack.enter_context(context)
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
        outer, self._loading = self._loading, threading.get_ident()
        try:
            self._load(boxes)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._loading = outer

    def _hand_over(self) -> None:
        """Make the recorded copies before the recording thread gives work to another, which no mode watches."""
        # Loads give work to their own threads, perhaps with locks held.
        if threading.get_ident() == self._thread != self._loading and self._notes:
            self.read_noted()

    def _fail(self, error: Exception) -> None:
        """Make the last load, in which all ranks wait for each other, fail with this rank's error."""
        with suppress(Exception):
            self._load([], last=True, failure=error)

    def run(self, func: Any, args: Any, kwargs: Any, *, seen: bool = True) -> Any:
        """Run an operation by the rules of this module. It records copies only where `_Watch` sees what follows."""
        with self._lock, torch._C.DisableTorchFunction():
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            promises = [leaf for leaf in leaves if isinstance(leaf, Promised)]
            makes_view = torch.Tag.inplace_view in getattr(func, "tags", ())
            if makes_view and isinstance(args[0], Promised):
                raise _refusal(args[0], func.overloadpacket.__name__)
            if len(promises) == 1:
                result = self._without_reading(func, promises[0], leaves, args, kwargs, seen)
                if result is not NotImplemented:
                    return result
            if promises:
                args, kwargs = with_real((args, kwargs))
                leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if is_of_extension(func):
                self.read_noted()
            if not getattr(func, "is_view", False):
                self.settle(leaves, whole=makes_view)
                self._note_all_written(func._schema.arguments, args, kwargs)
            return func(*args, **kwargs)

    def written(self, tensor: torch.Tensor) -> int:
        """Return the number of bytes of a tensor written in `noting`. Bytes of overlapping views count twice."""
        # The look-up of the address must not count as access to the memory.
        with torch._C.DisableTorchFunction():
            return sum(self._written.get(place_of(tensor), {}).values())

    def _note_all_written(self, arguments: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                for leaf in tree_leaves(written):
                    if isinstance(leaf, torch.Tensor):
                        self._note_written(leaf)

    def _note_written(self, view: torch.Tensor) -> None:
        if (place := place_of(view)) is not None:
            self._written.setdefault(place, {})[view.storage_offset(), view.shape, view.stride()] = view.nbytes

    def settle(self, tensors: Sequence[torch.Tensor], *, whole: bool = False) -> None:
        """Make all recorded copies if elements of a tensor, or with `whole` of its memory, wait for one of them."""
        if not self._waiting:
            return
        for tensor in tensors:
            odd = tensor.layout is not torch.strided or tensor.is_nested
            found = () if odd or place_of(tensor) is None else self._waiting.find(tensor, whole=whole)
            if odd or any(whole or overlap(tensor, target) for target in found):
                self.read_noted()
                return

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make later copies into these tensors' memory at once, because others access it without operations."""
        for tensor in filter(place_of, tensors):
            self._shared.add(tensor, None, whole=True)

    def _without_reading(
        self, func: Any, promise: Promised, leaves: list[torch.Tensor], args: Any, kwargs: Any, seen: bool
    ) -> Any:
        """Return the result of a view, or of a copy that can be recorded; otherwise NotImplemented."""
        saved = promise.saved
        if getattr(func, "is_view", False) and len(leaves) == 1:
            views = func(*tree_map_only(Promised, lambda leaf: leaf.meta, args), **kwargs)
            if not all(is_plain_view(view, saved.meta) for view in tree_leaves(views)):
                return NotImplemented
            return tree_map_only(torch.Tensor, lambda view: Promised(saved, view), views)
        if saved.real is not None:
            return NotImplemented
        records = seen and saved.promises is self and self._thread == threading.get_ident()
        if func is _aten.copy_.default and args[1] is promise and records:
            return self._note(args[0], promise)
        if func in (_aten._to_copy.default, _aten.clone.default) and len(leaves) == 1 and _keeps(promise, kwargs):
            device = torch.device(kwargs.get("device") or saved.device)
            meta, start = promise.meta.clone(), saved.start + int(promise.meta.storage_offset())
            return Promised(_Saved(saved.promises, saved.key, saved.whole, device, meta, start), meta)
        return NotImplemented

    def _note(self, target: torch.Tensor, promise: Promised) -> Any:
        repeated = any(not stride and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True))
        odd = place_of(target) is None or repeated or target.is_conj() or target.is_neg() or target.is_quantized
        # Without memory, an error that is due to the shape comes before a read.
        source = promise.meta.expand(target.shape)
        if target.is_meta or not target.numel():
            return target
        if odd or self._is_seen_by_others(target):
            return NotImplemented
        saved = promise.saved
        source = saved.whole.as_strided(source.shape, source.stride(), source.storage_offset() + saved.start)
        box = box_of(saved.key, saved.whole, source, target.detach())
        if box is None:
            return NotImplemented
        self._note_written(target)
        self._notes.append(box)
        self._waiting.add(target, box.target)
        return target

    def _is_seen_by_others(self, target: torch.Tensor) -> bool:
        """Return True for memory of an array, a file, another library or process: torch did not allocate it alone."""
        memory = target.untyped_storage()
        shared = not memory.resizable() or (target.device.type == "cpu" and memory.is_shared())
        return shared or any(True for _ in self._shared.find(target))

    def read(self, saved: _Saved) -> torch.Tensor:
        """Return the whole saved tensor on its device. The first call reads it."""
        with self._lock, torch._C.DisableTorchFunction(), torch.inference_mode(saved.inference):
            if saved.real is None:
                real = torch.empty(saved.whole.shape, dtype=saved.whole.dtype, device="cpu")
                self._load_now([SavedBox(saved.key, (0,) * real.dim(), real)])
                if saved.meta is not saved.whole:
                    real = real.as_strided(saved.meta.shape, saved.meta.stride(), saved.start).clone()
                saved.real = real.to(saved.device)
            return saved.real


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that passes every operation of this thread to the promises."""

    def __init__(self, promises: Promises) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._promises = promises

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(has_own_dispatch(kind) for kind in types if kind is not Promised):
            # The operations inside the wrapper come here next. Access without an operation does not.
            if not (func.is_view or func is _aten.copy_.default):
                self._promises.read_noted()
            return NotImplemented
        if is_composite(func):
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
            args = (args[0], *with_real(args[1:]))
        elif reaches_memory(func):
            args, kwargs = with_real((args, kwargs))
            with torch._C.DisableTorchFunction():
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                if is_of_extension(func):
                    # It may reach other tensors than its arguments.
                    self._promises.read_noted()
                self._promises.settle(tensors, whole=True)
                if name in SHARE_MEMORY:
                    self._promises.share(tensors)
        subclass = next((kind for kind in types if has_own_function(kind) and kind is not Promised), None)
        if subclass is not None and torch._C._is_torch_function_enabled():
            # Its function may access memory.
            with self:
                return subclass.__torch_function__(func, types, args, kwargs)
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


def with_real(values: Any) -> Any:
    """Replace promised tensors in the values by tensors that are read from the checkpoint."""

    def real(promise: Promised) -> torch.Tensor:
        meta, tensor = promise.meta, promise.saved.promises.read(promise.saved)
        return tensor.as_strided(meta.shape, meta.stride(), meta.storage_offset())

    return tree_map_only(Promised, real, values)


def _keeps(promise: Promised, kwargs: Any) -> bool:
    """Return True if a copy with these arguments has the dtype and the strides of the promised tensor."""
    order = kwargs.get("memory_format") or torch.preserve_format
    return (
        promise.meta.clone(memory_format=order).stride() == promise.meta.stride()
        and kwargs.get("dtype") in (None, promise.dtype)
        and kwargs.get("layout") in (None, torch.strided)
        and not kwargs.get("pin_memory")
    )
