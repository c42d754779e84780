"""Asynchronous saves that overlap on several ranks: put in order, whatever writer or stager begins them."""

from __future__ import annotations

from typing import Any

import pytest

from bucketpoint import StagingOptions
from dcp.ranks import Ranks
from dcp.saving import async_scenarios as scenarios
from services import Service

pytestmark = pytest.mark.contract

POLICIES = {
    "wait": None,
    "double_buffer": StagingOptions(when_busy="double_buffer"),
    "beside training": StagingOptions(use_async_staging=True),
    "double_buffer beside training": StagingOptions(use_async_staging=True, when_busy="double_buffer"),
}
policies = pytest.mark.parametrize("policy", list(POLICIES))


@policies
def test_holds_in_each_save_of_one_writer_what_it_was_given(two_ranks: Ranks, tmp_path: Any, policy: str) -> None:
    two_ranks.run(scenarios.one_writer_overlaps, str(tmp_path), POLICIES[policy])


@pytest.mark.parametrize("policy", ["wait", "beside training"])
def test_saves_a_model_and_an_optimizer_at_once_by_two_writers(two_ranks: Ranks, tmp_path: Any, policy: str) -> None:
    two_ranks.run(scenarios.two_writers_overlap, str(tmp_path), POLICIES[policy])


def test_saves_by_a_new_writer_for_each_step_whose_future_is_dropped(two_ranks: Ranks, tmp_path: Any) -> None:
    two_ranks.run(scenarios.a_writer_for_each_step, str(tmp_path))


def test_plans_saves_of_one_writer_once_without_plans_of_other_ranks(two_ranks: Ranks, tmp_path: Any) -> None:
    two_ranks.run(scenarios.plans_are_made_once_for_a_writer, str(tmp_path))


def test_waits_in_a_synchronous_save_for_the_asynchronous_one_before(two_ranks: Ranks, tmp_path: Any) -> None:
    two_ranks.run(scenarios.a_save_waits_for_the_asynchronous_one, str(tmp_path))


def test_waits_in_a_load_for_the_asynchronous_save_before(two_ranks: Ranks, tmp_path: Any) -> None:
    two_ranks.run(scenarios.a_load_waits_for_the_asynchronous_save, str(tmp_path))


@pytest.mark.parametrize("policy", ["wait", "double_buffer"])
def test_orders_saves_of_a_foreign_writer_with_our_stager(two_ranks: Ranks, tmp_path: Any, policy: str) -> None:
    two_ranks.run(scenarios.a_foreign_writer_is_put_in_order, str(tmp_path), POLICIES[policy])


def test_runs_pytorchs_recipes_with_our_writer(two_ranks: Ranks, service: Service) -> None:
    two_ranks.run(scenarios.the_recipes, service.url("run"), service.options)
