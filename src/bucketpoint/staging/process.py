"""Conversion of staged values for DCP's checkpoint process, and a check that this process is alive."""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from bucketpoint.errors import CheckpointProcessError

_EXECUTOR = "torch.distributed.checkpoint._async_process_executor"
_PLAIN = (int, float, str, bool, bytes, type(None))


def dead_checkpoint_process(grace_s: float = 0.0) -> CheckpointProcessError | None:
    """Return an error if DCP's checkpoint process was started and has died, else None.

    DCP starts one such process for each rank, keeps it until the job ends and never replaces it.

    Args:
        grace_s: seconds to wait for the process to end: a dying process closes its pipe some time before its end.
    """
    daemon = getattr(sys.modules.get(_EXECUTOR), "_CHECKPOINT_PROCESS", None)
    process = getattr(daemon, "_save_process", None)
    if process is None:
        return None
    process.join(grace_s)
    if process.is_alive():
        return None
    return CheckpointProcessError(
        f"DCP's checkpoint process (pid {process.pid}) of this rank has died with exit code {process.exitcode}",
        remedy="DCP does not restart this process: restart the job, or save with AsyncCheckpointerType.THREAD",
    )


def crossing(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Convert a staged value to a form that can be pickled, and that unpickles as the value itself.

    torch's pickler recognises a wrapper (a DTensor) by its null `data_ptr()`. But a wrapper around a view into a larger
    storage has the view's offset as its `data_ptr()`. The pickler would treat the wrapper's storage, which does not
    exist, as shared memory, and the process would die.

    Raises:
        CheckpointProcessError: a value cannot be pickled. The error has the value's key, unlike the pickler's error.
    """
    if isinstance(value, torch.Tensor):
        return _Wrapper(value) if hasattr(value, "__tensor_flatten__") else value
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return type(value)((key, crossing(item, (*path, key))) for key, item in value.items())
    if isinstance(value, list) or type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
        items = [crossing(item, (*path, index)) for index, item in enumerate(value)]
        return items if isinstance(value, list) else getattr(type(value), "_make", tuple)(items)
    try:
        ForkingPickler.dumps(value)
    except Exception as error:
        raise CheckpointProcessError(
            f"An object of type {type(value).__qualname__} cannot be sent to the checkpoint process: {error}",
            key=".".join(map(str, path)),
            remedy="Use AsyncCheckpointerType.THREAD, or remove the object from the state",
        ) from error
    return value


class _Wrapper:
    """Picklable form of a wrapper: the wrapped tensors, which lie in shared memory."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self._tensor
        names, context = tensor.__tensor_flatten__()
        inner = {name: crossing(getattr(tensor, name)) for name in names}
        return _wrapped_again, (type(tensor), inner, context, tensor.size(), tensor.stride())


def _wrapped_again(kind: Any, inner: dict[str, Any], context: Any, size: torch.Size, stride: tuple[int, ...]) -> Any:
    return kind.__tensor_unflatten__(inner, context, size, stride)
