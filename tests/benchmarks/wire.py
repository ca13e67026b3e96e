"""What the benchmarks of the wire share: a raw-socket HTTP client, a watch on a server's memory,
and bare servers to compare with.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from typing_extensions import override

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

READ_BYTES = 1 << 20
MIB = 1 << 20


class Connection(AbstractContextManager["Connection"]):
    """One HTTP/1.1 connection on a blocking socket: costs next to nothing beside the server it
    measures.
    """

    def __init__(self, port: int, token: str = "") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._token = token

    @override
    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(
        self,
        method: str,
        path: str,
        body: Sequence[memoryview | bytes] = (),
        headers: Sequence[str] = (),
    ) -> tuple[int, bytes]:
        """Send a request with a body in parts; status and body of the answer, which must be
        small.
        """
        self._begin(method, path, sum(map(len, body)), headers)
        for part in body:
            self._socket.sendall(part)
        status, size, data = self._head()
        while len(data) < size:
            data += self._received()
        return status, data

    def fetch(self, path: str) -> int:
        """Receive an answer into one buffer, over and over; how many bytes it had."""
        self._begin("GET", path, 0, ())
        status, size, data = self._head()
        assert status == 200, (status, data)
        got, room = len(data), bytearray(READ_BYTES)
        while got < size:
            count = self._socket.recv_into(room)
            if not count:
                raise ConnectionError("the server hung up")
            got += count
        return got

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST JSON; return the decoded answer."""
        text = json.dumps(body).encode()
        status, data = self.send("POST", path, [text], ["Content-Type: application/json"])
        assert status == 200, (status, data)
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _begin(self, method: str, path: str, size: int, headers: Sequence[str]) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
        if method != "GET":
            lines.append(f"Content-Length: {size}")
        if self._token:
            lines.append(f"Authorization: Bearer {self._token}")
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def _head(self) -> tuple[int, int, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._received()
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").lower().split("\r\n")
        sizes = [int(line.split(":")[1]) for line in lines if line.startswith("content-length:")]
        return int(first.split()[1]), sizes[0] if sizes else 0, rest

    def _received(self) -> bytes:
        data = self._socket.recv(64 << 10)
        if not data:
            raise ConnectionError("the server hung up")
        return data


class Memory(AbstractContextManager["Memory"]):
    """The most resident memory of a process while this is open, above what it had before: all of
    it, and the anonymous part.

    Mapped files are in the first only: the kernel takes those pages back when it needs them.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.base = self.peak = 0
        self._anonymous_base = self._anonymous_peak = 0

    @property
    def above_mb(self) -> float:
        return (self.peak - self.base) / MIB

    @property
    def anonymous_mb(self) -> float:
        return (self._anonymous_peak - self._anonymous_base) / MIB

    @override
    def __enter__(self) -> Memory:
        self.base, self._anonymous_base = self._now()
        self.peak, self._anonymous_peak = self.base, self._anonymous_base
        self._thread.start()
        return self

    def _now(self) -> tuple[int, int]:
        found = self._process.memory_info()
        return found.rss, found.rss - found.shared

    @override
    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.01):
            resident, anonymous = self._now()
            self.peak = max(self.peak, resident)
            self._anonymous_peak = max(self._anonymous_peak, anonymous)


def until_idle(pid: int, patience_s: float = 60.0) -> None:
    """Wait until a server has done what it does after its start (evaluation of version 0, imports
    of torch).
    """
    process, quiet = psutil.Process(pid), 0
    process.cpu_percent()
    until = time.monotonic() + patience_s
    while quiet < 3 and time.monotonic() < until:
        time.sleep(0.5)
        quiet = quiet + 1 if process.cpu_percent() < 5 else 0


# --- the bare server ---


class Bare(AbstractContextManager["Bare"]):
    """uvicorn and Starlette with nothing behind: PUT /up streams to disk and syncs, GET /down
    streams a file in 1 MiB reads.
    """

    def __init__(self, directory: Path) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.wire", str(directory)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout
        self.port = int(self.child.stdout.readline())

    @override
    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.communicate()


def _serve(directory: Path) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    async def up(request: Request) -> Response:
        path = directory / request.path_params["name"]
        with path.open("wb") as file:
            async for data in request.stream():
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return PlainTextResponse("stored")

    async def pieces(path: Path) -> AsyncIterator[bytes]:
        with path.open("rb", buffering=0) as file:
            while data := file.read(READ_BYTES):
                yield data

    async def down(request: Request) -> Response:
        path = directory / request.path_params["name"]
        size = {"content-length": str(path.stat().st_size)}
        return StreamingResponse(pieces(path), headers=size)

    routes = [Route("/up/{name}", up, methods=["PUT"]), Route("/down/{name}", down)]
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(Starlette(routes=routes), log_config=None, access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
