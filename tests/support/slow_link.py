"""A home's internet connection between a client and a server: bits a second up and down, latency,
and connections that break.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PIECE_BYTES = 16 << 10
PIECES_ON_THE_WAY = 1024
MBIT = 125_000  # bytes


class Bucket:
    """Token bucket of all connections together; holds no more than a piece takes."""

    def __init__(self, mbit: float) -> None:
        self._bytes_per_s = mbit * MBIT
        self._free_at = 0.0
        self.passed = 0

    async def take(self, count: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + count / self._bytes_per_s
        self.passed += count
        await asyncio.sleep(self._free_at - now)


class SlowLink:
    """A TCP proxy to a port of this machine. Made by `slow_link`."""

    def __init__(self, port: int, up_mbit: float, down_mbit: float, latency_s: float) -> None:
        self._target = port
        self._one_way_s = latency_s / 2
        self._open: set[asyncio.StreamWriter] = set()
        self.up, self.down = Bucket(up_mbit), Bucket(down_mbit)
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        try:
            inner, outer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._open |= {writer, outer}
        ways = [
            asyncio.ensure_future(self._carry(reader, outer, self.up)),
            asyncio.ensure_future(self._carry(inner, writer, self.down)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            outer.close()
            self._open -= {writer, outer}

    def drop(self) -> int:
        """Break every connection in the middle of its bytes; return their number."""
        broken = list(self._open)
        for writer in broken:
            writer.transport.abort()
        return len(broken) // 2

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bucket: Bucket
    ) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_ON_THE_WAY)
        arriving = asyncio.ensure_future(_deliver(pieces, writer))
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(PIECE_BYTES):
                    await bucket.take(len(data))
                    await pieces.put((_now() + self._one_way_s, data))
            await pieces.put((_now() + self._one_way_s, b""))
            await arriving
        finally:
            arriving.cancel()


async def _deliver(
    pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            arrives_at, data = await pieces.get()
            await asyncio.sleep(max(0.0, arrives_at - _now()))
            if not data:
                return
            writer.write(data)
            await writer.drain()


def _now() -> float:
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def slow_link(
    port: int, *, up_mbit: float, down_mbit: float, latency_s: float = 0.0
) -> AsyncIterator[SlowLink]:
    """A proxy to `port`; its own is in `.port`. `latency_s` is that of a round trip."""
    link = SlowLink(port, up_mbit, down_mbit, latency_s)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0, limit=PIECE_BYTES)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
