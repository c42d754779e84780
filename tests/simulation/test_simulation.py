"""Many actors on one bucket: nothing that was acknowledged is lost, and each guard of the product is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.simulation.facts import ViolationError
from tests.simulation.guards import GUARDS, switched_off
from tests.simulation.patches import simulated
from tests.simulation.run import run
from tests.simulation.scenarios import FAMILIES
from tests.simulation.shrink import shrunk, told

from bucketpoint.catalog.deletion.state import CHANGES

A_FEW, MANY = 20, 1000
"""Schedules of each family. All of the first take some 10 s."""

GUARD_SEEDS = 1500


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with simulated():
        yield


def _refuse_violations(family: str, first: int, count: int) -> None:
    for seed in range(first, first + count):
        made = run(seed, only=family)
        if made.kind:
            again = f"python -m tests.simulation.simulate --family {family} --seed {seed}"
            pytest.fail(f"{again}\n{told(shrunk(made))}", pytrace=False)


@pytest.mark.parametrize("family", [family.__name__ for family, _ in FAMILIES])
def test_loses_nothing_that_was_acknowledged(family: str) -> None:
    _refuse_violations(family, 0, A_FEW)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family.__name__ for family, _ in FAMILIES])
def test_loses_nothing_in_many_schedules(family: str) -> None:
    _refuse_violations(family, A_FEW, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("name", GUARDS)
def test_violates_something_without_a_guard(name: str) -> None:
    with switched_off(name):
        found = (run(seed, only=GUARDS[name].family).violation for seed in range(GUARD_SEEDS))
        assert any(isinstance(violation, ViolationError) for violation in found)


def test_gives_guards_of_a_deletion_to_its_changes() -> None:
    guards = {guard for change in CHANGES.values() for guard in change.guards}
    others = {"metrics of a commit", "one commit on all ranks", "ranks that staged the state", "a refusal is no damage"}
    assert guards | others == GUARDS.keys()


def test_shows_all_changes_of_a_deletion_in_the_documents() -> None:
    rows = (" | ".join((name, *(text or "-" for text in change[:5]))) for name, change in CHANGES.items())
    assert "".join(f"| {row} |\n" for row in rows) in (Path(__file__).parents[2] / "docs" / "catalog.md").read_text(
        encoding="utf-8"
    )


def test_repeats_a_seed_to_the_request() -> None:
    first, second = run(7, only="mixture"), run(7, only="mixture")
    assert first.requests > 10
    assert [line[2:] for line in first.trace] == [line[2:] for line in second.trace]
    again = run(7, only="mixture", replay=first.decisions)
    assert [line[2:] for line in again.trace] == [line[2:] for line in first.trace]
