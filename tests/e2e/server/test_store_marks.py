"""A store and a database carry each other's mark: twenty slips of configuration delete no blob."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import make_url

from coordinator.config import Settings
from coordinator.database import key_values, unreferenced_blobs
from coordinator.database import runs as run_rows
from coordinator.database.engine.open_database import Database, file_of
from coordinator.services import Coordinator, opened
from coordinator.storage.blobs import BlobStore
from coordinator.storage.open_blobs import open_blobs
from coordinator.upkeep.backup import backup, restore
from coordinator.upkeep.store_mark import LEASE_S, RENEW_S, stored_mark
from coordinator.upkeep.upkeep import ORPHAN_AGE_S
from shared.errors import Configuration, Unavailable
from tests.support.databases import Postgres
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import LocalCoordinator
from tests.support.virtual_clock import VirtualClock


@pytest.fixture(params=["disk", "s3"])
def blobs_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "blobs")
    return str(request.getfixturevalue("s3_url"))


async def stored(blobs: BlobStore) -> set[str]:
    return {entry.sha256 async for entry in blobs.entries()}


async def trouble(coordinator: Coordinator) -> str:
    return (
        await coordinator.db.read(lambda conn: key_values.get(conn, key_values.STORE_TROUBLE)) or ""
    )


async def old(coordinator: Coordinator) -> None:
    """Hours pass, in which a server renews its turn."""
    clock = coordinator.clock
    assert isinstance(clock, VirtualClock)
    await clock.advance(2 * ORPHAN_AGE_S)


class PartPosition:
    """Data directories and a clock for coordinators on one store."""

    def __init__(self, folder: Path, blobs: str, stack: AsyncExitStack) -> None:
        self.folder, self.blobs, self.stack = folder, blobs, stack
        self.clock = VirtualClock()

    async def server(self, name: str, database: str, blobs: str = "") -> Coordinator:
        """Start what `coordinator serve` starts, as far as the store sees it."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        first = self.folder / "one" / "signing.key"
        if first.exists() and not (folder / "signing.key").exists():
            shutil.copy(first, folder)
        settings = Settings(
            data_dir=str(folder), database=database, blobs=blobs or self.blobs, space_floor_bytes=0
        )
        made = await self.stack.enter_async_context(opened(settings, self.clock))
        await made.store_marks.claim()
        return made


@pytest.fixture
async def place(tmp_path: Path, blobs_url: str) -> AsyncIterator[PartPosition]:
    async with AsyncExitStack() as stack:
        yield PartPosition(tmp_path, blobs_url, stack)


async def filled(coordinator: Coordinator) -> set[str]:
    """A run with a version, and leftovers."""
    home = LocalCoordinator(coordinator, VirtualClock())
    await home.start_run()
    await coordinator.blobs.put_bytes(b"announced, never registered")
    return await stored(coordinator.blobs)


async def test_an_empty_sqlite_file_is_refused(place: PartPosition, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/coordinator.sqlite3"
    before = await filled(await place.server("one", url))
    await place.stack.aclose()
    file = file_of(url)
    assert file is not None
    for path in tmp_path.glob("coordinator.sqlite3*"):
        path.unlink()
    file.touch()
    with pytest.raises(Configuration, match=r"missing or empty.*belongs to the database.*sqlite3"):
        await place.server("one", url)
    assert file.stat().st_size == 0
    assert await stored(open_blobs(place.blobs, tmp_path / "cache")) == before


async def test_an_empty_postgresql_database_is_refused_and_stays_empty(
    place: PartPosition, postgres: Postgres
) -> None:
    one = await place.server("one", await postgres.fresh())
    before = await filled(one)
    url = await postgres.empty()
    with pytest.raises(
        Configuration, match=r"missing or empty.*belongs to the database postgresql"
    ):
        await place.server("two", url)
    assert await stored(one.blobs) == before


async def test_a_migrated_empty_database_is_refused_beside_a_store_in_use(
    place: PartPosition, database_url: str, postgres: Postgres
) -> None:
    one = await place.server("one", await postgres.fresh())
    before = await filled(one)
    with pytest.raises(Configuration, match=r"belongs to the database.*--take-over"):
        await place.server("two", database_url)
    assert await stored(one.blobs) == before
    assert await one.store_marks.renew()


async def test_blobs_without_a_mark_are_refused_to_who_does_not_know_them(
    place: PartPosition, database_url: str, postgres: Postgres
) -> None:
    one = await place.server("one", await postgres.fresh())
    before = await filled(one)
    await one.blobs.set_owner("")
    with pytest.raises(Configuration, match=r"holds blobs that .* does not know"):
        await place.server("two", database_url)
    await old(one)
    assert not await one.store_marks.renew()
    assert await one.upkeep.sweep() == 0
    assert "is gone" in await trouble(one)
    assert await stored(one.blobs) == before


async def copied(place: PartPosition, source: Coordinator, url: str, name: str) -> str:
    """Copy an SQLite database while it is served."""
    target = place.folder / name
    path = file_of(url)
    assert path is not None
    await source.db.write(lambda conn: None)
    with closing(sqlite3.connect(path)) as read, closing(sqlite3.connect(target)) as write:
        read.backup(write)
    return f"sqlite:///{target}"


async def test_a_copy_of_the_database_deletes_nothing_of_the_first(
    place: PartPosition, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/coordinator.sqlite3"
    one = await place.server("one", url)
    await filled(one)
    copy = await copied(place, one, url, "copy.db")
    await place.clock.advance(2 * RENEW_S)
    assert await one.store_marks.renew()
    with pytest.raises(Configuration, match=r"belongs to the database .*coordinator.sqlite3"):
        await place.server("two", copy)
    fresh = await copied(place, one, url, "fresh.db")
    two = await place.server("three", fresh)  # nobody can tell them apart yet
    await place.clock.advance(2 * RENEW_S)
    assert await two.store_marks.renew()
    before = await stored(one.blobs)
    await old(one)
    for each in (one, two, one, two):
        assert await each.upkeep.sweep() == 0
        assert "nothing is deleted" in await trouble(each)
    assert await stored(one.blobs) == before
    await one.store_marks.take_over()
    assert not await two.store_marks.renew()
    assert await one.upkeep.sweep() == 1  # what was announced only
    assert await trouble(one) == ""
    assert "nothing is deleted" in await trouble(two)


async def test_a_store_that_two_databases_dispute_is_taken_over_at_once(
    place: PartPosition, tmp_path: Path
) -> None:
    """Until the first has noticed the second, the store is in use by the second."""
    url = f"sqlite:///{tmp_path}/coordinator.sqlite3"
    one = await place.server("one", url)
    await filled(one)
    two = await place.server("two", await copied(place, one, url, "copy.db"))
    await place.clock.advance(2 * RENEW_S)
    assert await two.store_marks.renew()
    with pytest.raises(Configuration, match=r"in use by the database .*copy\.db"):
        await one.store_marks.take_over()
    assert not await one.store_marks.renew()
    await one.store_marks.take_over()
    assert await one.store_marks.renew()
    assert not await two.store_marks.renew()


async def test_a_database_that_lost_transactions_recovers_and_takes_nothing_over(
    place: PartPosition, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/coordinator.sqlite3"
    one = await place.server("one", url)
    before = await filled(one)
    older = file_of(await copied(place, one, url, "older.db"))
    assert older is not None
    await place.clock.advance(2 * RENEW_S)
    assert await one.store_marks.renew()
    settings = one.settings
    await place.stack.aclose()
    older.replace(tmp_path / "coordinator.sqlite3")
    await place.clock.advance(2 * LEASE_S)
    async with opened(settings, place.clock) as coordinator:
        for refused in (coordinator.store_marks.claim, coordinator.store_marks.take_over):
            with pytest.raises(Configuration, match=r"lost its newest.*--recovered`$"):
                await refused()
        await coordinator.store_marks.take_over(recovered=True)
    again = await place.server("one", url)
    assert await again.store_marks.renew()
    assert await stored(again.blobs) == before


async def test_a_volume_that_is_not_mounted_is_named(place: PartPosition, tmp_path: Path) -> None:
    url, volume = f"sqlite:///{tmp_path}/coordinator.sqlite3", tmp_path / "volume"
    await filled(await place.server("one", url, str(volume)))
    await place.stack.aclose()
    shutil.rmtree(volume)
    with pytest.raises(Configuration, match=r"is empty.*mount its volume"):
        await place.server("one", url, str(volume))


async def test_a_copy_in_the_same_postgresql_server_is_refused_at_once(
    place: PartPosition, postgres: Postgres
) -> None:
    url = await postgres.fresh()
    async with AsyncExitStack() as stack:
        first = PartPosition(place.folder, place.blobs, stack)
        await filled(await first.server("one", url))
    copy = await postgres.copy(url)
    with pytest.raises(Configuration, match="belongs to the database"):
        await place.server("two", copy)
    one = await place.server("one", url)
    await old(one)
    assert await one.upkeep.sweep() == 1


async def test_whoever_reads_the_store_learns_no_password_of_the_database(
    place: PartPosition, postgres: Postgres
) -> None:
    url = make_url(await postgres.fresh()).set(password="open-sesame")
    one = await place.server("one", url.render_as_string(hide_password=False))
    mark = await stored_mark(one.blobs)
    assert mark is not None
    assert ("open-sesame" in mark.place, str(url.database) in mark.place) == (False, True)


async def test_replicas_share_the_mark_and_their_turns(
    place: PartPosition, postgres: Postgres
) -> None:
    url = await postgres.fresh()
    replicas = [await place.server(name, url) for name in ("one", "two", "three")]
    for _ in range(5):
        await place.clock.advance(RENEW_S + LEASE_S)
        for each in replicas:
            assert await each.store_marks.renew()
            assert await trouble(each) == ""


async def test_another_key_and_another_prefix(
    place: PartPosition, tmp_path: Path, s3_url: str
) -> None:
    one = await place.server("one", f"sqlite:///{tmp_path}/a.db", s3_url)
    before = await filled(one)
    bucket = s3_url.removesuffix("/some/prefix")
    above = await place.server("two", f"sqlite:///{tmp_path}/b.db", bucket)
    below = await place.server("three", f"sqlite:///{tmp_path}/c.db", f"{s3_url}/ab")
    for other in (above, below):
        await filled(other)
    await old(one)
    for each in (above, below, above, below):
        await each.upkeep.sweep()
    assert await stored(one.blobs) == before
    async with opened(Settings(data_dir=str(tmp_path / "strange"), blobs=str(tmp_path / "own"))):
        pass
    settings = Settings(data_dir=str(tmp_path / "strange"), blobs=s3_url, space_floor_bytes=0)
    async with opened(settings, place.clock) as strange:
        with pytest.raises(Configuration, match="is the blob store of the key"):
            await strange.store_marks.claim()


async def test_an_empty_volume_in_place_of_the_store_is_refused(
    place: PartPosition, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/coordinator.sqlite3"
    await filled(await place.server("one", url))
    with pytest.raises(Configuration, match="is not the blob store of this database"):
        await place.server("two", url, str(tmp_path / "empty"))


async def test_a_second_store_is_refused_before_the_first_holds_a_blob(
    place: PartPosition, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/coordinator.sqlite3"
    await place.server("one", url)
    with pytest.raises(Configuration, match="is not the blob store of this database"):
        await place.server("two", url, str(tmp_path / "empty"))


async def test_a_restored_backup_takes_no_store_in_use(
    place: PartPosition, tmp_path: Path, postgres: Postgres
) -> None:
    one = await place.server("one", await postgres.fresh())
    await filled(one)
    await backup(one.db, one.blobs, one.settings, place.clock, tmp_path / "saved")
    later = await one.blobs.put_bytes(b"after the backup")
    before = await stored(one.blobs)
    settings = msgspec.structs.replace(
        one.settings, database=f"sqlite:///{tmp_path}/two.db", data_dir=str(tmp_path / "two")
    )
    mark = await stored_mark(one.blobs)
    assert mark is not None
    alive = msgspec.structs.replace(mark, until=4e9)
    await one.blobs.set_owner(msgspec.json.encode(alive).decode())
    with pytest.raises(Configuration, match="is in use by the database postgresql"):
        await restore(settings, tmp_path / "saved")
    assert not (tmp_path / "two.db").exists()
    ended = msgspec.structs.replace(mark, until=0.0)
    await one.blobs.set_owner(msgspec.json.encode(ended).decode())
    await restore(settings, tmp_path / "saved")
    two = await place.server("two", settings.database)
    await old(two)
    await two.upkeep.sweep()
    assert later in await stored(one.blobs)
    assert before - await stored(one.blobs) <= await one.db.read(unreferenced_blobs.names)
    assert not await one.store_marks.renew()
    assert "two.db" in await trouble(one)


async def test_a_damaged_mark_is_no_mark_of_anybody(place: PartPosition, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/coordinator.sqlite3"
    one = await place.server("one", url)
    await one.blobs.set_owner("half of a ma")
    with pytest.raises(Configuration, match="cannot be read"):
        await one.store_marks.renew()
    with pytest.raises(Configuration, match="cannot be read"):
        await place.server("two", url)


async def test_a_database_that_lost_its_last_turns_deletes_nothing_until_it_is_recovered(
    place: PartPosition, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/coordinator.sqlite3"
    one = await place.server("one", url)
    await filled(one)
    turns = await one.db.read(lambda conn: key_values.get(conn, key_values.STORE_TURNS))
    await place.clock.advance(2 * RENEW_S + LEASE_S)
    assert await one.store_marks.renew()
    await one.db.write(lambda conn: key_values.put(conn, key_values.STORE_TURNS, turns or ""))
    await old(one)
    assert await one.upkeep.sweep() == 0
    assert "migrate --recovered" in await trouble(one)
    await one.store_marks.take_over(recovered=True)
    assert await one.upkeep.sweep() == 1
    assert await trouble(one) == ""


async def test_a_restore_that_is_killed_leaves_no_state_without_its_statement(
    place: PartPosition, tmp_path: Path, database_url: str
) -> None:
    """Volunteers that saw a later state accept the restored one by the signed statement alone."""
    one = await place.server("one", f"sqlite:///{tmp_path}/coordinator.sqlite3")
    await filled(one)
    await backup(one.db, one.blobs, one.settings, one.clock, tmp_path / "saved")
    settings = Settings(
        data_dir=str(tmp_path / "back"), database=database_url, blobs=str(tmp_path / "new")
    )
    with (
        faults(fail(Unavailable("killed")).after("write _load")).installed(),
        pytest.raises(Unavailable, match="killed"),
    ):
        await restore(settings, tmp_path / "saved")
    db = await Database.open(database_url)
    try:
        assert (await db.read(run_rows.every))[0].name == "tiny"
        assert await db.read(lambda conn: key_values.get(conn, key_values.RESTORED))
    finally:
        await db.close()
