"""Alerts that stand: their words and levels are those of the newest look, on both databases."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, insert

from coordinator.database import key_values
from coordinator.database.monitoring import replicas
from coordinator.database.tables.merges import merges
from coordinator.platform import Platform
from coordinator.rules import health
from coordinator.rules.overview import Level, ReplicaFigures
from coordinator.rules.standstill_causes import HANDLING
from coordinator.upkeep.alerts import REPEAT_S, UNSEEN_S, Alert, Alerts
from shared.protocol.base import Cause
from shared.units import DAY_S
from tests.contract.test_escrow import NEW, draw, merged, setting, settle
from tests.support.certificates import certificate
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.run_rows import add_run


async def said(home: LocalCoordinator, kind: str) -> list[str]:
    """The states of the alerts of a kind that one look sends."""
    return [alert.state for alert in await home.coordinator.alerts.look() if alert.kind == kind]


async def shown(home: LocalCoordinator, kind: str) -> tuple[Level, str]:
    """Level and text in `top` and `status` of a coordinator that beats."""
    db, now = home.coordinator.db, home.clock.now()

    def beat(conn: Connection) -> None:
        replicas.begin(conn, "this", "here", now)
        replicas.beat(conn, "this", ReplicaFigures(where="http://this"), now)

    await db.write(beat)
    await home.clock.advance(10.0)  # the next overview
    seen = await home.coordinator.overviews.get()
    await db.write(lambda conn: replicas.end(conn, "this"))
    ((level, text),) = [(t.level, t.text) for t in seen.troubles if t.subject == kind]
    return level, text


async def test_a_certificate_that_nears_its_end_and_ends(tmp_path: Path, database_url: str) -> None:
    file, _ = certificate(tmp_path, days=20)
    settings = {"tls_cert": str(file), "tls_key": str(file), "database": database_url}
    async with local_coordinator(tmp_path / "server", **settings) as home:
        await home.clock.advance(time.time() - home.clock.now())
        assert await said(home, "certificate") == ["on"]
        level, text = await shown(home, "certificate")
        assert (level, text.endswith("ends in 19 days")) == ("watch", True), text
        for days, words, sent in (
            (12, "ends in 7 days", 0),
            (1, "ends in 6 days", 1),
            (8, "has ended", 0),
        ):
            await home.clock.advance(days * DAY_S)
            assert len(await said(home, "certificate")) == sent  # once a level
            level, text = await shown(home, "certificate")
            assert words in text
            assert level == ("watch" if "7" in words else "bad")
        certificate(tmp_path, days=90)
        assert await said(home, "certificate") == []  # the server still shows the old one
    async with local_coordinator(tmp_path / "server", **settings) as home:
        await home.clock.advance(time.time() + 21 * DAY_S - home.clock.now())
        assert await said(home, "certificate") == ["over"]


async def test_each_replica_keeps_the_words_of_its_own_machine_new(
    tmp_path: Path, database_url: str
) -> None:
    """Two replicas of one machine, too, of which one is well."""
    async with local_coordinator(tmp_path, database=database_url, port=1) as home:
        one = home.coordinator
        parts = {part.name: getattr(one, part.name) for part in fields(Platform)}
        settings = msgspec.structs.replace(one.settings, port=2)
        beside = Platform(**parts | {"settings": settings})
        other = Alerts(beside, one.traffic, one.run_queries.standstills)
        free = [3 << 20]
        one.space.floor_bytes = 1 << 20
        one.space._free = lambda _: free[0]
        for alerts, about in ((one.alerts, ":1"), (other, ":2")):
            (alert,) = await alerts.look()
            assert alert.kind == "disk"
            assert alert.about.endswith(about)
        free[0] = 2 << 20
        assert await one.alerts.look() == await other.look() == ()
        texts = {each.about[-2:]: each.message for each in await other.list()}
        assert {about: text.split(" are")[0] for about, text in texts.items()} == {
            ":1": "2.1 MB",
            ":2": "2.1 MB",
        }
        one.space.floor_bytes = 0  # as far as the first one asks
        await home.clock.advance(UNSEEN_S - 1.0)
        assert [each.about[-2:] for each in await one.alerts.look()] == [":1"]
        await home.clock.advance(1.0)
        assert [each.about[-2:] for each in await one.alerts.look()] == [":2"]


async def test_a_failed_check_is_shown_for_a_day(tmp_path: Path, database_url: str) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        db, clock = home.coordinator.db, home.clock
        run = await setting(db)

        async def fails() -> int:
            def write(conn: Connection) -> int:
                number = merged(conn, run, NEW, 1.0)
                settle(conn, draw(conn, number), "failed", now=clock.now())
                return number

            return await db.write(write)

        first = await fails()
        assert await said(home, "failed check") == ["on"]
        await clock.advance(REPEAT_S / 2)
        second = await fails()
        assert await said(home, "failed check") == []  # once in an hour
        assert await shown(home, "failed check") == (
            "watch",
            f"a recompute refuted contribution {second}, {first}: the account was suspended",
        )
        await clock.advance(REPEAT_S / 2)
        assert await said(home, "failed check") == ["on"]  # the second one
        await clock.advance(REPEAT_S)
        assert await said(home, "failed check") == []
        await clock.advance(DAY_S - 2 * REPEAT_S + 60.0)
        assert await said(home, "failed check") == []
        assert f"refuted contribution {second}:" in (await shown(home, "failed check"))[1]
        await clock.advance(REPEAT_S)
        assert await said(home, "failed check") == ["over"]


async def test_a_silent_replica_is_shown_until_it_is_forgotten(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        db, clock = home.coordinator.db, home.clock

        def begin(conn: Connection) -> None:
            for name in ("frozen", "moved"):
                replicas.begin(conn, name, name, clock.now())
                replicas.beat(conn, name, ReplicaFigures(where=f"http://{name}"), clock.now())

        await db.write(begin)
        await clock.advance(health.SILENT_S + 1.0)
        moved = ReplicaFigures(where="http://moved")  # serves again, from another folder
        await db.write(lambda conn: replicas.begin(conn, "again", "elsewhere", clock.now()))
        await db.write(lambda conn: replicas.beat(conn, "again", moved, clock.now()))
        assert await said(home, "server") == ["on"]
        assert await shown(home, "server") == ("bad", "http://frozen has been silent for 21 s")
        await clock.advance(2 * health.STOPPED_S)
        await db.write(lambda conn: replicas.beat(conn, "again", moved, clock.now()))
        assert await said(home, "server") == []
        assert await shown(home, "server") == ("watch", "http://frozen has been silent for 2:00 h")
        await clock.advance(replicas.FORGOTTEN_S)
        await shown_nothing(home)
        assert await said(home, "server") == ["over"]


async def shown_nothing(home: LocalCoordinator) -> None:
    """A beat, which forgets whoever is silent for a day."""
    now = home.clock.now()
    figures = ReplicaFigures(where="http://moved")
    await home.coordinator.db.write(lambda conn: replicas.beat(conn, "again", figures, now))


def failed_merge(run_id: int, **other: Any) -> dict[str, Any]:
    return {
        "run_id": run_id, "base": 0, "shard": 0, "state": "failed", "contributions": "[1]",
        "owner": "", "attempt": 1, "lease_until": 0.0, "failures": 1, "message": "", "terms": "{}",
        "created_at": 0.0, "ended_at": 0.0, **other,
    }  # fmt: skip


async def test_every_run_is_judged_however_many_there_are(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        db, alerts = home.coordinator.db, home.coordinator.alerts

        def make(conn: Connection) -> None:
            made = [add_run(conn, f"run-{n}", state="paused") for n in range(230)]
            made += [add_run(conn, f"on-{n}") for n in range(210)]
            # the failed ones are not among the newest merges
            conn.execute(insert(merges), [failed_merge(made[0]), failed_merge(made[-1])])
            fine = [failed_merge(each, state="committed", failures=0) for each in made[300:330]]
            conn.execute(insert(merges), fine)

        await db.write(make)
        assert told(await alerts.look(), "standstill") == ["on-209"]
        await home.clock.advance(HANDLING[Cause.NOBODY].patience_s or 0.0)
        assert len(told(await alerts.look(), "standstill")) == 209
        # a new try of the merge is no success
        await db.write(lambda conn: conn.execute(merges.update().values(state="leased")))
        assert told(await alerts.look(), "standstill") == []


def told(alerts: tuple[Alert, ...], kind: str) -> list[str]:
    return [alert.about for alert in alerts if alert.kind == kind]


async def test_ages_in_the_words_are_of_now(tmp_path: Path, database_url: str) -> None:
    settings = {"database": database_url, "alert_stalled_s": 600.0}
    async with local_coordinator(tmp_path, **settings) as home:
        run, c, now = await home.start_run(), home.coordinator, home.clock.now
        mia = await home.join("Mia")
        await mia.claim()
        saved = str(now() - 8 * DAY_S)
        await c.db.write(lambda conn: key_values.put(conn, key_values.BACKUP, saved))
        texts = set()
        began = now()
        for after in (300.0, 900.0, 3600.0, DAY_S, 2 * DAY_S - 300.0, 2 * DAY_S):
            await home.clock.advance(began + after - now())
            c.renewals.note_alive(mia.worker_id)
            await c.renewals.flush()
            await c.alerts.look()
            texts |= {each.message for each in await c.alerts.list()}
        backup = "the newest backup is {} days old"
        for said in (backup.format(8), backup.format(9), backup.format(10)):
            assert said in texts
        stalled = f"{run} does not go on: no version for {{}}, with 1 machine at work"
        spans = ("15:00 min", "1:00 h", "47:55 h", "2 days")
        assert {stalled.format(span) for span in spans} <= texts
