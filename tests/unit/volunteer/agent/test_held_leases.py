"""Leases in work, counted against how many a volunteer was told to do."""

from __future__ import annotations

import pytest

from shared.protocol.leases import Grant, Lease
from shared.workloads.base import Job, TrainSettings
from tests.support.virtual_clock import VirtualClock
from volunteer.agent.held_leases import HeldLeases, LeaseInWork, LeasePhase
from volunteer.agent.lifecycle import Lifecycle
from volunteer.storage.leases import HeldLease


def held(task: int) -> LeaseInWork:
    job = Job(
        run="r", workload="gpt", kind="train", update="delta", config={}, train=TrainSettings(),
        order_seed=1, start=0, stop=8, seed=1, steps=4, batch_size=2, global_step=0, total_steps=0,
    )  # fmt: skip
    lease = Lease(
        task=task, attempt=1, run="r", job=job, dataset="d", chunks=(0,), renew_by=0.0,
        finish_by=0.0, grant=Grant(codec="float32", bytes_max=10), price_micro=1, now=0.0,
    )  # fmt: skip
    return LeaseInWork(HeldLease(lease=lease, device="cpu", claim_id="c"))


def leases(max_tasks: int) -> HeldLeases:
    return HeldLeases(Lifecycle(VirtualClock()), max_tasks)


def full(mine: HeldLeases) -> bool:
    return mine.exhausted


def test_as_many_leases_are_taken_as_were_asked_for() -> None:
    mine = leases(2)
    assert not full(mine)
    mine.take(held(1))
    assert not full(mine)
    mine.take(held(2))
    assert full(mine)
    for one in mine:
        mine.put_down(one, counted=True)
    assert full(mine)  # their results count


def test_a_lease_that_ends_without_a_result_makes_room_for_one_other() -> None:
    mine = leases(1)
    one = held(1)
    mine.take(one)
    mine.put_down(one, counted=False)
    assert not full(mine)
    mine.take(held(2))
    assert full(mine)
    mine.uncount(one.key)  # it made room already
    assert full(mine)


def test_a_result_that_is_refused_later_makes_room_once() -> None:
    mine = leases(1)
    one = held(1)
    mine.take(one)
    mine.put_down(one, counted=True)
    mine.late.add(one.key)
    mine.uncount((one.key[0], 2))  # of another attempt
    assert full(mine)
    for _ in range(2):
        mine.uncount(one.key)
    assert not full(mine)
    assert mine.late == set()
    mine.take(held(2))
    assert full(mine)


@pytest.mark.parametrize("max_tasks", [0, -1])
def test_without_a_number_there_is_no_end(max_tasks: int) -> None:
    mine = leases(max_tasks)
    for task in range(5):
        mine.take(held(task))
    mine.uncount((0, 1))
    assert not full(mine)
    assert len(mine) == 5


@pytest.mark.parametrize(
    ("phase", "reported"),
    [("queued", "queued"), ("fetch", "fetch"), ("train", "paused"), ("encode", "encode")],
)
def test_a_pause_is_reported_of_training_alone(phase: LeasePhase, reported: LeasePhase) -> None:
    """The coordinator gives a paused task more time; files are fetched and encoded meanwhile."""
    lease = held(1)
    lease.phase = phase
    assert lease.report(paused=True).phase == reported
    assert lease.report(paused=False).phase == phase
