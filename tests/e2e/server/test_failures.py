"""Failures that page, `top`, /ready, webhook and metrics name alike, each within a look."""

from __future__ import annotations

import errno
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from coordinator.database.monitoring import replicas
from coordinator.rules import health
from coordinator.rules.thresholds import IDLE_S
from shared.errors import Unavailable
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import LocalCoordinator, local_coordinator

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
    await home.clock.advance(IDLE_S + 60.0)


@pytest.mark.parametrize(
    ("fails", "page", "top", "ready", "alert", "series"),
    [
        (store_refuses, "takes no results now", "cannot be written", 503, "read only",
         "coordinator_read_only 1"),
        (disk_full, "takes no results now", "nothing new is accepted", 200, "read only",
         "coordinator_read_only 1"),
        (database_away, "database file", "database", 503, "database", "coordinator_database_failed 1"),
        (merge_fails, "", "the merge to version 1 failed", 200, "merge",
         'coordinator_merges_total{outcome="failed"'),
        (nobody_comes, "At work 0", "nobody works", 200, "nobody", "coordinator_run_workers{"),
    ],
)  # fmt: skip
async def test_a_failure_is_named_alike(
    fails: Fail, page: str, top: str, ready: int, alert: str, series: str, tmp_path: Path
) -> None:
    async with local_coordinator(tmp_path) as home:
        run, coordinator = await home.start_run(), home.coordinator
        await coordinator.db.write(
            lambda conn: replicas.begin(conn, "one", "here", home.clock.now())
        )
        await fails(home, tmp_path)
        alerts = await coordinator.alerts.look()
        now, figures = home.clock.now(), coordinator._figures()()
        if alert != "database":
            await coordinator.db.write(lambda conn: replicas.beat(conn, "one", figures, now))
        shown, probe = await home.client().get(f"/runs/{run}"), await home.client().get("/ready")
        metrics = (await home.client().get("/metrics")).text
        try:
            _, troubles = health.judge(await coordinator.overviews.get())
            seen = [f"{each.subject} {each.text}" for each in troubles]
        except Unavailable as error:  # `top` draws the last picture, and why it is old
            seen = [error.message]
    assert page in words(shown)
    assert any(top in each for each in seen), seen
    assert probe.status_code == ready
    assert alert in {each.kind for each in alerts if each.state == "on"}, alerts
    assert series in metrics


def words(answer: httpx.Response) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", answer.text).split())
