"""What crosses ranks when an unchanged state is saved again: that it is little, and whole, whatever failed before."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.storage import WriteResult

import bucketpoint.dcp.saving.commit as commit_module
from bucketpoint import BucketReader, BucketWriter
from bucketpoint.dcp.planning.global_plan import RemoteMetadata
from bucketpoint.dcp.planning.results import Results
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.errors import BucketpointError, IncompleteSaveError
from bucketpoint.format.item_info import read_item
from bucketpoint.format.keys import parse_data_path
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.storage_info import make_storage_info, pack, set_object_facts, unpack
from dcp.reshard_job import Job, PiecedTensor, StoppedError, crossed
from dcp.states import assert_same, blank

pytestmark = pytest.mark.contract

ITEM_BYTES = 24
"""Allowed for each item, beside what a rank may send in all."""

RANK_BYTES = 2000
"""Allowed for each rank, 70 of them for the figures of its save."""

OF_ONE_SAVE = {"objects", "url", "endpoint", "token", "created", "seconds"}


def states(world: int, fill: float, *, note: str = "") -> list[dict[str, Any]]:
    """Replicated tensors, large enough to have blocks, tensors and notes of one rank alone, and an empty one."""
    return [
        {
            "model": {"w": torch.full((700, 1000), fill), "b": torch.full((300,), fill)},
            "optim": {"w": torch.full((300, 1000), fill + 1)},
            f"only{rank}": torch.full((5,), fill + rank),
            f"empty{rank}": torch.empty(0),
            f"note{rank}": note,
        }
        for rank in range(world)
    ]


def assert_holds(url: str, expected: list[dict[str, Any]]) -> None:
    for reader in (FileSystemReader(url.removeprefix("file://")), BucketReader(url, progress=False)):
        for state in expected:
            loaded = blank(state)
            dcp.load(loaded, storage_reader=reader, no_dist=True)
            assert_same(loaded, state)


# -- what crosses -----------------------------------------------------------------------------------------------------


def shards(items: int, fill: float) -> list[dict[str, Any]]:
    """Each of four ranks holds a shard of every tensor."""
    return [
        {
            f"model.layers.{number}.weight": PiecedTensor(
                (64, 3), torch.float32, {(16 * rank, 0): torch.full((16, 3), fill + number)}
            )
            for number in range(items)
        }
        for rank in range(4)
    ]


def most_sent(root: Path, writer: Callable[[str], StorageWriter], planner: Callable[[], Any], items: int) -> list[int]:
    """Of each of two saves, the bytes of the rank that most of them cross to or from."""
    job, most = Job(4, planner), []
    for save in range(2):
        url = f"{root}/{save}"
        job.writers = [writer(url) for _ in range(4)]
        job.save(shards(items, float(save)), url)
        most.append(max(job.bytes))
    return most


def test_sends_few_bytes_for_each_item_at_every_save(tmp_path: Path) -> None:
    for sent in most_sent(tmp_path, BucketWriter, SavePlanner, 500):
        assert sent < RANK_BYTES + ITEM_BYTES * 500


def test_sends_no_more_for_items_of_many_blocks_than_for_small_ones(tmp_path: Path) -> None:
    # 64 MiB is what replicas' tensors are cut into: 32 blocks. A shard of 8 MiB has 32 too.
    sent = {}
    for elements in (2 << 20, 2 << 10):
        job = Job(2)
        large = {"model": {"w": torch.ones(8 * elements)}, "optim": {f"w{n}": torch.zeros(elements) for n in range(9)}}
        job.save([large, {f"only{n}": torch.ones(elements) for n in range(9)}], f"file://{tmp_path}/{elements}")
        stored = decode_metadata((tmp_path / str(elements) / ".metadata").read_bytes()).storage_data or {}
        assert len(stored) == 19
        assert {read_item(info).table_nbytes for info in stored.values()} == {4 * 32 if elements > 2 << 10 else 0}
        assert [len(results.content.checksums) for results in job.reported] == [4 * 10, 4 * 9]
        sent[elements] = sum(job.bytes)
    assert sent[2 << 20] < sent[2 << 10] + 19 * 32


@pytest.mark.parametrize(("writer", "planner"), [(BucketWriter, DefaultSavePlanner), (FileSystemWriter, SavePlanner)])
def test_sends_less_with_either_half_of_ours_than_with_both_of_stock(tmp_path: Path, writer: Any, planner: Any) -> None:
    ours = most_sent(tmp_path / "ours", writer, planner, 50)
    assert ours[1] < most_sent(tmp_path / "stock", FileSystemWriter, DefaultSavePlanner, 50)[1]


# -- that all of it arrives -------------------------------------------------------------------------------------------


def test_saves_whole_while_sizes_of_values_change(tmp_path: Path) -> None:
    job = Job(3)
    notes = ["a", "b", "longer" * 50, "LONGER" * 50, "a"]
    for save, note in enumerate(notes):
        job.save(states(3, float(save), note=note), f"file://{tmp_path}/{save}")
        assert job.in_columns() == [True] * 3
    for save, note in enumerate(notes):
        assert_holds(f"file://{tmp_path}/{save}", states(3, float(save), note=note))


def test_commits_metadata_that_says_what_plain_lists_of_results_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact, plain = Job(3), Job(3)
    with monkeypatch.context() as patched:
        # What columns do not tell would be pickled by this.
        patched.setattr(commit_module, "encode_metadata", None)
        patched.setattr(commit_module, "complete_metadata", None)
        compact.save(states(3, 0.0, note="before"), f"file://{tmp_path}/first")
        compact.save(states(3, 1.0, note="behind"), f"file://{tmp_path}/compact")
    monkeypatch.setattr(Results, "of", lambda results, *_: results)
    plain.save(states(3, 1.0, note="behind"), f"file://{tmp_path}/plain")
    assert [job.in_columns()[0] for job in (compact, plain)] == [True, False]
    described = [described_without_tokens(tmp_path / name) for name in ("first", "compact", "plain")]
    assert described[1] == described[2]
    assert described[0] != described[1]
    assert (tmp_path / "compact" / ".metadata").stat().st_size < 1.1 * (tmp_path / "plain" / ".metadata").stat().st_size


def described_without_tokens(folder: Path) -> dict[str, Any]:
    """All that the metadata says, by any unpickler, but for what no two saves share."""
    data = (folder / ".metadata").read_bytes()
    metadata, foreign = decode_metadata(data), pickle.loads(data)
    assert foreign.state_dict_metadata == metadata.state_dict_metadata
    assert {index: vars(info) for index, info in foreign.storage_data.items()} == {
        index: vars(info) for index, info in (metadata.storage_data or {}).items()
    }
    facts = extra(metadata)
    assert {parse_data_path(path) is not None for path in facts["objects"]} == {True}
    assert metadata.storage_meta.checkpoint_id == facts["url"] == f"file://{folder}"
    assert str(metadata.storage_meta.save_id).endswith(f"-{facts['token']}")
    return {
        "planned": (metadata.state_dict_metadata, metadata.planner_data),
        "version": getattr(metadata, "version", None),
        "stored": sorted(
            (str(index), index.index, placed(info.relative_path), sorted({**vars(info), "relative_path": ""}.items()))
            for index, info in (metadata.storage_data or {}).items()
        ),
        "objects": {placed(path): fact["size"] for path, fact in facts["objects"].items()},
        "facts": {name: fact for name, fact in facts.items() if name not in OF_ONE_SAVE},
        "type": type(foreign),
    }


def placed(path: str) -> tuple[int, str, int]:
    parsed = parse_data_path(path)
    return parsed[1:]


class Annotating(SavePlanner):
    """Puts something into the metadata that is another thing at each save."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data={**metadata.planner_data, "saves": self.saves()})

    def saves(self) -> int:
        self.made = getattr(self, "made", 0) + 1
        return self.made


def test_commits_metadata_that_a_planner_altered_as_it_is(tmp_path: Path) -> None:
    job = Job(2, Annotating)
    for save in range(1, 4):
        job.save(states(2, float(save)), f"file://{tmp_path}/{save}")
        assert job.in_columns() == [True] * 2
        metadata = decode_metadata((tmp_path / str(save) / ".metadata").read_bytes())
        assert metadata.planner_data["saves"] == save


class Trimming(SavePlanner):
    """Leaves items out after the coordinator has dealt them."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        return SavePlan(list(reversed(plan.items)), planner_data=plan.planner_data)


class Forgetful(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        return dataclasses.replace(plan, items=plan.items[1:])


def test_refuses_to_commit_a_plan_with_an_item_that_nobody_wrote(tmp_path: Path) -> None:
    with pytest.raises(IncompleteSaveError, match=r"not written .*\(a\)"):
        Job(1, Forgetful).save([{"a": torch.ones(2), "b": torch.ones(2)}], f"file://{tmp_path}")
    assert not (tmp_path / ".metadata").exists()


# -- planners and writers that look into plans ------------------------------------------------------------------------


class AddsItem(SavePlanner):
    """Saves one thing more than the state has, as the plan that it makes of its own says."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[*plan.items, *_create_write_items("added", 7)]) if plan.usable else plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return 7 if index.fqn == "added" else super().lookup_object(index)


class DealsToTheFirst(SavePlanner):
    """Takes what was dealt to all ranks away from them, if the first one holds it too."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        dealt, metadata = super().create_global_plan(all_plans)
        if not dealt[0].usable:
            return dealt, metadata
        own = {item.index.fqn for item in all_plans[0].items}
        moved = [item for plan in dealt[1:] for item in plan.items if item.index.fqn in own]
        left = [replaced(plan, [item for item in plan.items if item.index.fqn not in own]) for plan in dealt[1:]]
        return [replaced(dealt[0], [*dealt[0].items, *moved]), *left], metadata


def replaced(plan: SavePlan, items: list[Any]) -> SavePlan:
    return dataclasses.replace(plan, items=items)


@pytest.mark.parametrize("kind", [SavePlanner, AddsItem, DealsToTheFirst, Trimming, DefaultSavePlanner])
def test_saves_all_under_planners_that_look_into_plans_or_alter_them(tmp_path: Path, kind: type[Any]) -> None:
    job = Job(3, kind)
    for save in range(3):
        job.save(states(3, float(save)), f"file://{tmp_path}/{save}")
        assert_holds(f"file://{tmp_path}/{save}", states(3, float(save)))
        if kind is AddsItem:
            assert_holds(f"file://{tmp_path}/{save}", [{"added": 7}])
        if kind in (SavePlanner, Trimming, DefaultSavePlanner):
            # The results of a plan that was altered on its rank, or that is not ours, are named one by one.
            assert job.in_columns() == [kind is SavePlanner] * 3


class LooksAtPlans(FileSystemWriter):
    """Looks at items before they are dealt and after, and leaves a note of its own on the plans."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(super().prepare_local_plan(plan), storage_data={"asked": len(plan.items)})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assert all(plan.storage_data is not None for plan in plans if plan.usable)
        self.seen = [len([item.index for item in plan.items]) for plan in plans]
        plans = [dataclasses.replace(plan, storage_data=None) for plan in plans]
        return super().prepare_global_plan(plans)


def test_gives_writers_of_others_their_plans_and_items_and_no_facts_of_ours(tmp_path: Path) -> None:
    job = Job(3)
    for save in range(3):
        url = f"{tmp_path}/{save}"
        # That writer drops an error of its threads, and with it the items that they had to write.
        job.writers = [LooksAtPlans(url, thread_count=2) for _ in range(3)]
        job.save(states(3, float(save)), url)
        assert_holds(f"file://{url}", states(3, float(save)))
        assert sum(job.writers[0].seen) > 9  # type: ignore[attr-defined]
        assert b"bucketpoint" not in (tmp_path / str(save) / ".metadata").read_bytes()


# -- failures between plan and commit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["write", "finish"])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_confuses_no_save_after_one_that_fails(tmp_path: Path, before: int, stop: str) -> None:
    job = Job(2)
    for save in range(before):
        job.save(states(2, float(save)), f"file://{tmp_path}/{save}")
    with pytest.raises((StoppedError, BucketpointError)):
        job.save(states(2, 9.0, note="longer" * 50), f"file://{tmp_path}/failed", stop=stop)
    vars(job.writers[0]).pop("_open", None)
    for save in (10, 11):
        job.save(states(2, float(save)), f"file://{tmp_path}/{save}")
        assert_holds(f"file://{tmp_path}/{save}", states(2, float(save)))


@pytest.mark.parametrize(("name", "value"), [("items", b"another plan"), ("content", None)])
def test_refuses_results_of_items_that_were_not_assigned(tmp_path: Path, name: str, value: Any) -> None:
    job = Job(2)
    job.save(states(2, 1.0), f"file://{tmp_path}/1")

    class ReportsOther(BucketWriter):
        def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
            results[1] = dataclasses.replace(results[1], **{name: value or results[0].content})  # type: ignore
            super().finish(metadata, results)

    job.writers[0] = ReportsOther(progress=False)
    with pytest.raises(IncompleteSaveError, match=r"not assigned|results were reported"):
        job.save([*states(1, 2.0), {"more": torch.ones(3)}], f"file://{tmp_path}/2")
    assert not (tmp_path / "2" / ".metadata").exists()
    job.writers[0] = BucketWriter(progress=False)
    job.save(states(2, 3.0), f"file://{tmp_path}/3")
    assert_holds(f"file://{tmp_path}/3", states(2, 3.0))


def test_fails_the_save_by_name_for_metadata_that_lost_its_plan(tmp_path: Path) -> None:
    class Plain(SavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, Metadata(metadata.state_dict_metadata, metadata.planner_data)

    with pytest.raises(IncompleteSaveError, match=r"dataclasses\.replace"):
        Job(2, Plain).save(states(2, 1.0), f"file://{tmp_path}")


# -- metadata ---------------------------------------------------------------------------------------------------------


def test_keeps_metadata_whole_until_it_is_committed_and_small_from_then_on(tmp_path: Path) -> None:
    job = Job(2)
    empty = len(pickle.dumps(job.planners[0]))
    metadata = job.save(states(2, 1.0), f"file://{tmp_path}")
    assert set(metadata.state_dict_metadata) > {"model.w", "model.b"}
    for result in (metadata, *crossed([metadata])):
        assert re.fullmatch(rf"Saved\(file://{tmp_path}, \d+\.\d MB, \d+\.\d s\)", repr(result))
    assert isinstance(crossed([metadata])[0], RemoteMetadata)
    assert len(pickle.dumps(metadata)) < 200
    assert len(pickle.dumps(job.planners[0])) == empty, "a planner is sent without the state"
    for duplicate in (copy.copy(metadata), copy.deepcopy(metadata)):
        assert duplicate.state_dict_metadata == metadata.state_dict_metadata
    fresh = job.planners[0].create_global_plan(crossed([planner.create_local_plan() for planner in job.planners]))[1]
    arrived = crossed([fresh])[0]
    assert type(arrived) is Metadata
    assert arrived.state_dict_metadata == metadata.state_dict_metadata
    # That of a save of one process stays whole.
    writer = BucketWriter(f"file://{tmp_path}/alone")
    alone = dcp.save(states(1, 1.0)[0], storage_writer=writer, planner=SavePlanner(), no_dist=True)
    assert "model.w" in crossed([alone])[0].state_dict_metadata


def test_tells_where_metadata_from_afar_is_when_somebody_looks_into_it() -> None:
    remote = crossed([crossed([RemoteMetadata("s3://bucket/run")])[0]])[0]
    assert isinstance(remote, Metadata)
    assert repr(remote) == "Saved(s3://bucket/run)"
    for name in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta"):
        with pytest.raises(BucketpointError, match="s3://bucket/run"):
            getattr(remote, name)


# -- columns ----------------------------------------------------------------------------------------------------------

infos = st.builds(
    lambda path, offset, length, payload, block, crc, facts: (path, offset, length, payload, block, crc, facts),
    st.sampled_from(["data/a", "data/b", "data/c"]),
    st.integers(0, 1 << 50),
    st.integers(0, 1 << 50),
    st.none() | st.tuples(st.integers(0, 1 << 16), st.integers(0, 1 << 50)),
    st.none() | st.integers(1, 1 << 30),
    st.integers(0, (1 << 32) - 1),
    st.none() | st.tuples(st.integers(0, 1 << 40), st.none() | st.text(max_size=5)),
)


@given(st.lists(infos, max_size=8), st.none() | st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=2))
@settings(max_examples=60, deadline=None)
def test_unpacks_from_columns_what_was_packed(drawn: list[Any], transforms: list[str] | None) -> None:
    given, told = [], set()
    for path, offset, length, payload, block, crc, facts in drawn:
        info = make_storage_info(
            path,
            offset,
            length,
            payload_offset=payload[0] if payload else None,
            payload_nbytes=payload[1] if payload else None,
            crc32c=crc,
            block_nbytes=block,
            transform_descriptors=transforms,
            table_offset=offset + length if block and block % 2 else None,
        )
        if facts is not None and path not in told and path not in {one.relative_path for one in given}:
            told.add(path)
            set_object_facts(info, size=facts[0], etag=facts[1])
        given.append(info)
    packed = pack(given)
    assert [vars(info) for info in unpack(crossed([packed])[0])] == [vars(info) for info in given]
    assert crossed([packed.layout])[0] == packed.layout


def test_packs_nothing_that_columns_cannot_hold() -> None:
    strange = make_storage_info("data/a", 0, 5, crc32c=1)
    strange.bp_new = 1
    assert pack([strange]) is None
    assert pack([make_storage_info("data/a", 0, 5)]) is None
    transformed = make_storage_info("data/a", 0, 5, crc32c=1, transform_descriptors=["zstd"])
    assert pack([transformed, make_storage_info("data/a", 0, 5, crc32c=1)]) is None
