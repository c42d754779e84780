"""Planners of our own, which DCP takes in place of its default ones. No I/O."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from bucketpoint.errors import MismatchError

_NAMED_AT_MOST = 20


class LoadPlanner(DefaultLoadPlanner):
    """DCP's own load planner, which says all that does not fit before anything is read.

    The default one stops at the first key or shape, and names neither the checkpoint nor the remedy.
    """

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads.

        Raises:
            MismatchError: keys that the checkpoint lacks, and tensors whose shape is another there; all of them.
        """
        try:
            return super().create_local_plan()
        except (RuntimeError, ValueError):
            misfits = [*self._missing(), *self._reshaped()]
            if not misfits:
                raise
        named = "; ".join(misfits[:_NAMED_AT_MOST])
        more = f"; and {len(misfits) - _NAMED_AT_MOST} more" if len(misfits) > _NAMED_AT_MOST else ""
        meta = getattr(self.metadata, "storage_meta", None)
        raise MismatchError(
            f"The checkpoint and the state to load into do not fit: {named}{more}",
            url=str(meta.checkpoint_id) if meta is not None and meta.checkpoint_id else None,
            rank=dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,
            remedy="Load into the model that was saved; LoadPlanner(allow_partial_load=True) skips missing keys",
        )

    def _missing(self) -> list[str]:
        assert self.metadata is not None
        if self.allow_partial_load:
            return []
        return [f"{fqn} is not in it" for fqn in self.state_dict if fqn not in self.metadata.state_dict_metadata]

    def _reshaped(self) -> list[str]:
        assert self.metadata is not None
        found = []
        for fqn, value in self.state_dict.items():
            entry = self.metadata.state_dict_metadata.get(fqn)
            if not isinstance(entry, TensorStorageMetadata) or not isinstance(value, torch.Tensor):
                continue
            if entry.size != value.size():
                found.append(f"{fqn} is {list(entry.size)} there and {list(value.size())} here")
        return found
