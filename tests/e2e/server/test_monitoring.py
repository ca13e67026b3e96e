"""The monitoring files: every metric that they name exists, and a real Prometheus takes them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.http.routes.metrics import INSTRUMENTS, PREFIX
from tests.support.local_coordinator import local_coordinator
from tests.support.served import served
from tests.support.sources import ROOT

FOLDER = ROOT / "packaging" / "monitoring"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
WAIT_S = 60.0

installed = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="Prometheus is not installed"
)


def metrics_of(text: str) -> set[str]:
    """Return the metrics of this program that a text names."""
    return set(re.findall(rf"\b{PREFIX}\w+", text))


def queries() -> list[str]:
    """Return what the dashboard asks, its variables filled in."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [expr.replace("$__rate_interval", "1m").replace("$run", ".*") for expr in found]


def exposed() -> set[str]:
    """Return the names of the series that a scrape has."""
    found: set[str] = set()
    for each in INSTRUMENTS:
        name = PREFIX + each.name
        ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
        found |= {name + end for end in ends[each.kind]}
    return found


@pytest.mark.parametrize("name", ["dashboard.json", "alerts.yml", "alerts_test.yml"])
def test_every_metric_that_is_named_exists(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    named = metrics_of(text)
    assert named
    assert named <= exposed()


def test_every_alert_is_provoked() -> None:
    rules = (FOLDER / "alerts.yml").read_text(encoding="utf-8")
    tested = (FOLDER / "alerts_test.yml").read_text(encoding="utf-8")
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert len(alerts) >= 10
    assert [name for name in alerts if f'alertname="{name}"' not in tested] == []


def test_panels_have_names_and_lie_beside_each_other() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)


@pytest.mark.prometheus
@installed
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        pytest.param(("test", "rules", "alerts_test.yml"), marks=pytest.mark.slow),
    ],
)
def test_promtool_accepts_the_files_and_each_alert_fires(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(PROMTOOL), *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@asynccontextmanager
async def prometheus(folder: Path, target: str, token: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run a Prometheus with the files as they are shipped, but for target, token and pace."""
    text = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8765", target).replace("15s", "1s")
    text = text.replace("# authorization:", "authorization:").replace(
        "#   credentials_file: /etc/prometheus/coordinator.token", f"  credentials_file: {token}"
    )
    (folder / "prometheus.yml").write_text(text, encoding="utf-8")
    shutil.copy(FOLDER / "alerts.yml", folder)
    listen = "127.0.0.1:0"
    process = await asyncio.create_subprocess_exec(
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={listen}",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        port = ""
        while not port:
            line = (await process.stderr.readline()).decode()
            assert line, "Prometheus ended"
            if found := re.search(r"Listening on\W+address=127\.0\.0\.1:(\d+)", line):
                port = found[1]
        reading = asyncio.create_task(process.stderr.read())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1") as client:
            yield client
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()


async def values(client: httpx.AsyncClient, query: str) -> list[dict[str, Any]]:
    """Return the result of a query that Prometheus understands."""
    answer = (await client.get("/query", params={"query": query})).json()
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


@pytest.mark.prometheus
@installed
async def test_a_real_prometheus_scrapes_a_real_server_with_its_token(tmp_path: Path) -> None:
    settings = {"host": "0.0.0.0", "open": True}
    async with local_coordinator(tmp_path / "server", **settings) as home, served(home) as url:
        run = await home.start_run()
        token = home.coordinator.settings.metrics_token_file
        target = url.removeprefix("http://")
        async with prometheus(tmp_path, target, token) as client:
            until = time.monotonic() + WAIT_S
            while not (found := await values(client, 'up{job="coordinator"} == 1')):
                assert time.monotonic() < until, (await client.get("/targets")).text
                await asyncio.sleep(0.2)
            assert found[0]["metric"]["instance"] == target
            (version,) = await values(client, "coordinator_run_version")
            assert (version["metric"]["run"], version["value"][1]) == (run, "0")
            for query in queries():
                await values(client, query)
            (group,) = (await client.get("/rules")).json()["data"]["groups"]
            assert len(group["rules"]) >= 10
            assert not [rule for rule in group["rules"] if rule.get("lastError")]
