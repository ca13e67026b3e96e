"""Files from the kernel's memory to a socket without a byte passing through this process
(sendfile(2), Linux).

Serving a file in pieces copies each byte three times and takes memory for it; of a coordinator that
sends 40 MiB to each of eight volunteers that was a seventh of all its CPU. What the kernel does not
have in memory, TLS and other systems stay with the pieces: the caller learns how many bytes went,
and sends the rest itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

from coordinator.http.request import ClientGone
from coordinator.storage.blobs import SendFile

EXTENSION = "coordinator.sendfile"  # of the ASGI scope, where it is possible
BYTES_MIN = 256 << 10  # fewer are sent sooner as they are
AT_ONCE_BYTES = 1 << 20  # then others have their turn
CALL_BYTES = 8 << 20  # that one call sends: then they are counted
AHEAD_BYTES = 128 << 10  # what the kernel reads ahead: one byte there stands for all of it
TURNS = 4  # of the loop, for the head of the answer to leave


class ZeroCopy:
    """The way past the buffers of one connection."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.sent = 0  # bytes, in all
        self.busy = False
        self._transport = transport
        self._loop = loop
        self._waiting: asyncio.Future[None] | None = None

    async def send(self, descriptor: int, offset: int, count: int) -> int:
        """Send the bytes of a file from `offset` on, at most `count`, while the kernel has them in
        memory; return how many went.

        Raises ClientGone.

        """
        count = min(count, CALL_BYTES)
        if count < BYTES_MIN or not await self._empty():
            return 0
        # Of its own: the loop has the other one registered for itself.
        socket = os.dup(self._transport.get_extra_info("socket").fileno())
        self.busy = True
        try:
            done = 0
            while done < count:
                most = min(AT_ONCE_BYTES, count - done)
                if not in_memory(descriptor, offset + done, most):
                    break
                done += await self._some(socket, descriptor, offset + done, most)
            return done
        finally:
            self.busy = False
            os.close(socket)

    def lost(self) -> None:
        """The connection is no more."""
        self._wake()

    @property
    def waiting(self) -> bool:
        """Return True while the socket takes no more bytes."""
        return self._waiting is not None

    async def _empty(self) -> bool:
        """Wait until all written before has left; return False if the connection closed."""
        for _ in range(TURNS):
            if not self._transport.get_write_buffer_size():
                return not self._transport.is_closing()
            await asyncio.sleep(0)
        return False

    async def _some(self, socket: int, descriptor: int, offset: int, most: int) -> int:
        """As much as the socket takes, at least one byte."""
        while True:
            if self._transport.is_closing():
                raise ClientGone
            try:
                done = os.sendfile(socket, descriptor, offset, most)
            except BlockingIOError:
                await self._writable(socket)
                continue
            except OSError as error:
                raise ClientGone from error
            if not done:
                raise OSError("a file is shorter than it was")
            self.sent += done
            await asyncio.sleep(0)
            return done

    async def _writable(self, socket: int) -> None:
        self._waiting = self._loop.create_future()
        self._loop.add_writer(socket, self._wake)
        try:
            await self._waiting
        finally:
            self._waiting = None
            self._loop.remove_writer(socket)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def possible(transport: asyncio.Transport) -> bool:
    """Return True if files can be sent on a connection: one without TLS, on Linux."""
    plain = transport.get_extra_info("sslcontext") is None
    socket = transport.get_extra_info("socket")
    return plain and socket is not None and hasattr(os, "sendfile") and hasattr(os, "RWF_NOWAIT")


def in_memory(descriptor: int, offset: int, count: int) -> bool:
    """Return True if the kernel has these bytes in memory.

    It probes one byte of every `AHEAD_BYTES` and the last one.
    """
    room = bytearray(1)
    probes = [*range(offset, offset + count, AHEAD_BYTES), offset + count - 1]
    with contextlib.suppress(OSError):  # not there, or a filesystem that cannot tell
        return all(os.preadv(descriptor, [room], at, os.RWF_NOWAIT) for at in probes)
    return False


def of_scope(scope: Any) -> SendFile | None:
    """Return the extension that sends a reply from a file; None where there is none."""
    found: SendFile | None = scope.get("extensions", {}).get(EXTENSION)
    return found
