"""Lease times: when a task must be submitted."""

from __future__ import annotations

import msgspec

from coordinator.rules.lease_times import LEASE_MAX_S, finish_beside_in_s, finish_in_s, task_s
from coordinator.rules.task_size import RunPace
from tests.support.waiting_workers import run_of


def test_a_lease_lasts_three_times_what_the_work_takes() -> None:
    task = {"lease_floor_seconds": 120.0}
    unknown = run_of(task=task)
    assert finish_in_s(unknown, 10, 0) == 1200
    assert finish_in_s(unknown, 100, 1e9) == 600
    known = run_of(task=task, pace=RunPace(step_s=1.0, flops=1e9))
    assert finish_in_s(known, 10, 1e9) == 120
    assert finish_in_s(known, 100, 1e9) == 300
    assert finish_in_s(known, 100, 1e8) == 3000
    assert finish_in_s(known, 100, 1e-3) == LEASE_MAX_S


def test_the_time_of_a_task_is_that_of_its_work_and_unknown_without_a_speed() -> None:
    run = run_of()
    assert task_s(run, 100, 1e9) == 2.0  # one step, a benchmark being twice too good
    assert task_s(run, 50, 4e9) == 0.25
    assert task_s(run, 100, 0.0) == 0.0
    assert task_s(run, 100, 0.5) == 4e9
    assert task_s(msgspec.structs.replace(run, step_flops=0.0), 100, 1e9) == 0.0
    assert task_s(msgspec.structs.replace(run, step_flops=0.5), 100, 1.0) == 1.0


def test_a_lease_outside_the_pass_lasts_three_times_what_its_price_takes() -> None:
    run = run_of(task={"lease_floor_seconds": 120.0})
    assert finish_beside_in_s(run, 100, 0.0) == 1200  # an unknown speed: ten times the floor
    assert finish_beside_in_s(run, 100, 1e9) == 120
    assert finish_beside_in_s(run, 10_000, 1e9) == 3 * task_s(run, 10_000, 1e9) == 600
    assert finish_beside_in_s(run, 100, 1e-3) == LEASE_MAX_S
