"""A cache between us and the store that nobody invalidates: what it serves is a whole checkpoint, or an error."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.errors import BucketpointError
from bucketpoint.testing import Rule, Script, Stale
from bucketpoint.testing.plugin import MakeProxy
from servers import S3Server


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((5000,), value)}, "optim": {"m": torch.full((50,), value)}, "step": int(value)}


def loaded(url: str, options: dict[str, Any]) -> set[float]:
    target = state(0.0)
    dcp.load(target, checkpoint_id=url, storage_reader=bp.S3Reader(storage_options=options), no_dist=True)
    tensors = (target["model"]["w"], target["optim"]["m"])
    return {value for tensor in tensors for value in tensor.unique().tolist()} | {float(target["step"])}


def test_a_stale_answer_is_never_mixed_with_a_fresh_one(minio: S3Server, fault_proxy: MakeProxy) -> None:
    """Each answer of a load in turn is the one of the load before the overwrite."""
    proxy = fault_proxy(minio)
    through, bucket = minio.at(proxy.url).options, minio.make_bucket()
    outcomes = []
    for number in range(4):
        url = f"s3://{bucket}/run-{number}"
        writer = bp.S3Writer(storage_options=minio.options)
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
