"""Self-play through a whole coordinator: games, learners and matches from one queue, and what is
done about fakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Connection, select, text, update
from sqlalchemy.util import await_only

from coordinator.accounts import suspension
from coordinator.compute import Compute
from coordinator.database import datasets, experience, runs, unreferenced_blobs, volunteers
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.trust import recomputes
from shared.protocol.contributions import Verdict
from shared.protocol.versions import VersionInfo
from shared.workloads.gomoku.records import GameRecord
from shared.workloads.gomoku.workload import GomokuWorkload
from tests.e2e.server.test_late_decisions import WAITING
from tests.support.databases import Postgres
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import LocalCoordinator, decode, local_coordinator
from tests.support.scripted_worker import Player
from tests.support.selfplay_run import RUN, history, player, selfplay_machine

WORKLOAD = GomokuWorkload()
Change = Callable[[list[GameRecord]], list[GameRecord]]


async def sound(home: LocalCoordinator) -> bool:
    report = await home.coordinator.checks.run()
    assert report.breaches == ()
    return await home.coordinator.ledger.check() == ()


async def kinds_done(home: LocalCoordinator) -> set[str]:
    def read(conn: Connection) -> set[str]:
        done = select(tasks.c.kind).where(tasks.c.state == "done").distinct()
        return set(conn.execute(done).scalars())

    return await home.coordinator.db.read(read)


def rated(rows: Sequence[VersionInfo]) -> list[VersionInfo]:
    """Return the versions that met an older one in a match."""
    return [row for row in rows if row.version and "elo" in row.metrics]


async def test_a_volunteer_plays_learns_and_measures(tmp_path: Path) -> None:
    async with selfplay_machine(tmp_path) as machine:
        home = machine.home
        async with machine.working() as process, process.eventually(120):
            while not rated(rows := await history(home)) or rows[0].loss is None:
                await process.tick()
        assert await kinds_done(home) == {"selfplay", "learn", "evaluate"}
        rows = await history(home)
        assert rows[-1].version >= 1
        assert rows[0].metrics["elo"] == 0
        assert {"tactics", "tactics_win", "loss"} <= set(rows[0].metrics)
        assert rated(rows)[0].metrics["elo_error"] > 0
        found = await home.coordinator.db.read(lambda conn: experience.totals(conn, 1))
        assert found.sealed >= 4
        assert found.samples > found.sealed
        assert await sound(home)


# ----------------------------------------------------------------------- one request after another


@pytest.fixture
async def home(tmp_path: Path, database_url: str) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path, database=database_url) as made:
        await made.coordinator.runs.create(RUN)
        await made.coordinator.runs.start("gomoku")
        yield made


async def learn(home: LocalCoordinator, who: Player) -> Verdict:
    """Games until there is something to learn from, then a version of it."""
    await home.coordinator.replay.tend(1)
    while (reply := await who.ask("learn")).lease is None:
        await who.do(await who.claim("selfplay"))
        await home.coordinator.replay.tend(1)
    verdict = await who.do(reply.lease)
    assert await home.coordinator.merger.merge_if_due(1)
    return verdict


async def test_games_become_chunks_and_chunks_a_version(home: LocalCoordinator) -> None:
    ann = await player(home, "Ann")
    played = await ann.do(await ann.claim("selfplay"))
    assert (played.state, played.message) == ("accepted", "4 games, all valid")
    assert played.credits_micro > 0
    assert await home.coordinator.replay.tend(1)
    lease = await ann.claim("learn")
    assert lease.data is not None
    assert [chunk.items for chunk in lease.data.chunks] == [4]
    assert (await ann.do(lease)).state == "accepted"
    assert await home.coordinator.merger.merge_if_due(1)
    assert (await home.coordinator.runs.queries.info("gomoku")).version == 1
    assert await sound(home)


async def test_games_are_drawn_by_what_they_are_paid(tmp_path: Path) -> None:
    """A task's price is a guess: drawn by it, fakes of long games would be drawn too rarely."""
    async with local_coordinator(tmp_path) as home:
        await home.coordinator.runs.create(f"{RUN}[trust]\nrecompute = 0.05\n")
        await home.coordinator.runs.start("gomoku")
        async with home.coordinator.working():
            ann = await player(home, "Ann")
            lease = await ann.claim("selfplay")
            await home.coordinator.db.write(
                lambda conn: conn.execute(update(tasks).values(price_micro=0))
            )
            assert (await ann.do(lease)).credits_micro > 0
            drawn = select(recomputes.c.result)
            found = await home.coordinator.db.read(lambda conn: conn.execute(drawn).scalars().all())
            assert found == ["passed"]


async def test_games_of_an_account_that_is_banned_while_they_are_decided_are_kept_out(
    tmp_path: Path, postgres: Postgres
) -> None:
    """The decision waits for the ban of another process; SQLite has one writer."""
    url = await postgres.fresh()
    async with local_coordinator(tmp_path, database=url) as home:
        await home.coordinator.runs.create(RUN)
        await home.coordinator.runs.start("gomoku")
        ann = await player(home, "Ann")
        lease = await ann.claim("selfplay")
        begun = await ann.worker.begin(lease)
        games = await ann.result(lease, begun)
        done, held = asyncio.Event(), asyncio.Event()

        def slow_ban(conn: Connection) -> None:
            account = volunteers.existing(conn, ann.worker.volunteer_id)
            suspension.ban(conn, account, "spam", 1.0)
            held.set()
            await_only(done.wait())

        other = await Database.open(url)
        ban = asyncio.create_task(other.write(slow_ban))
        await held.wait()
        decision = asyncio.create_task(ann.hand_in(lease, begun, games))
        async with asyncio.timeout(120):
            while not decision.done() and not await home.coordinator.db.read(
                lambda conn: conn.execute(text(WAITING)).scalar_one()
            ):
                await asyncio.sleep(0.01)
        done.set()
        await ban
        assert (await decision).state == "superseded"
        found = await home.coordinator.db.read(lambda conn: experience.totals(conn, 1))
        assert found.samples == 0
        assert await sound(home)
        await other.close()
    await postgres.recycle(url)


FLIPPED = "but the moves end with"


def flipped(records: list[GameRecord]) -> list[GameRecord]:
    return [msgspec.structs.replace(r, outcome=-r.outcome if r.outcome else 1) for r in records]


async def test_fake_games_cost_trust_and_the_task_goes_to_somebody_else(
    home: LocalCoordinator,
) -> None:
    eve, ann = await player(home, "Eve"), await player(home, "Ann")
    lease = await eve.claim("selfplay")
    verdict = await eve.do(lease, flipped)
    assert (verdict.state, verdict.reason) == ("rejected", "experience")
    assert "4 of 4 games were refused: game 0: its outcome is" in verdict.message
    assert FLIPPED in verdict.message
    assert await eve.standing() == "vetted"
    again = await ann.claim("selfplay")
    assert (again.task, again.job.seed) == (lease.task, lease.job.seed)
    assert (await ann.do(again)).state == "accepted"
    assert await sound(home)


async def test_one_odd_game_is_left_out_and_the_others_count(home: LocalCoordinator) -> None:
    ann = await player(home, "Ann")
    verdict = await ann.do(
        await ann.claim("selfplay"), lambda records: [*flipped(records[:1]), *records[1:]]
    )
    assert verdict.state == "accepted"
    assert verdict.message.startswith("3 valid games, 1 left out: game 0")
    found = await home.coordinator.db.read(lambda conn: experience.unsealed(conn, 1, 10))
    assert [row.episodes for row in found] == [3]
    assert await sound(home)


async def test_a_file_with_games_missing_is_refused(home: LocalCoordinator) -> None:
    eve = await player(home, "Eve")
    verdict = await eve.do(await eve.claim("selfplay"), lambda records: records[:2])
    assert (verdict.state, verdict.reason) == ("rejected", "experience")
    assert "the file has 2 games of 4" in verdict.message


@pytest.mark.parametrize(("count", "state"), [(4, "superseded"), (2, "rejected")])
async def test_games_that_wait_for_their_verdict_when_the_run_ends_are_paid_if_they_are_good(
    home: LocalCoordinator, count: int, state: str
) -> None:
    eve = await player(home, "Eve")
    lease = await eve.claim("selfplay")
    lost = faults(fail(RuntimeError("the process is gone")).after("write _receive"))
    with lost.installed(), pytest.raises(AssertionError, match="internal"):
        await eve.do(lease, lambda records: records[:count])
    await home.coordinator.runs.stop("gomoku")
    assert await home.coordinator.intake.recheck() == 1
    told = decode(await eve.worker.get("/contributions"), tuple[Verdict, ...])[0]
    assert told.state == state
    assert bool(told.credits_micro) is (state == "superseded")
    assert await sound(home)


async def test_a_server_without_pytorch_leaves_games_to_the_others(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = await player(home, "Ann")
    with monkeypatch.context() as bare:
        bare.setattr(Compute, "possible", staticmethod(lambda: False))
        assert (await ann.do(await ann.claim("selfplay"))).state == "checking"
        await home.coordinator.intake.recheck()
    await home.coordinator.intake.recheck()
    assert (
        decode(await ann.worker.get("/contributions"), tuple[Verdict, ...])[0].state == "accepted"
    )


async def test_games_may_begin_with_any_version_since_their_task_began(
    home: LocalCoordinator,
) -> None:
    """The server knows when a task began, and its worker alone when each game did."""
    slow, ann = await player(home, "Slow"), await player(home, "Ann")
    lease = await slow.claim("selfplay")
    begun = await slow.worker.begin(lease)
    await home.clock.advance(80)
    await learn(home, ann)
    for _ in range(4):
        await home.coordinator.runs.rollback("gomoku", 0)
    assert (await home.coordinator.runs.queries.info("gomoku")).version == 5
    other = await slow.claim("selfplay")
    data = await slow.result(lease, begun)
    await home.clock.advance(400)
    verdict = await slow.hand_in(lease, begun, data)
    assert (verdict.state, verdict.message) == ("accepted", "4 games, all valid")
    # Games of version 0 are none of a task that began with version 5.
    late = await slow.worker.begin(other)
    assert late.version == 5
    verdict = await slow.hand_in(other, late, await slow.result(other, begun))
    assert (verdict.state, verdict.reason) == ("rejected", "experience")
    assert await slow.standing() == "vetted"


async def test_without_a_learner_no_more_games_are_handed_out(home: LocalCoordinator) -> None:
    ann = await player(home, "Ann")
    for _ in range(4):
        await ann.do(await ann.claim("selfplay"))
        await home.coordinator.replay.tend(1)
    reply = await ann.ask("selfplay")
    assert reply.idle is not None
    assert "a learner has to use them first" in reply.idle.message
    await learn(home, ann)
    await home.coordinator.replay.tend(1)
    assert (await ann.claim("selfplay")).job.start == 16


async def test_learners_do_not_get_into_each_others_way(home: LocalCoordinator) -> None:
    def allow_two(conn: Connection) -> None:
        row = runs.by_id(conn, 1)
        runs.set_values(conn, 1, file=row.file.replace('"learners":1', '"learners":2'))

    await home.coordinator.db.write(allow_two)
    ann, bob = await player(home, "Ann"), await player(home, "Bob")
    for _ in range(4):
        await ann.do(await ann.claim("selfplay"))
    await home.coordinator.replay.tend(1)
    one, two = await ann.claim("learn"), await bob.claim("learn")
    assert one.data == two.data
    assert (one.job.stop, one.job.seed) == (two.job.start, one.job.seed)
    assert two.job.seed != one.job.seed
    verdicts = await asyncio.gather(ann.do(one), bob.do(two))
    assert [verdict.state for verdict in verdicts] == ["accepted", "accepted"]
    while await home.coordinator.merger.merge_if_due(1):
        pass
    assert (await home.coordinator.runs.queries.info("gomoku")).version >= 1
    assert await sound(home)


async def test_a_learner_that_dies_costs_nothing(home: LocalCoordinator) -> None:
    ann, bob = await player(home, "Ann"), await player(home, "Bob")
    await ann.do(await ann.claim("selfplay"))
    await home.coordinator.replay.tend(1)
    lost = await ann.claim("learn")
    await ann.worker.begin(lost)
    await home.clock.advance(5000)
    await home.coordinator.task_leases.expire()
    again = await bob.claim("learn")
    assert (again.task, again.data) == (lost.task, lost.data)
    assert (await bob.do(again)).state == "accepted"


async def test_only_a_match_that_was_checked_moves_the_best_version(home: LocalCoordinator) -> None:
    ann, eve = await player(home, "Ann"), await player(home, "Eve")
    await learn(home, ann)
    await home.coordinator.replay.tend(1)
    lease = await eve.claim("evaluate")
    assert lease.data is not None
    assert lease.data.meta == {"opponent": 0}

    def won(records: list[GameRecord]) -> list[GameRecord]:
        ends = {0: 1, 1: -1}
        return [msgspec.structs.replace(r, outcome=ends[r.game % 2]) for r in records]

    verdict = await eve.do(lease, won)
    assert (verdict.state, verdict.reason) == ("rejected", "experience")
    assert await home.coordinator.db.read(lambda conn: experience.matches_of(conn, 1)) == []
    again = await ann.claim("evaluate")
    assert (await ann.do(again)).state == "accepted"
    await home.coordinator.replay.tend(1)
    match = (await home.coordinator.db.read(lambda conn: experience.matches_of(conn, 1)))[0]
    assert (match.version, match.against) == (1, 0)
    assert match.wins + match.draws + match.losses == 4
    rows = {row.version: row for row in await history(home)}
    assert {"elo", "elo_error"} <= set(rows[1].metrics)
    assert rows[0].metrics["elo"] == 0
    assert (await ann.ask("evaluate")).lease is None  # nobody measures the same version twice
    assert await sound(home)


async def test_a_window_reaches_back_until_it_holds_a_batch(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experience, "CHUNKS_MAX", 8)

    def read(conn: Connection) -> list[int]:
        for number in range(9):
            row = experience.ChunkRow(
                run_id=1,
                number=number,
                sha256=str(number),
                size=1,
                episodes=16,
                samples=4,
                sealed_at=0.0,
                retired_at=None,
            )
            unreferenced_blobs.announce(conn, {row.sha256}, 0.0)
            datasets.register_referenced(conn, [(row.sha256, 1, "chunk")], 0.0)
            assert experience.seal(conn, row, [])
        wanted = ((64, 1), (64, 25), (64, 1000))
        return [len(experience.window(conn, 1, *each)) for each in wanted]

    assert await home.coordinator.db.write(read) == [4, 7, 8]


async def test_games_that_another_replica_sealed_are_not_sealed_again(
    home: LocalCoordinator,
) -> None:
    ann = await player(home, "Ann")
    for _ in range(2):
        await ann.do(await ann.claim("selfplay"))

    def twice(conn: Connection) -> tuple[bool, bool, list[int]]:
        def chunk(number: int) -> experience.ChunkRow:
            return experience.ChunkRow(
                run_id=1,
                number=number,
                sha256=str(number),
                size=1,
                episodes=4,
                samples=4,
                sealed_at=0.0,
                retired_at=None,
            )

        unreferenced_blobs.announce(conn, {"7", "8"}, 0.0)
        datasets.register_referenced(conn, [(str(number), 1, "chunk") for number in (7, 8)], 0.0)
        ids = [row.contribution_id for row in experience.unsealed(conn, 1, 10)]
        assert len(ids) == 2
        done = experience.seal(conn, chunk(7), ids[:1]), experience.seal(conn, chunk(8), ids)
        return *done, [row.contribution_id in ids[1:] for row in experience.unsealed(conn, 1, 10)]

    assert await home.coordinator.db.write(twice) == (True, False, [True])


async def test_a_deleted_run_keeps_no_files_of_games(home: LocalCoordinator) -> None:
    db = home.coordinator.db
    ann = await player(home, "Ann")
    await ann.do(await ann.claim("selfplay"))
    await home.coordinator.replay.tend(1)
    await ann.do(await ann.claim("selfplay"))

    def used(conn: Connection) -> int:
        return len(experience.blobs_in_use(conn, home.clock.now()))

    assert await db.read(used) == 2  # a chunk, and games that are not sealed
    await home.coordinator.runs.stop("gomoku")
    await home.coordinator.wind_down.delete_run("gomoku", yes=True)
    assert await db.read(used) == 0


async def test_files_of_games_live_as_long_as_somebody_may_read_them(
    home: LocalCoordinator,
) -> None:
    ann = await player(home, "Ann")
    await ann.do(await ann.claim("selfplay"))
    await home.coordinator.replay.tend(1)
    window = await home.coordinator.db.read(lambda conn: experience.window(conn, 1, 64, 1))
    used = await home.coordinator.db.read(
        lambda conn: experience.blobs_in_use(conn, home.clock.now())
    )
    assert used == {window[0].sha256}
    later = home.clock.now() + experience.KEPT_S + 1
    await home.coordinator.db.write(lambda conn: experience.retire(conn, 1, 1, home.clock.now()))
    assert (
        await home.coordinator.db.read(lambda conn: experience.blobs_in_use(conn, later)) == set()
    )
