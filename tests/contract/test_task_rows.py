"""Rows of tasks: what each change writes, column by column, and the rows that it must not touch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import pytest
from sqlalchemy import Connection, insert, select

from coordinator.database import lease_grants, tasks
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.database.tables.tasks import failures as failures_table
from coordinator.database.tables.tasks import tasks as tasks_table
from coordinator.database.tasks import TaskRow
from coordinator.rules.audits import AUDIT
from coordinator.rules.dispatch import Assignment
from coordinator.rules.eligibility import Waiter
from coordinator.rules.run_file import TaskSettings
from coordinator.rules.task_size import episodes_bytes_max, task_seed, upload_bytes_max
from shared.errors import Cancelled, Conflict, Gone, NotFound, Unavailable, VolunteerError
from shared.protocol.limits import AUDIT_BYTES, RENEW_S
from tests.support.run_rows import add_contribution, add_run, add_version, add_worker

T = TypeVar("T")
NOW = 1000.0
FREE: dict[str, Any] = {"claim_id": None, "renew_by": None, "finish_by": None, "finish_limit": None}
HELD: dict[str, Any] = {
    "state": "doing",
    "attempt": 3,
    "renew_by": 1100.0,
    "finish_by": 1200.0,
    "finish_limit": 1300.0,
    "claimed_at": 900.0,
}


class Rows:
    """Two runs, two workers, and tasks put into the table as a test wants them."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.count = 0

    async def prepare(self) -> None:
        self.run, self.other = await self.write(lambda c: (add_run(c), add_run(c, "other")))
        self.a, self.b = await self.write(lambda c: (add_worker(c), add_worker(c)))

    async def write(self, fn: Callable[[Connection], T]) -> T:
        return await self.db.write(fn)

    async def put(self, **columns: Any) -> TaskRow:
        self.count += 1
        start = 10 * self.count
        row = {
            "run_id": self.run,
            "kind": "train",
            "pass_no": 1,
            "start": start,
            "stop": start + 8,
            "seed": 77,
            "steps": 4,
            "batch_size": 2,
            "price_micro": 500,
            "state": "todo",
            "attempt": 2,
            "claim_id": f"claim-of-{self.count}" if columns.get("state") == "doing" else None,
            "worker_id": self.a.worker_id,
            "volunteer_id": self.a.volunteer_id,
            "device": "cpu",
            "claimed_at": None,
            "begun_at": None,
            "base_version": None,
            "renew_by": None,
            "finish_by": None,
            "finish_limit": None,
            "returned": False,
            "failures": 0,
            "timeouts": 0,
            "ended_at": None,
            "options": "{}",
        } | columns
        made = insert(tasks_table).values(**row).returning(tasks_table.c.id)
        return await self.row(await self.write(lambda c: int(c.execute(made).scalar_one())))

    async def submitted(self, task: TaskRow, **columns: Any) -> TaskRow:
        """Store a contribution of a task, and leave the lease as it was."""

        def store(conn: Connection) -> None:
            number = add_contribution(conn, task)
            of_it = contributions_table.c.id == number
            if columns:
                conn.execute(contributions_table.update().where(of_it).values(**columns))
            alive = {name: getattr(task, name) for name in ("renew_by", "finish_by")}
            conn.execute(tasks_table.update().where(tasks_table.c.id == task.id).values(**alive))

        await self.write(store)
        return await self.row(task.id)

    async def row(self, task: int) -> TaskRow:
        return await self.db.read(lambda c: tasks.holder(c, task, for_update=False))

    async def all(self) -> list[TaskRow]:
        query = select(tasks_table).order_by(tasks_table.c.id)
        return await self.db.read(lambda c: tasks.rows_of(c.execute(query)))

    async def failed(self) -> list[tuple[Any, ...]]:
        f = failures_table.c
        query = select(f.task_id, f.attempt, f.worker_id, f.kind, f.message, f.at).order_by(f.id)
        return await self.db.read(lambda c: [tuple(row) for row in c.execute(query)])


def changed(row: TaskRow, **values: Any) -> TaskRow:
    return msgspec.structs.replace(row, **values)


@pytest.fixture
async def rows(database: Database) -> Rows:
    made = Rows(database)
    await made.prepare()
    return made


def assignment(task: TaskRow | None, run: int, waiter: int, **values: Any) -> Assignment:
    return Assignment(
        **{
            "waiter": waiter,
            "run_id": run,
            "task_id": task.id if task else None,
            "pass_no": 1,
            "start": task.start if task else 600,
            "stop": task.stop if task else 620,
            "rest_stop": task.stop if task else 620,
            "steps": 9,
            "price_micro": 901,
            "seed": 31 if task is None else 0,
            "finish_in_s": 40.0,
            **values,
        }
    )


def taken(rows: Rows, task: TaskRow | None, number: int, **values: Any) -> lease_grants.NewLease:
    waiter = Waiter(
        claim_id=f"claim-{number}",
        worker_id=rows.b.worker_id,
        volunteer_id=rows.b.volunteer_id,
        device=f"cuda:{number}",
    )
    return lease_grants.NewLease(
        assignment=assignment(task, rows.run, number, **values),
        waiter=waiter,
        kind="selfplay",
        update_kind="gradient",
        part_steps=3,
        batch_size=5,
        options='{"games": 2}',
        run_seed=13,
    )


def forget_statements() -> None:
    """Statements are compiled once a process: let this test compile them."""
    lease_grants._REISSUE._compiled.clear()
    lease_grants._INSERT._compiled.clear()


async def test_a_returned_task_is_leased_anew_and_keeps_nothing_of_its_last_holder(
    rows: Rows,
) -> None:
    forget_statements()
    task = await rows.put(
        attempt=3, begun_at=7.0, base_version=0, returned=True, failures=2, timeouts=1
    )
    others = [await rows.put(), await rows.put(**HELD), await rows.put(run_id=rows.other)]
    [made] = await rows.write(lambda c: lease_grants.take(c, [taken(rows, task, 1)], NOW))
    assert made == await rows.row(task.id)
    assert made == changed(
        task,
        state="doing",
        attempt=4,
        claim_id="claim-1",
        worker_id=rows.b.worker_id,
        volunteer_id=rows.b.volunteer_id,
        device="cuda:1",
        steps=9,
        price_micro=901,
        update_kind="gradient",
        part_steps=3,
        claimed_at=NOW,
        begun_at=None,
        base_version=None,
        renew_by=NOW + RENEW_S,
        finish_by=NOW + 40,
        finish_limit=NOW + 80,
        returned=False,
    )
    assert [await rows.row(other.id) for other in others] == others


async def test_a_new_lease_has_the_assigned_range_and_counts_nothing_yet(rows: Rows) -> None:
    forget_statements()
    wanted = [taken(rows, None, 1), taken(rows, await rows.put(), 2)]
    wanted += [taken(rows, None, 3), taken(rows, None, 4)]
    made = await rows.write(lambda c: lease_grants.take(c, wanted, NOW))
    assert [row.claim_id for row in made] == [f"claim-{n}" for n in range(1, 5)]
    assert [row.attempt for row in made] == [1, 3, 1, 1]
    assert made[0] == TaskRow(
        id=made[0].id,
        run_id=rows.run,
        kind="selfplay",
        pass_no=1,
        start=600,
        stop=620,
        seed=31,
        steps=9,
        batch_size=5,
        price_micro=901,
        state="doing",
        attempt=1,
        claim_id="claim-1",
        worker_id=rows.b.worker_id,
        volunteer_id=rows.b.volunteer_id,
        device="cuda:1",
        claimed_at=NOW,
        begun_at=None,
        base_version=None,
        renew_by=NOW + RENEW_S,
        finish_by=NOW + 40,
        finish_limit=NOW + 80,
        returned=False,
        failures=0,
        timeouts=0,
        ended_at=None,
        options='{"games": 2}',
        update_kind="gradient",
        part_steps=3,
    )
    assert len(await rows.all()) == 4  # rows that only fill a statement up make no tasks


async def test_a_task_that_another_coordinator_took_is_not_taken_again(rows: Rows) -> None:
    forget_statements()
    task = await rows.put(**HELD)
    with pytest.raises(Conflict, match="claim again"):
        await rows.write(lambda c: lease_grants.take(c, [taken(rows, task, 1)], NOW))
    assert await rows.all() == [task]


async def test_the_rest_of_a_split_task_waits_with_the_failures_counted_so_far(rows: Rows) -> None:
    forget_statements()
    task = await rows.put(returned=True, failures=1, base_version=0, begun_at=1.0)
    note = {"attempt": 2, "worker_id": rows.a.worker_id, "kind": "failure", "at": 4.0}
    stranger = await rows.put()
    notes = [note | {"task_id": each.id, "message": f"of {each.id}"} for each in (task, stranger)]
    await rows.write(lambda c: c.execute(insert(failures_table), notes))
    wanted = taken(rows, task, 1, stop=task.start + 3, rest_stop=task.stop)
    await rows.write(lambda c: lease_grants.take(c, [wanted], NOW))
    first, _, rest = await rows.all()
    assert (first.start, first.stop, first.state) == (task.start, task.start + 3, "doing")
    assert rest == changed(
        task,
        id=rest.id,
        start=task.start + 3,
        seed=task_seed(13, 1, task.start + 3),
        worker_id=None,
        volunteer_id=None,
        returned=False,
        begun_at=None,
        base_version=None,
    )
    copied = [row for row in await rows.failed() if row[0] == rest.id]
    assert copied == [(rest.id, 2, rows.a.worker_id, "failure", f"of {task.id}", 4.0)]


async def test_a_task_taken_whole_leaves_no_rest(rows: Rows) -> None:
    task = await rows.put()
    await rows.write(lambda c: lease_grants.take(c, [taken(rows, task, 1)], NOW))
    assert [row.id for row in await rows.all()] == [task.id]


async def test_uploads_are_granted_by_the_kind_of_the_task(rows: Rows) -> None:
    async def granted(**columns: Any) -> int:
        row = await rows.put(**columns)
        return await rows.db.read(lambda c: tasks.grant_bytes(c, row, {}))

    assert await granted(kind=AUDIT) == AUDIT_BYTES
    assert await granted(kind="selfplay") == await granted(kind="evaluate") == episodes_bytes_max(8)
    assert await granted() == await granted(kind="learn") == upload_bytes_max(1000)


async def test_a_task_beside_the_pass_waits_for_anybody(rows: Rows) -> None:
    given = {"run_id": rows.run, "kind": "learn", "start": 0, "stop": 1, "seed": 8, "steps": 2}
    given |= {"batch_size": 4, "price_micro": 6, "options": '{"data": 1}'}
    number = await rows.write(lambda c: tasks.add_beside(c, given))
    made = await rows.row(number)
    said = {
        "pass_no": 0,
        "state": "todo",
        "attempt": 0,
        "device": "",
        "returned": False,
        "failures": 0,
        "timeouts": 0,
    }
    shown = msgspec.structs.asdict(made)
    assert {name: shown[name] for name in (*given, *said)} == given | said
    assert (made.worker_id, made.claim_id, made.renew_by, made.ended_at) == (None,) * 4


async def test_the_end_of_a_run_cancels_its_open_tasks_and_no_other(rows: Rows) -> None:
    held = await rows.put(**HELD)
    waiting = await rows.put(returned=True)
    kept = [await rows.put(state=state, ended_at=3.0) for state in ("done", "discarded")]
    kept.append(await rows.put(run_id=rows.other, **HELD))
    assert await rows.write(lambda c: tasks.cancel_run(c, rows.run, NOW)) == 2
    end = {"state": "cancelled", "returned": False, "ended_at": NOW, **FREE}
    assert await rows.row(held.id) == changed(held, **end)
    assert await rows.row(waiting.id) == changed(waiting, **end)
    assert [await rows.row(row.id) for row in kept] == kept


async def test_a_run_that_goes_on_reopens_what_its_end_cancelled(rows: Rows) -> None:
    ended = await rows.put(state="cancelled", ended_at=3.0)
    kept = [await rows.put(state=state, ended_at=3.0) for state in ("done", "discarded")]
    kept.append(await rows.put(run_id=rows.other, state="cancelled", ended_at=3.0))
    assert await rows.write(lambda c: tasks.reopen_run(c, rows.run)) == 1
    now = changed(ended, state="todo", attempt=ended.attempt + 1, ended_at=None)
    assert await rows.row(ended.id) == now  # who held it then may not submit any more
    assert [await rows.row(row.id) for row in kept] == kept


@pytest.mark.parametrize("way", ["recall", "overtake"])
async def test_leases_on_a_base_that_is_gone_are_taken_back_and_no_others(
    rows: Rows, way: str
) -> None:
    """Versions above 1 are gone by a rollback, versions below 2 by a merge."""
    gone, good = (2, 1) if way == "recall" else (1, 2)
    based = {"base_version": gone, "begun_at": 950.0}
    held = await rows.put(**HELD, **based)
    late = await rows.put(returned=True, **based)
    judged = []
    for columns, state in (
        (HELD, "checking"),
        (HELD, "received"),
        ({"returned": True}, "checking"),
    ):
        row = await rows.put(**columns, **based)
        judged.append(await rows.submitted(row, state=state))
    decided = await rows.submitted(await rows.put(**HELD, **based), state="rejected")
    earlier = await rows.submitted(await rows.put(**HELD, **based), attempt=2)
    kept = [
        *judged,
        await rows.put(**HELD, base_version=good),
        await rows.put(**HELD),  # has not begun: its base is bound later
        await rows.put(**HELD | {"renew_by": None}, **based),  # awaits its verdict
        await rows.put(**based),  # waits for anybody: nobody may submit it
        await rows.put(state="done", returned=True, renew_by=1.0, **based),
        await rows.put(**HELD, kind=AUDIT, **based),
        await rows.put(run_id=rows.other, **HELD, **based),
    ]

    def take_back(conn: Connection) -> int:
        if way == "recall":
            return tasks.recall(conn, rows.run, above=1)
        return tasks.overtake(conn, rows.run, head=2)

    assert await rows.write(take_back) == 4
    back = {"state": "todo", "returned": False, "begun_at": None, "base_version": None, **FREE}
    for row in (held, late, decided, earlier):
        assert await rows.row(row.id) == changed(row, attempt=row.attempt + 1, **back)
    assert [await rows.row(row.id) for row in kept] == kept


async def test_files_of_bases_stay_while_a_lease_may_need_them(rows: Rows) -> None:
    await rows.put(**HELD, base_version=4)
    await rows.put(returned=True, base_version=2)
    await rows.put(returned=True, base_version=2)
    await rows.put(base_version=7)  # waits for anybody, who begins from a newer one
    await rows.put(state="done", returned=True, base_version=8)
    await rows.put(**HELD)
    await rows.put(run_id=rows.other, **HELD, base_version=9)
    assert await rows.db.read(lambda c: tasks.bases_in_use(c, rows.run)) == [2, 4]


async def test_failed_tasks_of_open_runs_return_with_a_clean_slate(rows: Rows) -> None:
    states = {"running": True, "paused": True, "completed": False, "failed": False}
    runs = [await rows.write(partial(add_run, name=s, state=s)) for s in states]
    gone = [
        await rows.put(run_id=run, state="discarded", failures=3, timeouts=2, ended_at=3.0)
        for run in runs
    ]
    waiting = await rows.put(run_id=runs[0], failures=1)
    note = {"attempt": 2, "worker_id": rows.a.worker_id, "kind": "failure", "at": 4.0}
    notes = [note | {"task_id": row.id, "message": ""} for row in (*gone, waiting)]
    await rows.write(lambda c: c.execute(insert(failures_table), notes))
    assert await rows.write(lambda c: tasks.requeue(c, [gone[1].id, gone[2].id])) == [gone[1].id]
    assert (await rows.row(gone[0].id)).state == "discarded"
    assert await rows.write(lambda c: tasks.requeue(c, None, runs[1])) == []
    assert await rows.write(lambda c: tasks.requeue(c, None, runs[0])) == [gone[0].id]
    for row, back in zip(gone, states.values(), strict=True):
        clean = {"state": "todo", "failures": 0, "timeouts": 0, "ended_at": None}
        assert await rows.row(row.id) == (changed(row, **clean) if back else row)
    assert await rows.row(waiting.id) == waiting
    kinds = {row[0]: row[3] for row in await rows.failed()}
    forgiven = {
        row.id: "forgiven" if state else "failure"
        for row, state in zip(gone, states.values(), strict=True)
    }
    assert kinds == forgiven | {waiting.id: "failure"}


async def test_every_failed_task_may_be_requeued_at_once(rows: Rows) -> None:
    gone = [await rows.put(state="discarded"), await rows.put(run_id=rows.other, state="discarded")]
    assert sorted(await rows.write(lambda c: tasks.requeue(c, None))) == [row.id for row in gone]


async def test_only_tasks_whose_time_ran_out_expire(rows: Rows) -> None:
    silent = await rows.put(**HELD | {"renew_by": NOW - 1, "finish_by": NOW + 1})
    slow = await rows.put(**HELD | {"renew_by": NOW + 1, "finish_by": NOW - 1}, timeouts=1)
    later = await rows.put(**HELD | {"renew_by": NOW - 1})
    kept = [
        await rows.put(**HELD | {"renew_by": NOW, "finish_by": NOW}),
        await rows.put(**HELD | {"renew_by": None, "finish_by": None}),
        await rows.put(renew_by=1.0, finish_by=1.0),
    ]
    found = await rows.write(lambda c: tasks.expire(c, NOW, 2))
    back = {"state": "todo", "returned": True, **FREE}
    wanted = [changed(silent, timeouts=1, **back), changed(slow, timeouts=2, **back)]
    assert sorted(found, key=lambda row: row.id) == wanted
    assert [await rows.row(silent.id), await rows.row(slow.id)] == wanted
    assert [await rows.row(row.id) for row in kept] == kept
    said = "no heartbeat or result came in time"
    assert await rows.failed() == [
        (row.id, 3, rows.a.worker_id, "timeout", said, NOW) for row in (silent, slow)
    ]
    assert [row.id for row in await rows.write(lambda c: tasks.expire(c, NOW, 2))] == [later.id]
    assert await rows.write(lambda c: tasks.expire(c, NOW, 2)) == []


async def test_a_discarded_task_is_free_and_has_ended(rows: Rows) -> None:
    task, other = await rows.put(returned=True, claim_id="last"), await rows.put()
    await rows.write(lambda c: tasks.discard(c, [task.id], NOW))
    gone = {"state": "discarded", "returned": False, "ended_at": NOW, **FREE}
    assert await rows.row(task.id) == changed(task, **gone)
    await rows.write(lambda c: tasks.discard(c, [], NOW))
    assert await rows.row(other.id) == other


async def put_back(rows: Rows, task: TaskRow, worker: str, kind: Any, max_failures: int = 3) -> str:
    settings = TaskSettings(max_failures=max_failures, max_timeouts=3)
    return await rows.write(
        lambda c: tasks.put_back(
            c,
            task.id,
            worker_id=worker,
            kind=kind,
            message="m" * 600,
            now=NOW,
            settings=settings,
        )
    )


@pytest.mark.parametrize("kind", [None, "failure", "timeout"])
async def test_a_task_put_back_is_free_and_counts_what_happened(rows: Rows, kind: Any) -> None:
    task = await rows.put(
        **HELD, begun_at=950.0, base_version=0, returned=True, failures=1, timeouts=1, ended_at=9.0
    )
    assert await put_back(rows, task, rows.a.worker_id, kind) == "todo"
    back = {"state": "todo", "returned": False, "begun_at": None, "base_version": None, **FREE}
    counts = {"failures": 1 + (kind == "failure"), "timeouts": 1 + (kind == "timeout")}
    assert await rows.row(task.id) == changed(task, **back, **counts, ended_at=None)
    noted = (task.id, 3, rows.a.worker_id, kind, "m" * 500, NOW)
    assert await rows.failed() == ([noted] if kind else [])


@pytest.mark.parametrize("state", ["discarded", "cancelled"])
async def test_a_task_that_has_ended_is_not_put_back(rows: Rows, state: str) -> None:
    task = await rows.put(state=state, ended_at=9.0)
    assert await put_back(rows, task, rows.a.worker_id, None) == state
    assert await rows.row(task.id) == task


async def test_a_failure_told_by_a_former_holder_leaves_the_lease_of_the_present_one(
    rows: Rows,
) -> None:
    task = await rows.put(**HELD)
    assert await put_back(rows, task, rows.b.worker_id, "failure", max_failures=1) == "doing"
    assert await rows.row(task.id) == changed(task, failures=1)
    assert await put_back(rows, task, rows.b.worker_id, None) == "doing"
    assert await rows.row(task.id) == changed(task, failures=1)


async def test_a_task_failed_too_often_is_discarded_at_that_moment(rows: Rows) -> None:
    task = await rows.put(**HELD)
    assert await put_back(rows, task, rows.a.worker_id, "failure", max_failures=1) == "discarded"
    row = await rows.row(task.id)
    assert (row.state, row.ended_at, row.claim_id, row.renew_by) == ("discarded", NOW, None, None)


SUBMITTERS: list[tuple[dict[str, Any], str, int, type[Exception] | None]] = [
    ({"state": "doing"}, "a", 3, None),
    ({"state": "todo", "returned": True}, "a", 3, None),
    ({"state": "todo", "returned": False}, "a", 3, Gone),
    ({"state": "done", "returned": True}, "a", 3, Gone),
    ({"state": "doing"}, "a", 2, Gone),
    ({"state": "doing"}, "a", 1, Gone),
    ({"state": "doing"}, "a", 4, NotFound),
    ({"state": "doing"}, "a", 0, NotFound),
    ({"state": "doing"}, "b", 2, Gone),
    ({"state": "doing"}, "b", 1, Gone),
    ({"state": "doing"}, "b", 3, NotFound),
    ({"state": "doing"}, "b", 0, NotFound),
    ({"state": "cancelled"}, "a", 3, Cancelled),
    ({"state": "cancelled"}, "b", 2, Gone),
]


async def test_only_the_current_attempt_of_its_worker_may_submit(rows: Rows) -> None:
    for columns, worker, attempt, error in SUBMITTERS:
        row = await rows.put(**columns, attempt=3)
        who = {"a": rows.a, "b": rows.b}[worker].worker_id
        if error is None:
            tasks.may_submit(row, who, attempt)
            continue
        with pytest.raises(error, match=f"task {row.id}|task {row.id} "):
            tasks.may_submit(row, who, attempt)


async def test_a_cancelled_task_says_why(rows: Rows) -> None:
    audit, task = await rows.put(state="cancelled", kind=AUDIT), await rows.put(state="cancelled")
    with pytest.raises(Cancelled, match="the organiser did it, or its run has ended"):
        tasks.may_submit(audit, rows.a.worker_id, 2)
    with pytest.raises(Cancelled, match="cancelled: its run has ended"):
        tasks.may_submit(task, rows.a.worker_id, 2)


def begin(
    conn: Connection,
    task_id: int,
    worker_id: str,
    attempt: int,
    now: float,
    *,
    newest: bool = False,
) -> tuple[tasks.Begun, bool]:
    """Begin or continue work; return also True where it had begun."""
    row = tasks.holder(conn, task_id)
    tasks.may_submit(row, worker_id, attempt)
    if row.begun_at is None:
        [found] = tasks.begin_all(conn, [row], now)
    else:
        found = tasks.resume(conn, row, now, newest=newest)
    if isinstance(found, VolunteerError):
        raise found
    return found, row.begun_at is not None


async def test_work_begins_from_the_head_with_its_whole_time(rows: Rows) -> None:
    task, other = await rows.put(**HELD), await rows.put(**HELD)
    await rows.write(lambda c: add_version(c, rows.run, 1, global_step=30))
    begun, again = await rows.write(lambda c: begin(c, task.id, rows.a.worker_id, 3, 1050.0))
    bound = {"base_version": 1, "begun_at": 1050.0, "finish_by": 1250.0, "finish_limit": 1450.0}
    assert begun == tasks.Begun(task=changed(task, **bound), run="run", version=1, finish_by=1250.0)
    assert not again
    assert await rows.row(task.id) == begun.task
    assert await rows.row(other.id) == other
    await rows.write(lambda c: add_version(c, rows.run, 2, global_step=60))
    same = await rows.write(lambda c: begin(c, task.id, rows.a.worker_id, 3, 1060.0))
    assert same == (begun, True)
    newer, _ = await rows.write(
        lambda c: begin(c, task.id, rows.a.worker_id, 3, 1070.0, newest=True)
    )
    assert (newer.version, newer.finish_by) == (2, 1250.0)
    assert newer.task == changed(begun.task, base_version=2)


@pytest.mark.parametrize(
    "columns",
    [
        {"state": "todo", "returned": True, **FREE},
        {"finish_limit": None},
        {"claimed_at": None},
    ],
)
async def test_work_does_not_begin_once_its_time_is_over(
    rows: Rows, columns: dict[str, Any]
) -> None:
    task = await rows.put(**HELD | columns)
    with pytest.raises(Gone, match=f"task {task.id} ran out"):
        await rows.write(lambda c: begin(c, task.id, rows.a.worker_id, 3, NOW))
    assert await rows.row(task.id) == task


async def test_an_audit_begins_from_the_base_of_the_task_that_it_repeats(rows: Rows) -> None:
    audit = await rows.put(**HELD, kind=AUDIT, options='{"base_version": 0}')
    await rows.write(lambda c: add_version(c, rows.run, 1, global_step=30))
    begun, _ = await rows.write(lambda c: begin(c, audit.id, rows.a.worker_id, 3, NOW))
    assert (begun.version, begun.task.base_version) == (0, 0)
    again, _ = await rows.write(lambda c: begin(c, audit.id, rows.a.worker_id, 3, NOW, newest=True))
    assert again.version == 0


async def test_a_run_without_a_version_lets_nobody_begin(rows: Rows) -> None:
    task = await rows.put(**HELD)
    moved = tasks_table.metadata.tables["runs"]
    await rows.write(lambda c: c.execute(moved.update().values(head=5)))
    with pytest.raises(Unavailable, match="no version yet") as caught:
        await rows.write(lambda c: begin(c, task.id, rows.a.worker_id, 3, NOW))
    assert caught.value.retry_after_s == 10
    assert await rows.row(task.id) == task


async def test_a_worker_waits_for_the_merge_of_its_own_update_only(rows: Rows) -> None:
    done = await rows.put(state="done", base_version=0)
    task = await rows.put(**HELD)

    other = await rows.put(**HELD | {"worker_id": rows.b.worker_id, "claim_id": "other"})

    async def awaits() -> dict[int, int]:
        return await rows.db.read(lambda c: tasks.await_merge(c, [task.id, other.id]))

    assert not await awaits()
    await rows.write(lambda c: add_contribution(c, done))
    assert await awaits() == {task.id: rows.run}
    merged = contributions_table.update().values(state="merged")
    await rows.write(lambda c: c.execute(merged))
    assert not await awaits()


async def test_work_ends_once_however_it_came_in(rows: Rows) -> None:
    held = await rows.put(**HELD)
    late = await rows.put(returned=True)
    kept = [await rows.put(), await rows.put(state="done", ended_at=2.0)]

    async def finish(row: TaskRow) -> bool:
        return await rows.write(lambda c: tasks.finish_all(c, [row.id], NOW) == 1)

    assert [await finish(row) for row in (held, late, *kept)] == [True, True, False, False]
    end = {"state": "done", "returned": False, "ended_at": NOW, **FREE}
    assert [await rows.row(held.id), await rows.row(late.id)] == [
        changed(held, **end),
        changed(late, **end),
    ]
    assert [await rows.row(row.id) for row in kept] == kept
    assert not await finish(held)


async def test_the_list_of_tasks_tells_failures_of_several_workers_and_the_last_word(
    rows: Rows,
) -> None:
    task = await rows.put(state="discarded", failures=3, timeouts=1)
    other = await rows.put(run_id=rows.other, state="discarded")
    await rows.put(state="done")
    waiting = await rows.put()
    note = {"task_id": task.id, "attempt": 2, "at": 4.0}
    a, b = rows.a.worker_id, rows.b.worker_id
    notes = [
        note | {"worker_id": worker, "kind": kind, "message": message}
        for worker, kind, message in (
            (a, "failure", "first"),
            (a, "failure", "second"),
            (b, "failure", "third"),
            ("gone", "timeout", "fourth"),
            ("x", "forgiven", "fifth"),
        )
    ]
    elsewhere = {"task_id": other.id, "worker_id": "y", "kind": "failure", "message": ""}
    await rows.write(lambda c: c.execute(insert(failures_table), [*notes, note | elsewhere]))

    async def lines(states: list[str], *args: Any) -> list[tasks.TaskLine]:
        return await rows.db.read(lambda c: tasks.lines(c, states, *args))

    found = await lines(["discarded"])
    assert found[0] == tasks.TaskLine(
        id=task.id,
        run="run",
        state="discarded",
        pass_no=1,
        start=task.start,
        stop=task.stop,
        failures=3,
        timeouts=1,
        workers=2,
        message="fourth",
    )
    assert (found[1].id, found[1].run, found[1].message) == (other.id, "other", "")
    assert [line.id for line in await lines(["discarded"], rows.run)] == [task.id]
    assert [line.id for line in await lines(["todo", "discarded"], None, 2)] == [task.id, other.id]
    assert [line.id for line in await lines(["todo"])] == [waiting.id]


async def test_a_task_that_is_not_there_is_not_found(rows: Rows) -> None:
    with pytest.raises(NotFound, match="no task 99 of yours"):
        await rows.write(lambda c: tasks.holder(c, 99))
