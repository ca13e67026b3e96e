"""Alerts reach the log and a webhook, once, and once more when they are over."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.config import Constants
from coordinator.database import standings
from coordinator.database.monitoring import replicas
from coordinator.rules.overview import ReplicaFigures
from coordinator.upkeep import backup
from coordinator.upkeep.alert_conditions import WAVE_MIN
from coordinator.upkeep.alerts import RETRY_S, WINDOW_LOOKS, Alert
from shared.errors import NotFound, StorageFull
from shared.proofs import proof_of_work
from tests.e2e.server.test_recomputes import lazy, results, run_file
from tests.support.certificates import certificate
from tests.support.local_coordinator import RUN, LocalCoordinator, Worker, local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.served import served
from tests.support.server_process import command


@asynccontextmanager
async def webhook() -> AsyncIterator[tuple[str, list[Alert]]]:
    """A server that keeps what is posted to it."""
    heard: list[Alert] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(l.split(":")[1]) for l in head.split("\r\n") if l.startswith("Content-L"))
        body = json.loads(await reader.readexactly(length))
        assert body.pop("text") == body.pop("content")
        heard.append(Alert(**body))
        writer.write(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield f"http://127.0.0.1:{port}/alerts", heard


async def strangers(home: LocalCoordinator, names: range) -> None:
    for number in names:
        worker = Worker(home, f"S{number}")
        given = await home.coordinator.volunteers.challenge(worker.volunteer_id, "")
        nonce = proof_of_work.solve(given.challenge, given.bits, lambda _: True)
        proof = {"challenge": given.challenge, "nonce": f"{nonce:x}"}
        reply = await worker.post("/workers/register", worker.registration(**proof))
        assert reply.status_code == 200, reply.text


MANY = Constants(accounts_per_network=1000)


async def test_a_wave_of_strangers_is_said_once(tmp_path: Path) -> None:
    async with webhook() as (address, heard):
        settings = {
            "open": True, "proof_of_work_bits": 1, "alert_webhook": address,
            "constants": MANY,
        }  # fmt: skip
        async with local_coordinator(tmp_path, **settings) as home:
            alerts = home.coordinator.alerts
            await strangers(home, range(WAVE_MIN - 1))
            assert await alerts.look() == ()
            await strangers(home, range(WAVE_MIN, WAVE_MIN + 2))
            assert [alert.kind for alert in await alerts.look()] == ["sybil wave"]
            assert await alerts.look() == ()
        assert [alert.kind for alert in heard] == ["sybil wave"]
        assert "by invitation" in heard[0].message


async def test_a_failed_check_is_an_alert_and_stands_in_the_report(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        coordinator = home.coordinator
        alerts = coordinator.alerts
        await home.start_run(run_file())
        async with coordinator.working():
            machine = LocalMachine(tmp_path / "machine", home)
            await machine.join("Eve")
            async with machine.working(lazy, max_tasks=1) as process:
                await process.ended(120)
                await results(home, 1)
        kinds = {alert.kind for alert in await alerts.look()}
        assert {"failed check"} <= kinds <= {"failed check", "rollback"}  # if it was merged before
        report = await coordinator.volunteers.trust()
        assert report.standings == {"suspended": 1}
        assert report.drawn.failed == 1
        assert report.accounts[0].nickname == "Eve"
        assert "a recompute of task" in report.accounts[0].reason


async def test_a_webhook_that_does_not_answer_costs_nothing(tmp_path: Path) -> None:
    settings = {"open": True, "proof_of_work_bits": 1, "alert_webhook": "http://127.0.0.1:9/",
                "constants": MANY}  # fmt: skip
    async with local_coordinator(tmp_path, **settings) as home:
        await strangers(home, range(WAVE_MIN))
        assert len(await home.coordinator.alerts.look()) == 1


async def test_a_check_that_fails_within_the_silent_hour_is_said_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_coordinator(tmp_path) as home:
        alerts, clock = home.coordinator.alerts, home.clock
        failed: list[tuple[float, int]] = []
        monkeypatch.setattr(
            standings,
            "failed_recomputes",
            lambda conn, since: [(n, at) for at, n in reversed(failed) if at > since],
        )

        async def fails(number: int) -> str:
            await clock.advance(60.0)
            failed.append((clock.now(), number))
            await clock.advance(1.0)
            return " ".join(alert.message for alert in await alerts.look())

        assert "refuted contribution 1:" in await fails(1)
        assert await fails(2) == ""
        assert await alerts.look() == ()
        await clock.advance(3600.0)
        (late,) = await alerts.look()
        assert "contribution 2, 1:" in late.message
        assert await alerts.look() == ()


# --- what is said, and when it is over ---


def told(alerts: Iterable[Alert]) -> list[tuple[str, str, str]]:
    return [(alert.kind, alert.about, alert.state) for alert in alerts]


async def test_a_run_that_nobody_works_on_is_said_once_and_over_when_somebody_comes(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        run, look = await home.start_run(), home.coordinator.alerts.look
        assert await look() == ()
        await home.clock.advance(1799.0)
        assert await look() == ()
        await home.clock.advance(2.0)
        assert told(await look()) == [("standstill", run, "on")]
        assert await look() == ()
        assert [each.about for each in await home.coordinator.alerts.list()] == [run]
        assert home.coordinator.alerts.standing() == {"standstill": 1}
        mia = await home.join("Mia")
        await mia.claim()
        assert told(await look()) == [("standstill", run, "over")]
        assert await home.coordinator.alerts.list() == ()


async def test_the_commands_of_a_posted_alert_name_the_coordinator(tmp_path: Path) -> None:
    async with webhook() as (address, heard):
        async with local_coordinator(tmp_path, alert_webhook=address) as home:
            await home.start_run()
            await home.coordinator.alerts.look()
            await home.clock.advance(1801.0)
            (alert,) = await home.coordinator.alerts.look()
            settings = home.coordinator.settings
        assert settings.data_dir
        assert "`coordinator invite create`" in alert.message  # each reader adds its own options
        named = f"`coordinator invite create --data-dir {settings.directory}`"
        assert [named in posted.message for posted in heard] == [True]


async def test_a_run_without_a_version_is_stalled_but_not_one_that_was_resumed(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        run, alerts = await home.start_run(), home.coordinator.alerts
        mia = await home.join("Mia")
        await home.coordinator.runs.pause(run)
        await home.clock.advance(100_000.0)
        await home.coordinator.runs.resume(run)
        resumed_at = home.clock.now()
        await mia.claim()
        heard = list(await alerts.look())
        for _ in range(61):
            await home.clock.advance(60.0)
            home.coordinator.renewals.note_alive(mia.worker_id)
            await home.coordinator.renewals.flush()
            heard += await alerts.look()
        assert told(heard) == [("standstill", run, "on")]
        assert heard[0].at - resumed_at == home.coordinator.settings.alert_stalled_s


async def test_the_monitor_and_the_alerts_find_a_stalled_run_at_the_same_time(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path, alert_stalled_s=600.0) as home:
        run, coordinator = await home.start_run(), home.coordinator
        mia = await home.join("Mia")
        await mia.claim()
        db, now = coordinator.db, home.clock.now
        await db.write(lambda conn: replicas.begin(conn, "this", "here", now()))
        found: list[tuple[bool, bool]] = []
        for _ in range(12):
            await home.clock.advance(60.0)
            await db.write(lambda conn: replicas.beat(conn, "this", ReplicaFigures(), now()))
            coordinator.renewals.note_alive(mia.worker_id)
            await coordinator.renewals.flush()
            said = told(await coordinator.alerts.look()) == [("standstill", run, "on")]
            troubles = (await coordinator.overviews.get()).troubles
            found.append((said, any("no version for" in each.text for each in troubles)))
        first = found.index((True, True))
        assert first == 9  # ten minutes
        assert found[:first] == [(False, False)] * first


async def test_a_low_disk_and_an_old_backup(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run, coordinator = await home.start_run(), home.coordinator
        space, look = coordinator.space, coordinator.alerts.look
        space.floor_bytes = 1 << 20
        free = [3 * space.floor_bytes]
        space._free = lambda _: free[0]
        disk = told(await look())
        assert [(kind, state) for kind, _, state in disk] == [("disk", "on")]
        for floors, said in ((4.5, []), (6, ["over"])):  # a little more is not enough
            free[0] = int(floors * space.floor_bytes)
            assert [alert.state for alert in await look()] == said
        await home.clock.advance(8 * 86_400.0)
        await coordinator.runs.create(RUN.replace('"tiny"', '"new"'))
        await coordinator.runs.start("new")  # what is new does not excuse what is old
        heard = told(await look())
        assert ("backup", "", "on") in heard
        await backup.backup(
            coordinator.db, coordinator.blobs, coordinator.settings, home.clock, tmp_path / "saved"
        )
        assert ("backup", "", "over") in told(await look())
        await coordinator.runs.pause(run)
        await home.clock.advance(10 * 86_400.0)
        assert ("backup", "", "on") in told(await look())


async def test_a_disk_without_room_for_another_backup_is_told_until_one_has_room(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run()
        coordinator, look = home.coordinator, home.coordinator.alerts.look
        await look()
        scarce = replace(coordinator.settings, space_floor_bytes=1 << 60)
        for name, settings in (("one", scarce), ("two", coordinator.settings)):
            folder = tmp_path / name
            await backup.backup(coordinator.db, coordinator.blobs, settings, home.clock, folder)
            raised = await look()
            rooms = [alert for alert in raised if alert.about == "room"]
            assert [alert.state for alert in rooms] == ["on" if settings is scarce else "over"]
            assert str(tmp_path / "one") in rooms[0].message
        assert not coordinator.space.read_only  # the server goes on


async def test_each_step_of_a_disk_that_fills_is_said_and_what_is_over_is_named(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        space, look = home.coordinator.space, home.coordinator.alerts.look
        space.floor_bytes = 1 << 20
        free = [3 * space.floor_bytes]
        space._free = lambda _: free[0]
        assert [(each.kind, each.state) for each in await look()] == [("disk", "on")]
        free[0] = space.floor_bytes // 2
        space.look()
        (worse,) = await look()
        assert (worse.kind, worse.state) == ("read only", "on")
        assert "524 kB are free for " in worse.message
        free[0] = 100 * space.floor_bytes
        space.look()
        await home.clock.advance(90.0)
        over = {each.kind: each.message for each in await look() if each.state == "over"}
        assert set(over) == {"disk", "read only"}
        assert over["read only"].endswith("; that lasted 1:30 min")


async def test_a_store_that_cannot_be_written_is_named_everywhere(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        coordinator = home.coordinator
        space, scratch = coordinator.space, coordinator.blobs.scratch()
        away = scratch.rename(scratch.with_name("away"))
        space.look()
        with pytest.raises(StorageFull, match="refuses to be written"):
            space.check()
        (alert,) = await coordinator.alerts.look()
        assert (alert.kind, alert.state) == ("read only", "on")
        assert f"{scratch} cannot be written" in alert.message
        ready = await home.admin.get("/ready")
        assert ready.status_code == 503
        assert str(scratch) in ready.json()["message"]
        health = (await home.admin.get("/health")).json()
        assert health["read_only"]
        assert str(scratch) in health["why"]
        away.rename(scratch)
        assert space.look()
        assert [each.state for each in await coordinator.alerts.look()] == ["over"]
        assert (await home.admin.get("/ready")).status_code == 200


async def test_requests_that_fail_are_said_until_none_does(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        traffic, look = home.coordinator.traffic, home.coordinator.alerts.look
        for _ in range(9):
            traffic.count("POST", "/uploads", 500, 0.1)
        assert await look() == ()
        traffic.count("POST", "/uploads", 500, 0.1)
        (alert,) = await look()
        assert (alert.kind, alert.state) == ("errors", "on")
        assert "10 of 10 requests" in alert.message
        said = [await look() for _ in range(WINDOW_LOOKS)]
        assert [each.state for each in itertools.chain(*said)] == ["over"]


async def test_a_certificate_near_its_end(tmp_path: Path) -> None:
    file, _ = certificate(tmp_path, days=10)
    settings = {"tls_cert": str(file), "tls_key": str(file)}
    async with local_coordinator(tmp_path / "server", **settings) as home:
        await home.clock.advance(time.time() - home.clock.now())
        (alert,) = await home.coordinator.alerts.look()
        assert (alert.kind, alert.state) == ("certificate", "on")
        assert "ends in 9 days" in alert.message
        certificate(tmp_path, days=90)
        assert await home.coordinator.alerts.look() == ()  # the server still shows the old one
    async with local_coordinator(tmp_path / "server", **settings) as home:
        await home.clock.advance(time.time() - home.clock.now())
        (alert,) = await home.coordinator.alerts.look()
        assert (alert.kind, alert.state) == ("certificate", "over")


async def test_a_restart_says_nothing_twice_and_forgets_nothing(tmp_path: Path) -> None:
    dead = {"alert_webhook": "http://127.0.0.1:9/"}
    async with local_coordinator(tmp_path, **dead) as home:
        run = await home.start_run()
        await home.coordinator.alerts.look()
        await home.clock.advance(1801.0)
        assert told(await home.coordinator.alerts.look()) == [("standstill", run, "on")]
        now = home.clock.now()
    async with (
        webhook() as (address, heard),
        local_coordinator(tmp_path, alert_webhook=address) as home,
    ):
        await home.clock.advance(now + 60.0 - home.clock.now())
        assert await home.coordinator.alerts.look() == ()
        assert told(heard) == [("standstill", run, "on")]  # it is delivered by whoever is next
        await home.clock.advance(RETRY_S[1])
        await home.coordinator.alerts.look()
        assert len(heard) == 1


async def test_what_ended_while_the_server_was_down_is_said_to_be_over(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run = await home.start_run()
        await home.coordinator.alerts.look()
        await home.clock.advance(1801.0)
        assert told(await home.coordinator.alerts.look()) == [("standstill", run, "on")]
        now = home.clock.now()
    async with webhook() as (address, heard):
        async with local_coordinator(tmp_path, alert_webhook=address, alert_stalled_s=0.0) as home:
            await home.clock.advance(now + 7200.0 - home.clock.now())
            await (await home.join("Mia")).claim()
            assert told(await home.coordinator.alerts.look()) == [("standstill", run, "over")]
        assert told(heard) == [("standstill", run, "over")]


async def test_a_delivery_that_fails_is_tried_so_often_and_no_more(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, alert_webhook="http://127.0.0.1:9/") as home:
        await home.start_run()
        await home.coordinator.alerts.look()
        await home.clock.advance(1801.0)
        await home.coordinator.alerts.look()
        tries = []
        for wait_s in RETRY_S:
            tries += [letter.tries for letter in home.coordinator.alerts._state.letters]
            await home.clock.advance(wait_s)
            await home.coordinator.alerts.look()
        assert tries == [1, 2, 3, 4, 5]
        assert home.coordinator.alerts._state.letters == ()


# --- a test of the webhook ---


async def test_a_test_says_whether_it_arrived(tmp_path: Path) -> None:
    async with webhook() as (address, heard):
        async with local_coordinator(tmp_path, alert_webhook=address, name="forest") as home:
            reply = await home.admin.post("/api/v1/admin/alerts.test", content=b"{}")
            assert reply.json() == {"problem": ""}
        (alert,) = heard
        assert (alert.kind, alert.server) == ("test", "forest")
    async with local_coordinator(tmp_path, alert_webhook="http://127.0.0.1:9/") as home:
        assert "refused" in (await home.coordinator.alerts.test()).problem.lower()


async def test_the_commands_say_what_stands_and_try_the_webhook(tmp_path: Path) -> None:
    async with webhook() as (address, heard):
        async with local_coordinator(tmp_path, alert_webhook=address) as home:
            run, token = await home.start_run(), home.coordinator.settings.admin_token_file
            await home.coordinator.alerts.look()
            await home.clock.advance(1801.0)
            await home.coordinator.alerts.look()
            async with served(home, ticking=False) as url:
                where = ("--server", url, "--token-file", str(token))
                said = await asyncio.to_thread(command, "alerts", "test", *where)
                assert (said.returncode, said.stdout.strip()) == (0, "sent")
                said = await asyncio.to_thread(command, "alerts", "list", "--json", *where)
        assert said.returncode == 0
        assert [(each["kind"], each["about"]) for each in json.loads(said.stdout)] == [
            ("standstill", run)
        ]
        assert [alert.kind for alert in heard] == ["standstill", "test"]


async def test_a_test_without_a_webhook_says_what_to_set(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        with pytest.raises(NotFound, match="alert_webhook"):
            await home.coordinator.alerts.test()
