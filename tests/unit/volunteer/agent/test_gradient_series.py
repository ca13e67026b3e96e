"""Leases in parts, as numbers: where parts begin and end, what they earn and how often they pull."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.rules.task_size import first_part, parts_of
from tests.support.local_coordinator import RUN
from tests.support.local_volunteer import local_machine
from tests.support.workloads.tiny_gpt import job
from volunteer.agent.lease_parts import part_of


@given(st.integers(1, 400), st.integers(1, 10**9), st.integers(0, 50))
@example(1, 1, 1)
@example(6, 7, 3)
@example(7, 10**9, 3)
@example(7, 5, 8)
def test_what_a_lease_earns_is_what_its_parts_earn(steps: int, price: int, every: int) -> None:
    left, money, parts = steps, price, []
    while left:
        part, pay = first_part(left, money, every)
        assert 0 < part <= left
        assert abs(pay - price * part / steps) < 8  # by steps, to a few micro-credits
        parts.append((part, pay))
        left, money = left - part, money - pay
    assert len(parts) == parts_of(steps, every)
    assert sum(part for part, _ in parts) == steps
    assert sum(pay for _, pay in parts) == price


@given(st.integers(1, 60), st.integers(1, 9), st.lists(st.integers(1, 59), max_size=6))
@example(1, 1, [])
@example(3, 9, [1, 2])
@example(3, 1, [2])
def test_parts_cover_a_job_once(steps: int, short: int, cuts: list[int]) -> None:
    whole = job({}, steps=steps, batch=9, start=90, stop=90 + (steps - 1) * 9 + short)
    points = sorted({0, steps, *(cut for cut in cuts if cut < steps)})
    found = [part_of(whole, *pair) for pair in itertools.pairwise(points)]
    assert [found[0].start, *(each.stop for each in found)] == [
        *(each.start for each in found),
        whole.stop,
    ]
    assert sum(each.steps for each in found) == steps
    assert len({each.seed for each in found}) == len(found)  # no snapshot fits another part
    assert found[0].seed == whole.seed


async def test_a_lease_asks_for_newer_weights_every_so_many_steps_and_no_oftener(
    tmp_path: Path,
) -> None:
    """Each pull costs the volunteer a version over its line."""
    plan = 'preset = "async-sgd"\ngradient_every = 1\npull_every = 3'
    run = RUN.replace("local_steps = 2", "local_steps = 12")
    run = run.replace('preset = "fedavg"\nquorum = 2', plan)
    async with local_machine(tmp_path, run) as machine, machine.working(max_tasks=1) as process:
        assert await process.ended() == 0
        submissions = [path for path in process.network.seen if path.endswith("/submit")]
        asked = [path for path in process.network.seen if path.endswith("/begin")]
        assert (len(submissions), len(asked)) == (12, 4)  # before the steps 0, 3, 6 and 9
