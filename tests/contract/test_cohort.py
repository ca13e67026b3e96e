"""The cohort of norms, and what was discredited since, on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, insert

from coordinator.accounts.suspension import ban, suspend
from coordinator.database import contributions, versions, volunteers
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger.payments import Payment
from coordinator.database.ledger.reversal import take_back
from coordinator.database.tables.versions import versions as versions_table
from tests.contract.test_escrow import FRIEND, NEW, merged, setting
from tests.support.account_rows import add_contribution


def ban_by_id(conn: Connection, volunteer_id: str, reason: str, now: float) -> None:
    ban(conn, volunteers.existing(conn, volunteer_id), reason, now)


async def test_a_cohort_heals_by_the_voices_that_it_refused(database: Database) -> None:
    """Eight small updates that came first once kept all honest work out for ever."""
    run = await setting(database)

    def fill(conn: Connection) -> list[float]:
        _version(conn, run, 0, "initial", "a" * 64)
        for state, reason, norm in (
            ("accepted", "", 1.0), ("rejected", "norm", 2.0), ("rejected", "loss", 3.0),
        ):  # fmt: skip
            add_contribution(conn, run, FRIEND, state, reason=reason, norm=norm)
        add_contribution(conn, run, NEW, "accepted", norm=4.0, vetted=False)
        return [peer.norm for peer in contributions.cohort(conn, run, "delta", 10)]

    assert await database.write(fill) == [2.0, 1.0]


@pytest.mark.parametrize("end", [suspend, ban_by_id])
async def test_who_is_out_has_no_voice_in_the_limits_of_others(
    database: Database, end: Callable[[Connection, str, str, float], object]
) -> None:
    """Its large updates would else keep the limit high, and let a next account do the same."""
    run = await setting(database)

    def fill(conn: Connection) -> list[float]:
        _version(conn, run, 0, "initial", "a" * 64)
        add_contribution(conn, run, FRIEND, "merged", norm=1.0)
        add_contribution(conn, run, NEW, "merged", norm=9.0)
        before = contributions.cohort(conn, run, "delta", 10)
        end(conn, NEW, "made up", 2.0)
        after = contributions.cohort(conn, run, "delta", 10)
        return [peer.norm for peer in (*before, *after)]

    assert await database.write(fill) == [9.0, 1.0, 1.0]


async def test_discredited_is_what_was_suspended_or_taken_back_since(database: Database) -> None:
    run = await setting(database)
    new = await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    friend = await database.write(lambda conn: merged(conn, run, FRIEND, 1.0))
    other = await database.write(lambda conn: merged(conn, run, FRIEND, 1.0))

    async def found(first: int = 0) -> dict[int, frozenset[int]]:
        return await database.read(lambda conn: contributions.discredited(conn, run, first))

    assert await found() == {}
    await database.write(lambda conn: suspend(conn, NEW, "made up", 2.0))
    assert await found() == {1: frozenset({new})}
    assert await found(2) == {}

    def back(conn: Connection) -> None:
        take_back(conn, [Payment.of(contributions.by_id(conn, friend))], "made up", 3.0)

    await database.write(back)
    assert await found() == {1: frozenset({new, friend})}
    assert other not in (await found())[1]


def _version(conn: Connection, run: int, number: int, kind: str, master: str) -> None:
    conn.execute(
        insert(versions_table).values(
            run_id=run, version=number, kind=kind, parent=number - 1 if number else None,
            master_sha256=master, published_sha256=master, size=1, state_sha256=None,
            manifest="{}", signature="", contributions="[]", global_step=0, tokens=0,
            update_norm=None, created_at=0.0,
        )
    )  # fmt: skip


async def test_a_rollback_finds_the_version_that_it_went_back_to(database: Database) -> None:
    run = await setting(database)

    def fill(conn: Connection) -> list[int | None]:
        for number, (kind, master) in enumerate(
            [("initial", "a"), ("merge", "b"), ("merge", "c"), ("rollback", "b"), ("rollback", "b")]
        ):
            _version(conn, run, number, kind, master * 64)
        rows = [versions.get(conn, run, number) for number in (2, 3, 4)]
        return [versions.content_before(conn, row) for row in rows]

    assert await database.write(fill) == [None, 1, 3]
