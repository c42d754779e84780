"""Calls before which promised tensors are read: of torch's functions, as modes see them, and work for other threads.

Of torch's functions these reach memory without an operation, or run an extension's code.
"""

from __future__ import annotations

import multiprocessing.queues
import queue
import threading
from asyncio import BaseEventLoop
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from logging import LogRecord
from multiprocessing.pool import Pool
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from bucketpoint.errors import BucketpointError

_READ_MEMORY = {
    *("numpy", "tolist", "data_ptr", "const_data_ptr", "untyped_storage", "storage", "_typed_storage", "is_shared"),
    *("__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__", "__repr__", "share_memory_", "resize_"),
    *("apply_", "map_", "map2_", "tensor", "as_tensor", "asarray", "new_tensor", "new", "sparse_coo_tensor"),
    *("__float__", "__int__", "__index__", "__bool__", "__complex__"),
}
"""Functions that access the memory of tensors without an operation that a dispatch mode sees."""


SHARE_MEMORY = {"__dlpack__", "__get__"}
"""Methods whose results can access the memory later, and that leave no trace of it in the tensor. Addresses do not
count: loaders only compare them."""


def reaches_memory(func: Any) -> bool:
    """Return True for a function that may access its tensors' memory without an operation that a dispatch mode sees.

    These include operations of extensions: a kernel for all dispatch keys, such as vLLM's that packs a weight for a
    CPU, is called before any mode. No mode sees functions that an extension binds to Python directly.
    """
    name = getattr(func, "__name__", "")
    return is_of_extension(func) or name in _READ_MEMORY or func == torch.Tensor.__cuda_array_interface__.__get__


def is_of_extension(func: Any) -> bool:
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
    return packet._qualified_op_name.partition("::")[0] not in ("aten", "prim", "prims")


def is_composite(func: Any) -> bool:
    """Return True for an operation that torch composes of others. Dispatch modes see these in inference mode only."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch.is_inference_mode_enabled() and hasattr(func, "decompose") and func.has_kernel_for_dispatch_key(key)


def has_own_dispatch(kind: Any) -> bool:
    """Return True for a class of tensors that runs code of its own for operations."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_own_function(kind: Any) -> bool:
    """Return True for a class of tensors that runs code of its own for functions."""
    own = getattr(kind.__torch_function__, "__func__", None)
    return own not in (None, torch.Tensor.__torch_function__.__func__)  # type: ignore[attr-defined]


def place_of(tensor: torch.Tensor) -> tuple[torch.device, int] | None:
    """Return the device and the address of a tensor's memory; None if it has no memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or has_own_dispatch(type(tensor)):
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()


@contextmanager
def in_order(function_mode: TorchFunctionMode, dispatch_mode: TorchDispatchMode) -> Iterator[None]:
    """Enter two modes, and raise an error at the end if another mode, which began before them, ended meanwhile.

    Modes end from the innermost to the outermost, whichever is meant: one of these then ended instead of the other.
    """
    with function_mode, dispatch_mode:
        try:
            yield
        finally:
            functions = _get_current_function_mode()  # type: ignore[no-untyped-call]
            if functions is not function_mode or _get_current_dispatch_mode() is not dispatch_mode:
                raise BucketpointError(
                    "A mode of torch, such as `with torch.device(...)`, began before the first tensor of the load and "
                    "ended before the last one",
                    remedy="Take all tensors in one block, or begin the block after the first tensor",
                )


# -- work for other threads --------------------------------------------------------------------------------------------

# No function that is called with its object's lock held, as `Condition.notify`: the act may need the same lock.
_HAND_WORK_OVER = (
    *((threading.Thread, "start"), (ThreadPoolExecutor, "submit"), (Pool, "_check_running")),
    *((queue.Queue, "put"), (multiprocessing.queues.Queue, "put")),
    *((threading.Event, "set"), (BaseEventLoop, "call_soon_threadsafe")),
)
_LOGGED = (LogRecord, str, bytes)
"""Types that a handler of log messages puts into a queue, with its lock held, for which threads of the act may wait."""

_ORIGINAL = "_bucketpoint_original"

_acts: list[Callable[[], None]] = []
_changes = threading.Lock()


@contextmanager
def before_other_threads(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` whenever, during the block, any thread of the process is about to give work to another thread.

    Blocks may end in any order. The last one restores the patched functions, unless other code replaced them.
    """
    with _changes:
        if not _acts:
            for owner, name in _HAND_WORK_OVER:
                setattr(owner, name, _acting(getattr(owner, name)))
        _acts.append(act)
    try:
        yield
    finally:
        with _changes:
            _acts.remove(act)
            for owner, name in () if _acts else _HAND_WORK_OVER:
                current = getattr(owner, name)
                setattr(owner, name, getattr(current, _ORIGINAL, current))


def _acting(original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, _LOGGED) for value in args[1:]):
            for act in tuple(_acts):
                act()
        return original(*args, **kwargs)

    setattr(call, _ORIGINAL, original)
    return call
