"""A connection to a coordinator that sends any request as it is, in a fifth of the processor time
that a client library takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

BODY_BYTES_MAX = 1 << 24


class Line:
    """One connection, kept alive, and opened again where it was closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, method: str, where: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        """Return status and body of the answer. Raises ConnectionResetError where there is none,
        ConnectionRefusedError where nobody listens.
        """
        lines = [f"{method} {where} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        data = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        while True:
            kept = self._streams is not None
            try:
                return await self._answer(data)
            except (ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError) as error:
                await self.close()
                if not kept:  # else it was idle for too long
                    raise ConnectionResetError(str(error)) from error

    async def _answer(self, data: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status, said = int(head[9:12]), b""
        if b"\r\ntransfer-encoding: chunked" in head:
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                said = (said + (await reader.readexactly(size + 2))[:-2])[:BODY_BYTES_MAX]
            await reader.readuntil(b"\r\n")
        elif b"\r\ncontent-length: " in head and status != 304:
            length = head.split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0]
            said = await reader.readexactly(int(length))
        elif status not in (204, 304):
            said = await reader.read(BODY_BYTES_MAX)
            await self.close()
        if b"\r\nconnection: close" in head:
            await self.close()
        return status, said

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
