"""Death after the commit of an overwrite: the new checkpoint stands, and what it replaced is found and removed."""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed.checkpoint as dcp

from faults.saves import Place
from kit import FaultProxy, Kill, Rule, Script
from services import Server

OLD, NEW = 1, 2

THE_COMMIT = Rule((Kill(()),), kinds=("PutObject",), keys="*/.metadata")

THE_CLEAN_UP = Rule((Kill((), acted=False),), kinds=("DeleteObjects",), skip=1)
"""The first delete takes away the note of the uploads."""

THE_RECORD = Rule((Kill((), acted=False),), kinds=("PutObject",), keys="*/steps/*__model.*")


@pytest.mark.contract
@pytest.mark.parametrize("dies_at", [THE_COMMIT, THE_CLEAN_UP, THE_RECORD], ids=["commit", "clean-up", "record"])
def test_sweeps_what_an_overwrite_replaced_though_its_save_died(
    server: Server, proxy: FaultProxy, dies_at: Rule
) -> None:
    place = Place(server, server.make_bucket("after"), "run", 1)
    place.save(OLD)
    proxy.play(Script((dies_at,)))
    with contextlib.suppress(dcp.CheckpointException):
        # Cut off at the commit, it cannot know whether that arrived. Its store does not come back, so it need not wait.
        place.through(proxy.url).save(NEW, **server.attempts(1), retry_deadline_s=1)
    seen = proxy.exchanges
    assert "kill" in {one.fault for one in seen}
    assert place.load() == NEW
    place.sweep()
    assert place.load(verified=True) == NEW
    assert place.litter(seen) == []
