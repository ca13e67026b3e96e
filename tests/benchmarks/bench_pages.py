"""Costs of the public page: of a long run, and of very many who watch it.

    python -m tests.benchmarks.bench_pages --json pages.json
    python -m tests.benchmarks.bench_pages --rounds 2000 --viewers 100

A run of so many rounds of two contributions (copies of one real round, as rows of the database) is
asked for once a second, as by many at once; then so many viewers, in a process of their own, hold
the stream of a run over real sockets while something changes every second, and a worker sends
heartbeats before and meanwhile. CPU is that of the whole serving process. Where there is a
Chromium, it visits the page of a run as a newcomer does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import socket
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import structlog
import uvicorn

from coordinator.config import Constants, Settings
from coordinator.database import runs
from coordinator.http.app import create_app, opened
from coordinator.http.deadlines import ConnectionGuard, protocol
from coordinator.http.server import connections_possible, loop_factory
from tests.support.local_coordinator import local_coordinator
from tests.support.long_run import grow
from tests.support.rounds import MergeRounds

VISITS = 6  # the first is of a browser that has just begun
PAINTED = """() => new Promise(done => new PerformanceObserver(list => {
    const found = list.getEntriesByName('first-contentful-paint');
    if (found.length) done(found[0].startTime);
}).observe({ type: 'paint', buffered: true }))"""
QUIET: dict[str, Any] = {"space_floor_bytes": 0, "rate_ip": ""}


async def prepare(folder: Path, rounds: int) -> tuple[str, str]:
    """A run with so many versions; its name, and the token of a worker."""
    async with local_coordinator(folder) as home:
        run = await home.start_run()
        await home.coordinator.evaluation.evaluate_next()
        workers = (await home.join("Mia"), await home.join("Bob"))
        await MergeRounds(home, run, workers, lambda: 0.0).round(1)
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, run))
        if rounds > 1:
            await home.coordinator.db.write(lambda conn: grow(conn, row.id, rounds - 1))
        return run, f"{workers[0].worker_id}.{workers[0].secret}"


async def long_run(folder: Path, rounds: int, seconds: int) -> dict[str, float]:
    """Return the CPU of the first page, and of one that is asked for each second."""
    run, _ = await prepare(folder, rounds)
    async with opened(Settings(data_dir=str(folder), **QUIET)) as coordinator:
        transport = httpx.ASGITransport(app=create_app(coordinator))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://house.localhost"
        ) as client:
            answer = await client.get("/join")  # templates are compiled
            taken = []
            for _ in range(seconds + 1):
                before = time.process_time()
                answer = await client.get(f"/runs/{run}")
                assert answer.status_code == 200
                await asyncio.sleep(1.05)
                taken.append(1e3 * (time.process_time() - before))
            before = time.process_time()
            for _ in range(500):
                await client.get(f"/runs/{run}")
            kept = (time.process_time() - before) * 2
    return {
        "first_page_ms": taken[0],
        "page_a_second_ms": sum(taken[1:]) / seconds,
        "page_from_memory_ms": kept,
        "html_bytes_gzip": float(answer.num_bytes_downloaded),
    }


def watch(port: int, run: str, viewers: int, ready: Any, stop: Any) -> None:
    """Hold so many streams, from as many loopback addresses as a home has."""

    async def one(number: int, open_now: list[int]) -> None:
        here = (f"127.0.{1 + number % 200}.{1 + number // 200}", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=here)
        writer.write(f"GET /runs/{run}/events HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        await reader.readuntil(b"event: state")
        open_now.append(number)
        while await reader.read(65536):
            pass

    async def every() -> None:
        open_now: list[int] = []
        tasks = [asyncio.create_task(one(n, open_now)) for n in range(viewers)]
        while len(open_now) < viewers:
            await asyncio.sleep(0.05)
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()

    asyncio.run(every())


async def stream(folder: Path, viewers: int, seconds: int) -> dict[str, float]:
    """CPU and memory of so many viewers, a change every second and none."""
    run, token = await prepare(folder, 1)
    settings = Settings(
        data_dir=str(folder), constants=Constants(connections_max=5 * viewers), **QUIET
    )
    own = psutil.Process()
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(opened(settings))
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        guard = ConnectionGuard(settings, connections_possible(settings.constants.connections_max))
        config = uvicorn.Config(
            create_app(coordinator), http=protocol(guard), lifespan="off", log_config=None
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve([listener]))
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient() as client:
            await client.get(f"{url}/runs/{run}")
        visited = await first_visit(f"{url}/runs/{run}")
        quick = await heartbeats(url, token, seconds)
        resident = own.memory_info().rss
        spawn = multiprocessing.get_context("spawn")
        ready, stop = spawn.Event(), spawn.Event()
        child = spawn.Process(target=watch, args=(port, run, viewers, ready, stop))
        child.start()
        while not ready.is_set():
            await asyncio.sleep(0.1)
        each = (own.memory_info().rss - resident) / viewers
        still = await _cpu(seconds)
        changing = asyncio.create_task(_change(coordinator, run))
        moving = await _cpu(seconds)
        beside = await heartbeats(url, token, seconds)
        changing.cancel()
        stop.set()
        coordinator.stopping.set()
        server.should_exit = server.force_exit = True
        await serving
        child.join()
    return {
        "viewers": float(viewers),
        "bytes_a_viewer": each,
        "core_share_nothing_changes": still,
        "core_share_a_change_a_second": moving,
        "heartbeat_p95_ms_without": quick,
        "heartbeat_p95_ms_with": beside,
        **visited,
    }


async def heartbeats(url: str, token: str, seconds: int) -> float:
    """Return the 95th percentile of heartbeats, twenty a second of them, in milliseconds."""
    headers = {"Authorization": f"Bearer {token}"}
    body, took = b'{"tasks":[],"news_since":0}', []
    async with httpx.AsyncClient(base_url=url, headers=headers) as client:
        for _ in range(20 * seconds):
            began = time.perf_counter()
            answer = await client.post("/api/v1/workers/heartbeat", content=body)
            took.append(1e3 * (time.perf_counter() - began))
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.05)
    return statistics.quantiles(took, n=20)[-1]


async def first_visit(address: str) -> dict[str, float]:
    """Return bytes, requests and first paint of a first visit, where there is a Chromium."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if chromium is None:
        return {}
    from playwright.async_api import async_playwright

    async with async_playwright() as api:
        browser = await api.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        visits = [await visit(browser, address) for _ in range(VISITS)]
        await browser.close()
    return {
        "first_paint_ms": statistics.median(painted for painted, _, _ in visits[1:]),
        "first_visit_bytes": visits[-1][1],
        "first_visit_requests": visits[-1][2],
    }


async def visit(browser: Any, address: str) -> tuple[float, float, float]:
    """Visit a page for the first time; milliseconds to the first paint, bytes, requests."""
    sizes: list[float] = []
    asked: list[str] = []
    context = await browser.new_context(viewport={"width": 390, "height": 844})
    page = await context.new_page()
    session = await context.new_cdp_session(page)
    await session.send("Network.enable")
    session.on("Network.loadingFinished", lambda done: sizes.append(done["encodedDataLength"]))
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(address, wait_until="load")
    painted = float(await page.evaluate(PAINTED))
    await context.close()
    return painted, sum(sizes), float(len(asked))


async def _cpu(seconds: int) -> float:
    before = time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - before) / seconds


async def _change(coordinator: Any, run: str) -> None:
    """Let more tokens be merged every second."""
    row = await coordinator.db.read(lambda conn: runs.by_name(conn, run))
    tokens = 1
    while True:
        tokens = 2 * tokens % 999_999_937
        await coordinator.db.write(
            lambda conn, many=tokens: runs.set_values(conn, row.id, tokens=many)
        )
        await asyncio.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50_000)
    parser.add_argument("--viewers", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    found: dict[str, float] = {}
    loop = loop_factory()  # as `serve` has it
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=loop) as runner:
        found |= runner.run(long_run(Path(folder) / "long", asked.rounds, asked.seconds))
        found |= runner.run(stream(Path(folder) / "live", asked.viewers, asked.seconds))
    for name, value in found.items():
        print(f"{name:32} {value:12.4g}")
    if asked.json:
        asked.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
