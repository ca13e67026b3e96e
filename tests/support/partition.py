"""Partition between a process and a server of this machine: bytes stay on their way until it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

PIECE_BYTES = 64 << 10
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Wire:
    """TCP proxy that can be cut. Made by `wire`."""

    def __init__(self, reach: Callable[[], Awaitable[Streams]]) -> None:
        self.port = 0
        self._reach = reach
        self._whole = asyncio.Event()
        self._whole.set()

    async def cut(self, for_s: float) -> None:
        """Let nothing through for a while, neither bytes nor ends of connections."""
        self._whole.clear()
        try:
            await asyncio.sleep(for_s)
        finally:
            self._whole.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        with contextlib.closing(writer):
            await self._whole.wait()
            try:
                inner, outer = await self._reach()
            except OSError:
                return
            with contextlib.closing(outer):
                ways = [
                    asyncio.create_task(self._pump(reader, outer)),
                    asyncio.create_task(self._pump(inner, writer)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    await self._whole.wait()
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()


@contextlib.asynccontextmanager
async def wire(reach: Callable[[], Awaitable[Streams]]) -> AsyncIterator[Wire]:
    """Serve inside the block; `reach` connects to the other side, and the port is in `.port`."""
    made = Wire(reach)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
