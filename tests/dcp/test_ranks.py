"""Saving and loading on several ranks, real processes over gloo, on real servers."""

from __future__ import annotations

import pytest

from dcp import scenarios
from dcp.ranks import Ranks
from services import Service

pytestmark = pytest.mark.contract


@pytest.fixture
def root(service: Service) -> str:
    return service.url("run")


def test_reads_a_save_without_collectives_on_as_many_ranks(
    two_ranks: Ranks, four_ranks: Ranks, service: Service, root: str
) -> None:
    two_ranks.run(scenarios.save_without_collectives, f"{root}/each", service.options)
    names = {key.rsplit("/", 1)[-1] for key in service.listed()}
    assert {"__0.metadata", "__1.metadata"} <= names
    answers = four_ranks.run(scenarios.load_fails_everywhere, f"{root}/each", service.options)
    assert all("MismatchError" in kinds for kinds in answers)


def test_raises_the_reason_on_every_rank_that_loads_nothing(two_ranks: Ranks, service: Service, root: str) -> None:
    answers = two_ranks.run(scenarios.load_fails_everywhere, f"{root}/nothing", service.options)
    assert answers == [["CheckpointNotFoundError"] * 2] * 2
