"""Data that members keep: whom nobody counts, and what a withdrawal ends, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection

from coordinator.accounts import suspension
from coordinator.accounts.accounts import Principal, Volunteers
from coordinator.config import Settings
from coordinator.database import runs, tasks
from coordinator.database.engine.open_database import Database
from coordinator.database.invariants import breaches
from coordinator.database.members import heldout_rows, member_rows
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.runs import members
from coordinator.database.tables.runs import runs as runs_table
from coordinator.database.tables.tasks import tasks as tasks_table
from coordinator.database.tables.versions import evaluations, heldout_sums
from coordinator.runs import member_figures
from coordinator.runs.member_figures import MemberFigures, MemberLoss
from coordinator.scheduling.member_data import MemberDeclarations
from coordinator.scheduling.task_leases import TaskLeases
from coordinator.signals import Signals
from shared.errors import BadRequest, Conflict, Forbidden
from shared.protocol.leases import Lease, ReleaseRequest
from shared.protocol.limits import RENEW_S
from shared.protocol.members import HeldoutSums, MemberData
from tests.support.run_rows import (
    add_contribution,
    add_run,
    add_version,
    add_worker,
    claim,
    queue_of,
)
from tests.support.virtual_clock import VirtualClock

MODEL = {"vocab_size": 300, "block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8}
TASK = {"local_steps": 2, "batch_size": 4, "in_flight": 16, "lease_floor_seconds": 600.0}
T = TypeVar("T")


@dataclass
class Ward:
    """A run over its members' data, and a member with one machine."""

    db: Database
    clock: VirtualClock
    queue: TaskLeases
    data: MemberDeclarations
    run: int
    ann: Principal

    async def write(self, fn: Callable[[Connection], T]) -> T:
        return await self.db.write(fn)

    async def declare(
        self, who: Principal, samples: int = 20, run: str = "ward", edition: str = ""
    ) -> None:
        numbers = MemberData(samples=samples, items=8 * samples, heldout=3, edition=edition)
        await self.data.declare(who, run, numbers)

    async def lease(self, who: Principal | None = None, run: str = "ward") -> Lease:
        lease = (await claim(self.queue, who or self.ann, runs=(run,))).lease
        assert lease is not None
        return lease

    async def give_back(self, lease: Lease) -> None:
        await self.queue.release(self.ann, lease.task, ReleaseRequest(attempt=lease.attempt))

    async def states(self) -> list[str]:
        query = sa.select(tasks_table.c.state).order_by(tasks_table.c.id)
        return await self.db.read(lambda conn: [*conn.execute(query).scalars()])

    async def best(self, run: int | None = None) -> int | None:
        row = await self.db.read(lambda conn: runs.by_id(conn, run or self.run))
        return row.best

    async def figures(self) -> MemberFigures | None:
        row = await self.db.read(lambda conn: runs.by_id(conn, self.run))
        return await self.db.read(lambda conn: member_figures.figures(conn, row))

    async def declared(self) -> list[str]:
        """Return the machines whose data count."""
        rows = await self.db.read(lambda conn: member_rows.of_run(conn, self.run))
        return sorted(row.worker_id for row in rows)

    async def measure(
        self, who: Principal, loss: float, version: int = 0, run: int | None = None
    ) -> None:
        sums = HeldoutSums(version=version, loss_sum=10 * loss, items=10)
        owner = (who.volunteer_id, who.worker_id)
        of_run = run or self.run
        await self.write(lambda conn: member_figures.record_loss(conn, of_run, owner, sums))

    async def add_versions(self, until: int) -> None:
        def add(conn: Connection) -> None:
            for version in range(1, until + 1):
                add_version(conn, self.run, version)
                add_evaluation(conn, self.run, version)

        await self.write(add)

    async def losses(self) -> dict[int, tuple[float, ...]]:
        losses = await self.db.read(lambda conn: heldout_rows.losses(conn, self.run))
        return {version: tuple(sorted(means)) for version, means in losses.items()}


@pytest.fixture
async def ward(database: Database) -> Ward:
    clock = VirtualClock()

    def begin(conn: Connection) -> tuple[int, Principal]:
        run = add_run(conn, "ward", task=TASK, model=MODEL, data={"at": "members"})
        add_evaluation(conn, run, 0)
        return run, add_worker(conn)

    run, ann = await database.write(begin)
    queue, data = queue_of(database, clock), MemberDeclarations(database, clock, Signals())
    await clock.advance(RENEW_S)
    return Ward(database, clock, queue, data, run, ann)


def add_evaluation(conn: Connection, run: int, version: int) -> None:
    blank = {"state": "skipped", "metrics": "{}", "sample": "", "message": "", "pruned": False}
    conn.execute(sa.insert(evaluations).values(run_id=run, version=version, **blank))


async def test_data_that_were_withdrawn_come_back_as_other_data(ward: Ward) -> None:
    """As many samples may be of other files, and no old task may name their positions."""
    await ward.declare(ward.ann)
    first = await ward.lease()
    await ward.give_back(first)
    await ward.data.withdraw(ward.ann, "ward")
    assert await ward.states() == ["cancelled"]
    await ward.declare(ward.ann)
    again = await ward.lease()
    assert (again.job.start, again.task != first.task) == (0, True)
    assert again.job.order_seed != first.job.order_seed
    reopened = await ward.write(lambda conn: tasks.reopen_run(conn, ward.run))
    assert (reopened, await ward.states()) == (0, ["cancelled", "doing"])


async def test_the_same_numbers_again_keep_the_pass_and_its_waiting_tasks(ward: Ward) -> None:
    await ward.declare(ward.ann)
    first = await ward.lease()
    await ward.give_back(first)
    await ward.declare(ward.ann)
    assert await ward.states() == ["todo"]
    assert (await ward.lease()).task == first.task


async def test_a_member_waits_for_others_only_until_their_updates_are_enough(ward: Ward) -> None:
    plan = {"min_contributions": 2}

    def begin(conn: Connection) -> Principal:
        add_run(conn, "mixed", task=TASK, model=MODEL, data={"at": "members"}, plan=plan)
        return add_worker(conn)

    async def submit(who: Principal) -> None:
        lease = await ward.lease(who, "mixed")
        await ward.queue.begin(who, lease.task, lease.attempt)
        row = await ward.db.read(lambda conn: tasks.holder(conn, lease.task, for_update=False))
        number = await ward.write(lambda conn: add_contribution(conn, row))
        accepted = sa.update(contributions).where(contributions.c.id == number)
        await ward.write(lambda conn: conn.execute(accepted.values(state="accepted")))
        await ward.write(lambda conn: tasks.finish_all(conn, [lease.task], ward.clock.now()))

    bob = await ward.write(begin)
    for who in (ward.ann, bob):
        await ward.declare(who, run="mixed")
    await submit(ward.ann)
    idle = (await claim(ward.queue, ward.ann, runs=("mixed",))).idle
    assert idle is not None
    assert "waits to be mixed with those of 1 other member" in idle.message
    await submit(bob)
    assert (await ward.lease(ward.ann, "mixed")).run == "mixed"


async def test_each_machine_goes_through_its_data_once_a_pass(ward: Ward) -> None:
    await ward.declare(ward.ann)
    leases = [await ward.lease() for _ in range(4)]
    assert [(lease.job.start, lease.job.stop) for lease in leases] == [
        (0, 8),
        (8, 16),
        (16, 20),
        (0, 8),
    ]
    first, second, third, again = [lease.job.order_seed for lease in leases]
    assert (first == second == third, first != again) == (True, True)
    row = await ward.db.read(lambda conn: member_rows.row_of(conn, ward.run, ward.ann.worker_id))
    assert row is not None
    assert (row.first_pass, row.pass_no, row.cursor) == (1, 2, 8)


@pytest.mark.parametrize("other", [{"samples": 12}, {"edition": "b"}, None])
async def test_other_data_cancel_the_tasks_that_wait_for_the_data_before(
    ward: Ward, other: dict[str, Any] | None
) -> None:
    """And no task of another machine, or of another run; so does a withdrawal (None)."""
    ben = await ward.write(add_worker)
    another = await ward.write(
        lambda conn: add_run(conn, "another", task=TASK, model=MODEL, data={"at": "members"})
    )
    for who, run in ((ward.ann, "ward"), (ben, "ward"), (ward.ann, "another")):
        await ward.declare(who, run=run)
    for who, run in ((ward.ann, "ward"), (ben, "ward"), (ward.ann, "another")):
        lease = await ward.lease(who, run)
        await ward.queue.release(who, lease.task, ReleaseRequest(attempt=lease.attempt))
    if other is None:
        await ward.data.withdraw(ward.ann, "ward")
    else:
        await ward.declare(ward.ann, **other)
    t = tasks_table.c
    query = sa.select(t.run_id, t.home, t.state, t.returned, t.ended_at).order_by(t.id)
    rows = await ward.db.read(lambda conn: [tuple(row) for row in conn.execute(query)])
    now = ward.clock.now()
    assert rows == [
        (ward.run, ward.ann.worker_id, "cancelled", False, now),
        (ward.run, ben.worker_id, "todo", False, None),
        (another, ward.ann.worker_id, "todo", False, None),
    ]
    row = await ward.db.read(lambda conn: member_rows.row_of(conn, ward.run, ward.ann.worker_id))
    assert row is not None
    passes = (1, 1, 8) if other is None else (2, 2, 0)
    assert (row.first_pass, row.pass_no, row.cursor) == passes
    assert row.declared_at == (None if other is None else now)


async def test_who_keeps_no_data_withdraws_none(ward: Ward) -> None:
    await ward.data.withdraw(ward.ann, "ward")
    assert await ward.declared() == []


async def test_who_waits_for_members_hears_of_one(ward: Ward) -> None:
    signals = Signals()
    watch = signals.watch("volunteers")
    assert not await watch.wait(0)
    numbers = MemberData(samples=20, items=160)
    await MemberDeclarations(ward.db, ward.clock, signals).declare(ward.ann, "ward", numbers)
    assert await watch.wait(0)


async def test_sizes_are_of_the_machines_that_were_asked_for(ward: Ward) -> None:
    """Also of withdrawn data, whose updates may still be merged."""
    ben, cid = await ward.write(lambda conn: [add_worker(conn) for _ in range(2)])
    for who, samples in ((ward.ann, 20), (ben, 7), (cid, 9)):
        await ward.declare(who, samples)
    await ward.data.withdraw(ben, "ward")
    asked = [ben.worker_id, ward.ann.worker_id, ben.worker_id]
    sizes = await ward.db.read(lambda conn: member_rows.sizes(conn, ward.run, asked))
    assert sizes == {ward.ann.worker_id: 20, ben.worker_id: 7}
    assert await ward.db.read(lambda conn: member_rows.sizes(conn, ward.run + 1, asked)) == {}


async def test_a_withdrawal_leaves_what_was_submitted_to_its_verdict(ward: Ward) -> None:
    """Its time ran out before it was submitted: the task waits, and its update may be accepted."""
    await ward.declare(ward.ann)
    late = await ward.lease()
    await ward.queue.begin(ward.ann, late.task, late.attempt)
    await ward.clock.advance(86_400)
    assert await ward.queue.expire() == 1
    row = await ward.db.read(lambda conn: tasks.holder(conn, late.task, for_update=False))
    assert (row.state, row.returned) == ("todo", True)
    await ward.write(lambda conn: add_contribution(conn, row))
    waiting = await ward.lease()
    assert waiting.task != late.task
    await ward.give_back(waiting)
    at_work = await ward.lease()
    assert at_work.task == waiting.task
    await ward.data.withdraw(ward.ann, "ward")
    assert await ward.states() == ["todo", "doing"]
    await ward.data.withdraw(ward.ann, "ward")  # once more
    assert await ward.states() == ["todo", "doing"]


async def test_only_data_of_members_who_are_here_count(ward: Ward) -> None:
    others = await ward.write(lambda conn: [add_worker(conn) for _ in range(3)])
    gone, banned, withdrawn = others
    for who in (ward.ann, *others):
        await ward.declare(who)
    assert len(await ward.declared()) == 4
    await ward.data.withdraw(withdrawn, "ward")
    left = sa.update(workers).where(workers.c.id == gone.worker_id).values(revoked_at=1.0)
    out = sa.update(volunteers).where(volunteers.c.id == banned.volunteer_id)
    await ward.write(lambda conn: conn.execute(left))
    await ward.write(lambda conn: conn.execute(out.values(state="banned")))
    assert await ward.declared() == [ward.ann.worker_id]
    rows = await ward.db.read(lambda conn: member_rows.of_run(conn, ward.run))
    counts = member_rows.counts(rows)
    assert (counts.members, counts.machines, counts.samples, counts.items) == (1, 1, 20, 160)


async def test_a_machine_that_signed_off_counts_again_when_it_comes_back(ward: Ward) -> None:
    await ward.declare(ward.ann)
    machine = sa.update(workers).where(workers.c.id == ward.ann.worker_id)
    await ward.write(lambda conn: conn.execute(machine.values(state="left")))
    assert await ward.declared() == []
    await ward.write(lambda conn: conn.execute(machine.values(state="online")))
    assert await ward.declared() == [ward.ann.worker_id]


@pytest.mark.parametrize("end", ["ban", "forget", "reissue"])
async def test_no_task_waits_for_the_data_of_who_will_not_come_back(ward: Ward, end: str) -> None:
    """The waiting task is cancelled at once, the one in work when its time ran out."""
    ben = await ward.write(add_worker)
    for who in (ward.ann, ben):
        await ward.declare(who)
        lease = await ward.lease(who)
        await ward.queue.release(who, lease.task, ReleaseRequest(attempt=lease.attempt))
    at_work = await ward.lease()
    waiting = await ward.lease()
    assert at_work.task < waiting.task
    await ward.give_back(waiting)
    people = Volunteers(ward.db, ward.clock, Settings())
    by_name = {"ban": people.ban, "forget": people.forget, "reissue": people.reissue}
    await by_name[end](ward.ann.volunteer_id)
    assert await ward.states() == ["doing", "todo", "cancelled"]
    assert await ward.declared() == [ben.worker_id]
    await ward.clock.advance(86_400)
    assert await ward.queue.expire() == 1
    assert await ward.states() == ["cancelled", "todo", "cancelled"]
    reopened = await ward.write(lambda conn: tasks.reopen_run(conn, ward.run))
    assert (reopened, await ward.db.read(breaches)) == (0, [])


async def test_a_lifted_ban_lets_a_member_declare_again(ward: Ward) -> None:
    await ward.declare(ward.ann)
    first = await ward.lease()
    await ward.give_back(first)
    people = Volunteers(ward.db, ward.clock, Settings())
    await people.ban(ward.ann.volunteer_id)
    await people.unban(ward.ann.volunteer_id)
    assert await ward.declared() == []
    await ward.declare(ward.ann)
    again = await ward.lease()
    assert (again.task != first.task, again.job.start) == (True, 0)
    assert await ward.db.read(breaches) == []


async def test_nothing_of_the_data_of_a_forgotten_member_stays(ward: Ward) -> None:
    """Sizes stay while an update of the member waits, since its weight in the merge needs them."""
    ben = await ward.write(add_worker)
    for who in (ward.ann, ben):
        await ward.declare(who)
        await ward.measure(who, 1.0)
    lease = await ward.lease()
    await ward.queue.begin(ward.ann, lease.task, lease.attempt)
    row = await ward.db.read(lambda conn: tasks.holder(conn, lease.task, for_update=False))
    await ward.write(lambda conn: add_contribution(conn, row))
    await Volunteers(ward.db, ward.clock, Settings()).forget(ward.ann.volunteer_id)
    await ward.write(member_rows.delete_forgotten)
    machines = [ward.ann.worker_id, ben.worker_id]
    sizes = await ward.db.read(lambda conn: member_rows.sizes(conn, ward.run, machines))
    assert sizes == dict.fromkeys(machines, 20)
    ended = sa.update(contributions).values(state="superseded")
    await ward.write(lambda conn: conn.execute(ended))
    await ward.write(member_rows.delete_forgotten)

    def left(conn: Connection) -> list[str]:
        columns = (members.c.worker_id, heldout_sums.c.worker_id)
        return [
            worker for column in columns for worker in conn.execute(sa.select(column)).scalars()
        ]

    assert await ward.db.read(left) == [ben.worker_id, ben.worker_id]


async def test_two_machines_of_a_member_are_one_member(ward: Ward) -> None:
    second = await ward.write(lambda conn: add_worker(conn, ward.ann.volunteer_id))
    await ward.declare(ward.ann)
    await ward.declare(second, 5)
    rows = await ward.db.read(lambda conn: member_rows.of_run(conn, ward.run))
    counts = member_rows.counts(rows)
    assert (counts.members, counts.machines, counts.samples) == (1, 2, 25)


@pytest.mark.parametrize("state", ["completed", "failed"])
async def test_a_run_that_ended_takes_no_data(ward: Ward, state: str) -> None:
    ended = sa.update(runs_table).values(state=state)
    await ward.write(lambda conn: conn.execute(ended))
    with pytest.raises(Conflict, match="has ended"):
        await ward.declare(ward.ann)
    assert await ward.declared() == []


async def test_a_run_on_its_organisers_data_takes_none(ward: Ward) -> None:
    await ward.write(lambda conn: add_run(conn, "whole", task=TASK, model=MODEL))
    with pytest.raises(BadRequest, match="data of its organiser"):
        await ward.declare(ward.ann, run="whole")
    stored = sa.select(sa.func.count()).select_from(members)
    assert await ward.db.read(lambda conn: conn.execute(stored).scalar_one()) == 0


@pytest.mark.parametrize("standing", ["vetted", "probation"])
async def test_who_is_not_vouched_for_declares_nothing(ward: Ward, standing: str) -> None:
    """Draws that passed do not stand for the organiser's word."""
    stranger = sa.update(volunteers).values(invited=False, standing=standing)
    await ward.write(lambda conn: conn.execute(stranger))
    with pytest.raises(Forbidden, match="vouched for"):
        await ward.declare(ward.ann)
    assert await ward.declared() == []


async def test_losses_are_of_active_members_and_of_versions_with_files(ward: Ward) -> None:
    ben, cid = await ward.write(lambda conn: [add_worker(conn) for _ in range(2)])

    await ward.add_versions(1)
    for version in (0, 1):
        for who, loss in ((ward.ann, 1.0), (ben, 2.0), (cid, 3.0)):
            await ward.measure(who, loss + version, version)
    assert await ward.losses() == {0: (1.0, 2.0, 3.0), 1: (2.0, 3.0, 4.0)}
    await ward.measure(ben, 8.0, 1)  # measured again: the newer one counts
    out = sa.update(volunteers).where(volunteers.c.id == cid.volunteer_id)
    await ward.write(lambda conn: conn.execute(out.values(state="banned")))
    assert await ward.losses() == {0: (1.0, 2.0), 1: (2.0, 8.0)}
    pruned = sa.update(evaluations).where(evaluations.c.version == 0).values(pruned=True)
    await ward.write(lambda conn: conn.execute(pruned))
    assert await ward.losses() == {1: (2.0, 8.0)}


@pytest.mark.parametrize(("by", "best"), [("mean", 1), ("worst", 2)])
async def test_members_choose_the_best_version_by_the_choice_of_their_run(
    ward: Ward, by: Literal["mean", "worst"], best: int
) -> None:
    ben, run = await ward.write(lambda conn: (add_worker(conn), add_chosen(conn, by)))
    other, ward.run = ward.run, run
    await ward.add_versions(3)
    for who in (ward.ann, ben):
        await ward.declare(who, run="chosen")
    for version, pair in enumerate([(3.0, 3.0), (1.0, 4.0), (2.5, 3.0)]):
        for who, loss in zip((ward.ann, ben), pair, strict=True):
            await ward.measure(who, loss, version)
    await ward.measure(ward.ann, 9.0, 3)
    await ward.measure(ben, 8.0, 3)
    assert (await ward.best(), await ward.best(other)) == (best, None)
    of_best = {
        1: MemberLoss(version=1, members=2, mean=2.5, worst=4.0, spread=1.5),
        2: MemberLoss(version=2, members=2, mean=2.75, worst=3.0, spread=0.25),
    }
    assert await ward.figures() == MemberFigures(
        members=2, machines=2, samples=40, items=320, heldout=6, cap=3.0, best_by=by,
        newest=MemberLoss(version=3, members=2, mean=8.5, worst=9.0, spread=0.5),
        best=of_best[best],
    )  # fmt: skip
    gone = sa.update(evaluations).where(evaluations.c.run_id == run).values(pruned=True)
    await ward.write(lambda conn: conn.execute(gone))
    await ward.measure(ward.ann, 0.1, 3)  # of files that nobody can have any more
    assert await ward.best() == best
    figures = await ward.figures()
    assert figures is not None
    assert (figures.newest, figures.best) == (None, None)


def add_chosen(conn: Connection, by: str) -> int:
    data = {"at": "members", "best": by, "cap": 3.0}
    run = add_run(conn, "chosen", task=TASK, model=MODEL, data=data)
    add_evaluation(conn, run, 0)
    return run


async def test_a_run_on_its_organisers_data_has_no_figures_of_members(ward: Ward) -> None:
    ward.run = await ward.write(lambda conn: add_run(conn, "whole", task=TASK, model=MODEL))
    assert await ward.figures() is None


async def test_a_private_run_names_no_measure_by_which_members_choose(ward: Ward) -> None:
    """Losses of its members would tell of their data."""
    ward.run = await ward.write(
        lambda conn: add_run(
            conn, "private", task=TASK, model=MODEL, data={"at": "members"},
            privacy={"epsilon": 8.0, "clip": 1.0}, stop={"versions": 2},
        )
    )  # fmt: skip
    await ward.declare(ward.ann, run="private")
    await ward.measure(ward.ann, 1.0)
    figures = await ward.figures()
    assert figures is not None
    assert (figures.members, figures.best_by, figures.newest) == (1, None, None)
    assert await ward.losses() == {}


async def test_a_suspended_member_neither_counts_nor_chooses_the_best_version(ward: Ward) -> None:
    ben = await ward.write(add_worker)
    for who in (ward.ann, ben):
        await ward.declare(who)
        await ward.measure(who, 1.0)
    reason = "its updates pointed away from everybody's"
    await ward.write(lambda conn: suspension.suspend(conn, ben.volunteer_id, reason, 2.0))
    assert await ward.losses() == {0: (1.0,)}
    assert await ward.declared() == [ward.ann.worker_id]


async def test_a_version_that_is_not_there_is_measured_by_nobody(ward: Ward) -> None:
    await ward.measure(ward.ann, 1.0, version=1)
    other = await ward.write(lambda conn: add_run(conn, "whole", task=TASK, model=MODEL))
    sums = HeldoutSums(version=0, loss_sum=1.0, items=1)
    owner = (ward.ann.volunteer_id, ward.ann.worker_id)
    await ward.write(lambda conn: member_figures.record_loss(conn, other, owner, sums))
    stored = sa.select(sa.func.count()).select_from(heldout_sums)
    assert await ward.db.read(lambda conn: conn.execute(stored).scalar_one()) == 0
