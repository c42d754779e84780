"""What may be sent to DCP's checkpoint process, and whether there is one to send to. Sends nothing itself."""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from bucketpoint.errors import CheckpointProcessError

_EXECUTOR = "torch.distributed.checkpoint._async_process_executor"
_PLAIN = (int, float, str, bool, bytes, type(None))


def dead_checkpoint_process(grace_s: float = 0.0) -> CheckpointProcessError | None:
    """The error that names DCP's checkpoint process, if that has been started and has died.

    DCP starts one for each rank, keeps it for good and never replaces it.

    Args:
        grace_s: how long to wait for its end, in seconds: a dying process closes its pipe before it can be waited for.
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
        remedy="DCP never replaces it: restart the job, or save with AsyncCheckpointerType.THREAD",
    )


def check_picklable(value: Any, path: tuple[Any, ...] = ()) -> None:
    """Raises CheckpointProcessError with the key of what cannot cross, which the pickler's own message lacks."""
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            check_picklable(item, (*path, key))
        return
    try:
        ForkingPickler.dumps(value)
    except Exception as error:
        raise CheckpointProcessError(
            f"An object of type {type(value).__qualname__} cannot be sent to the checkpoint process: {error}",
            key=".".join(map(str, path)),
            remedy="Use AsyncCheckpointerType.THREAD, or leave it out of the state",
        ) from error
