"""Ranks that load together, real processes over gloo: what they read, what they get, and how they fail."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bucketpoint import BucketpointError, BucketReader, BucketWriter, TransferOptions
from dcp import scenarios as dcp_scenarios
from dcp.cooperative import cooperative_scenarios as scenarios
from dcp.cooperative.cooperative_scenarios import SMALL, expected_tensor
from dcp.ranks import TIMEOUT_S, Ranks
from kit.kills import Job
from services import Service

SHAPE = (1024, 1500)
NBYTES = 1024 * 1500 * 4


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Far below the timeout of the ranks' group, which is what a rank that waits in vain would take."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 200


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/step-1"


def save_alone(url: str, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter(**options), no_dist=True)


@pytest.mark.contract
@pytest.mark.parametrize("planner", ["stock", "ours"])
@pytest.mark.parametrize("options", [None, SMALL], ids=["default", "small"])
def test_loads_every_placement_as_plainly_and_reads_less(
    four_ranks: Ranks, two_ranks: Ranks, url: str, planner: str, options: TransferOptions | None
) -> None:
    four_ranks.run(scenarios.save, url)
    stored = sum(path.stat().st_size for path in Path(url.removeprefix("file://")).rglob("*.distcp"))
    for ranks in (four_ranks, two_ranks):
        plain = ranks.run(scenarios.load, url, planner, options, "off")
        together = ranks.run(scenarios.load, url, planner, options, "group")
        # Each byte once, but for what lies in memory of two tensors.
        assert sum(each["read"] for each in together) <= 1.1 * stored < sum(each["read"] for each in plain)
        assert [each["gets"] for each in plain] == [1] * ranks.world
        assert [each["gets"] for each in together] == [1] + [0] * (ranks.world - 1)
        assert all(each["explain"].startswith("Cooperative") for each in together)


@pytest.mark.contract
def test_loads_ranks_together_from_a_bucket(four_ranks: Ranks, two_ranks: Ranks, service: Service) -> None:
    url = service.url("step")
    four_ranks.run(dcp_scenarios.save, url, service.options)
    for each in two_ranks.run(scenarios.load, url, "stock", None, "group", service.options):
        assert each["explain"].startswith("Cooperative")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reads_each_byte_of_replicas_once_and_shares_the_work(four_ranks: Ranks, url: str, dtype: str) -> None:
    shapes = {"big": SHAPE, "other": (3000, 400), **{f"small.{index}": (index + 1, 7) for index in range(200)}}
    save_alone(url, {name: expected_tensor(shape) for name, shape in shapes.items()})
    distinct = 4 * sum(expected_tensor(shape).numel() for shape in shapes.values())
    answers = four_ranks.run(scenarios.load_replicas, url, shapes, dtype, SMALL)
    read = [each["read"] for each in answers]
    assert sum(read) <= 1.02 * distinct
    assert max(read) <= 1.05 * sum(read) / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keeps_memory_of_our_own_within_the_budget(four_ranks: Ranks, url: str, dtype: str) -> None:
    shape = (4096, 1500)
    save_alone(url, {"w": expected_tensor(shape)})
    options = TransferOptions(part_bytes=1 << 20, connections=8, max_inflight_bytes=4 << 20)
    for each in four_ranks.run(scenarios.load_replicas, url, {"w": shape}, dtype, options):
        # float32 as saved is read and received in place.
        assert each["peak"] == 0 if dtype == "float32" else 0 < each["peak"] <= options.max_inflight_bytes


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_loads_tensors_on_a_gpu_through_host_memory(two_ranks: Ranks, url: str) -> None:
    save_alone(url, {"there": expected_tensor(SHAPE), "host": expected_tensor(SHAPE)})
    read = two_ranks.run(scenarios.load_on_device, url, SHAPE, "cuda")
    assert sum(read) <= 1.02 * 2 * NBYTES


@pytest.mark.contract
def test_hands_on_no_bytes_from_memory_that_two_tensors_of_another_writer_share(two_ranks: Ranks, url: str) -> None:
    # Large enough that the place of its elements is read from the archive, and that they are received in place.
    shape = (300, 1000)
    state = {"one": torch.ones(shape), "two": torch.full(shape, 2.0)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(url[len("file://") :]), no_dist=True)
    assert two_ranks.run(scenarios.load_tied_on_the_first_rank, url, shape)[1] == [1.0, 2.0]


def test_reads_small_neighbours_in_one_request(two_ranks: Ranks, url: str) -> None:
    save_alone(url, {f"w{at:03}": torch.full((1000,), float(at)) for at in range(300)})
    assert sum(two_ranks.run(scenarios.load_every_second, url, 300)) <= 3


@st.composite
def boxes(draw: st.DrawFn) -> Any:
    shape = (draw(st.integers(1, 60)), draw(st.integers(1, 60)))
    found = []
    for _ in range(4):
        at = [draw(st.integers(0, size - 1)) for size in shape]
        size = [draw(st.integers(1, size - start)) for size, start in zip(shape, at, strict=True)]
        found.append(draw(st.sampled_from([(at, size), (at, size), ([0, 0], list(shape)), None])))
    options = TransferOptions(
        part_bytes=draw(st.integers(64, 4096)),
        connections=draw(st.integers(1, 4)),
        # An eighth of it is a round, and each round costs the ranks some collectives.
        max_inflight_bytes=draw(st.integers(2048, 16384)),
        coalesce_gap_bytes=draw(st.integers(0, 512)),
        free_gap_bytes=draw(st.integers(0, 128)),
    )
    return shape, found, options


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=boxes())
def test_loads_any_boxes_on_any_ranks(four_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    shape, found, options = case
    url = f"file://{tmp_path_factory.mktemp('boxes')}/step"
    save_alone(url, {"w": expected_tensor(shape)}, transfer=TransferOptions())
    four_ranks.run(scenarios.load_boxes, url, shape, found, options)


def test_reads_once_on_each_node_in_node_mode_and_once_in_each_group_in_group_mode(four_ranks: Ranks, url: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    answers = four_ranks.run(scenarios.load_whole, url, SHAPE, "node", 2)
    assert sum(each["read"] for each in answers[:2]) == sum(each["read"] for each in answers[2:])
    assert NBYTES <= sum(each["read"] for each in answers[:2]) <= 1.02 * NBYTES
    assert [each["gets"] for each in answers] == [1, 0, 1, 0]
    for each in four_ranks.run(scenarios.load_whole, url, SHAPE, "node", 1):
        assert "alone on its node" in each["explain"]
    group = four_ranks.run(scenarios.load_whole, url, SHAPE, "group", 2)
    assert NBYTES <= sum(each["read"] for each in group) <= 1.02 * NBYTES
    # Groups of other ranks than the first of the job.
    groups = four_ranks.run(scenarios.load_whole, url, SHAPE, "group", 4, [[0, 2], [1, 3]])
    read = [each["read"] for each in groups]
    assert NBYTES <= read[0] + read[2] <= 1.02 * NBYTES
    assert NBYTES <= read[1] + read[3] <= 1.02 * NBYTES


def test_names_a_rank_outside_the_group_on_every_rank(four_ranks: Ranks, url: str) -> None:
    save_alone(url, {"w": expected_tensor((8, 8))})
    for found, _ in four_ranks.run(scenarios.load_from, [url] * 4, (8, 8), ["group"] * 4, 2):
        assert set(found) == {2, 3}
        assert all("not in the process group" in text for _, text in found.values())


@pytest.mark.parametrize("difference", ["checkpoint", "mode", "scheme"])
def test_refuses_on_every_rank_if_ranks_do_not_load_the_same(two_ranks: Ranks, url: str, difference: str) -> None:
    urls, modes = [url, url], ["group", "group"]
    if difference == "checkpoint":
        urls[1] = f"{url}-other"
    elif difference == "mode":
        modes[1] = "node"
    for each in set(urls):
        save_alone(each, {"w": expected_tensor((8, 8))})
    if difference == "scheme":
        # Opening this URL fails, which must not keep the rank from meeting the other.
        urls[1] = "nothing-reads-this://bucket/step-1"
    for found, _ in two_ranks.run(scenarios.load_from, urls, (8, 8), modes):
        assert set(found) == {0, 1}
        assert all("different calls" in text for _, text in found.values())


def test_looks_once_for_a_missing_checkpoint_and_raises_on_every_rank(two_ranks: Ranks, url: str) -> None:
    answers = two_ranks.run(scenarios.load_from, [url] * 2, (3,), ["group"] * 2)
    kinds = [[kind for kind, _ in found.values()] for found, _ in answers]
    assert kinds == [["CheckpointNotFoundError"] * 2] * 2
    # For the commit, and for the index and the file of safetensors.
    assert [gets for _, gets in answers] == [3, 0]


def test_names_the_failure_of_a_rank_and_not_the_ranks_that_were_done_before(four_ranks: Ranks, url: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE), "alone": expected_tensor(SHAPE)})
    *others, (kind, text) = four_ranks.run(scenarios.one_rank_fails_alone, url, SHAPE)
    assert others == [None] * 3
    assert kind == "AccessDeniedError"
    assert "rank=3" in text


def test_gives_up_a_load_whose_process_group_was_destroyed(two_ranks: Ranks, url: str) -> None:
    assert two_ranks.run(scenarios.give_up_without_a_process_group, url) == ["Plain: there is one rank"] * 2


@pytest.mark.contract
@pytest.mark.parametrize("step", ["set_up_planner", "create_local_plan", "resolve_tensor", "commit_tensor"])
def test_fails_every_rank_if_the_planner_of_one_fails(four_ranks: Ranks, url: str, step: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    # Before DCP's collective nobody comes to wait for the others in the exchange: the limit is never used.
    for found in four_ranks.run(scenarios.one_planner_fails_at, url, SHAPE, step, 1e6, False):
        assert all(f"no such {step}" in text for _, text in found.values())
        if step in ("set_up_planner", "create_local_plan"):
            assert {rank: kind for rank, (kind, _) in found.items()} == {1: "ValueError"}
        else:
            assert set(found) == {0, 1, 2, 3} or (step == "commit_tensor" and 1 in found)


@pytest.mark.contract
def test_waits_briefly_for_and_names_a_planner_that_fails_after_dcps_collective(four_ranks: Ranks, url: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    for found in four_ranks.run(scenarios.one_planner_fails_at, url, SHAPE, "finish_plan", 3.0, False):
        assert set(found) == {0, 1, 2, 3}
        assert found[1] == ("ValueError", "no such finish_plan")
        assert any("rank 1 died, stopped, or did not answer" in found[rank][1] for rank in (0, 2, 3))


@pytest.mark.parametrize("step", ["create_local_plan", "finish_plan"])
def test_waits_briefly_for_a_planner_that_fails_where_dcp_has_no_collectives(
    four_ranks: Ranks, url: str, step: str
) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    answers = four_ranks.run(scenarios.one_planner_fails_at, url, SHAPE, step, 3.0, True)
    assert answers[1][0] == ("ValueError", f"no such {step}")
    assert any("rank 1 died, stopped, or did not answer" in answers[rank][0][1] for rank in (0, 2, 3))


@pytest.mark.parametrize("how", ["reset", "dropped"])
def test_waits_for_no_rank_that_gives_up_between_planning_and_reading(four_ranks: Ranks, url: str, how: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    started = time.monotonic()
    first, _, *others = four_ranks.run(scenarios.one_rank_gives_up, url, SHAPE, how)
    # Not the two minutes for which they would wait for one that plans.
    assert time.monotonic() - started < 60
    for kind, text in (first, *others) if how == "reset" else ():
        assert (kind, "rank=1" in text) == ("BucketpointError", True)
        assert "gave up this load" in text


@pytest.mark.parametrize("at", [0, 5])
def test_raises_on_all_other_ranks_if_one_is_killed(url: str, at: int) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    # A group that waits as long as that of the other tests.
    with Job(3, group_timeout_s=TIMEOUT_S) as job:
        job.ready()
        first, killed, last = job.run(scenarios.one_rank_is_killed, url, SHAPE, 1, at)
    assert killed.died
    for outcome in (first, last):
        assert outcome.value is not None, outcome
        kind, text = outcome.value
        assert kind == "PeerFailedError"
        assert "rank 1 died, stopped, or did not answer" in text


def test_names_a_rank_known_to_be_lost_like_one_found_to_be(two_ranks: Ranks, url: str) -> None:
    texts, _ = two_ranks.run(scenarios.one_rank_is_known_to_be_lost, url)
    assert len(texts) == 6
    assert all("load together died" in text for text in texts)


def test_tells_listeners_when_a_rank_leaves_and_cuts_off_those_who_wait_for_bytes(four_ranks: Ranks, url: str) -> None:
    answers = four_ranks.run(scenarios.one_rank_leaves, url)
    for kind, text in answers:
        assert kind == "BucketpointError"
        assert "I have had enough" in text
        assert "rank=1" in text


def test_cuts_off_the_third_rank_if_one_leaves_after_another_was_lost(four_ranks: Ranks, url: str) -> None:
    four_ranks.run(scenarios.one_rank_leaves_after_another_was_lost, url)


@pytest.mark.parametrize("when", ["at the start", "in a read"])
def test_waits_for_a_rank_that_stands_still_as_long_as_the_group_waits(four_ranks: Ranks, url: str, when: str) -> None:
    save_alone(url, {"w": expected_tensor(SHAPE)})
    answers = four_ranks.run(scenarios.one_rank_stands_still, url, SHAPE, 3.0, when)
    for text in answers[:3]:
        # In a read the others may leave before they have compared which of them came.
        assert ("rank 3 did not begin it" if when == "at the start" else "did not answer") in text


@pytest.mark.parametrize("mode", ["auto", "", "Group", True])
def test_refuses_a_mode_that_is_not_known(mode: Any) -> None:
    with pytest.raises(BucketpointError, match="is invalid") as caught:
        BucketReader("file:///tmp/x", cooperative=mode)
    assert "'off', 'node', 'group'" in str(caught.value)


@pytest.mark.parametrize("mode", ["node", "group"])
def test_loads_plainly_without_other_ranks_by_a_reader_that_was_pickled(url: str, mode: str) -> None:
    save_alone(url, {"w": expected_tensor((8, 8))})
    reader = pickle.loads(pickle.dumps(BucketReader(url, cooperative=mode)))
    assert reader.explain() == "Nothing has been loaded yet"
    state = {"w": torch.zeros(8, 8)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["w"], expected_tensor((8, 8)))
    assert reader.explain() == "Plain: there is one rank"
