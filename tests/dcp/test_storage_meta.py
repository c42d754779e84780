"""`storage_meta` of a writer, as DCP and tools ask for it: it looks, and changes nothing."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import bucketpoint as bp
from bucketpoint.format.metadata.facts import extra


class Asking(bp.SavePlanner):
    """A planner that asks the writer in the middle of the save."""

    def __init__(self, writer: bp.BucketWriter) -> None:
        super().__init__()
        self.writer = writer
        self.told: list[Any] = []

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.told.append(self.writer.storage_meta())
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def resolve_data(self, write_item: Any) -> Any:
        self.told.append(self.writer.storage_meta())
        return super().resolve_data(write_item)


def test_tells_the_id_of_a_save_before_within_and_after_it(tmp_path: Path) -> None:
    writer = bp.BucketWriter(tmp_path)
    before, planner = writer.storage_meta(), Asking(writer)
    for state in ({"w": torch.ones(3)}, {"w": torch.ones(4)}):
        # The second save has no `reset`, as neither names a checkpoint_id.
        saved = dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    told = [before, *planner.told[:2]]
    assert {meta.save_id for meta in told} == {before.save_id}
    after = writer.storage_meta()
    assert after == writer.storage_meta() == planner.told[-1] != before
    committed = bp.BucketReader(tmp_path).read_metadata()
    assert committed.storage_meta.save_id == after.save_id
    assert saved.state_dict_metadata["w"].size == (4,)
    assert uuid.UUID(after.save_id).version == 4
    assert str(uuid.UUID(after.save_id)) == after.save_id
    assert after.save_id.endswith(extra(committed)["token"])


def test_asks_beside_a_save_without_waiting_for_it(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(bp.SavePlanner):
        def create_local_plan(self) -> Any:
            begun.set()
            assert go_on.wait(60)
            return super().create_local_plan()

    writer = bp.BucketWriter(tmp_path / "a")
    handle = bp.async_save({"w": torch.ones(3)}, storage_writer=writer, planner=Slow())
    assert begun.wait(60)
    told = [writer.storage_meta(), writer.storage_meta()]
    assert not handle.done()
    go_on.set()
    handle.result()
    assert told[0] == told[1] == writer.storage_meta()
    writer.close()
