"""A cache between us and the store that nobody invalidates: what it serves is a whole checkpoint, or an error."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bucketpoint.errors import BucketpointError
from kit import FaultProxy, Rule, Script, Stale
from services import Service


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((5000,), value)}, "optim": {"m": torch.full((50,), value)}, "step": int(value)}


def loaded(url: str, service: Service) -> set[float]:
    target = state(0.0)
    dcp.load(target, checkpoint_id=url, storage_reader=service.reader(), no_dist=True)
    tensors = (target["model"]["w"], target["optim"]["m"])
    return {value for tensor in tensors for value in tensor.unique().tolist()} | {float(target["step"])}


def test_a_stale_answer_is_never_mixed_with_a_fresh_one(service: Service, proxy: FaultProxy) -> None:
    """Each answer of a load in turn is the one of the load before the overwrite."""
    through = service.at(proxy.url)
    outcomes = []
    for number in range(4):
        url = service.url(f"run-{number}")
        writer = service.writer()
        dcp.save(state(1.0), checkpoint_id=url, storage_writer=writer, no_dist=True)
        proxy.play(Script())
        assert loaded(url, through) == {1.0}
        reads = sum(one.request.kind == "GetObject" for one in proxy.exchanges)
        proxy.clear()
        proxy.play(Script((Rule((Stale(),), kinds=("GetObject",), skip=reads + number, times=1),)))
        assert loaded(url, through) == {1.0}
        dcp.save(state(2.0), checkpoint_id=url, storage_writer=writer, no_dist=True)
        found, error = None, None
        try:
            found = loaded(url, through)
        except dcp.CheckpointException as failed:
            error = failed.failures[0][0]
        assert found in ({1.0}, {2.0}) or isinstance(error, BucketpointError), (found, error)
        outcomes.append(found)
        proxy.clear()
    assert outcomes[0] is None, "the old metadata, whose data the overwrite has deleted"
