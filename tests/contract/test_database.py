"""The promises of `Database`, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence

import pytest
from sqlalchemy import Connection, select, text, update
from sqlalchemy.exc import DBAPIError

from coordinator.database.engine import postgres as postgres_engine
from coordinator.database.engine.open_database import Database, parse
from coordinator.database.tables.record import meta
from coordinator.signals import Signals
from shared.errors import Configuration, Conflict, Unavailable
from tests.support.databases import Postgres, keys, put, putting
from tests.support.virtual_clock import VirtualClock


async def test_what_was_written_is_read_back_and_what_failed_is_not(database: Database) -> None:
    def fail(conn: Connection) -> None:
        put(conn, "lost")
        raise Conflict("no")

    await database.write(putting("kept"))
    with pytest.raises(Conflict):
        await database.write(fail)
    assert await database.read(keys) == ["kept"]


async def test_joined_writes_fail_one_by_one(database: Database) -> None:
    async def one(index: int) -> None:
        def write(conn: Connection) -> None:
            put(conn, f"{index:03}")
            if index % 3 == 0:
                raise Conflict(str(index))

        await database.write(write)

    outcomes = await asyncio.gather(*(one(i) for i in range(90)), return_exceptions=True)
    assert [i for i, outcome in enumerate(outcomes) if outcome] == list(range(0, 90, 3))
    kept = [f"{i:03}" for i in range(90) if i % 3]
    assert await database.read(keys) == kept


async def test_a_counter_raised_by_many_at_once_loses_nothing(database: Database) -> None:
    def raise_by_one(conn: Connection) -> None:
        query = select(meta.c.value).where(meta.c.key == "n").with_for_update()
        value = int(conn.execute(query).scalar_one())
        conn.execute(update(meta).where(meta.c.key == "n").values(value=str(value + 1)))

    await database.write(putting("n", "0"))
    await asyncio.gather(*(database.write(raise_by_one) for _ in range(100)))
    assert (
        await database.read(lambda conn: conn.execute(select(meta.c.value)).scalar_one()) == "100"
    )


async def test_lost_races_are_run_again(database: Database) -> None:
    """Two transactions that lock two rows in opposite order: on PostgreSQL one of them is a
    deadlock's victim.
    """

    def both(first: str, second: str) -> None:
        def move(conn: Connection) -> None:
            for key in (first, second):
                value = conn.execute(
                    select(meta.c.value).where(meta.c.key == key).with_for_update()
                ).scalar_one()
                conn.execute(update(meta).where(meta.c.key == key).values(value=value + "x"))

        jobs.append(database.write(move))

    jobs: list[Coroutine[object, object, None]] = []
    await database.write(putting("a"))
    await database.write(putting("b"))
    for _ in range(3):
        both("a", "b")
        both("b", "a")
    await asyncio.gather(*jobs)
    found = await database.read(lambda conn: conn.execute(select(meta.c.value)).scalars().all())
    assert found == ["x" * 6, "x" * 6]


async def test_a_view_is_consistent_and_cannot_write(database: Database) -> None:
    with pytest.raises(DBAPIError):
        await database.read(putting("sneaked in"))
    assert await database.read(keys) == []


async def test_closed_means_closed(database_url: str) -> None:
    db = await Database.open(database_url)
    waiting = [asyncio.ensure_future(db.write(putting(i))) for i in range(20)]
    await asyncio.sleep(0)
    await db.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    with pytest.raises(Unavailable):
        await db.write(putting("late"))
    again = await Database.open(database_url)
    kept = await again.read(keys)
    await again.close()
    assert sorted(str(i) for i, o in enumerate(outcomes) if o is None) == kept


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "is not a database address"),
        ("mysql://a/b", "not supported"),
        ("sqlite://", "needs a file"),
        ("postgresql://ann:secret@host:port/name", "^this is not a database address"),
        ("postgresql://[::1/name", "is not a database address"),
        ("postgresql://host/name?sslmod=require", 'no parameter "sslmod"'),
        ("sqlite:////nonexistent/volunteer.db", "coordinator migrate"),
    ],
)
async def test_a_wrong_address_gets_a_sentence(url: str, says: str) -> None:
    with pytest.raises(Configuration, match=says) as caught:
        await Database.open(url)
    assert caught.value.exit_code == 78


def test_addresses_as_they_are_handed_around_are_understood() -> None:
    url = parse("postgres://me:secret@db.example/volunteer?sslmode=require")
    assert url.drivername == "postgresql+asyncpg"
    assert dict(url.query) == {"ssl": "require"}


async def test_a_watch_misses_nothing() -> None:
    signals = Signals(VirtualClock())
    watch = signals.watch("queue", "run:1")
    signals.notify("run:2")
    signals.notify("run:1")
    assert await watch.wait(60)
    assert not await watch.wait(0)


async def test_a_watch_whose_topics_are_named_later_misses_nothing_either() -> None:
    signals = Signals(VirtualClock())
    watch, other = signals.watch(), signals.watch()
    signals.notify("run:1")
    watch.topics, other.topics = ("run:1",), ("run:2",)
    assert await watch.wait(60)
    assert not await other.wait(0)
    signals.deliver(None)
    assert await watch.wait(60)
    assert await other.wait(60)


async def test_a_watch_gives_up_when_time_is_up() -> None:
    clock = VirtualClock()
    signals = Signals(clock)
    waiting = asyncio.ensure_future(signals.watch("queue").wait(30))
    await clock.advance(0)  # it begins to wait
    await clock.advance(29)
    assert not waiting.done()
    await clock.advance(2)
    assert await waiting is False


async def test_other_processes_are_heard_after_an_error_of_the_database(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await postgres.fresh()
    here, there = await Database.open(url), await Database.open(url)
    listening, telling = Signals(), Signals()
    await listening.connect(here)
    await telling.connect(there)
    watch, tell = listening.watch("run:7"), postgres_engine._notify
    failed = asyncio.Event()

    def fail(connection: Connection, topics: Sequence[str]) -> None:
        monkeypatch.setattr(postgres_engine, "_notify", tell)
        failed.set()
        connection.execute(text("SELECT 1 / 0"))

    monkeypatch.setattr(postgres_engine, "_notify", fail)
    telling.notify("run:7")
    assert await watch.wait(60)
    assert failed.is_set()
    await here.close()
    await there.close()


async def test_a_database_that_nobody_can_listen_to_is_named_at_the_start(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_engine, "LISTEN_S", 0.0)
    database = await Database.open(await postgres.fresh())
    with pytest.raises(Unavailable, match="cannot be reached"):
        await Signals().connect(database)
    await database.close()


async def test_more_topics_than_one_transaction_announces_wake_every_waiter(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_engine, "TOPICS_MAX", 3)
    url = await postgres.fresh()
    here, there = await Database.open(url), await Database.open(url)
    listening, telling = Signals(), Signals()
    await telling.connect(there)
    await listening.connect(here)
    watches = [listening.watch(f"run:{number}") for number in range(9)]
    for number in range(9):
        telling.notify(f"run:{number}")
    async with asyncio.timeout(30):
        assert all([await watch.wait(60) for watch in watches])
    await here.close()
    await there.close()
    await postgres.recycle(url)


async def test_other_processes_are_heard_by_one_that_has_written_nothing(database_url: str) -> None:
    here, there = await Database.open(database_url), await Database.open(database_url)
    listening, telling = Signals(), Signals()
    await telling.connect(there)
    await listening.connect(here)
    watch = listening.watch("run:7")
    await there.write(putting("x"))
    telling.notify("run:7")
    assert await watch.wait(60)
    await here.close()
    await there.close()


async def test_other_processes_are_heard(database_url: str) -> None:
    """Two databases of one address stand for two processes: what one commits and tells wakes the
    other.
    """
    here, there = await Database.open(database_url), await Database.open(database_url)
    listening, telling = Signals(), Signals()
    await listening.connect(here)
    await telling.connect(there)
    watch = listening.watch("run:7")
    await here.write(putting("own commits wake nobody here"))
    await there.write(putting("x"))
    telling.notify("run:7")
    assert await watch.wait(60)
    await here.close()
    await there.close()
