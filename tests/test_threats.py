"""Attacks and mistakes that once succeeded, and the test that holds each closed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
CLOSED = {
    # trust
    "a forged optimiser state or residual (S1)": (
        "unit/coordinator/test_request_body.py::test_a_submission_with_more_than_its_task_names_the_field_and_the_remedy",
        "e2e/server/test_replay.py::test_a_stored_task_gives_the_same_bytes_whenever_it_is_done",
    ),
    "ranges and passes used up by made-up work (S2)": (
        "e2e/server/test_blame.py::test_made_up_work_neither_uses_up_the_data_nor_ends_the_run",
        "e2e/server/test_blame.py::"
        "test_made_up_work_that_is_faster_than_its_proof_makes_no_version",
    ),
    "holes of the sandbox (S3)": (
        "unit/volunteer/machine/test_sandbox.py::test_a_hole_is_closed",
        "unit/volunteer/machine/test_sandbox.py::"
        "test_a_call_that_is_not_listed_is_absent_and_named",
    ),
    "proving nothing for free (S4)": (
        "contract/test_refused_work.py::test_what_proves_nothing_moves_no_standing_and_costs_time",
        "e2e/server/test_recomputes.py::"
        "test_the_class_of_a_device_is_that_of_the_lease_whatever_a_result_says",
    ),
    "long tasks that drift (S5)": (
        "e2e/server/test_drifts.py::test_a_run_of_long_tasks_hands_out_what_it_can_prove",
        "e2e/server/test_drifts.py::"
        "test_honest_other_arithmetic_is_paid_and_cheats_fail_at_the_longest_allowed_length",
        "e2e/server/test_blame.py::"
        "test_a_task_that_drifts_too_far_for_a_verdict_blames_nobody_and_the_next_is_shorter",
    ),
    "a wrong rate that costs volunteers their standing (F2)": (
        "unit/coordinator/checking/test_wrong_run_files.py::"
        "test_no_honest_volunteer_is_blamed_for_a_wrong_run_file",
        "e2e/server/test_blame.py::test_a_run_of_a_wrong_file_pauses_itself_and_blames_nobody",
    ),
    "windows without a learnt token (F3)": (
        "unit/shared/workloads/data/test_dialogue_windows.py::"
        "test_each_learnt_token_is_learnt_once_after_all_that_fits_before_it",
    ),
    "accepted work that weighs nothing and holds a merge up (F4)": (
        "e2e/server/test_blame.py::test_work_after_a_wrong_run_counts_whole_and_is_merged_at_once",
    ),
    # the first review
    "a cohort captured by tiny updates (T1)": (
        "unit/coordinator/rules/test_validation.py::"
        "test_next_to_nothing_is_refused_before_anybody_else_has_worked",
        "unit/coordinator/rules/test_validation.py::"
        "test_a_volunteer_has_one_voice_however_many_tasks_it_did",
    ),
    "pay without work (T2)": (
        "e2e/server/test_attacks.py::test_no_attack_earns_or_stops_the_model",
        "unit/coordinator/rules/test_adversary.py::"
        "test_who_computes_nothing_frees_nothing_and_uses_up_no_range",
    ),
    "buffers that nobody measures (T3)": (
        "e2e/server/test_attacks.py::test_buffers_of_a_hostile_account_move_no_version",
        "unit/coordinator/aggregation/test_aggregate.py::test_one_hostile_of_ten_moves_no_buffer",
    ),
    "trailers without end (T4)": (
        "unit/coordinator/http/test_deadlines.py::test_trailers_are_bounded",
    ),
    "bytes that begin no request (T5)": (
        "unit/coordinator/http/test_deadlines.py::"
        "test_bytes_that_begin_no_request_start_the_deadline",
        "unit/coordinator/http/test_deadlines.py::"
        "test_when_all_places_are_taken_the_longest_idle_makes_room",
    ),
    "tasks discarded by strangers (T6)": (
        "contract/test_condemned_tasks.py::"
        "test_strangers_discard_nothing_where_a_vetted_volunteer_works",
    ),
    "idle machines that shrink merges (T7)": (
        "contract/test_steering.py::test_sixty_idle_machines_of_one_volunteer_are_one",
    ),
    "leases for the asking (T8)": (
        "contract/test_tasks.py::test_a_newcomer_holds_two_leases_over_all_its_machines",
        "contract/test_tasks.py::test_a_made_up_speed_makes_no_long_lease",
    ),
    "lazy work that sets the pace (T9)": (
        "contract/test_tasks.py::test_the_pace_of_others_bounds_a_lease",
        "contract/test_tasks.py::test_one_voice_of_the_pace_is_one_volunteer_and_vetted_ones_count",
    ),
    "public pages that read all history (T10)": (
        "contract/test_long_runs.py::test_strangers_asking_for_samples_read_no_history",
    ),
    "claims that are stored without bound (T11)": (
        "unit/coordinator/test_request_body.py::test_a_submission_has_few_metrics",
    ),
    "uploads that fill the disk (T12)": (
        "e2e/server/test_uploads.py::test_a_part_has_two_uploads_at_most",
        "e2e/server/test_uploads.py::test_newcomers_fill_half_of_the_free_disk_at_most",
    ),
    "identities for nothing (T13)": (
        "e2e/server/test_refusals.py::test_addresses_of_one_home_share_its_rate",
        "e2e/agent/test_open_registration.py::test_a_network_makes_a_few_accounts_a_day",
    ),
    "data discarded by an older workload (T14)": (
        "contract/test_tasks.py::"
        "test_another_version_of_the_workload_is_refused_and_nothing_is_counted",
    ),
}


@pytest.mark.parametrize("threat", CLOSED)
def test_a_test_holds_each_threat_closed(threat: str) -> None:
    for name in CLOSED[threat]:
        file, _, test = name.partition("::")
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = ast.walk(ast.parse((ROOT / file).read_text()))
        assert test in {node.name for node in nodes if isinstance(node, functions)}, name
