"""The queue beside a small pure model of it, through random histories, on both databases.

The model knows every task, who holds it, and what the next claim must give. After each step the
database must say the same; at the end everything is worked off, and every sample of every pass must
have ended in exactly one task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, select, update
from typing_extensions import override

from coordinator.accounts.accounts import Principal
from coordinator.database import tasks
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.runs import runs as runs_table
from coordinator.database.tables.tasks import tasks as tasks_table
from coordinator.scheduling.task_list import TaskList
from coordinator.signals import Signals
from shared.errors import Gone
from shared.protocol.heartbeat import HeartbeatRequest, TaskBeat
from shared.protocol.leases import Lease, ReleaseRequest
from shared.protocol.limits import RENEW_S
from tests.support.queue_model import SETTINGS, TOTAL, Model, Task
from tests.support.run_rows import add_run, add_worker, claim, queue_of
from tests.support.virtual_clock import VirtualClock

T = TypeVar("T")

_names = count(1)


class World:
    """A database of the kind under test, kept for all histories, and the loop it lives in."""

    def __init__(self, url: str) -> None:
        self.runner = asyncio.Runner()
        self.db = self.run(Database.open(url))

    def run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self.runner.run(wait())

    def write(self, fn: Callable[[Connection], T]) -> T:
        return self.run(self.db.write(fn))

    def close(self) -> None:
        self.run(self.db.close())
        self.runner.close()


WORKERS = st.integers(0, 2)

WHICH = st.integers(0, 11)


class QueueMachine(RuleBasedStateMachine):
    """Random histories of three workers of two volunteers."""

    world: World  # set by the test

    @initialize()
    def begin(self) -> None:
        self.clock = VirtualClock()
        self.queue = queue_of(self.world.db, self.clock)
        self.world.run(self.clock.advance(RENEW_S))  # past the grace after a start
        self.name = f"run-{next(_names)}"
        self.run_id, self.workers = self.world.write(self._people)
        owners = {who.worker_id: who.volunteer_id for who in self.workers}
        self.model = Model(self.clock.now() - RENEW_S, owners)

    def _people(self, conn: Connection) -> tuple[int, list[Principal]]:
        task = {
            "local_steps": SETTINGS.local_steps,
            "batch_size": SETTINGS.batch_size,
            "max_failures": SETTINGS.max_failures,
            "max_timeouts": SETTINGS.max_timeouts,
        }
        run = add_run(conn, self.name, counts=(10, TOTAL - 10), task=task)
        first = add_worker(conn)
        return run, [first, add_worker(conn, first.volunteer_id), add_worker(conn)]

    def lease(self, who: Principal) -> Lease | None:
        return self.world.run(claim(self.queue, who, runs=(self.name,))).lease

    def pick(self, which: int, *states: str) -> int | None:
        found = sorted(self.model.some(*states))
        return found[which % len(found)] if found else None

    def holder(self, number: int) -> Principal:
        worker = self.model.tasks[number].worker
        return next(who for who in self.workers if who.worker_id == worker)

    # --- what workers do ---

    @rule(worker=WORKERS)
    def claim_one(self, worker: int) -> None:
        who = self.workers[worker]
        expected = self.model.next_for(who.worker_id, self.clock.now())
        lease = self.lease(who)
        if lease is None:
            assert expected is None
            return
        place = (self.model.pass_of(lease), lease.job.start, lease.job.stop)
        assert expected == (lease.task if lease.task in self.model.tasks else place)
        self.model.give(lease, who.worker_id, self.clock.now())
        assert lease.attempt == self.model.tasks[lease.task].attempt

    @rule()
    def claim_all_at_once(self) -> None:
        async def everyone() -> list[Lease | None]:
            asked = (claim(self.queue, who, runs=(self.name,)) for who in self.workers)
            return [reply.lease for reply in await asyncio.gather(*asked)]

        leases = self.world.run(everyone())
        got = [(who, lease) for who, lease in zip(self.workers, leases, strict=True) if lease]
        assert len({lease.task for _, lease in got}) == len(got)
        for who, lease in sorted(got, key=lambda pair: pair[1].task):
            task = self.model.tasks.get(lease.task)
            assert task is None or task.state == "todo"
            self.model.give(lease, who.worker_id, self.clock.now())

    @rule(which=WHICH)
    def begin_work(self, which: int) -> None:
        number = self.pick(which, "doing")
        if number is None:
            return
        task = self.model.tasks[number]
        begun = self.world.run(self.queue.begin(self.holder(number), number, task.attempt))
        assert begun.version == 0
        task.finish_by = begun.finish_by

    @rule()
    def hand_in_everything(self) -> None:
        for number, task in self.model.some("doing").items():
            self.world.write(partial(tasks.accept_all, updates=_own(number), now=self.clock.now()))
            task.state = "accepted"

    @rule(which=WHICH)
    def merge(self, which: int) -> None:
        number = self.pick(which, "accepted")
        if number is not None:
            self.world.write(lambda conn: tasks.finish_merged(conn, [number]))
            self.model.tasks[number].state = "done"

    @rule(which=WHICH)
    def where_update_is_not_merged(self, which: int) -> None:
        number = self.pick(which, "accepted")
        if number is not None:
            self.world.write(lambda conn: tasks.return_all(conn, [number]))
            self.model.tasks[number].state = "todo"

    @rule(which=WHICH)
    def hand_in(self, which: int) -> None:
        """Accepted: also when it comes late and nobody else has claimed it."""
        late = [n for n, t in self.model.some("todo").items() if t.returned]
        found = sorted([*self.model.some("doing"), *late])
        if not found:
            return
        number = found[which % len(found)]
        task = self.model.tasks[number]

        def accept(conn: Connection) -> None:
            tasks.may_submit(tasks.holder(conn, number), task.worker, task.attempt)
            tasks.accept_all(conn, _own(number), self.clock.now())

        self.world.write(accept)
        task.state, task.returned = "accepted", False

    @rule(which=WHICH, failed=st.booleans())
    def release(self, which: int, failed: bool) -> None:
        number = self.pick(which, "doing")
        if number is None:
            return
        request = ReleaseRequest(attempt=self.model.tasks[number].attempt, failed=failed)
        who = self.holder(number)
        self.world.run(self.queue.release(who, number, request))
        self.model.back(number, failed, self.clock.now())
        if failed:
            self.model.rest(who.worker_id, self.clock.now())

    @rule(which=WHICH)
    def somebody_who_lost_it_hands_in(self, which: int) -> None:
        number = self.pick(which, "doing", "accepted", "done", "discarded")
        if number is None or self.model.tasks[number].attempt < 2:
            return
        task = self.model.tasks[number]
        row = self.world.run(
            self.world.db.read(lambda conn: tasks.holder(conn, number, for_update=False))
        )
        with pytest.raises(Gone):
            tasks.may_submit(row, task.worker, task.attempt - 1)

    @rule(worker=WORKERS)
    def beat(self, worker: int) -> None:
        who = self.workers[worker]
        held = self.model.held(who.worker_id)
        beats = tuple(TaskBeat(task=n, attempt=self.model.tasks[n].attempt) for n in held)
        orders = self.world.run(self.queue.renewals.beat(who, HeartbeatRequest(tasks=beats)))
        assert {order.order for order in orders} <= {"continue"}
        self.world.run(self.queue.renewals.flush())
        for number in held:
            self.model.tasks[number].renew_by = self.clock.now() + RENEW_S

    # --- what happens to them ---

    @rule(seconds=st.sampled_from([1, 60, 95, 700]))
    def time_passes(self, seconds: int) -> None:
        self.world.run(self.clock.advance(seconds))
        assert self.world.run(self.queue.expire()) == self.model.expire(self.clock.now())

    @rule()
    def the_coordinator_restarts(self) -> None:
        self.queue = queue_of(self.world.db, self.clock)
        self.model.started_at = self.clock.now()
        # The database knows until when a worker rests, not how often it failed.
        self.model.rests = {who: (0, until) for who, (_, until) in self.model.rests.items()}

    @rule(which=WHICH)
    def a_merge_sets_aside(self, which: int) -> None:
        number = self.pick(which, "accepted")
        if number is not None:
            self.world.write(lambda conn: tasks.return_all(conn, [number]))
            self._verdict(number, "failure")
            self.model.back(number, failed=True, now=self.clock.now())

    @rule(which=WHICH)
    def it_was_stale(self, which: int) -> None:
        number = self.pick(which, "doing")
        if number is not None:
            self._verdict(number, None)
            self.model.back(number, failed=False, now=self.clock.now())

    def _verdict(self, number: int, kind: tasks.FailureKind | None) -> None:
        worker = self.model.tasks[number].worker
        now = self.clock.now()
        self.world.write(
            lambda conn: tasks.put_back(
                conn, number, worker_id=worker, kind=kind, message="", now=now, settings=SETTINGS
            )
        )

    @rule()
    def requeue(self) -> None:
        task_list = TaskList(self.world.db, self.clock, Signals(self.clock))
        back = self.world.run(task_list.requeue(self.name))
        assert sorted(back) == sorted(self.model.some("discarded"))
        for number in back:
            task = self.model.tasks[number]
            task.state, task.failures, task.timeouts = "todo", 0, 0
            task.failed_by, task.timed_out_by = set(), set()

    # --- what must hold ---

    @invariant()
    def the_database_says_the_same(self) -> None:
        query = select(tasks_table).where(tasks_table.c.run_id == self.run_id)
        rows = self.world.run(
            self.world.db.read(
                lambda conn: [tasks.row_of(r) for r in conn.execute(query).mappings()]
            )
        )
        found = {
            row.id: Task(
                row.pass_no,
                row.start,
                row.stop,
                row.state,
                row.attempt,
                row.worker_id or "",
                row.returned,
                row.failures,
                row.timeouts,
            ).shown()
            for row in rows
        }
        assert found == {number: task.shown() for number, task in self.model.tasks.items()}

    @invariant()
    def every_cut_sample_is_in_one_task(self) -> None:
        for pass_no in range(1, self.model.pass_no + 1):
            whole = TOTAL if pass_no < self.model.pass_no else self.model.cursor
            assert self._covered(pass_no) == list(range(whole))

    def _covered(self, pass_no: int) -> list[int]:
        ranges = sorted(
            (t.start, t.stop) for t in self.model.tasks.values() if t.pass_no == pass_no
        )
        return [sample for start, stop in ranges for sample in range(start, stop)]

    @override
    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        try:
            self._work_everything_off()
        finally:
            self.world.write(self._end)

    def _work_everything_off(self) -> None:
        """The pass ends, and each of its samples has ended in exactly one task."""
        last = self.model.pass_no
        fresh = self.world.write(add_worker)
        self.workers.append(fresh)
        self.model.owners[fresh.worker_id] = fresh.volunteer_id
        while self.model.pass_no == last:
            self.hand_in_everything()
            for number in list(self.model.some("accepted")):
                self.world.write(partial(tasks.finish_merged, contribution_ids=[number]))
                self.model.tasks[number].state = "done"
            lease = self.lease(fresh)
            assert lease is not None
            self.model.give(lease, fresh.worker_id, self.clock.now())
        ended = [t for t in self.model.tasks.values() if t.pass_no <= last]
        assert {task.state for task in ended} <= {"done", "discarded"}
        assert self._covered(last) == list(range(TOTAL))
        self.the_database_says_the_same()

    def _end(self, conn: Connection) -> None:
        conn.execute(update(runs_table).values(state="completed"))
        tasks.cancel_run(conn, self.run_id, self.clock.now())


def _own(number: int) -> dict[int, int]:
    """Return the contribution of a task, which has its number."""
    return {number: number}


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    world = World(database_url)
    yield world
    world.close()


def test_the_queue_does_what_the_model_says(world: World, database_url: str) -> None:
    run_state_machine_as_test(
        type("WorldlyQueueMachine", (QueueMachine,), {"world": world}),
        settings=settings(
            max_examples=20 if database_url.startswith("sqlite") else 10,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
