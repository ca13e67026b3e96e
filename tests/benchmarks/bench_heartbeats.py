"""Heartbeats a second beside a no-op JSON route of the same server, over real sockets, on SQLite
with every commit synced.

    python -m tests.benchmarks.bench_heartbeats --json heartbeats.json
    python -m tests.benchmarks.bench_heartbeats --repeats 3 --seconds 1

Both routes are served by one process, as `coordinator serve` serves: same protocol with its
deadlines, same outermost layer, limits far out of reach. 32 workers with a lease each send the body
of a real heartbeat over connections of their own. The no-op route is Starlette's plainest: parse
the JSON, answer `{"ok": true}`. "endpoint" is a no-op behind our own reading of requests (msgspec,
no sign-in). CPU is the server's, per request, and does not depend on who else uses the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from typing_extensions import override

from tests.benchmarks.bench_rounds import prepare
from tests.benchmarks.wire import Connection, until_idle

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from coordinator.http.routes.endpoint_app import Call
    from shared.protocol.heartbeat import HeartbeatRequest

GOAL = 0.85
WORKERS = 32
API = "/api/v1"
HEARTBEAT, PLAIN, ENDPOINT = f"{API}/workers/heartbeat", "/noop", "/noop-endpoint"


# --- the server ---


async def serve(data_dir: Path) -> None:
    """The coordinator with two routes more; prints its port."""
    import uvicorn
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from coordinator.config import Settings
    from coordinator.http.app import create_app, opened
    from coordinator.http.deadlines import ConnectionGuard, protocol
    from coordinator.http.routes.endpoint_app import EndpointApp, Reply, json_reply
    from coordinator.http.server import listen
    from coordinator.log import configure
    from shared.protocol.endpoint import NOTHING, Endpoint
    from shared.protocol.heartbeat import HeartbeatRequest

    async def plain(request: Request) -> Response:
        await request.json()
        return JSONResponse({"ok": True})

    async def endpoint(call: Call[HeartbeatRequest]) -> Reply:
        return json_reply({"ok": True})

    far = "off"
    settings = Settings(
        data_dir=str(data_dir), port=0, rate_worker=far, rate_ip=far, rate_register=far
    )
    configure(settings.log_level, as_json=False)
    listener = listen(settings.host, settings.port)
    async with opened(settings, exclusive=True) as coordinator:
        app = create_app(coordinator)
        noop = Endpoint(
            method="POST",
            path=ENDPOINT,
            root=True,
            summary="nothing",
            auth="none",
            request=HeartbeatRequest,
            reply=NOTHING,
        )
        # Beside the heartbeat, which is the first otherwise: a route further down is found later.
        app.router.routes[0:0] = [
            Route(ENDPOINT, EndpointApp(noop, coordinator, endpoint), methods=["POST"])
        ]
        app.router.routes[2:2] = [Route(PLAIN, plain, methods=["POST"])]
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(
            app,
            http=protocol(ConnectionGuard(settings)),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
        )
        await uvicorn.Server(config).serve(sockets=[listener])


# --- the clients ---


class Sender(asyncio.Protocol):
    """One connection that sends the same request again as soon as it is answered."""

    def __init__(self, request: bytes, over: asyncio.Event) -> None:
        self.count = 0
        self._request = request
        self._over = over
        self._seen = b""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    @override
    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, found, body = self._seen.partition(b"\r\n\r\n")
        if not found:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(self._seen.decode())
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) < size:
            return
        self._seen = b""
        self.count += 1
        if not self._over.is_set():
            self.transport.write(self._request)


async def rate(port: int, requests: list[bytes], seconds: float, process: psutil.Process) -> Any:
    """Requests a second of all connections together, and microseconds of the server's CPU for
    each.
    """
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    senders = []
    for request in requests:
        _, sender = await loop.create_connection(partial(Sender, request, over), "127.0.0.1", port)
        senders.append(sender)
    await asyncio.sleep(0.2)
    before, cpu, began = sum(s.count for s in senders), process.cpu_times(), time.perf_counter()
    await asyncio.sleep(seconds)
    count, spent = sum(s.count for s in senders) - before, time.perf_counter() - began
    now = process.cpu_times()
    over.set()
    await asyncio.sleep(0.1)
    for sender in senders:
        sender.transport.close()
    return count / spent, 1e6 * (now.user + now.system - cpu.user - cpu.system) / count


def worker(port: int, number: int) -> bytes:
    """A registered worker with a lease; the body and the token of its heartbeat."""
    name, secret = secrets.token_hex(16), secrets.token_hex(32)
    token = f"{name}.{secret}"
    with Connection(port, token) as connection:
        account = {"volunteer_id": name, "worker_id": name, "secret": secret}
        connection.call(
            f"{API}/workers/register",
            {**account, "nickname": f"bench-{number}", "workloads": ["gpt"]},
        )
        claim = {"claim_id": secrets.token_hex(16), "step_flops": 1e9}
        lease = connection.call(f"{API}/claims", claim)["lease"]
        begun = {"attempt": lease["attempt"]}
        connection.call(f"{API}/tasks/{lease['task']}/begin", begun)
    beat = {"task": lease["task"], "attempt": lease["attempt"], "step": 7, "steps": 50}
    body = json.dumps({"tasks": [{**beat, "loss": 3.1, "rate": 2.5}], "news_since": 0}).encode()
    lines = (
        f"Host: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
    )
    return f"{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def compare(port: int, pid: int, repeats: int, seconds: float) -> list[dict[str, Any]]:
    process = psutil.Process(pid)
    bodies = await asyncio.to_thread(lambda: [worker(port, n) for n in range(WORKERS)])
    paths = (HEARTBEAT, PLAIN, ENDPOINT)
    requests = {p: [f"POST {p} HTTP/1.1\r\n".encode() + body for body in bodies] for p in paths}
    seen: list[dict[str, tuple[float, float]]] = []
    for turn in range(repeats + 1):
        order = paths if turn % 2 else paths[::-1]
        found = {p: await rate(port, requests[p], seconds, process) for p in order}
        if turn:  # the first warms up
            seen.append(found)
    rows = []
    for beside, path in (("Starlette's no-op", PLAIN), ("endpoint", ENDPOINT)):
        ratio = statistics.median(one[HEARTBEAT][0] / one[path][0] for one in seen)
        cpu = statistics.median(one[path][1] / one[HEARTBEAT][1] for one in seen)
        row = {
            "beside": beside,
            "heartbeats_per_s": round(statistics.median(one[HEARTBEAT][0] for one in seen)),
            "noop_per_s": round(statistics.median(one[path][0] for one in seen)),
            "ratio": round(ratio, 3),
            "cpu_ratio": round(cpu, 3),
            "heartbeat_cpu_us": round(statistics.median(one[HEARTBEAT][1] for one in seen), 1),
            "noop_cpu_us": round(statistics.median(one[path][1] for one in seen), 1),
        }
        if path == PLAIN:
            row |= {"goal": GOAL, "reached": ratio >= GOAL}
        rows.append(row)
    return rows


def measure(repeats: int, seconds: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        data_dir = Path(directory) / "data"
        asyncio.run(prepare(data_dir, WORKERS + 1))
        command = [sys.executable, "-m", "tests.benchmarks.bench_heartbeats", "--serve"]
        server = subprocess.Popen([*command, str(data_dir)], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout
            port = int(server.stdout.readline())
            until_idle(server.pid)
            return asyncio.run(compare(port, server.pid, repeats, seconds))
        finally:
            server.kill()
            server.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each side in each repeat")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        from coordinator.http.server import loop_factory

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(options.serve))
        return
    rows = measure(options.repeats, options.seconds)
    for row in rows:
        print("\n".join(f"{name:18} {value}" for name, value in row.items()), end="\n\n")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
