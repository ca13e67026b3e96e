"""Coordinators killed at random moments while they do tasks again and have them audited: real
volunteers, real sockets. No check is lost, stuck or blamed on who is honest, and who lies is found.

    CHAOS_KILLS=1000 CHAOS_MINUTES=10 make test-slow PYTEST_ARGS='-k chaos_of_checks -s'

kills so often, or as often as the minutes allow, and tells how often that was.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import ColumnElement, Connection, Row, Select, func, select, true, update

from coordinator.database import volunteers
from coordinator.database.recomputes import waiting
from coordinator.database.tables.accounts import volunteers as accounts
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.trust import recomputes
from coordinator.http.app import Coordinator
from coordinator.rules.draws import RECOMPUTE_FLOPS_MAX
from tests.e2e.conftest import ServedCoordinator
from tests.e2e.server.test_recomputes import lazy, run_file
from tests.support.load_clients import GOOD
from tests.support.local_volunteer import Process
from tests.support.served_machine import Balanced, ServedMachine
from volunteer.control import events

KILLS = int(os.environ.get("CHAOS_KILLS", "6"))
KILLING_S = 60.0 * float(os.environ.get("CHAOS_MINUTES", "inf"))
HONEST, LIAR = ("Ann", "Bob", "Cleo"), "Eve"
CHECKED_EACH = 10  # kills after which a check is waited for, which takes a process of its own
PATIENCE_S = 300.0
CHECKS = "recompute = 0.3\n[evaluation]\nevery = 0"
RUN = run_file().replace("recompute = 1.0", CHECKS)
SHARDED = RUN.replace("quorum = 1", "quorum = 2\nshards = 2")


class Crew:
    """Volunteers at work, and what their coordinators' database says of them."""

    def __init__(self, house: Coordinator) -> None:
        self.house = house
        self.processes: dict[str, Process] = {}

    async def vouched(self) -> None:
        """Let the honest be known, and have worked long, so that they may audit."""
        for name in HONEST:
            await self.house.volunteers.vouch(name)
        many = update(accounts).values(accepted=10**9, accepted_micro=10**9)
        await self.house.db.write(lambda conn: conn.execute(many))

    def judged(self) -> int:
        return sum(len(process.all(events.Judged)) for process in self.processes.values())

    async def more(self) -> None:
        """Wait for one more verdict."""
        until = self.judged() + 1
        async with asyncio.timeout(PATIENCE_S):
            while self.judged() < until:
                await asyncio.sleep(0.01)

    async def checked(self, more: int = 1) -> None:
        """Wait until so many more checks have a result."""
        done = select(func.count()).where(recomputes.c.state == "done")
        await self._grown(done, more)

    async def audited(self) -> None:
        """Wait for one more answer to an audit."""
        await self._grown(select(func.count()).where(recomputes.c.answer_id.is_not(None)), 1)

    async def _grown(self, query: Select[int], more: int) -> None:
        def count(conn: Connection) -> int:
            return int(conn.execute(query).scalar_one())

        until = await self.house.db.read(count) + more
        async with asyncio.timeout(PATIENCE_S):
            while await self.house.db.read(count) < until:
                await self.hurry()
                await asyncio.sleep(0.05)

    async def hurry(self) -> None:
        """Leave every second recompute to volunteers, too."""
        large = recomputes.c.contribution_id % 2 == 0
        await self._weigh(large, 2 * RECOMPUTE_FLOPS_MAX)

    async def _weigh(self, which: ColumnElement[bool], flops: float) -> None:
        query = update(recomputes).where(which, recomputes.c.state != "done").values(flops=flops)
        await self.house.db.write(lambda conn: conn.execute(query))

    async def ended(self) -> None:
        """Stop the run and wait until every check that was ordered has a result."""
        await self.house.runs.stop("tiny")
        until = time.monotonic() + PATIENCE_S
        while await self.house.db.read(waiting):
            await self._weigh(true(), 1.0)  # no volunteer is given any more
            assert time.monotonic() < until, await self.stuck()
            await asyncio.sleep(0.05)

    async def stuck(self) -> list[dict[str, Any]]:
        """Return the checks without a result, with their audits' tasks and accounts."""
        r = recomputes.c
        columns = (r.contribution_id, r.state, r.lease_until, r.owner, r.tries, accounts.c.nickname)
        query = (
            select(*columns, r.agrees, tasks.c.state.label("task"))
            .join(accounts, accounts.c.id == r.volunteer_id)
            .outerjoin(tasks, tasks.c.id == r.audit_id)
            .where(r.state != "done")
        )
        return await self.house.db.read(
            lambda conn: [dict(row) for row in conn.execute(query).mappings()]
        )


@asynccontextmanager
async def crew(path: Path, served: Sequence[ServedCoordinator]) -> AsyncIterator[Crew]:
    """Three honest volunteers and a liar before coordinators that are there already."""
    async with served[0].opened() as house, AsyncExitStack() as stack:
        found, fingerprint = Crew(house), house.server.link().fingerprint
        transport = Balanced([each.settings["port"] for each in served])
        stack.push_async_callback(transport.aclose)
        for name in (*HONEST, LIAR):
            machine = ServedMachine(path / name, transport, fingerprint)
            await machine.join(name)
            if name == HONEST[-1]:
                await found.vouched()
            load = lazy if name == LIAR else None
            found.processes[name] = await stack.enter_async_context(machine.working(load))
        yield found


async def rows_of(house: Coordinator) -> list[Row[Any]]:
    """Contributions with their tasks' kinds."""
    columns = (contributions, tasks.c.kind.label("task_kind"))
    query = select(*columns).join(tasks, tasks.c.id == contributions.c.task_id)
    return await house.db.read(lambda conn: list(conn.execute(query)))


async def wrong(house: Coordinator, told: dict[str, list[Any]]) -> list[str]:
    """Return what was lost, doubled, stuck, or blamed on who is honest."""
    rows = await rows_of(house)
    by_id = {row.id: row for row in rows}
    found = [f"contribution {row.id} hangs in checking" for row in rows if row.state == "checking"]
    twice = Counter((row.task_id, row.attempt, row.part, row.tries) for row in rows)
    found += [f"{key} was counted {many} times" for key, many in twice.items() if many > 1]
    for who in await house.volunteers.list():
        honest = who.nickname in HONEST
        for verdict in told[who.nickname]:
            row = by_id.get(verdict.contribution)
            if row is None or (verdict.state in GOOD) != (row.state in GOOD):
                found.append(f"{who.nickname} was told {verdict}, the database says {row}")
        mine = [row for row in rows if row.volunteer_id == who.volunteer_id and row.state in GOOD]
        late = {row.id for row in mine if row.task_kind == "audit" and row.state == "superseded"}
        worth = sum(row.price_micro for row in mine if row.id not in late)
        has = await house.ledger.balances(who.volunteer_id)
        paid = has.pending_micro + has.escrow_micro + has.earned_micro
        if paid != (worth if honest else 0):
            found.append(f"{who.nickname} has {has}, for work worth {worth}")
    found += await house.ledger.check()
    return found + list((await house.checks.run()).breaches)


async def blamed(house: Coordinator) -> list[str]:
    """Return the checks that went against who is honest, and honest accounts that lost standing."""
    people = {p.volunteer_id: p.nickname for p in await house.volunteers.list()}

    def read(conn: Connection) -> list[str]:
        against = recomputes.c.result.in_(("failed", "unproven"))
        columns = (recomputes.c.volunteer_id, recomputes.c.result, recomputes.c.message)
        found = [
            f"{people[who]}'s work {result}: {message}"
            for who, result, message in conn.execute(select(*columns).where(against))
            if people[who] in HONEST
        ]
        for who, name in people.items():
            standing = volunteers.existing(conn, who).standing
            if standing != ("vetted" if name in HONEST else "suspended"):
                found.append(f"{name} is {standing}")
        return found

    return await house.db.read(read)


async def done(house: Coordinator) -> dict[str, int]:
    """Return how many checks ended, by kind and result."""

    def read(conn: Connection) -> dict[str, int]:
        counts = Counter(
            f"recompute {result}" for result in conn.execute(select(recomputes.c.result)).scalars()
        )
        answered = select(recomputes.c.answer_id).where(recomputes.c.answer_id.is_not(None))
        counts["audits answered"] = len(conn.execute(answered).all())
        return dict(counts)

    return await house.db.read(read)


async def killed(at_work: Crew, served: Sequence[ServedCoordinator]) -> int:
    """Kill one coordinator after another at random moments of its work; how often."""
    moments, until = random.Random(22), time.monotonic() + KILLING_S
    for number in range(KILLS):
        if time.monotonic() > until:
            return number
        began, victim = time.monotonic(), served[moments.randrange(len(served))]
        await at_work.more()
        await at_work.hurry()
        if number % CHECKED_EACH == CHECKED_EACH - 1:
            await at_work.checked()
        slowness = min(5.0, time.monotonic() - began)
        await asyncio.sleep(moments.uniform(0.0, max(0.25, slowness / 4)))
        victim.child.kill()
        assert await victim.child.ended() == -signal.SIGKILL, victim.child.said()[-3000:]
        await victim.serve()
    return KILLS


async def survive(served: Sequence[ServedCoordinator], path: Path, text: str) -> None:
    """Kill coordinators of a run, and look at everything at the end."""
    for each in served:
        each.settings |= {"open": True, "proof_of_work_bits": 0}
    await served[0].start_run(text)
    for each in served:
        await each.serve()
        await each.listening()
    async with crew(path, served) as at_work:
        kills = await killed(at_work, served)
        await at_work.checked(2)  # and the checks go on
        await at_work.audited()
        await at_work.ended()
        told = {
            name: [event.verdict for event in process.all(events.Judged)]
            for name, process in at_work.processes.items()
        }
    for each in served:
        assert await each.stop() == 0
    async with served[0].opened() as house:
        assert await wrong(house, told) + await blamed(house) == []
        counts = await done(house)
        version = (await house.runs.queries.info("tiny")).version
    print(f"{kills} kills, version {version}, {counts}")
    assert version > 0
    assert counts["recompute passed"] > 0
    assert counts["recompute failed"] > 0
    assert counts["audits answered"] > 0
    where = served[0].settings
    words = ["check", "--data-dir", where["data_dir"], "--database", where["database"]]
    check = await served[0].fork_server.run(["coordinator", *words], served[0].log)
    assert await check.ended() == 0, check.said()[-2000:]


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(300 + 40 * KILLS)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # the other one: below
async def test_no_check_is_lost_when_the_coordinator_is_killed_at_random_moments(
    served: ServedCoordinator, tmp_path: Path
) -> None:
    await survive([served], tmp_path, RUN)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(300 + 40 * KILLS)
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_no_check_is_lost_when_replicas_of_a_run_in_shards_are_killed_in_turn(
    served: ServedCoordinator, twin: ServedCoordinator, tmp_path: Path
) -> None:
    await survive([served, twin], tmp_path, SHARDED)
