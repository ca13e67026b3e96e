"""Raw bytes at both parsers of the coordinator, each behind its guard in a process of its own."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import psutil
import uvicorn

from coordinator.config import Constants, Settings
from coordinator.http.deadlines import ConnectionGuard, protocol
from tests.support.fuzz_watch import TOGETHER, Plan, Watch, flat, watched

PIECES = [
    b"GET / HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\n", b"Host: x\r\n", b"\r\n", b"\n",
    b"\r", b"\x00", b":",
    b"Content-Length: 5\r\n", b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: -1\r\n",
    b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n", b"ffffffffffffffff\r\n",
    b"hello",
    b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"X: y\r\n" * 50,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b"GET http://a/ HTTP/1.0\r\n",
    b"a" * 3000,
    b"Connection: close\r\n", b"Connection: keep-alive\r\n", b";ext=1\r\n", b"1;a=\"b\"\r\nx\r\n",
]  # fmt: skip


def stream(rng: random.Random) -> list[bytes]:
    """Return the bytes of one connection, piece by piece."""
    pieces = []
    for _ in range(rng.randrange(1, 12)):
        piece = rng.choice(PIECES) if rng.random() < 0.9 else rng.randbytes(rng.randrange(1, 200))
        pieces.append(piece[: rng.randrange(1, len(piece) + 1)] if rng.random() < 0.1 else piece)
    return pieces


async def streams(port: int, plan: Plan, watch: Watch) -> Counter[str]:
    """Open so many connections, one stream each."""
    found: Counter[str] = Counter()

    async def answered(sent: list[bytes]) -> str:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in sent:
                writer.write(piece)
                await writer.drain()
            writer.write_eof()
            said = await reader.read(65536)
        except OSError:
            return "reset"
        finally:
            if writer is not None:
                writer.close()
        return said[9:12].decode("latin-1") if said.startswith(b"HTTP/1.1 ") else "closed"

    async def once(number: int) -> str:
        sent = stream(random.Random(f"{plan.seed} stream {number}"))
        try:
            async with watch.patience(f"number {number}: {sent}"):
                status = await answered(sent)
        except TimeoutError:
            watch.fault(f"number {number}: a hang", sent, b"".join(sent))
            return "hang"
        if status.startswith("500"):
            watch.fault(f"number {number}: answered {status}", sent, b"".join(sent))
        return status

    with watched(watch):
        for numbers in plan.batches():
            found.update(await asyncio.gather(*map(once, numbers)))
            watch.done += len(numbers)
            if time.monotonic() > plan.until or watch.ended:
                break
    return found


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """The application behind a parser: reads the body and says 200."""
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.disconnect":
        return
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    await send(start)
    await send({"type": "http.response.body", "body": b""})


def serve() -> None:
    """Serve the parser behind the guard, and print the port."""
    settings = Settings(constants=Constants(connections_per_address=4096, headers_s=2.0))
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(
        answer,
        http=protocol(ConnectionGuard(settings)),
        lifespan="off",
        ws="none",
        log_config=None,
    )
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def fuzz_parser(plan: Plan) -> Counter[str]:
    """Raw streams at the parser in a process of its own. Raises AssertionError for a fault."""
    words = [sys.executable, "-m", "tests.support.fuzz_streams"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        try:
            assert child.stdout
            port = int(child.stdout.readline())
            time.sleep(0.5)
            process = psutil.Process(child.pid)
            warm = Watch("warm-up", 10 * TOGETHER, process, plan.folder)
            asyncio.run(streams(port, plan.begun(10 * TOGETHER, 30), warm))
            watch = Watch("streams", plan.count, process, plan.folder, warm.faults)
            with flat(process) as grown:
                found = asyncio.run(streams(port, plan.begun(seed=1), watch))
                print(f"streams: {grown() / 2**20:+.0f} MB")
            watch.check()
        finally:
            child.kill()
    return found


if __name__ == "__main__":
    serve()
