"""A real Prometheus with the shipped files, for tests; it needs to be installed."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.sources import ROOT

FOLDER = ROOT / "packaging" / "monitoring"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")

installed = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="Prometheus is not installed"
)


@asynccontextmanager
async def prometheus(
    folder: Path, target: str, token: Path | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """Run a Prometheus with the files as they are shipped, but for target, token and pace: a
    second between two scrapes, and no alert waits.
    """
    text = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8765", target).replace("15s", "1s")
    if token is not None:
        text = text.replace("# authorization:", "authorization:").replace(
            "#   credentials_file: /etc/prometheus/coordinator.token",
            f"  credentials_file: {token}",
        )
    (folder / "prometheus.yml").write_text(text, encoding="utf-8")
    rules = (FOLDER / "alerts.yml").read_text(encoding="utf-8")
    (folder / "alerts.yml").write_text(re.sub(r"for: \d+[smhd]", "for: 0s", rules))
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
