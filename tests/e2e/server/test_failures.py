"""Failures that page, `top`, /ready, webhook and Prometheus name alike, each within a look."""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Connection

from coordinator.database.monitoring import replicas
from coordinator.rules import health
from coordinator.rules.overview import ReplicaFigures
from coordinator.rules.standstill_causes import HANDLING
from coordinator.runs import standstills
from coordinator.upkeep.alerts import Alert
from shared.errors import Unavailable
from shared.protocol.base import Cause
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.prometheus import installed, prometheus, values
from tests.support.served import served

WAIT_S = 60.0

Fail = Callable[[LocalCoordinator, Path], Awaitable[None]]


async def store_refuses(home: LocalCoordinator, _: Path) -> None:
    scratch = home.coordinator.blobs.scratch()
    scratch.rename(scratch.with_name("away"))
    home.coordinator.space.look()


async def disk_full(home: LocalCoordinator, _: Path) -> None:
    space = home.coordinator.space
    space.floor_bytes = 1 << 20
    space._free = lambda _: 1 << 10
    space.look()


async def database_away(home: LocalCoordinator, folder: Path) -> None:
    (folder / "coordinator.sqlite3").unlink()
    assert await home.coordinator.alerts.look() == ()  # finds it out


async def merge_fails(home: LocalCoordinator, _: Path) -> None:
    for name, seed in (("Ann", 2), ("Bob", 3)):
        assert (await (await home.join(name)).work(seed)).state == "accepted"
    broken = fail(OSError(errno.EIO, "input/output error")).before("put_file")
    with faults(broken).installed():
        assert not await home.coordinator.merger.merge_if_due(1)


async def nobody_comes(home: LocalCoordinator, _: Path) -> None:
    await home.coordinator.alerts.look()
    await home.clock.advance((HANDLING[Cause.NOBODY].patience_s or 0.0) + 60.0)


async def replica_freezes(home: LocalCoordinator, _: Path) -> None:
    def begin(conn: Connection) -> None:
        replicas.begin(conn, "two", "there", home.clock.now() - health.SILENT_S - 1.0)
        figures = ReplicaFigures(where="http://two:8765")
        replicas.beat(conn, "two", figures, home.clock.now() - health.SILENT_S - 1.0)

    await home.coordinator.db.write(begin)


async def proxy_fails(home: LocalCoordinator, _: Path) -> None:
    assert await home.coordinator.alerts.look() == ()  # it leads here
    FRONT.status = 502


@dataclass
class Front:
    """A proxy at the public address, and what it answers."""

    status: int = 200

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {self.status} Said\r\ncontent-length: 0\r\n\r\n".encode())
        writer.close()


FRONT = Front()


@asynccontextmanager
async def failed(
    fails: Fail, folder: Path
) -> AsyncIterator[tuple[LocalCoordinator, str, tuple[Alert, ...]]]:
    """A coordinator after a failure and one look of its alerts; its run, and the alerts."""
    FRONT.status = 200
    async with await asyncio.start_server(FRONT.take, "127.0.0.1", 0) as front:
        url = f"http://127.0.0.1:{front.sockets[0].getsockname()[1]}"
        behind = {"url": url} if fails is proxy_fails else {}
        async with local_coordinator(folder, metrics="public", **behind) as home:
            run, coordinator = await home.start_run(), home.coordinator
            await coordinator.db.write(
                lambda conn: replicas.begin(conn, "one", "here", home.clock.now())
            )
            await fails(home, folder)
            await home.clock.advance(standstills.FRESH_S)
            alerts = await coordinator.alerts.look()
            now, figures = home.clock.now(), coordinator._figures()()
            if not coordinator.db.failed:
                await coordinator.db.write(lambda conn: replicas.beat(conn, "one", figures, now))
            yield home, run, alerts


@pytest.mark.parametrize(
    ("fails", "page", "top", "ready", "alert", "series"),
    [
        (store_refuses, "takes no results now", "cannot be written", 503, "read only",
         "coordinator_read_only 1"),
        (disk_full, "takes no results now", "nothing new is accepted", 200, "read only",
         "coordinator_read_only 1"),
        (database_away, "database file", "database", 503, "database",
         "coordinator_database_failed 1"),
        (merge_fails, "", "the merge to version 1 fails", 200, "standstill",
         'coordinator_run_standstill{cause="merge_fails",run="tiny"} 1'),
        (nobody_comes, "nobody is here", "nobody is here", 200, "standstill",
         'coordinator_run_standstill{cause="nobody",run="tiny"} 1'),
        (replica_freezes, "", "http://two:8765 has been silent for", 200, "server",
         'coordinator_alerts{kind="server"} 1'),
        (proxy_fails, "", "answers 502", 200, "address", 'coordinator_alerts{kind="address"} 1'),
    ],
)  # fmt: skip
async def test_a_failure_is_named_alike(
    fails: Fail, page: str, top: str, ready: int, alert: str, series: str, tmp_path: Path
) -> None:
    async with failed(fails, tmp_path) as (home, run, alerts):
        shown, probe = await home.client().get(f"/runs/{run}"), await home.client().get("/ready")
        metrics = (await home.client().get("/metrics")).text
        try:
            picture = await home.coordinator.overviews.get()
            seen = [f"{each.subject} {each.text}" for each in picture.troubles]
        except Unavailable as error:  # `top` draws the last picture, and why it is old
            seen = [error.message]
    assert page in words(shown)
    assert any(top in each for each in seen), seen
    assert probe.status_code == ready
    assert alert in {each.kind for each in alerts if each.state == "on"}, alerts
    assert series in metrics


@pytest.mark.prometheus
@pytest.mark.slow
@installed
@pytest.mark.parametrize(
    ("fails", "rule"),
    [
        (store_refuses, "ReadOnly"),
        (disk_full, "ReadOnly"),
        (database_away, "DatabaseFailed"),
        (merge_fails, "RunStandsStill"),
        (nobody_comes, "NobodyHere"),
        (replica_freezes, "CoordinatorSays"),
        (proxy_fails, "CoordinatorSays"),
    ],
)
async def test_a_real_prometheus_fires_the_rule_of_each_failure(
    fails: Fail, rule: str, tmp_path: Path
) -> None:
    async with (
        failed(fails, tmp_path / "server") as (home, _, _),
        served(home, ticking=False) as url,
        prometheus(tmp_path, url.removeprefix("http://")) as client,
    ):
        until = time.monotonic() + WAIT_S
        while not await values(client, f'ALERTS{{alertname="{rule}",alertstate="firing"}}'):
            assert time.monotonic() < until, await values(client, "ALERTS")
            await asyncio.sleep(0.2)
        assert not await values(client, 'ALERTS{alertname="CoordinatorDown"}')


def words(answer: httpx.Response) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", answer.text).split())
