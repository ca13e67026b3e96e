"""Requests that are served together: each has its own answer, and the books are those of one after
the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import pytest
from sqlalchemy import Connection, Engine, event

from coordinator.database import contributions, submissions
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.database.tables.contributions import uploads
from coordinator.database.tables.tasks import tasks
from shared.errors import NotFound
from shared.protocol.accounts import Me
from shared.protocol.contributions import SubmitReply, SubmitRequest, UploadInfo, Verdict
from shared.protocol.heartbeat import HeartbeatReply, HeartbeatRequest
from shared.protocol.leases import Lease
from shared.protocol.limits import API
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)

SLOW = RUN.replace("quorum = 2", "quorum = 1000")  # nothing is merged
NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Fay", "Gil", "Hal")
Ready = tuple[Worker, Lease, SubmitRequest]


async def uploaded(worker: Worker, seed: int, *, broken: bool = False) -> Ready:
    """Claim, begin and upload one task; return what is to be submitted."""
    lease = await worker.claim()
    begun = await worker.begin(lease)
    data = await worker.update(lease.job.run, seed)
    if broken:
        data = data[:-4] + np.float32(np.nan).tobytes()
    await worker.upload(lease, data)
    return worker, lease, worker.submission(lease, begun, data)


async def submit(ready: Ready) -> httpx.Response:
    worker, lease, said = ready
    return await worker.post(f"/tasks/{lease.task}/submit", said)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Statements that reach a database inside the block."""
    seen: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def books(home: LocalCoordinator) -> list[tuple[Any, ...]]:
    """States of contributions and tasks, and trust and pay of accounts, without their numbers."""
    c, t, v = contributions_table.c, tasks.c, volunteers.c
    queries = (
        contributions_table.select().with_only_columns(c.sha256, c.state, c.reason, c.price_micro),
        tasks.select().with_only_columns(t.state, t.start, t.failures).where(t.attempt > 0),
        volunteers.select().with_only_columns(v.nickname, v.standing, v.accepted, v.accepted_micro),
    )

    def read(conn: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for query in queries for row in conn.execute(query)]

    assert await home.coordinator.ledger.check() == ()
    assert (await home.coordinator.checks.run()).breaches == ()
    return sorted(await home.coordinator.db.read(read), key=repr)


def failures_of(home: LocalCoordinator) -> list[BaseException]:
    """Errors of transactions from now on."""
    db, failed = home.coordinator.db, list[BaseException]()
    write = db.write

    async def watched(fn: Any) -> Any:
        try:
            return await write(fn)
        except BaseException as error:
            failed.append(error)
            raise

    db.write = watched  # type: ignore[method-assign]
    return failed


async def crew(home: LocalCoordinator) -> list[Worker]:
    await home.start_run(SLOW)
    return [await home.join(name) for name in NAMES]


async def work_of_all(home: LocalCoordinator) -> list[Ready]:
    """One upload of each, every third broken."""
    return [
        await uploaded(worker, seed, broken=seed % 3 == 1)
        for seed, worker in enumerate(await crew(home))
    ]


async def test_submissions_at_one_moment_have_the_books_of_one_after_the_other(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path / "alone") as home:
        for ready in await work_of_all(home):
            await submit(ready)
        wanted = await books(home)
    async with local_coordinator(tmp_path / "together", database=database_url) as home:
        work = await work_of_all(home)
        with counted() as statements:
            replies = await asyncio.gather(*map(submit, work))
        verdicts = [decode(reply, Verdict) for reply in replies]
        assert [each.state for each in verdicts] == [
            "rejected" if seed % 3 == 1 else "accepted" for seed in range(len(work))
        ]
        assert await books(home) == wanted
        posted = [each for each in statements if each.startswith("INSERT INTO contributions")]
        assert len(posted) < len(work)
        assert (
            await home.coordinator.db.read(lambda conn: conn.execute(uploads.select()).all()) == []
        )


async def test_each_submission_has_its_own_answer_whatever_comes_with_it(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        good, twice, other, missing, lost, rest = [
            await uploaded(worker, seed) for seed, worker in enumerate((await crew(home))[:6])
        ]
        strange = (rest[0], good[1], rest[2])  # a task of somebody else
        elsewhere = msgspec.structs.replace(missing[2], sha256="0" * 64)  # never uploaded
        renamed = msgspec.structs.replace(other[2], loss_last=1.0)  # other content, same key
        given_back = {"attempt": lost[1].attempt}
        assert (await lost[0].post(f"/tasks/{lost[1].task}/release", given_back)).status_code < 300
        asked: Sequence[Ready] = [
            good,
            twice,
            twice,
            other,
            (other[0], other[1], renamed),
            strange,
            (missing[0], missing[1], elsewhere),
            lost,
            rest,
        ]
        failed = failures_of(home)
        replies = await asyncio.gather(*map(submit, asked))
        assert failed == []
        codes = [reply.status_code for reply in replies]
        assert codes[:3] + codes[5:] == [200, 200, 200, 404, 409, 410, 200]
        assert sorted(codes[3:5]) == [200, 409]  # which of the two comes first is open
        first = codes.index(200, 3)
        found = [decode(replies[place], Verdict).contribution for place in (0, 1, 2, first, 8)]
        assert found[1] == found[2]
        assert len({*found}) == 4
        states = await home.coordinator.db.read(lambda conn: contributions.counts(conn, 1))
        assert states == {"accepted": 4}
        row = await home.coordinator.db.read(lambda conn: contributions.by_id(conn, found[0]))
        gone = msgspec.structs.replace(row, task_id=10**9)
        assert not await home.coordinator.db.write(lambda conn: submissions.tasks_of(conn, [gone]))
        again = await asyncio.gather(*map(submit, [good, rest]))
        assert [decode(reply, Verdict).contribution for reply in again] == [found[0], found[4]]
        await books(home)


@pytest.mark.parametrize("seed", range(4))
async def test_retries_and_failing_transactions_pay_nothing_twice(
    tmp_path: Path, database_url: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    async with local_coordinator(tmp_path, database=database_url) as home:
        work = [await uploaded(worker, n) for n, worker in enumerate(await crew(home))]
        db, left = home.coordinator.db, {"faults": 6}
        write = db.write

        async def unsure(fn: Any) -> Any:
            """Fail before a transaction, or after its commit."""
            dice = rng.random() if left["faults"] else 1.0
            left["faults"] -= dice < 0.5
            if dice < 0.25:
                raise RuntimeError("it did not begin")
            found = await write(fn)
            if dice < 0.5:
                raise RuntimeError("its commit was not heard of")
            return found

        db.write = unsure  # type: ignore[method-assign]
        waiting = dict(enumerate(work))
        while waiting:
            asked = [place for place in waiting for _ in range(1 + int(rng.integers(2)))]
            replies = await asyncio.gather(*(submit(waiting[place]) for place in asked))
            for place, reply in zip(asked, replies, strict=True):
                if reply.status_code == 200 and decode(reply, Verdict).state == "accepted":
                    waiting.pop(place, None)
        states = await db.read(lambda conn: contributions.counts(conn, 1))
        assert states == {"accepted": len(work)}
        await books(home)


async def test_of_one_account_each_is_decided_after_the_other(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run(SLOW)
        machines = [await home.join(NAMES[0])]
        people = home.coordinator.volunteers
        ann = await people.authenticate(machines[0].worker_id, machines[0].secret)
        for _ in range(4):
            code = (await people.link_code(ann)).code
            machines += [await home.join("", code=code)]
        work = [await uploaded(worker, seed) for seed, worker in enumerate(machines)]
        with counted() as statements:
            replies = await asyncio.gather(*map(submit, work))
        assert {decode(reply, Verdict).state for reply in replies} == {"accepted"}
        counts = [each for each in statements if "UPDATE volunteers SET accepted=" in each]
        assert len(counts) == len(work)
        await books(home)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_accounts_are_locked_in_one_order_before_their_draws_are_counted(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run(SLOW + "[trust]\nrecompute = 1.0\n")
        work = [await uploaded(await home.join(name), n) for n, name in enumerate(NAMES)]
        with counted() as statements:
            await asyncio.gather(*map(submit, work))
        order = ""
        for each in statements:
            order += "d" if each.startswith("UPDATE volunteers SET draws") else ""
            order += "l" if "FROM volunteers" in each and "FOR NO KEY UPDATE" in each else ""
        assert order.count("d") == len(work)
        assert order.startswith("l")


async def test_begins_and_uploads_at_one_moment_have_their_own_answers(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        workers = await crew(home)
        leases = [await worker.claim() for worker in workers]
        ann, bob = workers[:2]
        with counted() as statements:
            replies: list[Any] = await asyncio.gather(
                bob.post(f"/tasks/{leases[0].task}/begin", {"attempt": 1}),
                bob.post("/tasks/987654321/begin", {"attempt": 1}),
                *map(Worker.begin, workers, leases),
            )
        foreign, unknown, *begun = replies
        assert (foreign.status_code, unknown.status_code) == (404, 404)
        assert {each.version for each in begun} == {0}
        assert len([each for each in statements if each.startswith("UPDATE tasks")]) < len(workers)
        assert [await ann.begin(leases[0]), await bob.begin(leases[1])] == begun[:2]

        data = [await worker.update("tiny", seed) for seed, worker in enumerate(workers)]
        with counted() as statements:
            foreign, large, *granted = await asyncio.gather(
                bob.announce(leases[0], data[0]),
                ann.announce(leases[0], data[0], size=1 << 40),
                *map(Worker.announce, workers, leases, data),
            )
        assert (foreign.status_code, large.status_code) == (404, 413)
        infos = [decode(reply, UploadInfo) for reply in granted]
        posted = [each for each in statements if each.startswith("INSERT INTO uploads")]
        assert len(posted) < len({info.upload_id for info in infos}) == len(workers)

        assert (await bob.put(infos[0].upload_id, 0, data[0])).status_code == 404
        ended = await asyncio.gather(
            *(
                worker.put(info.upload_id, 0, each)
                for worker, info, each in zip(workers, infos, data, strict=True)
            )
        )
        assert all(decode(reply, UploadInfo).complete for reply in ended)


async def test_accounts_read_at_one_moment_are_those_read_alone(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        work = await work_of_all(home)
        await asyncio.gather(*map(submit, work))
        workers = [worker for worker, _, _ in work]

        async def view(worker: Worker) -> Me:
            return decode(await worker.get("/workers/me"), Me)

        together = await asyncio.gather(*map(view, [*workers, *workers]))
        alone = [await view(worker) for worker in workers]
        assert together == alone * 2
        assert [(me.accepted, me.rejected) for me in alone] == [
            (0, 1) if seed % 3 == 1 else (1, 0) for seed in range(len(work))
        ]
        assert all(bool(me.pending_micro) == bool(me.accepted) for me in alone)


async def test_a_transaction_that_is_run_again_loses_no_verdict_of_a_reply(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run(SLOW)
        ready = await uploaded(await home.join("Ann"), 1)
        db = home.coordinator.db
        read = db.read

        async def twice(fn: Any) -> Any:  # as after a lost connection
            return await read(lambda conn: (fn(conn), fn(conn))[1])

        db.read = twice  # type: ignore[method-assign]
        reply = decode(await submit(ready), SubmitReply)
        assert [each.contribution for each in reply.news] == [reply.contribution]


async def test_heartbeats_at_one_moment_ask_once_who_has_news(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run(SLOW)
        people = [await home.join(name) for name in NAMES]
        reply = decode(await submit(await uploaded(people[0], 1)), SubmitReply)
        body = HeartbeatRequest(news_since=0)
        alone = decode(await people[1].post("/workers/heartbeat", body), HeartbeatReply)
        assert alone.news == ()
        assert alone.news_until > 0
        await home.clock.advance(2.0)  # what heartbeats share is read again
        with counted() as statements:
            beats = [each.post("/workers/heartbeat", body) for each in people]
            found = [decode(each, HeartbeatReply) for each in await asyncio.gather(*beats)]
        assert [len(each.news) for each in found] == [1] + [0] * (len(NAMES) - 1)
        assert found[0].news[0].contribution == reply.contribution
        assert found[0].me is not None
        assert {each.news_until for each in found} == {alone.news_until}
        assert len([each for each in statements if "verdicts" in each]) <= len(NAMES)


async def test_a_view_is_read_once_whatever_fails_beside_it(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        people = [await home.join(name) for name in NAMES]
        read = list[str]()

        def also(conn: Connection, _: object, name: str) -> str:
            read.append(name)
            if name == "Bob":
                raise NotFound("none")
            return name

        accounts = home.coordinator.volunteers
        known = [await accounts.authenticate(each.worker_id, each.secret) for each in people]
        views = [
            accounts.me_with(each, partial(also, name=name))
            for each, name in zip(known, NAMES, strict=True)
        ]
        found = await asyncio.gather(*views, return_exceptions=True)
        assert sorted(read) == sorted(NAMES)
        assert [type(each) for each in found] == [
            NotFound if name == "Bob" else tuple for name in NAMES
        ]


@pytest.mark.parametrize(
    "name", ["\0", "\ud800", "0" * 31, "A" * 32, "0" * 32 + "\n", "\u0660" * 32]
)
async def test_a_name_that_no_upload_has_is_not_looked_up(
    tmp_path: Path, database_url: str, name: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        ann = await home.join("Ann")
        who = await home.coordinator.volunteers.authenticate(ann.worker_id, ann.secret)
        with counted() as statements, pytest.raises(NotFound, match="no such upload"):
            await home.coordinator.uploads.write(who, name, 0, nothing())
        assert not statements
        path = f"{API}/uploads/{quote(name, errors='surrogatepass')}"
        refused(await ann.http.put(path, headers={"Upload-Offset": "0"}), 404)


async def nothing() -> AsyncIterator[bytes]:
    """Yield an empty piece."""
    yield b""
