"""Small checkpoints of one value, and their loads: whatever is loaded has that value everywhere, or it is a mix."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketReader, BucketWriter


def state_of(value: float, elements: int = 100) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((elements,), float(value))},
        "optim": {"m": torch.full((50,), float(value))},
        "step": int(value),
    }


def save(url: str, value: float, writer: Any = None, *, elements: int = 100, planner: Any = None) -> None:
    dcp.save(
        state_of(value, elements),
        checkpoint_id=url,
        storage_writer=writer or BucketWriter(),
        planner=planner,
        no_dist=True,
    )


def load(url: str, reader: Any = None, *, elements: int = 100) -> float:
    """Load all of it. Returns the one value."""
    target = state_of(0, elements)
    dcp.load(target, checkpoint_id=url, storage_reader=reader or BucketReader(), no_dist=True)
    tensors = (target["model"]["w"], target["optim"]["m"])
    values = {float(target["step"]), *(end.item() for tensor in tensors for end in (tensor.min(), tensor.max()))}
    assert len(values) == 1, "a mix"
    return float(values.pop())


def saved(value: Any, **options: Any) -> bytes:
    """Return the bytes of a file of torch.save."""
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()
