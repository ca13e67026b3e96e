"""Parts of a merge in shards: each is one worker's at a time, surveys come first, the late one is
refused.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from sqlalchemy import Connection

from coordinator.database import merge_jobs, merges
from coordinator.database.engine.open_database import Database
from coordinator.database.merge_jobs import MergedPart, PartRow, StateFile
from coordinator.database.merges import Bid, MergeRow
from tests.support.run_rows import add_run

NOW, LEASE_S = 1000.0, 15.0
MADE = MergedPart(sha256="a" * 64, size=9, state_sha256="b" * 64, state_size=3, squares=(0.1, 2.5))


@pytest.fixture
async def merge(database: Database) -> MergeRow:
    """A leased merge of four shards with surveys."""

    def begin(conn: Connection) -> MergeRow:
        run_id = add_run(conn)
        bid = Bid(run_id=run_id, base=0, contributions="[1]", owner="leader", lease_until=NOW + 15)
        found = merges.begin(conn, bid, NOW)
        merge_jobs.begin(conn, found.id, ["survey", "merge"], range(4))
        return found

    return await database.write(begin)


async def take(
    db: Database, owner: str = "ann", now: float = NOW, merge_id: int | None = None
) -> PartRow | None:
    return await db.write(lambda conn: merge_jobs.take(conn, owner, now, LEASE_S, merge_id))


async def finish(db: Database, part: PartRow | None) -> bool:
    assert part is not None
    return await db.write(lambda conn: merge_jobs.finish(conn, part, MADE))


async def test_surveys_come_first_and_each_part_goes_to_one(
    database: Database, merge: MergeRow
) -> None:
    surveys = await asyncio.gather(*(take(database, f"worker-{n}") for n in range(9)))
    held = [part for part in surveys if part is not None]
    assert sorted((part.phase, part.shard) for part in held) == [("survey", n) for n in range(4)]
    for part in held[1:]:
        assert await finish(database, part)
    assert await take(database) is None  # one survey is still out
    assert await finish(database, held[0])
    merges = await asyncio.gather(*(take(database, merge_id=merge.id) for _ in range(9)))
    assert sorted(part.shard for part in merges if part) == [0, 1, 2, 3]
    assert {part.phase for part in merges if part} == {"merge"}


async def test_what_a_part_made_is_kept_to_the_last_bit(
    database: Database, merge: MergeRow
) -> None:
    assert await finish(database, await take(database))
    rows = await database.read(lambda conn: merge_jobs.of_merge(conn, merge.id))
    assert [row.state for row in rows] == ["done"] + ["todo"] * 7
    assert merge_jobs.made_by(rows[0]) == MADE
    assert merge_jobs.files_of(rows) == [MADE.sha256]
    assert await database.read(merge_jobs.blobs_in_use) == {MADE.sha256, MADE.state_sha256}


async def test_a_part_of_somebody_silent_is_taken_over_and_comes_too_late(
    database: Database, merge: MergeRow
) -> None:
    silent = await take(database, "ann")
    assert silent is not None
    others = [await take(database, "bob", NOW + LEASE_S - 1) for _ in range(3)]
    assert silent.id not in {part.id for part in others if part}
    again = await take(database, "bob", NOW + LEASE_S)
    assert again is not None
    assert (again.id, again.owner, again.attempt) == (silent.id, "bob", silent.attempt + 1)
    assert not await finish(database, silent)
    assert not await database.write(lambda conn: merge_jobs.JOBS.renew(conn, silent, NOW + 99))
    await database.write(lambda conn: merge_jobs.fail(conn, silent, "late", content=True))
    assert await database.write(lambda conn: merge_jobs.JOBS.renew(conn, again, NOW + 99))
    assert await finish(database, again)
    assert not await finish(database, again)


async def test_a_disk_gets_a_second_try_and_content_none(
    database: Database, merge: MergeRow
) -> None:
    for tried, state in ((1, "todo"), (2, "failed")):
        part = await take(database)
        assert part is not None
        assert part.shard == 0
        await database.write(partial(merge_jobs.fail, part=part, message="no disk", content=False))
        row = (await database.read(lambda conn: merge_jobs.of_merge(conn, merge.id)))[0]
        assert (row.state, row.failures, row.message) == (state, tried, "no disk")
    part = await take(database)
    assert part is not None
    assert part.shard == 1
    await database.write(lambda conn: merge_jobs.fail(conn, part, "NaN", content=True))
    row = (await database.read(lambda conn: merge_jobs.of_merge(conn, merge.id)))[1]
    assert (row.state, row.message) == ("failed", "NaN")


async def test_a_part_that_is_given_back_is_as_before(database: Database, merge: MergeRow) -> None:
    part = await take(database)
    assert part is not None
    await database.write(lambda conn: merge_jobs.JOBS.release(conn, part))
    again = await take(database, "bob")
    assert again is not None
    assert (again.id, again.failures) == (part.id, 0)


async def test_nobody_helps_a_merge_that_has_ended(database: Database, merge: MergeRow) -> None:
    ended = await database.write(lambda conn: merges.end(conn, merge, "abandoned", NOW))
    assert ended
    assert await take(database) is None
    assert await take(database, merge_id=merge.id) is not None  # who leads it again goes on


async def test_parts_of_a_merge_that_nobody_is_at_are_forgotten(
    database: Database, merge: MergeRow
) -> None:
    await database.write(lambda conn: merge_jobs.drop_old(conn, NOW + 15))
    assert len(await database.read(lambda conn: merge_jobs.of_merge(conn, merge.id))) == 8
    await database.write(lambda conn: merge_jobs.drop_old(conn, NOW + 16))
    assert await database.read(lambda conn: merge_jobs.of_merge(conn, merge.id)) == []


async def test_a_state_is_one_file_or_those_that_were_noted(database: Database) -> None:
    files = [StateFile(shard, f"{shard}" * 64, 5) for shard in (0, 2, 7)]
    for _ in range(2):  # a version may come back to the state of an earlier one
        await database.write(lambda conn: merge_jobs.add_state(conn, "f" * 64, files))

    async def of(sha256: str | None) -> tuple[str, ...]:
        return await database.read(lambda conn: merge_jobs.state_files(conn, sha256))

    assert await of("f" * 64) == tuple(file.sha256 for file in files)
    assert await of("e" * 64) == ("e" * 64,)
    assert await of(None) == ()
    await database.write(lambda conn: merge_jobs.drop_states(conn, {"f" * 64}))
    assert await database.read(merge_jobs.blobs_in_use) == {file.sha256 for file in files}
    await database.write(lambda conn: merge_jobs.drop_states(conn, set()))
    assert await database.read(merge_jobs.blobs_in_use) == set()
