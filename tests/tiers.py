"""The tier of each test: `make test` runs every behaviour once, on one server; CI and `make test-full` run the rest.

A test is `broad` if it repeats on a further server what the same test shows on MinIO, or if it is marked so because of
the time that it takes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import pytest

FURTHER = frozenset({"moto", "gcs", "gcs_xml", "versitygw"})
"""Servers and engines that say of S3, or of the code above the stores, what MinIO says."""

ALWAYS_FURTHER = frozenset({"versitygw"})


KEPT: Mapping[str, tuple[str, ...]] = {
    # Kills, faults and failures: one of each kind.
    "test_kills_one_rank_after_each_request": ("minio-over an old one-THREAD",),
    "test_kills_a_rank_that_has_objects_copied_after_some_requests": ("minio-some",),
    "test_kills_four_ranks_after_some_requests": (),
    "test_saves_though_its_helper_is_killed_after_each_request": (),
    "test_commits_though_the_program_ends_during_the_upload": ("return-0",),
    "test_keeps_no_upload_waiting_by_workers_that_are_forked_while_it_starts": (),
    "test_raises_after_two_deaths_during_one_upload_and_leaves_no_upload": (),
    "test_leaves_no_process_upload_or_checkpoint_of_a_killed_trainer": ("fork",),
    "test_keeps_no_other_rank_waiting_if_a_store_stalls_one": (),
    "test_raises_an_exception_at_each_item_of_each_of_four_ranks_on_all": (),
    "test_saves_through_a_fault_at_each_request": (
        "minio-reset after the store acted-over an old one",
        "minio-200 with an error in its body0-fresh",
        "minio-request cut short-fresh",
    ),
    "test_loads_through_a_fault_at_each_request": (
        "s3-alone-reply cut short-0.7",
        "s3-alone-503 SlowDown-",
        "s3-alone-stall-",
        "s3-together-reset-",
    ),
    "test_takes_no_flipped_bit_at_each_request_for_a_value": ("s3-alone-0.6",),
    "test_tells_every_rank_of_credentials_that_expire_at_each_request": ("s3-alone",),
    "test_leaves_nothing_that_loads_after_a_kill_and_continues_in_the_next_run": ("safetensors",),
    "test_ends_with_three_pruners_of_which_some_are_killed_where_one_does": (),
    "test_names_a_lost_rank_on_all_others": ("a save, killed",),
    "test_names_a_rank_that_stalls_and_raises_there_when_it_goes_on": ("save",),
    "test_raises_on_all_ranks_by_the_deadline_if_a_store_stalls_one": ("minio-save",),
    "test_commits_a_save_that_has_begun_however_the_program_ends": (
        "falls-0-async_save",
        "raises-1-dcp",
        "exit-3-3-manager",
        "ctrl-c--2-manager",
    ),
    "test_leaves_the_old_checkpoint_after_sigterm_that_nobody_handles": ("manager",),
    "test_fails_the_exit_status_for_a_last_save_that_fails_after_the_program": ("async_save",),
    "test_names_a_killed_checkpoint_process_in_its_save_and_in_the_next": (),
    "test_makes_progress_in_every_loop_of_restarts": ("grace0-lose", "grace1-damage", "grace0-garble"),
    "test_leaves_what_was_there_after_an_exception_at_each_item": ("over an old one-minio",),
    "test_saves_three_times_before_and_after_two_that_fail": (),
    "test_raises_on_every_rank_for_a_range_that_is_bad_for_good": (
        "s3-alone-500",
        "s3-alone-404",
        "s3-together-flipped",
    ),
    "test_confuses_no_save_after_one_that_fails": ("1-write", "0-finish"),
    "test_waits_briefly_for_a_planner_that_fails_where_dcp_has_no_collectives": ("finish_plan",),
    "test_waits_briefly_for_and_names_a_planner_that_fails_after_dcps_collective": (),
    # Many examples of one property, and many seeds.
    "test_reads_its_own_step_from_beginning_to_end_in_every_upload": (),
    "test_reads_and_runs_no_pickle_of_the_corpus": (),
    "test_sets_off_no_bomb_of_the_corpus": (),
    "test_raises_an_error_of_ours_at_worst_for_any_input": (),
    "test_hangs_in_no_schedule_loses_no_commit_and_continues_after_each_restart": (),
    "test_loads_any_saved_layout_into_any_other": (),
    "test_keeps_any_history_of_several_ranks": (),
    "runTest": (),
    # Whole programs of which another test shows the parts.
    "test_saves_in_a_job_under_torchrun_and_resumes_in_one_of_another_size": (),
    "test_commits_twice_and_exits_with_0_after_sigterm_in_the_middle_of_an_upload": (),
    "test_saves_requeues_and_resumes_with_fewer_nodes_a_job_told_to_end": (),
    "test_runs_the_snippets_of_the_first_pages_as_they_stand": ("2",),
    "test_saves_and_loads_on_two_ranks_with_the_async_save_recipe": (),
    "test_exports_what_transformers_loads_and_reads_what_it_wrote": (),
    "test_keeps_what_the_policy_says_in_a_job_that_saves_beside_training": ("THREAD-s3",),
    "test_takes_options_for_each_side": (),
    # Further values of a parameter that lead the same way.
    "test_answers_alike_on_all_ranks_to_every_method_and_trigger_during_an_upload": ("2-wait", "2-skip"),
    "test_loads_every_placement_as_plainly_and_reads_less": ("small-ours",),
    "test_waits_for_a_rank_that_stands_still_as_long_as_the_group_waits": (),
    "test_saves_and_loads_on_many_ranks_with_an_index": ("group",),
    "test_checks_the_index": ("memory-flipped", "file-whole", "minio-shorter"),
    "test_tells_a_store_that_ignores_conditions_from_what_it_calls_itself": ("If-None-Match",),
    "test_returns_all_memory_by_close": ("wait-1-sync-private", "double_buffer-2-async-shared"),
    "test_holds_in_each_save_of_one_writer_what_it_was_given": ("wait", "double_buffer beside training"),
    "test_saves_all_under_planners_that_look_into_plans_or_alter_them": (
        "SavePlanner",
        "AddsItem",
        "Trimming",
        "DefaultSavePlanner",
    ),
    "test_loads_a_model_under_any_other_parallelism": ("hsdp-4-Replicate-loaded1",),
    "test_names_each_right_that_is_missing": ("s3:PutObject-put-fail", "s3:DeleteObject-delete-warn"),
    "test_tries_what_a_role_may_do_and_leaves_the_bucket_as_before": (
        "trainer-trainer-failing1",
        "reader-pruner-failing5",
    ),
    "test_keeps_resident_memory_and_descriptors_over_fifty_saves": ("async-shared",),
}
"""Parameters with which `make test` runs a test that takes long. With others it is broad; without any, all of it is."""


def mark_broad(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that repeat another one on a further server."""
    items = list(items)
    on_minio = {_function(item) for item in items if "minio" in _servers(item)}
    for item in items:
        servers = _servers(item)
        # What GCS's own store does is nowhere else to be seen.
        of_gcs = "gcs" in servers and "stores" in item.path.parts
        repeats = bool(servers & FURTHER) and _function(item) in on_minio and "minio" not in servers and not of_gcs
        if repeats or servers & ALWAYS_FURTHER or _is_left_out(item):
            item.add_marker(pytest.mark.broad)


def servers_later(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order the tests so that each worker begins with those that need no compiled server.

    pytest-xdist gives each worker a stretch of the list to begin with.
    """
    parts: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
    for item in items:
        served = _servers(item) - {"moto"} or "bucketpoint_minio_binary" in getattr(item, "fixturenames", ())
        parts[bool(served)].append(item)
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        for part in parts:
            ordered += part[len(part) * worker // workers : len(part) * (worker + 1) // workers]
    return ordered


def _is_left_out(item: pytest.Item) -> bool:
    kept = KEPT.get(getattr(item, "originalname", None) or item.name)
    callspec = getattr(item, "callspec", None)
    return kept is not None and (callspec.id if callspec is not None else "") not in kept


def _function(item: pytest.Item) -> tuple[str, str]:
    return str(item.path), item.nodeid.partition("[")[0]


def _servers(item: pytest.Item) -> set[str]:
    """The servers that a test names: by its parameters, or by the fixture of one."""
    callspec = getattr(item, "callspec", None)
    named = set(map(str, callspec.params.values())) if callspec is not None else set()
    return (named | set(getattr(item, "fixturenames", ()))) & (FURTHER | {"minio"})


def sampled(numbers: Sequence[int], count: int, *, seed: int) -> list[int]:
    """Return `count` of the numbers, in order, the same for the same seed: a sample for runs without time for all."""
    return sorted(random.Random(seed).sample(list(numbers), min(count, len(numbers))))
