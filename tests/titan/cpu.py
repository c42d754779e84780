"""Importing this makes torchtitan take the CPU for its device, which it does not provide for, and gloo for its backend.

Nothing of bucketpoint's, and nothing that a run on GPUs needs: only what torchtitan asks of an accelerator, answered.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import FSDPModule

_barrier = torch.distributed.barrier


def _without_devices(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
    return _barrier(*args, **kwargs)


_divide = FSDPModule.set_gradient_divide_factor


def _by_plain_sums(module: FSDPModule, factor: float) -> None:
    # gloo has no sums of premultiplied values.
    module.set_force_sum_reduction_for_comms(True)
    _divide(module, factor)


torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *_: "CPU"
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
torch.distributed.barrier = _without_devices
FSDPModule.set_gradient_divide_factor = _by_plain_sums
torch.set_num_threads(1)

# From here on torchtitan: what is imported before the ranks are forked is not imported by each.
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.train import main  # noqa: E402

from bucketpoint.integrations.torchtitan import BucketpointManager  # noqa: E402

__all__ = ["BucketpointManager", "llama3_debugmodel", "main"]
