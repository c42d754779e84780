"""A cache between us and the store that nobody invalidates: what it serves is a whole checkpoint, or an error."""

from __future__ import annotations

import torch.distributed.checkpoint as dcp

from bucketpoint.errors import BucketpointError
from kit import FaultProxy, Rule, Script, Stale
from kit.checkpoints import load, save
from services import Service


def test_mixes_no_stale_answer_with_a_fresh_one(service: Service, proxy: FaultProxy) -> None:
    """Each answer of a load in turn is the one of the load before the overwrite."""
    through = service.at(proxy.url)
    outcomes = []
    for number in range(4):
        url = service.url(f"run-{number}")
        writer = service.writer()
        save(url, 1, writer, elements=5000)
        proxy.play(Script())
        assert load(url, through.reader(), elements=5000) == 1
        reads = sum(one.request.kind == "GetObject" for one in proxy.exchanges)
        proxy.clear()
        proxy.play(Script((Rule((Stale(),), kinds=("GetObject",), skip=reads + number, times=1),)))
        assert load(url, through.reader(), elements=5000) == 1
        save(url, 2, writer, elements=5000)
        found, error = None, None
        try:
            found = load(url, through.reader(), elements=5000)
        except dcp.CheckpointException as failed:
            error = failed.failures[0][0]
        assert found in (1, 2) or isinstance(error, BucketpointError), (found, error)
        outcomes.append(found)
        proxy.clear()
    assert outcomes[0] is None, "the old metadata, whose data the overwrite has deleted"
