"""The simulation's model: nothing is lost, no limit is passed or bound beaten, a seed decides. And an index's size."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from sim.calibrate import CASES, predicted
from sim.coordinator import OURS, STOCK, measure
from sim.layouts import Layout, Model
from sim.limiters import Limiters
from sim.loading import CASES as REPLICA_CASES
from sim.loading import metadata_s
from sim.services import Cluster, Service, ideal_s
from sim.store import ObjectWork, Outcome, Work, simulate
from sim.transfers import load_work, object_sizes, partitions, save_work

from bucketpoint.stores import retry
from bucketpoint.transfer import TransferOptions
from sim import coordinator, index, report

MIB = 1 << 20
BUSY = Service(partitions=4, writes_per_s=200.0, reads_per_s=300.0, ceiling_bytes_per_s=5e9)
CLUSTER = Cluster(ranks=32, connections=6)


def run(
    work: Work, service: Service = BUSY, cluster: Cluster = CLUSTER, *, seed: int = 7, refuse: bool = False
) -> Outcome:
    where = np.arange(cluster.ranks * len(work.objects)).reshape(cluster.ranks, -1) % service.partitions
    return simulate(work, where, cluster, service, seed=seed, refuse=refuse)


works = st.builds(
    Work,
    st.lists(
        st.builds(
            ObjectWork,
            st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=9).map(tuple),
            st.just(True),
        )
        | st.builds(ObjectWork, st.integers(1, 16 * MIB).map(lambda size: (size,)), st.just(False)),
        min_size=1,
        max_size=4,
    ).map(tuple),
    st.just(True),
)
reads = st.builds(
    lambda sizes: Work(tuple(ObjectWork(tuple(each), False) for each in sizes), False),
    st.lists(st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=9), min_size=1, max_size=4),
)


@given(work=works | reads, refuse=st.booleans(), connections=st.integers(1, 8), seed=st.integers(0, 1000))
@settings(max_examples=12)
def test_moves_every_byte_and_makes_every_request_once(work: Work, refuse: bool, connections: int, seed: int) -> None:
    cluster = replace(CLUSTER, connections=connections)
    outcome = run(work, cluster=cluster, seed=seed, refuse=refuse)
    if outcome.failed:
        assert refuse
        return
    assert outcome.nbytes == work.nbytes * cluster.ranks
    assert outcome.requests == work.requests * cluster.ranks
    assert outcome.requests == outcome.admitted.sum()
    assert outcome.wall_s >= outcome.ideal_s


@pytest.mark.parametrize("refuse", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_accepts_no_more_than_its_rate_in_a_partition_over_any_window(write: bool, refuse: bool) -> None:
    work = save_work(200 * MIB, TransferOptions()) if write else load_work(200 * MIB, TransferOptions())
    # Two waves of requests that no partition can take at once.
    service = replace(BUSY, writes_per_s=100.0, reads_per_s=100.0)
    outcome = run(work, service, refuse=refuse)
    accepted = np.pad(np.cumsum(outcome.admitted, axis=1), ((0, 0), (1, 0)))
    steps = outcome.admitted.shape[1]
    for window in {1, 2, 10, 100, steps}:
        if window <= steps:
            most = (accepted[:, window:] - accepted[:, :-window]).max()
            assert most <= 100.0 * (window * outcome.step_s + service.burst_s) + 1


def test_takes_the_time_of_a_partition_the_ceiling_or_a_card_whichever_is_narrowest() -> None:
    outcome = run(save_work(200 * MIB, TransferOptions()), replace(BUSY, partitions=1, writes_per_s=50.0))
    assert outcome.wall_s == pytest.approx(outcome.requests / 50, rel=0.1)
    work = save_work(400 * MIB, TransferOptions())
    outcome = run(work, Service(partitions=64, ceiling_bytes_per_s=1e9))
    assert outcome.wall_s == pytest.approx(work.nbytes * CLUSTER.ranks / 1e9, rel=0.1)
    # The ranks of a node share its card.
    outcome = run(work, Service(partitions=64), replace(CLUSTER, nic_bytes_per_s=0.2e9))
    assert outcome.wall_s == pytest.approx(work.nbytes * 8 / 0.2e9, rel=0.1)


def test_gives_the_same_outcome_for_the_same_seed_and_another_for_another() -> None:
    work = save_work(100 * MIB, TransferOptions())
    one, same, other = run(work, seed=1), run(work, seed=1), run(work, seed=2)
    assert one.wall_s == same.wall_s
    assert np.array_equal(one.admitted, same.admitted)
    assert one.wall_s != other.wall_s


def test_sends_refused_requests_again_until_they_are_accepted_or_too_late() -> None:
    work = save_work(100 * MIB, TransferOptions())
    outcome = run(work, replace(BUSY, partitions=1, writes_per_s=20.0), refuse=True)
    assert outcome.refused > 0
    assert not outcome.failed
    assert outcome.requests == work.requests * CLUSTER.ranks
    assert outcome.wall_s > run(work, replace(BUSY, partitions=1, writes_per_s=20.0)).wall_s
    outcome = run(work, replace(BUSY, partitions=1, writes_per_s=0.2), refuse=True)
    assert outcome.failed
    assert outcome.wall_s == pytest.approx(retry.DEADLINE_S, rel=0.05)


@given(events=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=200))
@settings(max_examples=50)
def test_limits_in_the_simulation_as_the_real_limiter_does(events: list[tuple[int, int]]) -> None:
    real, simulated = retry.ConcurrencyLimiter(), Limiters(ranks=2, connections=8)
    random = np.random.default_rng(0)
    idle, running, now = list(range(8, 16)), {}, 0.0
    for kind, which in events:
        now += 0.01
        if kind == 0 and idle:
            simulated.enter(np.array([idle.pop()]), np.array([now]), now)
        elif kind and running:
            slot = sorted(running)[which % len(running)]
            throttled = kind == 1
            real.leave(running.pop(slot), answered=True, throttled=throttled, succeeded=not throttled)
            if throttled:
                simulated.refused(np.array([slot]), np.array([now]), random)
            else:
                simulated.succeeded(np.array([slot]))
            idle.append(slot)
        waiting = set(simulated.waiting.tolist())
        simulated.enter(np.zeros(0, np.int64), np.zeros(0), now)
        # The real limiter would block where the simulated one lets the request wait.
        for slot in sorted(set(range(8, 16)) - set(idle) - set(running) - set(simulated.waiting.tolist())):
            assert len(running) < real.limit
            running[slot] = real.enter(now)
        assert not set(simulated.waiting.tolist()) - waiting
        assert not simulated.waiting.size or len(running) >= real.limit
        assert simulated.limit(1) == pytest.approx(real.limit)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("nbytes", [10 * MIB, 977_000_000, 30_000_000_000])
def test_carries_the_bytes_of_the_rank_in_planned_requests(nbytes: int, device: bool) -> None:
    for plan in (save_work, load_work):
        work = plan(nbytes, TransferOptions(), device=device)
        assert work.nbytes == nbytes
        assert all(min(each.parts) > 0 for each in work.objects)
    assert sum(size for _, _, size in object_sizes(nbytes)) == nbytes


def test_spreads_keys_over_the_partitions_about_evenly() -> None:
    counts = np.bincount(partitions(2048, 10**9, 64).reshape(-1), minlength=64)
    assert counts.sum() == 2 * 2048
    assert counts.max() <= 2 * counts.mean()


def test_stays_near_the_ideal_with_the_defaults_at_a_thousand_ranks() -> None:
    nbytes = 10**13 // 1024
    outcome = simulate(
        save_work(nbytes, TransferOptions()), partitions(1024, nbytes, 64), Cluster(1024), Service(), seed=1
    )
    assert outcome.over_ideal <= 1.25


def test_counts_costs_of_the_coordinator_alike_for_copies_of_a_rank_and_real_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout(Model("small", 2, 0.1), ranks=4, replicas=2)
    real = measure(layout, OURS)
    for found in (real, measure(layout, STOCK)):
        assert found["gathered"] == layout.gathered
        assert found["kept"] == layout.kept
        assert all(np.isfinite(cost) and cost >= 0 for cost in found["first"]["cpu_s"].values())
        assert found["metadata_bytes"] > 0
    assert found["second"]["sent"]["plans_up"] == found["first"]["sent"]["plans_up"]
    monkeypatch.setattr(coordinator, "PLAYED_RANKS", 2)
    copied = measure(layout, OURS)
    assert (copied["gathered"], copied["kept"]) == (real["gathered"], real["kept"])
    for save in ("first", "second"):
        for message, nbytes in real[save]["sent"].items():
            assert 0.7 * nbytes <= copied[save]["sent"][message] <= 1.3 * nbytes, message


def test_predicts_no_less_than_the_bound() -> None:
    for case in CASES:
        cluster = Cluster(case.processes, ranks_per_node=1, nic_bytes_per_s=1e12, connections=4)
        assert min(predicted(case)) >= ideal_s(40 * MIB * case.processes, cluster, case.service)


def test_reads_each_byte_once_in_no_more_time_than_broadcasting_takes() -> None:
    for case in REPLICA_CASES:
        assert case.shared_reads_s <= case.one_broadcasts_s
    assert metadata_s(1e9, 1.0, 10240, nic=12.5e9, store=125e9, once=True) < metadata_s(
        1e9, 1.0, 10240, nic=12.5e9, store=125e9, once=False
    )


def test_keeps_rows_of_an_earlier_run_unless_they_were_measured_again() -> None:
    row = {"who": OURS, "model": "8B", "ranks": 8, "replicas": 1}
    earlier = {"coordinator": [{**row, "kept": 1}, {**row, "ranks": 16, "kept": 2}]}
    now = {"coordinator": [{**row, "kept": 3}]}
    kept = {each["ranks"]: each["kept"] for each in report.merged(earlier, now)["coordinator"]}
    assert kept == {8: 3, 16: 2}


@pytest.mark.parametrize("irregular", [False, True])
def test_plans_the_same_from_a_small_index_as_from_a_pickle(irregular: bool) -> None:
    found = index.measure(4, irregular=irregular)
    assert found["items"] == 873 * 4 + 291 + 1
    assert {found[kind]["planned"] for kind in index.KINDS} == {found["stock"]["planned"]}
    assert found["stock"]["planned"] >= 873 + 291
    assert found["index"]["bytes"] / found["items"] <= 12
    assert found["stock"]["bytes"] / found["items"] > 150
    assert len(list(index.lines(4, irregular, found))) == 3
