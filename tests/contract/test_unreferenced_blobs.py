"""Only what a database once knew, and let go on purpose, is deleted; the same on both databases."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from sqlalchemy import Connection

from coordinator.database import datasets, unreferenced_blobs
from coordinator.database.engine.open_database import Database
from coordinator.database.unreferenced_blobs import SWEEPER_S
from shared.errors import Unavailable

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


async def announced(database: Database, names: set[str], since: float) -> dict[str, str]:
    return await database.write(lambda conn: unreferenced_blobs.announce(conn, names, since))


async def announce(database: Database, names: set[str], since: float) -> set[str]:
    """Announce blobs; return those that a sweep deletes meanwhile."""
    return names - (await announced(database, names, since)).keys()


async def take(database: Database, used: set[str], before: float, most: int = 9) -> list[str]:
    def work(conn: Connection) -> list[str]:
        unreferenced_blobs.let_go(conn, used, before)
        return unreferenced_blobs.take(conn, used, "me", (before, before + 100.0), most)

    return await database.write(work)


async def register(database: Database, name: str, now: float) -> None:
    """Register a blob to which a row has referred since it was announced."""
    await database.write(partial(datasets.register_referenced, rows=[(name, 1, "update")], now=now))


async def register_written(database: Database, written: dict[str, str]) -> None:
    rows = [(name, 1, "asset") for name in written]
    await database.write(partial(datasets.register, rows=rows, now=9.0, serials=written))


async def test_what_was_never_known_is_never_taken(database: Database) -> None:
    assert await take(database, set(), 1e9) == []


async def test_an_announced_blob_is_taken_once_it_is_old_and_unused(database: Database) -> None:
    await announce(database, {A, B}, 10.0)
    assert await take(database, set(), 10.0) == []
    assert await take(database, {A}, 11.0) == [B]
    assert await take(database, {A}, 11.0) == []


async def test_a_registered_blob_is_taken_only_when_nothing_uses_it(database: Database) -> None:
    await announce(database, {A}, 1.0)
    await register(database, A, 2.0)
    assert await take(database, {A}, 100.0) == []
    assert A in await database.read(datasets.all_registered)
    assert await take(database, set(), 100.0) == [A]
    assert await database.read(datasets.all_registered) == {}


async def test_a_blob_that_is_announced_again_waits_again(database: Database) -> None:
    await announce(database, {A}, 1.0)
    await announce(database, {A}, 50.0)
    await announce(database, {A}, 20.0)
    assert await take(database, set(), 40.0) == []
    assert await take(database, set(), 51.0) == [A]


async def test_a_blob_that_is_being_deleted_is_neither_announced_nor_registered(
    database: Database,
) -> None:
    await announce(database, {A, B}, 1.0)
    assert await take(database, {B}, 2.0) == [A]
    assert await announce(database, {A, B}, 3.0) == {A}
    with pytest.raises(Unavailable):
        await register(database, A, 4.0)
    assert await database.read(datasets.all_registered) == {}
    await database.write(lambda conn: unreferenced_blobs.end_sweep(conn, "me", [A]))
    assert await announce(database, {A}, 5.0) == set()
    await register(database, A, 6.0)


async def test_files_of_an_ended_merge_are_held_unless_they_are_registered(
    database: Database,
) -> None:
    await announce(database, {A, B}, 1.0)
    await register(database, A, 2.0)
    await announce(database, {A}, 3.0)  # somebody writes the same bytes again

    def hold(conn: Connection) -> list[str]:
        return unreferenced_blobs.hold(conn, {A, B, C}, "me", 4.0)

    assert await database.write(hold) == [B]  # C was never announced
    assert await database.write(hold) == []
    assert await announce(database, {A, B}, 5.0) == {B}


async def test_a_sweep_that_died_is_finished_by_a_later_one(database: Database) -> None:
    await announce(database, {A}, 1.0)
    assert await take(database, set(), 2.0) == [A]  # at 102

    async def later(now: float) -> list[str]:
        return await database.write(
            lambda conn: unreferenced_blobs.take(conn, set(), "other", (50.0, now), 9)
        )

    assert await later(102.0 + SWEEPER_S) == []
    assert await later(103.0 + SWEEPER_S) == [A]


async def test_a_sweeper_that_died_refuses_a_blob_for_a_while_only(database: Database) -> None:
    await announce(database, {A}, 1.0)
    assert await take(database, set(), 2.0) == [A]  # at 102
    assert await announce(database, {A}, 102.0 + SWEEPER_S) == {A}
    assert await announce(database, {A}, 103.0 + SWEEPER_S) == set()
    await database.write(lambda conn: unreferenced_blobs.end_sweep(conn, "me", [A]))
    await register(database, A, 104.0 + SWEEPER_S)


async def test_a_sweep_that_ends_early_lets_go_of_the_rest(database: Database) -> None:
    await announce(database, {A, B}, 1.0)
    assert await take(database, set(), 2.0) == [A, B]
    await database.write(lambda conn: unreferenced_blobs.end_sweep(conn, "other", [A]))
    assert await announce(database, {A, B}, 3.0) == {A, B}
    await database.write(lambda conn: unreferenced_blobs.end_sweep(conn, "me", [A]))
    assert await announce(database, {A, B}, 4.0) == set()


async def test_a_blob_that_was_deleted_since_its_announcement_is_not_registered(
    database: Database,
) -> None:
    """Its process stood still for hours between writing it and naming it."""
    await announce(database, {A}, 1.0)
    assert await take(database, set(), 2.0) == [A]
    await database.write(lambda conn: unreferenced_blobs.end_sweep(conn, "me", [A]))
    with pytest.raises(Unavailable):
        await register(database, A, 5.0)
    assert await database.read(datasets.all_registered) == {}


async def test_bytes_are_registered_under_the_announcement_they_were_written_under(
    database: Database,
) -> None:
    written = await announced(database, {A, B}, 1.0)
    assert await announced(database, {A}, 3.0) == {A: written[A]}  # nothing was deleted since
    await register_written(database, written)
    assert {A, B} == (await database.read(datasets.all_registered)).keys()


async def test_an_announcement_of_another_vouches_for_no_deleted_bytes(database: Database) -> None:
    """A process stood still, a sweep deleted its blob, and another is about to write it again."""
    written = await announced(database, {A}, 1.0)
    assert await take(database, set(), 2.0) == [A]
    await database.write(lambda conn: unreferenced_blobs.end_sweep(conn, "me", [A]))
    of_another = await announced(database, {A}, 5.0)
    for lost in (written, {A: ""}):
        with pytest.raises(Unavailable):
            await register_written(database, lost)
        with pytest.raises(Unavailable):
            await database.write(partial(unreferenced_blobs.demand, serials=lost))
    assert await database.read(datasets.all_registered) == {}
    await database.write(partial(unreferenced_blobs.demand, serials=of_another))
    await register_written(database, of_another)


async def test_a_sweep_that_died_may_have_deleted_what_was_announced(database: Database) -> None:
    written = await announced(database, {A}, 1.0)
    assert await take(database, set(), 2.0) == [A]  # at 102
    of_another = await announced(database, {A}, 103.0 + SWEEPER_S)
    with pytest.raises(Unavailable):
        await register_written(database, written)
    await register_written(database, of_another)


async def test_a_name_that_was_let_go_needs_an_announcement_of_its_own(database: Database) -> None:
    written = await announced(database, {A}, 1.0)
    await register_written(database, written)
    await database.write(lambda conn: unreferenced_blobs.let_go(conn, set(), 100.0))
    with pytest.raises(Unavailable):
        await register_written(database, written)


async def test_one_sweep_takes_the_oldest_few(database: Database) -> None:
    for name, at in ((A, 3.0), (B, 1.0), (C, 2.0)):
        await announce(database, {name}, at)
    assert await take(database, set(), 9.0, most=2) == [B, C]


async def test_sweeps_and_announcements_at_once_never_agree(database: Database) -> None:
    """Whoever announces a blob while it is taken either comes first, or is told."""
    names = [f"{number:064x}" for number in range(40)]
    await announce(database, set(names), 1.0)

    async def again(name: str) -> bool:
        return not await announce(database, {name}, 50.0)

    taking = asyncio.create_task(take(database, set(), 20.0, most=99))
    announced = await asyncio.gather(*map(again, names))
    taken = await taking
    kept = {name for name, done in zip(names, announced, strict=True) if done}
    assert kept.isdisjoint(taken)
    assert kept | set(taken) == set(names)
