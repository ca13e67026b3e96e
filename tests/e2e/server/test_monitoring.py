"""The monitoring files: every metric that they name exists, and a real Prometheus takes them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.http.routes.metrics import INSTRUMENTS, PREFIX
from tests.support.local_coordinator import local_coordinator
from tests.support.prometheus import FOLDER, PROMTOOL, installed, prometheus, values
from tests.support.served import served

DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
WAIT_S = 60.0


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
