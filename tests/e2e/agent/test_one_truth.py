"""Credits and verdicts come together: whoever follows the events never sees the one without the
other.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from shared.protocol import endpoints
from tests.support.local_coordinator import RUN
from tests.support.local_volunteer import local_machine
from volunteer.control import commands, events
from volunteer.control.status import Status, fold

PAID = ("accepted", "merged", "superseded")


async def test_credits_equal_the_sum_of_the_verdicts_after_every_event(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=4) as process:
        assert await process.ended(60) == 0
        status, decided = Status(), 0
        for event in process.told:
            status = fold(status, event)
            if status.me is None or not isinstance(event, events.Credits | events.Judged):
                continue
            paid = sum(v.credits_micro for v in status.verdicts if v.state in PAID)
            assert status.me.earned_micro + status.me.pending_micro == paid
            assert status.me.merged == sum(v.state == "merged" for v in status.verdicts)
            assert status.me.accepted == sum(v.state in PAID for v in status.verdicts)
            decided = max(decided, len(status.verdicts))
        assert decided == 4


async def test_a_page_that_asks_for_runs_sets_the_card_of_the_run_right(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=1) as process:
        await process.until(events.RunsListed)
        known = len(process.all(events.RunsListed))
        runs = await process.control.query(endpoints.RUNS)
        assert process.control.status.runs == runs
        async with process.eventually():
            while len(process.all(events.RunsListed)) == known:
                await process.tick()


async def test_a_page_of_credits_has_the_account_of_now(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        machine.speed = 1.0  # the next heartbeat would be half a minute away
        async with machine.working() as process:
            await process.until(events.Started)
            async with process.heartbeat():
                await process.control.do(commands.Pause())
            async with process.heartbeat():
                await process.control.query(endpoints.LEDGER)


async def test_what_was_decided_between_two_processes_is_said_before_the_devices_are_known(
    tmp_path: Path,
) -> None:
    known = threading.Event()  # of a machine whose torch takes its time

    async with local_machine(tmp_path, RUN) as machine:
        bob = await machine.home.join("Bob")
        lease = await bob.claim()
        async with machine.working(max_tasks=1) as process:
            assert await process.ended(60) == 0
            assert process.all(events.Judged)[-1].verdict.state == "accepted"
        await bob.hand_in(lease, await bob.begin(lease))
        async with process.eventually():
            while (await machine.home.coordinator.runs.queries.info("tiny")).version == 0:
                await asyncio.sleep(0.01)
        await machine.home.clock.advance(5.0)  # over what the server keeps of its newest verdict
        machine.detect = lambda: machine.devices if known.wait(60) else ()
        try:
            async with machine.working() as process:
                merged = await process.until(
                    events.Judged, lambda event: event.verdict.state == "merged"
                )
                assert merged.verdict.version == 1
        finally:
            known.set()
