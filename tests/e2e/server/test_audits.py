"""Tasks done again by vetted volunteers for others: a real server and real volunteers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Select, select, text, update
from sqlalchemy.util import await_only

from coordinator.accounts import suspension
from coordinator.accounts.suspension import suspend
from coordinator.checking.audits import Audits, _sums_of_update
from coordinator.checking.recompute_comparison import redo
from coordinator.checking.recompute_queue import Recomputes
from coordinator.compute import Compute
from coordinator.database import audits as rows
from coordinator.database import contributions, runs, volunteers
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import escrow as ledger
from coordinator.database.ledger import payments
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.trust import recomputes
from coordinator.rules import audits as rules
from coordinator.rules.draws import Redone
from coordinator.runs.definition import definition
from shared.errors import NotFound, Unavailable
from shared.protocol.accounts import LinkCode, RegisterReply
from shared.protocol.contributions import Verdict
from shared.protocol.leases import ClaimReply, Lease
from shared.protocol.limits import RENEW_S
from tests.e2e.server.test_late_decisions import WAITING
from tests.e2e.server.test_recomputes import balances, lazy, postponed, run_file, settled
from tests.support.databases import Postgres
from tests.support.local_coordinator import LocalCoordinator, Worker, decode, local_coordinator
from tests.support.local_volunteer import LocalMachine
from volunteer.control import events

RUN = run_file()
MANY = 10**9
ORGANISER = asyncio.Event()  # set while the server makes recomputes


async def proven(home: LocalCoordinator, name: str) -> None:
    """Let an account have had enough accepted contributions to audit."""
    found = next(p for p in await home.coordinator.volunteers.list() if p.nickname == name)
    many = {"accepted": MANY, "accepted_micro": MANY}
    await home.coordinator.db.write(
        lambda conn: volunteers.set_volunteer(conn, found.volunteer_id, **many)
    )


@asynccontextmanager
async def line_is_long() -> AsyncIterator[None]:
    """Let the server make no recompute until `organiser`, so that volunteers are asked at once."""
    make = Recomputes.next

    async def later(self: Recomputes) -> bool:
        return ORGANISER.is_set() and await make(self)

    with pytest.MonkeyPatch.context() as patched:
        ORGANISER.clear()
        patched.setattr(Recomputes, "next", later)
        patched.setattr(rows, "OFFERED_AFTER_S", -3600.0)
        patched.setattr(rows, "OPEN_MAX", 1)
        yield


def organiser(home: LocalCoordinator, *, at_work: bool = True) -> None:
    """Let the server make recomputes from now on, or none any more."""
    if at_work:
        ORGANISER.set()
    else:
        ORGANISER.clear()
    home.coordinator.signals.notify("recomputes")


@asynccontextmanager
async def done(
    path: Path, database: str, load: Any = None
) -> AsyncIterator[tuple[LocalCoordinator, LocalMachine, Worker]]:
    """A coordinator where Ann did a task that is to be audited; Bob may, and is a machine, or a
    worker over HTTP.
    """
    async with line_is_long(), local_coordinator(path / "coordinator", database=database) as home:
        await home.start_run(RUN)
        ann, bob = LocalMachine(path / "ann", home), LocalMachine(path / "bob", home)
        await ann.join("Ann")
        await bob.join("Bob the machine")
        await proven(home, "Bob the machine")
        by_hand = await home.join("Bob")
        await proven(home, "Bob")
        async with home.coordinator.working():
            async with ann.working(load, max_tasks=1) as process:
                assert await process.ended(120) == 0
                await until(home, "waiting")
            yield home, bob, by_hand


@asynccontextmanager
async def checked(
    path: Path, database: str, load: Any = None
) -> AsyncIterator[tuple[LocalCoordinator, Worker]]:
    async with done(path, database, load) as (home, _, bob):
        yield home, bob


def audited(*columns: Any) -> Select[Any]:
    """Return the query of recomputes that were offered to volunteers, the oldest first."""
    c = recomputes.c
    return select(*columns).where(c.audit_id.is_not(None)).order_by(c.contribution_id)


async def until(home: LocalCoordinator, state: str) -> None:
    """Wait until a recompute was offered to volunteers and is in this state."""

    def read(conn: Connection) -> str | None:
        return conn.execute(audited(recomputes.c.state)).scalar()

    async with asyncio.timeout(120):
        while await home.coordinator.db.read(read) != state:
            await asyncio.sleep(0.02)


async def result(home: LocalCoordinator) -> str:
    """Return the result of the recompute that was offered first, or of the first one."""
    c = recomputes.c
    found = select(c.result).order_by(c.audit_id.is_(None), c.contribution_id).limit(1)

    def read(conn: Connection) -> str:
        return str(conn.execute(found).scalar_one())

    return await home.coordinator.db.read(read)


async def escrow(home: LocalCoordinator, name: str) -> int:
    found = next(p for p in await home.coordinator.volunteers.list() if p.nickname == name)
    read = payments.balances
    return (
        await home.coordinator.db.read(lambda conn: read(conn, found.volunteer_id))
    ).escrow_micro


def claim(**more: Any) -> dict[str, Any]:
    """A request for work of a program that knows audits."""
    return {"claim_id": secrets.token_hex(16), "wait_s": 0.0, "audits": True} | more


async def taken(home: LocalCoordinator, worker: Worker) -> Lease:
    """Claim until it is an audit, as a volunteer between its tasks."""
    reply = decode(await worker.post("/claims", claim()), ClaimReply)
    assert reply.lease is not None, reply.idle
    assert reply.lease.audit is not None
    return reply.lease


async def update_of(home: LocalCoordinator) -> ContributionRow:
    """The update that is checked."""

    def read(conn: Connection) -> ContributionRow:
        number = conn.execute(audited(recomputes.c.contribution_id)).scalar_one()
        return contributions.by_id(conn, number)

    return await home.coordinator.db.read(read)


async def sums_of_the_update(home: LocalCoordinator, lease: Lease) -> bytes:
    """The sums of what was submitted, which no auditor is told."""
    assert lease.audit is not None
    row = await update_of(home)
    path = await home.coordinator.blobs.local(row.sha256)
    run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, lease.run))
    return _sums_of_update(path, definition(run).schema, row.codec, lease.audit.seed)


async def answer(
    home: LocalCoordinator, worker: Worker, lease: Lease, sums: bytes, state: str = "accepted"
) -> None:
    begun = await worker.begin(lease)
    await worker.upload(lease, sums)
    said = worker.submission(lease, begun, sums)
    verdict = decode(await worker.post(f"/tasks/{lease.task}/submit", said), Verdict)
    assert verdict.state == state, verdict.message


async def audits(bob: LocalMachine, load: Any = None) -> None:
    async with bob.working(load, max_tasks=1) as process:
        assert await process.ended(120) == 0


async def test_an_honest_audit_passes_and_is_paid(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "confirmed_chance", lambda freed, stake: 0.0)
    async with done(tmp_path, database_url) as (home, bob, _):
        await audits(bob)
        await until(home, "done")
        assert await result(home) == "passed"
        assert await escrow(home, "Bob the machine") > 0
        assert (await balances(home, "Ann"))[0] == "vetted"
        assert await home.coordinator.ledger.check() == ()
        assert (await home.coordinator.checks.run()).breaches == ()


async def test_a_lying_worker_is_caught_by_an_audit_and_the_organiser(
    tmp_path: Path, database_url: str
) -> None:
    async with done(tmp_path, database_url, lazy) as (home, bob, _):
        await audits(bob)
        organiser(home)
        await until(home, "done")
        assert await result(home) == "failed"
        assert await balances(home, "Ann") == ("suspended", 0, 0)
        assert (await balances(home, "Bob the machine"))[0] == "vetted"
        assert await escrow(home, "Bob the machine") > 0
        assert await home.coordinator.ledger.check() == ()


async def test_a_lying_auditor_is_caught_and_its_pay_taken_back(
    tmp_path: Path, database_url: str
) -> None:
    async with done(tmp_path, database_url) as (home, bob, _):
        await audits(bob, lazy)
        organiser(home)
        await until(home, "done")
        assert await result(home) == "passed"
        assert (await balances(home, "Ann"))[0] == "vetted"
        assert await balances(home, "Bob the machine") == ("suspended", 0, 0)
        assert await home.coordinator.ledger.check() == ()


async def test_one_who_says_yes_to_the_work_of_a_friend_falls_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums are those of the made-up update, so they agree: this answer is drawn for the
    organiser's own recompute.
    """
    weighed: list[tuple[int, int | None]] = []

    def certain(gained: int, stake: int | None) -> float:
        weighed.append((gained, stake))
        return 1.0

    monkeypatch.setattr(rules, "confirmed_chance", certain)
    async with checked(tmp_path, "", lazy) as (home, bob):
        lease = await taken(home, bob)
        ann = await escrow(home, "Ann")
        await answer(home, bob, lease, await sums_of_the_update(home, lease))
        gained = ann + 2 * lease.price_micro  # the pay of the work, and of the answer
        assert weighed == [(gained, None)]  # he is vouched for
        organiser(home)
        await until(home, "done")
        assert await result(home) == "failed"
        for name in ("Ann", "Bob"):
            assert await balances(home, name) == ("suspended", 0, 0)


async def test_an_answer_counts_once_of_its_holder_and_of_the_right_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "confirmed_chance", lambda freed, stake: 1.0)
    async with checked(tmp_path, "") as (home, bob):
        eve = await home.join("Eve")
        await proven(home, "Eve")
        lease = await taken(home, bob)
        right = await sums_of_the_update(home, lease)
        path = f"/tasks/{lease.task}/submit"
        begun = await bob.begin(lease)
        said = bob.submission(lease, begun, right)
        assert (await eve.announce(lease, right)).status_code == 404
        assert (await eve.post(path, said)).status_code == 404
        assert (await bob.announce(lease, right + b"x")).status_code == 413
        await bob.upload(lease, right[:-4])
        short = await bob.post(path, bob.submission(lease, begun, right[:-4]))
        assert decode(short, Verdict).state == "rejected"
        async with asyncio.timeout(120):  # somebody else's turn, or its own again
            lease = await taken(home, eve)
        begun = await eve.begin(lease)
        await eve.upload(lease, right)
        first = decode(await eve.post(path, eve.submission(lease, begun, right)), Verdict)
        again = decode(await eve.post(path, eve.submission(lease, begun, right)), Verdict)
        assert first.contribution == again.contribution
        assert first.state == "accepted"
        assert (await bob.post(path, said)).status_code == 409
        organiser(home)
        await until(home, "done")
        assert await escrow(home, "Eve") == lease.price_micro
        assert await escrow(home, "Bob") == 0
        assert await home.coordinator.ledger.check() == ()


async def test_a_task_that_nobody_has_is_given_to_nobody_once_the_organiser_did_it(
    tmp_path: Path,
) -> None:
    async with checked(tmp_path, "") as (home, bob):
        organiser(home)
        await settled(home)
        await home.coordinator.audits.open()
        await until(home, "done")
        reply = decode(await bob.post("/claims", claim()), ClaimReply)
        assert reply.lease is not None
        assert reply.lease.audit is None


async def test_an_audit_is_for_nobody_else(tmp_path: Path) -> None:
    """Neither for a program that does not know the kind, nor for the account itself, nor for one
    on probation, nor too often.
    """
    async with checked(tmp_path, "") as (home, bob):
        many = home.coordinator.volunteers

        async def kinds(**more: Any) -> bool:
            reply = decode(await bob.post("/claims", claim(**more)), ClaimReply)
            assert reply.lease is not None
            await bob.post(f"/tasks/{reply.lease.task}/release", {"attempt": reply.lease.attempt})
            return reply.lease.audit is not None

        assert not await kinds(audits=False)
        number = next(p for p in await many.list() if p.nickname == "Bob").volunteer_id

        async def so(**values: Any) -> None:
            await home.coordinator.db.write(
                lambda conn: volunteers.set_volunteer(conn, number, **values)
            )

        await so(accepted_micro=rules.PAY_PER_AUDIT - 1)
        assert not await kinds()
        await so(accepted_micro=MANY, standing="probation")
        assert not await kinds()
        await so(standing="vetted")
        assert await kinds()


async def test_an_audit_that_was_given_back_is_for_another_account(tmp_path: Path) -> None:
    """Otherwise a second machine of the account would be asked, and could do no more."""
    async with checked(tmp_path, "") as (home, bob):
        lease = await taken(home, bob)
        second = Worker(home, "Bob")
        second.volunteer_id, second.secret = bob.volunteer_id, bob.secret
        second.http = home.client(f"{second.worker_id}.{second.secret}")
        code = decode(await bob.post("/links"), LinkCode).code
        said = second.registration(code=code)
        decode(await second.post("/workers/register", said), RegisterReply)
        back = {"attempt": lease.attempt, "failed": True}
        assert (await bob.post(f"/tasks/{lease.task}/release", back)).status_code == 204
        reply = decode(await second.post("/claims", claim()), ClaimReply)
        assert reply.lease is not None
        assert reply.lease.audit is None
        eve = await home.join("Eve")
        await proven(home, "Eve")
        assert (await taken(home, eve)).task == lease.task


async def test_a_lost_lease_goes_on_and_silence_leaves_it_to_the_organiser(tmp_path: Path) -> None:
    async with checked(tmp_path, "") as (home, bob):
        lease = await taken(home, bob)
        await home.clock.advance(RENEW_S + 10)
        await home.coordinator.task_leases.expire()
        again = await taken(home, bob)
        assert (again.task, again.attempt) == (lease.task, lease.attempt + 1)
        begun, sums = await bob.begin(again), await sums_of_the_update(home, again)
        await bob.upload(again, sums)
        await home.clock.advance(RENEW_S + 10)
        await home.coordinator.task_leases.expire()
        organiser(home)
        await settled(home)
        assert await result(home) == "passed"
        said = bob.submission(again, begun, sums)
        reply = await bob.post(f"/tasks/{again.task}/submit", said)
        assert reply.status_code != 200 or decode(reply, Verdict).state == "superseded"
        assert await escrow(home, "Bob") == 0
        assert await home.coordinator.ledger.check() == ()


async def test_a_base_that_is_gone_is_the_organisers_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that cannot be compared is paid, and proves nothing of anybody."""
    async with checked(tmp_path, "") as (home, bob):
        lease = await taken(home, bob)
        right = await sums_of_the_update(home, lease)

        async def gone(sha256: str) -> Path:
            if sha256 == (await update_of(home)).sha256:
                raise NotFound("there is no such blob")
            return await local(sha256)

        local = home.coordinator.blobs.local
        monkeypatch.setattr(home.coordinator.blobs, "local", gone)
        await answer(home, bob, lease, right)
        organiser(home)
        assert (await postponed(home))[0].startswith("it cannot be done again now: ")
        assert (await balances(home, "Bob"))[0] == "vetted"


async def test_audits_survive_a_kill_of_either_side(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The auditor is killed with its lease in hand, the server between the answer and its
    verdict.
    """
    compared, died = Audits._compare, asyncio.Event()

    async def dies(self: Audits, *work: Any) -> Any:
        if not died.is_set():
            died.set()
            raise Unavailable("killed")
        return await compared(self, *work)

    monkeypatch.setattr(Audits, "_compare", dies)
    monkeypatch.setattr(rules, "confirmed_chance", lambda freed, stake: 0.0)
    async with done(tmp_path, database_url) as (home, bob, _):
        async with bob.working(max_tasks=1) as process:
            assert (await process.until(events.Claimed)).kind == events.AUDIT
        async with bob.working(max_tasks=1) as process:
            async with asyncio.timeout(120):
                await died.wait()
            async with asyncio.timeout(120):
                while not await home.coordinator.intake.recheck():
                    await asyncio.sleep(0.02)
            assert await process.ended(120) == 0
        await until(home, "done")
        assert await result(home) == "passed"
        assert await escrow(home, "Bob the machine") > 0
        assert await home.coordinator.ledger.check() == ()
        assert (await home.coordinator.checks.run()).breaches == ()


async def state_of(home: LocalCoordinator, task: int) -> str:
    def read(conn: Connection) -> str:
        return str(conn.execute(select(tasks.c.state).where(tasks.c.id == task)).scalar_one())

    return await home.coordinator.db.read(read)


async def test_a_lease_that_comes_back_behind_the_organiser_is_given_to_nobody(
    tmp_path: Path,
) -> None:
    """Otherwise it would stay among the waiting tasks for ever."""
    async with checked(tmp_path, "") as (home, bob):
        lease = await taken(home, bob)
        await bob.post(f"/tasks/{lease.task}/release", {"attempt": lease.attempt})
        organiser(home)
        await settled(home)
        await home.coordinator.audits.open()
        await until(home, "done")
        assert await state_of(home, lease.task) == "cancelled"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_an_audit_whose_run_has_ended_is_left_to_the_organiser_at_once(
    tmp_path: Path, when: str
) -> None:
    async with checked(tmp_path, "") as (home, _):
        await home.coordinator.runs.stop("tiny")
        if when == "meanwhile":  # opened by a transaction that saw the run still going
            late = update(tasks).where(tasks.c.kind == "audit").values(state="todo", ended_at=None)
            await home.coordinator.db.write(lambda conn: conn.execute(late))
        await home.coordinator.audits.open()
        organiser(home)
        await settled(home)
        assert await result(home) == "passed"


async def test_an_audit_that_a_banned_account_answered_is_for_another_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "confirmed_chance", lambda freed, stake: 0.0)
    compare = Audits._compare
    async with checked(tmp_path, "") as (home, bob):
        eve = await home.join("Eve")
        await proven(home, "Eve")

        async def ban_first(self: Audits, *work: Any) -> Any:
            await home.coordinator.volunteers.ban(bob.volunteer_id)
            return await compare(self, *work)

        lease = await taken(home, bob)
        right = await sums_of_the_update(home, lease)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Audits, "_compare", ban_first)
            await answer(home, bob, lease, right, "rejected")
        assert await result(home) == ""
        assert await balances(home, "Bob") == ("vetted", 0, 0)
        assert await state_of(home, lease.task) == "todo"
        await home.coordinator.volunteers.unban(bob.volunteer_id)
        reply = decode(await bob.post("/claims", claim(audits=True)), ClaimReply)
        assert reply.lease is None or reply.lease.audit is None
        async with asyncio.timeout(120):
            again = await taken(home, eve)
        assert again.task == lease.task
        await answer(home, eve, again, right)
        assert await result(home) == "passed"
        assert (await home.coordinator.checks.run()).breaches == ()


async def test_a_ban_that_comes_while_an_answer_is_decided_counts(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision waits for the ban of another process; SQLite has one writer."""
    monkeypatch.setattr(rules, "confirmed_chance", lambda freed, stake: 0.0)
    url = await postgres.fresh()
    async with checked(tmp_path, url) as (home, bob):
        lease = await taken(home, bob)
        right = await sums_of_the_update(home, lease)
        done, held = asyncio.Event(), asyncio.Event()

        def slow_ban(conn: Connection) -> None:
            suspension.ban(conn, volunteers.existing(conn, bob.volunteer_id), "spam", 1.0)
            held.set()
            await_only(done.wait())

        begun = await bob.begin(lease)
        await bob.upload(lease, right)
        other = await Database.open(url)
        ban = asyncio.create_task(other.write(slow_ban))
        await held.wait()
        said = bob.submission(lease, begun, right)
        decision = asyncio.create_task(bob.post(f"/tasks/{lease.task}/submit", said))
        async with asyncio.timeout(120):
            while not decision.done() and not await home.coordinator.db.read(
                lambda conn: conn.execute(text(WAITING)).scalar_one()
            ):
                await asyncio.sleep(0.01)
        done.set()
        await ban
        assert decode(await decision, Verdict).state == "rejected"
        assert await result(home) == ""
        await other.close()
    await postgres.recycle(url)


async def test_a_suspension_leaves_what_an_audit_has_earned_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "confirmed_chance", lambda freed, stake: 0.0)
    async with checked(tmp_path, "") as (home, bob):
        lease = await taken(home, bob)
        await answer(home, bob, lease, await sums_of_the_update(home, lease))
        await until(home, "done")
        who = next(p for p in await home.coordinator.volunteers.list() if p.nickname == "Bob")
        now = home.clock.now()
        free = ledger.free_all
        await home.coordinator.db.write(lambda conn: free(conn, who.volunteer_id, now))
        assert await balances(home, "Bob") == ("vetted", 0, lease.price_micro)
        await home.coordinator.db.write(
            lambda conn: suspend(conn, who.volunteer_id, "of another thing", now)
        )
        assert await balances(home, "Bob") == ("suspended", 0, lease.price_micro)


@pytest.mark.parametrize(("agrees", "standing"), [(True, "suspended"), (False, "vetted")])
async def test_an_auditor_is_refuted_by_two_voices_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agrees: bool, standing: str
) -> None:
    """If update, answer and recompute all differ, a state that was made for it may be why; if
    the answer agrees with what was made up, it was said for a friend.
    """
    async with checked(tmp_path, "") as (home, bob):
        lease = await taken(home, bob)
        other = np.random.default_rng(0).standard_normal(512).astype(np.float32).tobytes()
        figures = Redone(cosine=0.1, norm_ratio=1.0, sums=other)

        real = Compute.timed

        async def found(self: Compute, work: Any, *given: Any) -> Any:
            return (figures, 1.0) if work is redo else await real(self, work, *given)

        monkeypatch.setattr(Compute, "timed", found)
        monkeypatch.setattr(rules, "confirmed_chance", lambda freed, stake: 1.0)
        right = await sums_of_the_update(home, lease)
        made_up = np.ones(512, np.float32).tobytes()
        await answer(home, bob, lease, right if agrees else made_up)
        organiser(home)
        await until(home, "done")
        assert (await balances(home, "Bob"))[0] == standing


async def test_an_answer_that_comes_while_the_organiser_is_at_it_is_held_beside_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that nobody looked at would be paid, and prove nothing."""
    async with checked(tmp_path, "") as (home, bob):
        lease = await taken(home, bob)
        begun = await bob.begin(lease)
        sums = np.ones(512, np.float32).tobytes()
        await bob.upload(lease, sums)
        await home.clock.advance(RENEW_S + 10)  # its lease is lost: the server may begin
        await home.coordinator.task_leases.expire()
        real, times = Compute.timed, 0

        async def late(self: Compute, work: Any, *given: Any) -> Any:
            nonlocal times
            found = await real(self, work, *given)
            times += work is redo  # versions are measured beside it
            if work is redo and times == 1:
                said = bob.submission(lease, begun, sums)
                reply = await bob.post(f"/tasks/{lease.task}/submit", said)
                assert decode(reply, Verdict).state == "accepted"
            return found

        monkeypatch.setattr(Compute, "timed", late)
        organiser(home)
        await until(home, "done")
        assert await result(home) == "passed"
        assert times == 1
        assert (await balances(home, "Bob"))[0] == "suspended"
