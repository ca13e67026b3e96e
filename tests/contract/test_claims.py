"""Claiming a task, the same on SQLite and PostgreSQL, in virtual time."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Connection, Table, update
from sqlalchemy.util import await_only

from coordinator.accounts.accounts import Principal
from coordinator.database import runs, tasks
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.accounts import volunteers as volunteers_table
from coordinator.database.tables.accounts import workers as workers_table
from coordinator.database.tables.runs import runs as runs_table
from coordinator.rules import run_file
from coordinator.rules.eligibility import Waiter
from coordinator.scheduling.claims import Answer
from coordinator.signals import Signals
from shared.errors import (
    BadRequest,
    Banned,
    Unauthorized,
    Unavailable,
    VolunteerError,
)
from shared.protocol.base import Reason
from shared.protocol.leases import ClaimRequest, Lease, ReleaseRequest
from shared.protocol.limits import RENEW_S
from tests.support.account_rows import TINY
from tests.support.databases import Postgres
from tests.support.run_rows import add_run, add_worker, claim, queue_of
from tests.support.virtual_queue import TASK, VirtualQueue, check_cover, virtual_queue


@pytest.fixture
async def house(database: Database) -> VirtualQueue:
    return await virtual_queue(database)


async def test_a_lease_says_all_that_a_worker_needs(house: VirtualQueue) -> None:
    lease = await house.lease(house.a, device="cuda:0")
    now = house.clock.now()
    assert (lease.attempt, lease.run, lease.dataset, lease.chunks) == (1, "run", "", (0,))
    assert (lease.job.start, lease.job.stop, lease.job.steps, lease.job.batch_size) == (0, 8, 2, 4)
    assert (lease.job.workload, lease.job.kind, lease.job.update) == ("gpt", "train", "delta")
    assert lease.renew_by == now + RENEW_S
    assert lease.finish_by == now + 6000  # ten floors, while nobody knows how long it takes
    assert lease.price_micro == 2000
    assert lease.grant.bytes_max > 4000
    assert (lease.grant.codec, lease.now) == ("int8", now)
    plain = await house.lease(house.b, codecs=("float32", "bf16"))
    assert plain.grant.codec == "bf16"  # the next best that it speaks


async def test_the_same_claim_gets_the_same_lease_while_it_lives(house: VirtualQueue) -> None:
    first = await house.lease(house.a, "mine")
    assert (await house.lease(house.a, "mine")).task == first.task
    one, two = await asyncio.gather(house.lease(house.a, "both"), house.lease(house.a, "both"))
    assert one.task == two.task != first.task
    await house.queue.release(house.a, first.task, ReleaseRequest(attempt=1))
    again = await house.lease(house.a, "mine")
    assert (again.task, again.attempt) == (first.task, 2)


async def test_a_claim_id_of_somebody_else_is_of_no_use(house: VirtualQueue) -> None:
    first = await house.lease(house.a, "id")
    assert (await house.lease(house.b, "id")).task != first.task


async def test_an_extended_run_hands_out_its_next_pass(house: VirtualQueue) -> None:
    def extend(conn: Connection, passes: int) -> None:
        table = {"name": "run", "workload": "gpt", "model": TINY, "task": TASK}
        table["stop"] = {"passes": passes}
        runs.set_values(conn, house.run, file=run_file.encode(run_file.from_table(table)))

    await house.write(partial(extend, passes=1))
    for _ in range(8):
        assert await house.finish((await house.lease(house.a)).task)
    assert await house.idle(house.a) == Reason.MERGING
    await house.write(partial(extend, passes=2))
    house.signals.notify("runs")
    assert (await house.lease(house.a)).job.start == 0


@pytest.mark.parametrize(
    "request_",
    [{"claim_id": ""}, {"claim_id": "x" * 65}, {"device": "../x"}, {"runs": ("r",) * 99}],
)
async def test_a_senseless_claim_is_refused(house: VirtualQueue, request_: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        await house.queue.claims.claim(house.a, ClaimRequest(**{"claim_id": "c", **request_}))


async def test_many_coordinators_never_hand_out_a_sample_twice(
    house: VirtualQueue, database_url: str
) -> None:
    """Eight coordinators claim from one database; some tasks are given back meanwhile."""
    run = await house.write(
        lambda conn: add_run(conn, "wide", counts=(4000,), task={**TASK, "in_flight": 16})
    )
    workers = await house.write(lambda conn: [add_worker(conn) for _ in range(8)])
    databases = [await Database.open(database_url) for _ in range(8)]
    taken: list[Lease] = []

    async def hammer(db: Database, who: Principal) -> None:
        queue = queue_of(db, house.clock)
        for turn in range(12):
            lease = (await claim(queue, who, runs=("wide",))).lease
            assert lease is not None
            if turn % 4 == 3:
                await queue.release(who, lease.task, ReleaseRequest(attempt=lease.attempt))
            else:
                taken.append(lease)

    await asyncio.gather(*(hammer(db, who) for db, who in zip(databases, workers, strict=True)))
    for db in databases:
        await db.close()
    assert len({(lease.task, lease.attempt) for lease in taken}) == len(taken) == 72
    assert len({lease.task for lease in taken}) == 72
    starts = sorted((lease.job.start, lease.job.stop) for lease in taken)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(starts))
    await house.write(lambda conn: check_cover(conn, run))


async def test_an_empty_queue_says_why(house: VirtualQueue) -> None:
    assert await house.idle(house.a, runs=("nothing",)) == Reason.NO_RUN
    assert await house.idle(house.a, memory_bytes=1) == Reason.NO_FIT
    assert await house.idle(house.a, codecs=("ternary",)) == Reason.NO_FIT
    await house.lease(house.a)
    await house.lease(house.a)
    assert await house.idle(house.a) == Reason.IN_FLIGHT
    for state, reason in (
        ("paused", Reason.RUN_PAUSED),
        ("completed", Reason.RUN_ENDED),
        ("failed", Reason.RUN_ENDED),
    ):
        changed = update(runs_table).values(state=state)
        await house.write(lambda conn, changed=changed: conn.execute(changed))  # type: ignore[misc]
        assert await house.idle(house.b, runs=("run",)) == reason
        anywhere = Reason.RUN_PAUSED if state == "paused" else Reason.NO_RUN
        assert await house.idle(house.b) == anywhere


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", '"nowhere" does not exist here'),
        ("early", '"early" has not started yet'),
        ("late", '"late" has ended'),
        ("resting", '"resting" does not go on: '),
    ],
)
async def test_who_chose_a_run_hears_what_it_is_about_that_run(
    house: VirtualQueue, name: str, sentence: str
) -> None:
    def others(conn: Connection) -> None:
        for run, state in (("early", "draft"), ("late", "completed"), ("resting", "paused")):
            add_run(conn, run, state=state)

    await house.write(others)
    idle = (await claim(house.queue, house.a, runs=(name,))).idle
    assert idle is not None
    assert idle.message.startswith(sentence)


async def test_a_waiting_claim_gets_what_comes_back(house: VirtualQueue) -> None:
    leases = [await house.lease(house.a, device=f"cuda:{i}") for i in range(8)]
    waiting = asyncio.ensure_future(house.lease(house.b, wait_s=30.0))
    await _until_it_waits(house)
    assert not waiting.done()
    await house.queue.release(house.a, leases[3].task, ReleaseRequest(attempt=1))
    got = await waiting
    assert (got.task, got.attempt) == (leases[3].task, 2)


async def test_a_waiting_claim_gets_a_discarded_task_that_the_organiser_requeues(
    house: VirtualQueue,
) -> None:
    leases = [await house.lease(house.a, device=f"cuda:{i}") for i in range(8)]
    await house.write(lambda conn: tasks.discard(conn, [leases[3].task], house.clock.now()))
    waiting = asyncio.ensure_future(house.lease(house.b, wait_s=30.0))
    await _until_it_waits(house)
    assert await house.task_list.requeue(ids=[leases[3].task]) == [leases[3].task]
    await house.clock.advance(31)  # who was not woken gives up
    assert (await waiting).task == leases[3].task


async def test_a_device_works_on_a_model_that_its_machine_has_memory_for(
    house: VirtualQueue,
) -> None:
    await house.write(lambda conn: add_run(conn, "large", parameters=1_000_000_000))
    gpu: dict[str, Any] = {"runs": ("large",), "device": "cuda:0", "memory_bytes": 1 << 30}
    assert await house.idle(house.a, **gpu) == Reason.NO_FIT
    assert await house.idle(house.a, **gpu, host_bytes=1 << 30) == Reason.NO_FIT
    assert (await house.lease(house.a, **gpu, host_bytes=64 << 30)).run == "large"


@pytest.mark.parametrize(
    ("table", "of", "change", "refusal"),
    [
        (volunteers_table, "volunteer_id", {"state": "banned"}, Banned),
        (workers_table, "worker_id", {"revoked_at": 1.0}, Unauthorized),
    ],
)
async def test_a_claim_that_waits_gets_no_lease_once_its_worker_is_shut_out(
    house: VirtualQueue,
    table: Table,
    of: str,
    change: dict[str, Any],
    refusal: type[VolunteerError],
) -> None:
    leases = [await house.lease(house.a, device=f"cuda:{i}", runs=("run",)) for i in range(8)]
    waiting = asyncio.ensure_future(house.lease(house.b, wait_s=30.0))
    await _until_it_waits(house)
    shut_out = update(table).where(table.c.id == getattr(house.b, of)).values(**change)
    await house.write(lambda conn: conn.execute(shut_out))
    await house.queue.release(house.a, leases[0].task, ReleaseRequest(attempt=1))
    with pytest.raises(refusal):
        await waiting
    assert (await house.row(leases[0].task)).state == "todo"
    assert (await house.lease(house.a)).task == leases[0].task  # those asked with it go on


async def test_a_waiting_claim_gives_up_in_time(house: VirtualQueue) -> None:
    for i in range(8):
        await house.lease(house.a, device=f"cuda:{i}")
    waiting = asyncio.ensure_future(house.idle(house.b, wait_s=30.0))
    await _until_it_waits(house)
    await house.clock.advance(31)
    assert await waiting == Reason.ALL_TAKEN


async def test_claims_that_begin_together_give_up_apart(house: VirtualQueue) -> None:
    for i in range(8):
        await house.lease(house.a, device=f"cuda:{i}")
    waiting = [asyncio.ensure_future(house.idle(house.b, wait_s=30.0)) for _ in range(40)]
    await _until_they_wait(house, len(waiting))
    ends: set[float] = set()
    begun = house.clock.now()
    while not all(each.done() for each in waiting):
        await house.clock.advance(0.5)
        await asyncio.sleep(0)
        ends.add(sum(each.done() for each in waiting))
    assert house.clock.now() - begun <= 31.0
    assert len(ends) > 8


async def test_work_that_appears_wakes_a_few_claims_the_oldest_first(
    house: VirtualQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = [await house.lease(house.a, device=f"cuda:{i}") for i in range(8)]
    crowd = await house.write(lambda conn: [add_worker(conn) for _ in range(80)])
    waiting = [asyncio.ensure_future(house.lease(who, wait_s=30.0)) for who in crowd]
    asked: list[str] = []
    ask = house.queue.claims.batcher.ask

    async def counted(waiter: Waiter) -> Answer:
        asked.append(waiter.worker_id)
        return await ask(waiter)

    monkeypatch.setattr(house.queue.claims.batcher, "ask", counted)
    await _until_they_wait(house, len(crowd))
    first = len(asked)
    assert first == len(crowd)
    for lease in leases[:3]:
        await house.queue.release(house.a, lease.task, ReleaseRequest(attempt=1))
    await asyncio.gather(*waiting[:3])
    assert len(asked) - first <= 6
    assert [each.done() for each in waiting] == [True] * 3 + [False] * 77
    for each in waiting:
        each.cancel()


async def test_a_task_that_none_may_take_is_tried_by_the_line_once(
    house: VirtualQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = [await house.lease(house.a, device=f"cuda:{i}") for i in range(7)]
    failed = await house.lease(house.b)
    waiting = [
        asyncio.ensure_future(house.lease(house.b, device=f"cuda:{i}", wait_s=30.0))
        for i in range(100)
    ]
    await _until_they_wait(house, len(waiting))
    asked = answered = quiet = 0
    ask = house.queue.claims.batcher.ask

    async def counted(waiter: Waiter) -> Answer:
        nonlocal asked, answered
        asked += 1
        try:
            return await ask(waiter)
        finally:
            answered += 1

    monkeypatch.setattr(house.queue.claims.batcher, "ask", counted)
    await house.put_back(failed, house.b, "failure")
    for most in (100, 1, 1):
        asked = answered = quiet = 0
        house.signals.notify("queue")
        while quiet < 50:  # turns of the loop without a claim
            await asyncio.sleep(0)
            quiet = quiet + 1 if asked == answered else 0
        assert 0 < asked <= most
    for lease in leases[:3]:
        await house.queue.release(house.a, lease.task, ReleaseRequest(attempt=1))
    done = await asyncio.gather(*waiting[:3])
    assert {each.task for each in done} == {lease.task for lease in leases[:3]}
    for each in waiting:
        each.cancel()


async def test_a_new_version_wakes_no_claim_that_no_run_suits(
    house: VirtualQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.ensure_future(house.idle(house.a, memory_bytes=1, wait_s=30.0))
    await _until_they_wait(house, 1)
    asked: list[Waiter] = []
    monkeypatch.setattr(house.queue.claims.batcher, "ask", asked.append)
    for topic in ("versions", "queue", f"run:{house.run}"):
        house.signals.notify(topic)
        for _ in range(9):
            await asyncio.sleep(0)
    assert not asked
    assert not waiting.done()
    waiting.cancel()


async def test_a_claim_that_cannot_take_a_task_passes_it_on(house: VirtualQueue) -> None:
    for i in range(7):
        await house.lease(house.a, device=f"cuda:{i}")
    failed = await house.lease(house.b)
    crowd = await house.write(lambda conn: [add_worker(conn) for _ in range(40)])
    waiting = [
        asyncio.ensure_future(house.lease(house.b, device=f"cuda:{i}", wait_s=30.0))
        for i in range(40)
    ]
    await _until_they_wait(house, len(waiting))
    waiting += [asyncio.ensure_future(house.lease(who, wait_s=30.0)) for who in crowd]
    await _until_they_wait(house, len(waiting))
    await house.put_back(failed, house.b, "failure")
    house.signals.notify("queue")
    assert (await waiting[40]).task == failed.task
    assert sum(each.done() for each in waiting) == 1
    for each in waiting:
        each.cancel()


async def test_a_woken_claim_that_leaves_wakes_the_next(
    house: VirtualQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = [await house.lease(house.a, device=f"cuda:{i}") for i in range(8)]
    crowd = await house.write(lambda conn: [add_worker(conn) for _ in range(2)])
    gone, stays = [asyncio.ensure_future(house.lease(who, wait_s=30.0)) for who in crowd]
    await _until_they_wait(house, 2)
    ask, woken = house.queue.claims.batcher.ask, asyncio.Event()

    async def stuck(waiter: Waiter) -> Answer:
        if waiter.worker_id == crowd[0].worker_id:
            woken.set()
            await asyncio.Event().wait()
        return await ask(waiter)

    monkeypatch.setattr(house.queue.claims.batcher, "ask", stuck)
    await house.queue.release(house.a, leases[0].task, ReleaseRequest(attempt=1))
    await woken.wait()
    gone.cancel()
    assert (await stays).task == leases[0].task


async def test_a_claim_that_fails_leaves_the_others_waiting(
    house: VirtualQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(8):
        await house.lease(house.a, device=f"cuda:{i}")
    crowd = await house.write(lambda conn: [add_worker(conn) for _ in range(20)])
    waiting = [asyncio.ensure_future(house.idle(who, wait_s=30.0)) for who in crowd]
    await _until_they_wait(house, len(crowd))

    async def away(waiter: Waiter) -> Answer:
        raise Unavailable("the database cannot be reached")

    monkeypatch.setattr(house.queue.claims.batcher, "ask", away)
    house.signals.notify("queue")
    with pytest.raises(Unavailable):
        await waiting[0]
    assert house.queue.claims.waiting == len(crowd) - 1
    for each in waiting:
        each.cancel()


async def test_all_waiting_claims_learn_that_their_run_was_paused(
    house: VirtualQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(8):
        await house.lease(house.a, device=f"cuda:{i}")
    crowd = await house.write(lambda conn: [add_worker(conn) for _ in range(20)])
    waiting = [asyncio.ensure_future(house.idle(who, runs=("run",), wait_s=30.0)) for who in crowd]
    await _until_they_wait(house, len(crowd))
    await house.write(lambda conn: runs.set_values(conn, house.run, state="paused"))
    house.signals.notify("runs")
    while not all(each.done() for each in waiting):
        await _until_it_waits(house)
        assert house.clock.next_at is not None
        await house.clock.advance(house.clock.next_at - house.clock.now())
    assert {each.result() for each in waiting} == {Reason.RUN_PAUSED}


async def test_work_that_appears_at_one_replica_is_given_at_another(postgres: Postgres) -> None:
    url = await postgres.fresh()
    here, there = await Database.open(url), await Database.open(url)
    house = await virtual_queue(here)
    queues = []
    for db in (here, there):
        await (signals := Signals(house.clock)).connect(db)
        queues.append(queue_of(db, house.clock, signals=signals))
    lease, *_ = [await house.lease(house.a, device=f"cuda:{i}") for i in range(8)]
    waiting = asyncio.ensure_future(claim(queues[1], house.b, wait_s=30.0))
    async with asyncio.timeout(120):
        while not queues[1].claims.waiting or house.clock.next_at is None:
            await asyncio.sleep(0)
        await queues[0].release(house.a, lease.task, ReleaseRequest(attempt=1))
        given = (await waiting).lease
    assert given is not None
    assert given.task == lease.task
    await here.close()
    await there.close()


async def _until_they_wait(house: VirtualQueue, count: int) -> None:
    while house.queue.claims.waiting < count or house.clock.next_at is None:
        await asyncio.sleep(0)


async def _until_it_waits(house: VirtualQueue) -> None:
    while house.clock.next_at is None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_claim_gets_a_task_that_another_transaction_locked_and_left(
    house: VirtualQueue,
) -> None:
    """A repeated release locks its task, changes nothing, and announces nothing."""
    for _ in range(7):
        assert await house.finish((await house.lease(house.a)).task)
    last = await house.lease(house.a)
    await house.put_back(last, house.a, None)
    held, go = asyncio.Event(), asyncio.Event()

    def hold(conn: Connection) -> None:
        tasks.holder(conn, last.task)
        held.set()
        await_only(go.wait())

    holding = asyncio.create_task(house.write(hold))
    await held.wait()
    looks, request = house.queue.claims.durations, ClaimRequest(claim_id="waits", wait_s=20.0)
    before = looks.count
    waiting = asyncio.create_task(house.queue.claims.claim(house.b, request))
    async with asyncio.timeout(30):
        while looks.count == before:
            await asyncio.sleep(0.01)
        go.set()
        await holding
        lease = (await waiting).lease  # no clock moves: a long poll without news never ends
    assert lease is not None
    assert (lease.task, lease.attempt) == (last.task, 2)
