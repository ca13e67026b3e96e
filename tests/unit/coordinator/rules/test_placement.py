"""Tasks beside the pass go to a machine that is fast enough, and never stand still for it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.eligibility import Todo, Waiter
from coordinator.rules.lease_times import task_s
from coordinator.rules.placement import (
    MACHINES_MAX,
    PATIENCE_S,
    PRESENT_S,
    WORTH_WAITING,
    DeviceBench,
    Machines,
    PeerDevice,
    Placement,
)
from coordinator.rules.task_size import Run
from shared.protocol.base import Reason
from tests.support.waiting_workers import ask, run_of, todo_of, waiter

SLOW, FAST = 1e9, 16e9


def games() -> Run:
    return run_of(
        kind="selfplay",
        beside=("learn", "evaluate"),
        step_flops=1e9,
        price_micro=100,
        endless=True,
        samples_total=10**6,
    )


def learn(id: int = 7, work_s: float = 100.0, **values: Any) -> Todo:
    """A learn task that takes a slow machine so many seconds."""
    price = round(work_s / 2.0 * 100)  # a benchmark is believed to be twice too good
    return todo_of(id, 0, 640, beside="learn", steps=5, price_micro=price, **values)


def bench(*peers: tuple[Waiter, float], left_s: float = 0.0) -> DeviceBench:
    found = tuple(PeerDevice(waiter=who, free_s=free_s) for who, free_s in peers)
    return DeviceBench(peers=found, reserved_s={7: left_s} if left_s else {})


def test_a_slow_machine_plays_on_and_the_fast_one_learns_whoever_asks_first() -> None:
    slow, fast = waiter(1, flops=SLOW), waiter(2, flops=FAST)
    outcome = ask([slow, fast], [games()], [learn()], bench=bench((slow, 0.0), (fast, 0.0)))
    assert {a.waiter: a.task_id for a in outcome.assignments} == {0: None, 1: 7}
    assert outcome.reserved == {7}


def test_it_is_left_to_a_fast_machine_that_is_busy_unless_that_takes_too_long() -> None:
    slow, fast = waiter(1, flops=SLOW), waiter(2, flops=FAST)
    soon = ask([slow], [games()], [learn()], bench=bench((slow, 0.0), (fast, 40.0)))
    assert [a.task_id for a in soon.assignments] == [None]
    late = ask([slow], [games()], [learn()], bench=bench((slow, 0.0), (fast, 60.0)))
    assert [a.task_id for a in late.assignments] == [7]


def test_a_task_is_left_for_an_end_in_less_than_half_the_time_and_for_no_other() -> None:
    """The slow machine needs 100 s, the fast one 6.25."""
    run, task, slow, fast = games(), learn(), waiter(1, flops=SLOW), waiter(2, flops=FAST)

    def left(slow_s: float, fast_s: float) -> bool:
        placement = Placement(bench((slow, slow_s), (fast, fast_s)))
        found = placement.leaves(run, task, slow)
        assert placement.reserved == ({7} if found else set())
        return found

    assert [left(0.0, fast_s) for fast_s in (43.7, 43.75, 44.0)] == [True, False, False]
    assert [left(20.0, fast_s) for fast_s in (53.7, 53.75)] == [True, False]
    unknown = Placement(bench((fast, 43.7)))  # the slow machine asks for the first time
    assert unknown.leaves(run, task, slow)
    assert not Placement(bench((fast, 43.75))).leaves(run, task, slow)
    assert not Placement(bench((fast, 0.0))).leaves(run, task, waiter(1, flops=0.0))


def test_a_machine_that_was_given_a_task_is_busy_for_that_much_longer() -> None:
    run, task, slow, fast = games(), learn(), waiter(1, flops=SLOW), waiter(2, flops=FAST)
    placement = Placement(bench((slow, 0.0), (fast, 37.6)))
    assert placement.leaves(run, task, slow)
    placement.note(run, task.price_micro, fast)
    assert not placement.leaves(run, task, slow)  # 37.6 and twice 6.25 are 50.1
    placement.note(run, task.price_micro, waiter(3, flops=SLOW))  # nobody that was seen
    placement.note(run, task.price_micro, slow)
    assert placement.leaves(run, task, slow)


def test_nobody_is_waited_for_longer_than_the_task_takes_here() -> None:
    slow, fast = waiter(1, flops=SLOW), waiter(2, flops=FAST)
    tired = bench((slow, 0.0), (fast, 0.0), left_s=100.0)
    assert ask([slow], [games()], [learn()], bench=tired).assignments[0].task_id == 7
    huge = bench((slow, 0.0), (fast, 0.0), left_s=PATIENCE_S)
    assert ask([slow], [games()], [learn(work_s=1e6)], bench=huge).assignments[0].task_id == 7


def test_only_who_would_take_it_is_waited_for() -> None:
    slow = waiter(1, flops=SLOW)
    others = [
        waiter(2, flops=FAST, kinds=frozenset({"selfplay", "evaluate"})),
        waiter(2, flops=FAST, runs=frozenset({"another"})),
        waiter(2, flops=FAST, workloads=frozenset({"dcgan"})),
        waiter(2, flops=0.0),
    ]
    for other in others:
        beside = bench((slow, 0.0), (other, 0.0))
        assert ask([slow], [games()], [learn()], bench=beside).assignments[0].task_id == 7
    failed = learn(failed_by={"worker-2"})
    beside = bench((slow, 0.0), (waiter(2, flops=FAST), 0.0))
    assert ask([slow], [games()], [failed], bench=beside).assignments[0].task_id == 7


def test_a_machine_that_only_learns_is_told_what_it_waits_for() -> None:
    only = frozenset({"learn"})
    slow, fast = waiter(1, flops=SLOW, kinds=only), waiter(2, flops=FAST)
    left = ask([slow], [games()], [learn()], bench=bench((slow, 0.0), (fast, 0.0))).refusals[0]
    assert left.reason == Reason.ALL_TAKEN
    assert "faster machine" in left.message
    none = ask([slow], [games()]).refusals[0]
    assert 'kind "learn"' in none.message


def test_a_fast_machine_takes_one_and_the_slow_one_the_other_when_that_is_sooner() -> None:
    slow, fast = waiter(1, flops=SLOW), waiter(2, flops=1.5 * SLOW)
    back = [learn(7), learn(8)]
    outcome = ask([fast, slow], [games()], back, bench=bench((slow, 0.0), (fast, 0.0)))
    assert {a.waiter: a.task_id for a in outcome.assignments} == {0: 7, 1: 8}


def test_who_asked_no_more_is_forgotten() -> None:
    known = Machines()
    slow, fast = waiter(1, flops=SLOW), waiter(2, flops=FAST)
    known.note_asking([slow, fast], [], 100.0)
    known.note_assigned(games(), 16 * 5 * 100, fast)  # ten seconds of work at its speed
    peers = {p.waiter.worker_id: p.free_s for p in known.bench([learn()], 104.0).peers}
    assert peers == {"worker-1": 0.0, "worker-2": 6.0}
    later = known.bench([learn()], 100.0 + PRESENT_S + 5.0).peers
    assert [p.waiter.worker_id for p in later] == ["worker-2"]
    assert not known.bench([learn()], 200.0).peers
    known.note_asking([fast], [], 200.0)  # it is done sooner than was thought
    assert known.bench([learn()], 201.0).peers[0].free_s == 0.0
    assert known.bench([], 201.0) == DeviceBench()  # nothing waits: nobody is looked at


def test_a_device_that_still_works_is_busy_for_as_long_as_was_thought() -> None:
    known, fast = Machines(), waiter(2, flops=FAST)
    known.note_asking([fast], [], 100.0)
    known.note_assigned(games(), 16 * 5 * 100, fast)  # ten seconds of work at its speed
    known.note_assigned(games(), 16 * 5 * 100, waiter(3, flops=FAST))  # one that never asked
    known.note_asking([fast], [("worker-2", "cpu")], 104.0)
    assert [p.free_s for p in known.bench([learn()], 104.0).peers] == [6.0]
    known.note_asking([fast], [("worker-2", "cuda:0")], 104.0)
    assert [p.free_s for p in known.bench([learn()], 104.0).peers] == [0.0]
    new = waiter(4, flops=FAST)
    known.note_asking([new], [("worker-4", "cpu")], 104.0)  # of which nothing is known
    assert [p.free_s for p in known.bench([learn()], 104.0).peers] == [0.0, 0.0]


def test_a_device_is_there_until_it_should_have_asked_again() -> None:
    known = Machines()
    known.note_asking([waiter(1, flops=SLOW)], [], 100.0)
    assert len(known.bench([learn()], 100.0 + PRESENT_S).peers) == 1
    assert not known.bench([learn()], 100.1 + PRESENT_S).peers


def test_the_devices_that_asked_longest_ago_are_forgotten() -> None:
    known = Machines()
    known.note_asking([waiter(n, flops=SLOW) for n in range(MACHINES_MAX)], [], 100.0)
    assert len(known.bench([learn()], 100.0).peers) == MACHINES_MAX
    known.note_asking([waiter(0, flops=SLOW), waiter(-1, flops=SLOW)], [], 100.0)
    found = {peer.waiter.worker_id for peer in known.bench([learn()], 100.0).peers}
    assert len(found) == MACHINES_MAX
    assert "worker-1" not in found
    assert {"worker-0", "worker--1", "worker-2"} <= found


def test_since_when_a_task_is_left_to_others_is_remembered_while_it_waits() -> None:
    known = Machines()
    known.note_reserved([7, 8], 100.0)
    known.note_reserved([7], 130.0)  # again: it counts from the first time
    assert known.bench([learn(7), learn(8), learn(9)], 150.0).reserved_s == {7: 50.0, 8: 50.0}
    assert known.bench([learn(8)], 160.0).reserved_s == {8: 60.0}
    assert known.bench([learn(7), learn(8)], 160.0).reserved_s == {8: 60.0}  # 7 had gone


speeds = st.floats(1e8, 1e11)


@given(
    flops=st.lists(speeds, min_size=1, max_size=6),
    free_s=st.lists(st.floats(0, 300), min_size=6, max_size=6),
    work_s=st.floats(1, 1000),
)
def test_a_task_ends_within_a_factor_of_the_soonest_and_never_stands_still(
    flops: list[float], free_s: list[float], work_s: float
) -> None:
    """Machines ask whenever they are free: one of them takes the task, and ends it at most so many
    times later than the best of them could.
    """
    run, task = games(), learn(work_s=work_s)
    peers = [
        (free, waiter(n, flops=speed))
        for n, (speed, free) in enumerate(zip(flops, free_s, strict=False))
    ]
    best_s = min(free + task_s(run, task.price_micro, who.flops) for free, who in peers)
    left_at: float | None = None
    for now, who in sorted(peers, key=lambda peer: peer[0]):
        others = [(peer, max(0.0, free - now)) for free, peer in peers]
        left_s = 0.0 if left_at is None else now - left_at
        found = ask([who], [run], [task], bench=bench(*others, left_s=left_s))
        if found.assignments[0].task_id == task.id:
            end_s = now + task_s(run, task.price_micro, who.flops)
            assert end_s <= WORTH_WAITING * best_s + 1e-6
            return
        left_at = now if left_at is None else left_at
    raise AssertionError("nobody took the task")
