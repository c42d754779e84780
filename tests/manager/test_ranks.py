"""A save of two ranks: one tells the catalog of the attempt and the commit, each tells of its own uploads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketWriter, SavePlanner, TransferOptions
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.records import read_record
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.format import catalog_keys
from bucketpoint.location import Location
from dcp.ranks import Ranks
from services import Service

MIB = 1 << 20


class Telling(SaveLog):
    """Notes what a rank was asked to tell, and tells it."""

    def begin(self, url: str, token: str) -> None:
        self.told.append("begin")
        super().begin(url, token)

    def uploading(self, url: str, token: str, rank: int, paths: Any) -> None:
        self.told.append(f"uploading {len(paths)}")
        super().uploading(url, token, rank, paths)
        assert len(self.catalog.listed(catalog_keys.UPLOADS)) >= 1

    def uploaded(self, url: str, token: str, rank: int) -> None:
        self.told.append("uploaded")
        super().uploaded(url, token, rank)

    def committed(self, url: str, record: Any, *, intent_stays: bool = False) -> None:
        self.told.append("committed")
        assert len(self.catalog.steps().attempts) == 1
        super().committed(url, record, intent_stays=intent_stays)

    @property
    def told(self) -> list[str]:
        return self.__dict__.setdefault("_told", [])


def save_twice(rank: int, world: int, root: str, options: dict[str, Any]) -> list[str]:
    log = Telling(open_catalog(Location.of(root, options)))
    transfer = TransferOptions(part_bytes=5 * MIB, single_put_bytes=5 * MIB)
    writer = BucketWriter.of_run(None, log, storage_options=options, transfer=transfer)
    planner = SavePlanner()
    for step in (100, 200):
        # The second save uses the plan that was kept of the first.
        state = {"model": {f"own-{rank}": torch.full((2 * MIB,), float(step))}, "optim": {f"m-{rank}": torch.ones(10)}}
        dcp.save(state, checkpoint_id=log.catalog.url_of(step), storage_writer=writer, planner=planner)
    return log.told


@pytest.mark.contract
def test_records_a_save_of_two_ranks_in_the_catalog_once(ranks: Ranks, service: Service) -> None:
    root = service.url("run")
    first, second = ranks.run(save_twice, root, service.options)
    catalog = open_catalog(Location.of(root, service.options))
    # Nobody need tell of uploads that a sweep finds by listing them.
    once = [] if catalog.store.capabilities.lists_uploads else ["uploading 1", "uploaded"]
    assert first == ["begin", *once, "committed"] * 2
    assert second == once * 2
    snapshot = catalog.snapshot()
    assert [row.step for row in snapshot.rows()] == [100, 200]
    assert snapshot.attempts == snapshot.finished == ()
    assert catalog.listed(catalog_keys.UPLOADS) == []
    record = read_record(catalog, snapshot.checkpoints[1].key or "")
    assert record is not None
    assert (record.world_size, record.objects, record.step) == (2, 4, 200)
