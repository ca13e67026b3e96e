"""A home's internet connection between a client and a server: bits a second up and down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

PIECE_BYTES = 16 << 10
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

    def __init__(self, port: int, up_mbit: float, down_mbit: float) -> None:
        self._target = port
        self.up, self.down = Bucket(up_mbit), Bucket(down_mbit)
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        try:
            inner, outer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        ways = [
            asyncio.ensure_future(_pump(reader, outer, self.up)),
            asyncio.ensure_future(_pump(inner, writer, self.down)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            outer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bucket: Bucket) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(PIECE_BYTES):
            await bucket.take(len(data))
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def slow_link(port: int, *, up_mbit: float, down_mbit: float) -> AsyncIterator[SlowLink]:
    """A proxy to `port`; its own is in `.port`."""
    link = SlowLink(port, up_mbit, down_mbit)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0, limit=PIECE_BYTES)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
