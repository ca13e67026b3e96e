"""Metrics: what a scrape says, who may read it, and that nobody outside makes up a label."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.database.monitoring.overview_rows import RUNS_MAX
from coordinator.http.routes.metrics import INSTRUMENTS, PREFIX
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.rounds import MergeRounds
from tests.support.run_rows import add_run
from tests.support.sources import ROOT

BEYOND = {"host": "0.0.0.0", "open": True}
PROMTOOL = shutil.which("promtool")


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as found:
        yield found


async def scrape(home: LocalCoordinator) -> str:
    """Return the metrics, read anew."""
    await home.clock.advance(60.0)
    answer = await home.client().get("/metrics")
    assert answer.status_code == 200
    return answer.text


async def test_a_round_of_work_moves_what_it_should(home: LocalCoordinator) -> None:
    run = await home.start_run()
    workers = (await home.join("Mia"), await home.join("Bob"))
    await home.coordinator.evaluation.evaluate_next()
    await MergeRounds(home, run, workers, lambda: 0.0).round(1)
    lease = await workers[0].claim()
    said = (await scrape(home)).splitlines()
    for line in (
        'contributions_total{reason="",run="tiny",verdict="accepted"} 2.0',
        'merges_total{outcome="merged",run="tiny"} 1.0',
        'leases_total{run="tiny"} 3.0',
        'evaluations_total{outcome="done",run="tiny"} 2.0',
        'run_version{run="tiny"} 1.0',
        'run_state{run="tiny",state="running"} 1.0',
        'run_workers{run="tiny"} 1.0',
        'tasks{run="tiny",state="doing"} 1.0',
        'workers{state="online"} 2.0',
        'accounts{standing="vetted"} 2.0',
        "merge_seconds_count 1.0",
        "submit_seconds_count 2.0",
        "evaluation_seconds_count 2.0",
        'merge_seconds_bucket{le="+Inf"} 1.0',
        "database_failed 0.0",
        "read_only 0.0",
    ):
        assert f"{PREFIX}{line}" in said
    body = {"attempt": lease.attempt, "reason": "no time"}
    assert (await workers[0].post(f"/tasks/{lease.task}/release", body)).status_code == 204
    assert f'{PREFIX}leases_released_total{{reason="given back"}} 1.0' in await scrape(home)


async def test_a_contribution_that_is_sent_twice_counts_once(home: LocalCoordinator) -> None:
    await home.start_run()
    mia = await home.join("Mia")
    lease = await mia.claim()
    begun = await mia.begin(lease)
    data = await mia.update("tiny")
    await mia.upload(lease, data)
    body = mia.submission(lease, begun, data)
    for _ in range(2):
        assert (await mia.post(f"/tasks/{lease.task}/submit", body)).status_code == 200
    assert sum(home.coordinator.intake.decided.values()) == 1


async def test_every_instrument_is_written_and_named_by_convention(home: LocalCoordinator) -> None:
    await home.start_run()
    said = await scrape(home)
    named = set(re.findall(r"^# TYPE (\w+)", said, re.MULTILINE))
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    for each in INSTRUMENTS:
        total = "_total" if each.kind == "counter" else ""
        assert f"{PREFIX}{each.name}{total}" in named
        labels = f"{{{','.join(each.labels)}}}" if each.labels else ""
        assert f"`{each.name}{total}{labels}`" in page
        assert f"# HELP {PREFIX}{each.name}{total} " in said
        assert f"# TYPE {PREFIX}{each.name}{total} {each.kind}\n" in said
    assert "process_cpu_seconds_total" in named


@pytest.mark.prometheus
@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
async def test_promtool_finds_nothing_wrong_with_them(home: LocalCoordinator) -> None:
    await home.start_run()
    said = await scrape(home)
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=said, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_nothing_from_outside_becomes_a_label(home: LocalCoordinator) -> None:
    await home.start_run()
    client = home.client()
    for number in range(30):
        await client.request(f"MADEUP{number}", f"/made-up/{number}")
        await client.get(f"/runs/made-up-{number}", headers={"host": f"made-up-{number}"})
    await home.join("made-up-name")
    said = await scrape(home)
    assert "made-up" not in said
    assert "MADEUP" not in said
    assert len(said) < 40_000


async def test_runs_beyond_a_bound_count_as_one(home: LocalCoordinator) -> None:
    await home.coordinator.db.write(
        lambda conn: [add_run(conn, f"run-{n}") for n in range(RUNS_MAX + 30)]
    )
    for number in range(RUNS_MAX + 30):
        home.coordinator.intake.decided[f"run-{number}", "accepted", ""] += 1
    said = await scrape(home)
    assert len(re.findall(rf"^{PREFIX}run_version\{{", said, re.MULTILINE)) == RUNS_MAX
    assert 'contributions_total{reason="",run="other",verdict="accepted"} 30.0' in said
    assert f'run="run-{RUNS_MAX + 29}"' in said  # the newest are named
    assert 'run="run-1"' not in said


async def test_a_scrape_is_one_view_and_many_scrapes_are_none(home: LocalCoordinator) -> None:
    await home.start_run()
    await home.clock.advance(60.0)
    reads = home.coordinator.db.reads
    before = reads.count
    for _ in range(5):
        await home.client().get("/metrics")
    assert reads.count - before == 1


async def test_beyond_loopback_only_who_has_the_token_reads_them(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path, **BEYOND) as home:
        token = home.coordinator.settings.metrics_token_file.read_text().strip()
        for client, status in (
            (home.client(), 401),
            (home.client("admin.wrong"), 401),
            (home.client(token[:-1]), 401),
            (home.client(token), 200),
            (home.admin, 200),
        ):
            assert (await client.get("/metrics")).status_code == status
        refused = await home.client(f"admin.{token}").get("/api/v1/admin/run.list")
        assert refused.status_code != 200  # it opens nothing else
        assert home.coordinator.settings.metrics_token_file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"metrics": "public", **BEYOND}, 200),
        ({"metrics": "off"}, 404),
        ({"url": "https://train.example.org", "open": True}, 401),  # behind a proxy
        ({}, 200),
    ],
)
async def test_who_may_read_them(tmp_path: Path, settings: dict[str, object], status: int) -> None:
    async with local_coordinator(tmp_path, **settings) as home:
        assert (await home.client().get("/metrics")).status_code == status
