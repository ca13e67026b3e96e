"""Counts of bytes on the wire, of CPU time and of lines of programs, by the standard library alone,
so that a program in the environment of a peer can use them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

PIECE_BYTES = 1 << 16


class Moment(NamedTuple):
    """End of a round: its time, and the counts up to it."""

    at: float
    up: int
    down: int
    cpu_s: float


class CountingProxy:
    """TCP proxy before a port of this machine: bytes to it (`up`) and back (`down`)."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.port = self.up = self.down = 0

    def moment(self, at: float) -> Moment:
        """Return the counts of now, with the CPU time of the processes below this one."""
        return Moment(at, self.up, self.down, cpu_seconds(below(os.getpid())))

    def passed(self, data: bytes, up: bool) -> None:
        """Count bytes on their way."""
        if up:
            self.up += len(data)
        else:
            self.down += len(data)

    async def serve(self, client: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        """Carry one connection until both directions have ended."""
        try:
            server, request = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            reply.close()
            return
        with contextlib.suppress(asyncio.CancelledError):  # of the last connections
            ways = self._carry(client, request, True), self._carry(server, reply, False)
            await asyncio.gather(*ways)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool
    ) -> None:
        try:
            while data := await reader.read(PIECE_BYTES):
                self.passed(data, up)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


P = TypeVar("P", bound=CountingProxy)


def counting_proxy(target: int) -> contextlib.AbstractContextManager[CountingProxy]:
    """Run a proxy before `target` on a thread; its own port is in `.port`."""
    return running(CountingProxy(target))


@contextlib.contextmanager
def running(proxy: P) -> Iterator[P]:
    """Run a proxy on a thread."""
    listening = threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        listening.set()
        await ended.wait()
        server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    listening.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def code_lines(*texts: str) -> int:
    """Return the lines of programs that are neither empty nor comments."""
    stripped = (line.strip() for text in texts for line in text.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in stripped)


def _fields(stat: Path) -> list[str]:
    """Return the fields of a process from its state on, as the kernel numbers them from 3."""
    return stat.read_text().rpartition(")")[2].split()


def below(root: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            children.setdefault(int(_fields(stat)[1]), []).append(int(stat.parent.name))
    pids: list[int] = []
    level = [root]
    while level:
        level = [child for pid in level for child in children.get(pid, [])]
        pids += level
    return pids


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time of processes and of their children that have ended."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _fields(Path(f"/proc/{pid}/stat"))[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
