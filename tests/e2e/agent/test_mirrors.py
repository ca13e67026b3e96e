"""Weights from mirrors: each piece is checked by the manifest, the fastest mirror is taken."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typing_extensions import override

from coordinator.runs import publishing
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import SHORT, LocalMachine
from volunteer.control import events
from volunteer.net import transfers

PIECE = 4096
WIDE = SHORT.replace("n_embd = 8", "n_embd = 64").replace("[plan]", '[plan]\ndownlink = "float32"')


class Mirror(ThreadingHTTPServer):
    """Public copy of a directory of blobs."""

    daemon_threads = True
    blobs = Path()
    wrong = False  # it serves other bytes
    short = False  # it leaves the last byte out
    slow_s = 0.0
    lacking = 0  # so many requests are answered with 404
    seen = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        self.server.seen += 1
        if self.server.seen <= self.server.lacking:
            self.send_error(404)
            return
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        data = (self.server.blobs / self.path[1:]).read_bytes()[int(first) : int(last) + 1]
        if self.server.wrong:
            data = bytes(len(data))
        if self.server.short:
            data = data[:-1]
        time.sleep(self.server.slow_s)
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @override
    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def mirror() -> Iterator[Mirror]:
    server = Mirror(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def mirrors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mirror]]:
    """Three mirrors of the coordinator, and pieces that are small."""
    for module in (publishing, transfers):
        monkeypatch.setattr(module, "MIRROR_PIECE_BYTES", PIECE)
    monkeypatch.setattr(transfers, "DIRECT_BYTES", PIECE)
    with ExitStack() as stack:
        found = [stack.enter_context(mirror()) for _ in range(3)]
        for each in found:
            each.blobs = tmp_path / "coordinator" / "blobs"
        yield found


@pytest.fixture
async def home(mirrors: list[Mirror], tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    named = ", ".join(each.url for each in mirrors)
    async with local_coordinator(tmp_path / "coordinator", mirrors=named) as made:
        await made.start_run(WIDE)
        yield made


async def fetched_here(home: LocalCoordinator, machine: LocalMachine) -> list[str]:
    """Blobs that the coordinator served itself while a machine did one task."""
    async with machine.working(max_tasks=1) as process:
        await process.until(events.Judged)
        assert await process.ended() == 0
    return [seen for seen in process.network.seen if "/blobs/" in seen]


async def test_a_bad_mirror_costs_a_piece_and_the_fastest_serves_the_rest(
    home: LocalCoordinator, mirrors: list[Mirror], tmp_path: Path
) -> None:
    bad, slow, fast = mirrors
    bad.wrong, slow.slow_s = True, 1.0
    machine = LocalMachine(tmp_path / "machine", home)
    machine.speed = 1.0
    async with home.coordinator.working():
        await machine.join()
        asked = await fetched_here(home, machine)
    size = (await home.coordinator.runs.queries.info("tiny")).parameters * 4
    assert (bad.seen, slow.seen) == (1, 1)
    assert fast.seen > 0.9 * size / PIECE > 20
    weights = max(
        (path for path in (tmp_path / "coordinator/blobs").glob("??/*")),
        key=lambda path: path.stat().st_size,
    )
    assert not [seen for seen in asked if weights.name in seen]


@pytest.mark.parametrize("lie", ["wrong", "short"])
async def test_without_a_right_mirror_the_coordinator_serves(
    home: LocalCoordinator, mirrors: list[Mirror], tmp_path: Path, lie: str
) -> None:
    for each in mirrors:
        setattr(each, lie, True)
    machine = LocalMachine(tmp_path / "machine", home)
    async with home.coordinator.working():
        await machine.join()
        assert await fetched_here(home, machine)
    assert [each.seen for each in mirrors] == [1, 1, 1]


async def test_a_mirror_without_a_piece_is_asked_again_after_a_rest(
    home: LocalCoordinator,
    mirrors: list[Mirror],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "MIRROR_REST_S", 0.0)
    late, slow, bad = mirrors
    late.lacking, slow.slow_s, bad.wrong = 1, 0.2, True
    machine = LocalMachine(tmp_path / "machine", home)
    async with home.coordinator.working():
        await machine.join()
        await fetched_here(home, machine)
    assert late.seen > 20 > slow.seen
