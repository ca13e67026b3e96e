"""Passes over data that members keep, through random histories, on both databases.

Whatever members declare, withdraw, give back or lose: a position of a machine's pass is leased to
that machine alone, in one task, and never again once the machine has declared other data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import Connection, select, update
from typing_extensions import override

from coordinator.accounts.accounts import Principal
from coordinator.database import invariants, tasks
from coordinator.database.engine.open_database import Database
from coordinator.database.members import member_rows
from coordinator.database.members.member_rows import MemberRow
from coordinator.database.tables.runs import runs as runs_table
from coordinator.database.tables.tasks import tasks as tasks_table
from coordinator.database.tasks import TaskRow
from coordinator.rules.run_file import TaskSettings
from coordinator.scheduling.member_data import MemberDeclarations
from coordinator.signals import Signals
from shared.protocol.base import Reason
from shared.protocol.leases import ReleaseRequest
from shared.protocol.limits import RENEW_S
from shared.protocol.members import MemberData
from tests.support.examples import try_on_database
from tests.support.run_rows import add_run, add_worker, claim, queue_of
from tests.support.virtual_clock import VirtualClock

T = TypeVar("T")

SETTINGS = TaskSettings(local_steps=2, batch_size=2, in_flight=2, max_failures=2, max_timeouts=3)
MODEL = {"vocab_size": 300, "block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8}
WORKERS, WHICH = st.integers(0, 3), st.integers(0, 11)
_names = count(1)


class MemberMachine(RuleBasedStateMachine):
    """Random histories of four machines of three members."""

    def __init__(self, runner: asyncio.Runner, db: Database) -> None:
        super().__init__()
        self.runner, self.db = runner, db

    def run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self.runner.run(wait())

    def write(self, fn: Callable[[Connection], T]) -> T:
        return self.run(self.db.write(fn))

    @initialize()
    def begin(self) -> None:
        self.clock, self.signals = VirtualClock(), Signals()
        self.queue = queue_of(self.db, self.clock)
        self.data = MemberDeclarations(self.db, self.clock, self.signals)
        self.run(self.clock.advance(RENEW_S))
        self.name = f"members-{next(_names)}"
        self.run_id, self.workers = self.write(self._people)

    def _people(self, conn: Connection) -> tuple[int, list[Principal]]:
        settings = {name: getattr(SETTINGS, name) for name in ("local_steps", "batch_size")}
        settings |= {"max_failures": 2, "max_timeouts": 3}
        run = add_run(conn, self.name, task=settings, model=MODEL, data={"at": "members"})
        first = add_worker(conn)
        others = [add_worker(conn, first.volunteer_id), add_worker(conn), add_worker(conn)]
        return run, [first, *others]

    def rows(self, *states: str) -> list[TaskRow]:
        query = select(tasks_table).where(tasks_table.c.run_id == self.run_id)
        query = query.where(tasks_table.c.state.in_(states)) if states else query
        return self.run(
            self.db.read(lambda conn: tasks.rows_of(conn.execute(query.order_by(tasks_table.c.id))))
        )

    def kept(self, who: Principal) -> MemberRow | None:
        row = self.run(
            self.db.read(lambda conn: member_rows.row_of(conn, self.run_id, who.worker_id))
        )
        return None if row is None or row.declared_at is None else row

    def pick(self, which: int, *states: str) -> TaskRow | None:
        rows = self.rows(*states)
        return rows[which % len(rows)] if rows else None

    # --- what members do ---

    @rule(worker=WORKERS, samples=st.sampled_from([1, 5, 23]), edition=st.sampled_from("ab"))
    def declare(self, worker: int, samples: int, edition: str) -> None:
        who = self.workers[worker]
        before = self.kept(who)
        numbers = MemberData(samples=samples, items=8 * samples, heldout=1, edition=edition)
        self.run(self.data.declare(who, self.name, numbers))
        after = self.kept(who)
        assert after is not None
        same = before is not None and (before.edition, before.samples) == (edition, samples)
        assert (before is not None and after.first_pass == before.first_pass) == same

    @rule(worker=WORKERS)
    def withdraw(self, worker: int) -> None:
        self.run(self.data.withdraw(self.workers[worker], self.name))

    @rule(worker=WORKERS)
    def claim_one(self, worker: int) -> None:
        who = self.workers[worker]
        row = self.kept(who)
        reply = self.run(claim(self.queue, who, runs=(self.name,)))
        if reply.lease is None:
            assert reply.idle is not None
            if row is None:
                assert reply.idle.reason == Reason.NO_FIT
                assert f"volunteer data add {self.name} PATH" in reply.idle.message
            else:
                assert reply.idle.reason == Reason.IN_FLIGHT
            return
        assert row is not None
        lease = reply.lease
        task = next(task for task in self.rows("doing") if task.id == lease.task)
        assert lease.member
        assert lease.chunks == ()
        assert task.home == task.worker_id == who.worker_id
        assert task.pass_no >= row.first_pass
        assert 0 <= lease.job.start < lease.job.stop <= row.samples

    @rule(which=WHICH, failed=st.booleans())
    def release(self, which: int, failed: bool) -> None:
        task = self.pick(which, "doing")
        if task is None:
            return
        who = next(who for who in self.workers if who.worker_id == task.worker_id)
        request = ReleaseRequest(attempt=task.attempt, failed=failed)
        self.run(self.queue.release(who, task.id, request))

    @rule(which=WHICH)
    def hand_in(self, which: int) -> None:
        task = self.pick(which, "doing")
        if task is not None:
            updates = {task.id: task.id}
            self.write(partial(tasks.accept_all, updates=updates, now=self.clock.now()))

    @rule(which=WHICH)
    def merge(self, which: int) -> None:
        task = self.pick(which, "accepted")
        if task is not None:
            self.write(lambda conn: tasks.finish_merged(conn, [task.id]))

    # --- what happens to them ---

    @rule(which=WHICH)
    def an_update_is_not_merged(self, which: int) -> None:
        task = self.pick(which, "accepted")
        if task is not None:
            self.write(lambda conn: tasks.return_all(conn, [task.id]))

    @rule(seconds=st.sampled_from([1, 95, 86_400]))
    def time_passes(self, seconds: int) -> None:
        self.run(self.clock.advance(seconds))
        self.run(self.queue.expire())

    @rule()
    def the_run_ends_and_is_extended(self) -> None:
        def end(conn: Connection) -> None:
            tasks.cancel_run(conn, self.run_id, self.clock.now())
            tasks.reopen_run(conn, self.run_id)

        self.write(end)

    @rule()
    def the_coordinator_restarts(self) -> None:
        self.queue = queue_of(self.db, self.clock)

    # --- what must hold ---

    @invariant()
    def every_position_is_in_one_task_of_its_own_machine(self) -> None:
        ends: dict[tuple[str, int], int] = {}
        for task in sorted(self.rows(), key=lambda task: (task.home, task.pass_no, task.start)):
            assert task.home in {who.worker_id for who in self.workers}
            assert task.worker_id in (task.home, None)
            assert task.start == ends.get((task.home, task.pass_no), 0)
            ends[task.home, task.pass_no] = task.stop
        for who in self.workers:
            row = self.kept(who)
            if row is not None:
                assert ends.get((who.worker_id, row.pass_no), 0) == row.cursor <= row.samples
                for pass_no in range(row.first_pass, row.pass_no):
                    assert ends[who.worker_id, pass_no] == row.samples

    @override
    def teardown(self) -> None:
        if not hasattr(self, "run_id"):
            return
        found = self.run(self.db.read(invariants.breaches))
        assert [line for line in found if "pass" in line or "data of" in line] == []
        self.write(self._end)

    def _end(self, conn: Connection) -> None:
        conn.execute(update(runs_table).values(state="completed"))
        tasks.cancel_run(conn, self.run_id, self.clock.now())


def test_a_position_is_leased_once_a_pass_and_to_its_own_machine_alone(database_url: str) -> None:
    try_on_database(database_url, MemberMachine)
