"""Leases in parts, as numbers: where parts begin and end, what they earn and how often they pull."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from sqlalchemy import select

from coordinator.database.tables.contributions import contributions
from coordinator.rules.task_size import first_part, parts_of
from shared.protocol.contributions import Verdict
from tests.support.local_coordinator import RUN, decode
from tests.support.local_volunteer import local_machine
from tests.support.workloads.tiny_gpt import job
from volunteer.agent.lease_parts import part_of
from volunteer.control import commands, events


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


async def test_the_part_after_one_that_is_computed_again_is_a_first_try(tmp_path: Path) -> None:
    plan = 'preset = "sync-sgd"\nquorum = 1'
    run = RUN.replace("local_steps = 2", "local_steps = 3")
    run = run.replace('preset = "fedavg"\nquorum = 2', plan)
    async with local_machine(tmp_path, run) as machine, machine.working(max_tasks=1) as process:
        process.network.refuse("/submit")
        await process.until(events.Connection, lambda event: event.queued == 1)
        bob = await machine.home.join("Bob")
        lease = await bob.claim()
        begun, data = await bob.begin(lease), await bob.update("tiny")
        await bob.upload(lease, data)
        submission = bob.submission(lease, begun, data)
        first = replace(submission, steps=1, samples=lease.job.batch_size)
        verdict = decode(await bob.post(f"/tasks/{lease.task}/submit", first), Verdict)
        assert verdict.state in ("accepted", "merged")
        async with process.eventually():
            while (await machine.home.coordinator.runs.queries.info("tiny")).version < 1:
                await asyncio.sleep(0.02)
        process.network.heal()
        await process.control.do(commands.Retry())
        assert await process.ended() == 0
        c = contributions.c
        own = select(c.part, c.tries).where(c.task_id != lease.task).order_by(c.id)
        rows = await machine.home.coordinator.db.read(lambda conn: conn.execute(own).all())
        tries = {part: [row.tries for row in rows if row.part == part] for part, _ in rows}
        assert sorted(tries) == [0, 1, 2]
        assert tries[0] == [0, 1]
        assert all(numbers == list(range(len(numbers))) for numbers in tries.values())
