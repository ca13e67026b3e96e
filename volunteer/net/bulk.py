"""Downloads of large files, each over its own connection, read from the socket into the buffer that
is written.

httpx copies each byte five times and needs a turn of the event loop for every 64 KiB: a 40 MiB
download takes 105 ms of CPU with httpx, 56 ms with this module. It handles only the common case: a
GET answered by 200 or 206 with a body of known length. For any other answer (an error, a chunked
body) it returns None, and the caller repeats the request through httpx. Connections behind a proxy
do not use this module (`direct`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from shared.proxy import proxy_of
from volunteer.net.tls import Address

PIECE_BYTES = 1 << 20  # passed on at once
SLACK_BYTES = 256 << 10  # one read may arrive while a buffer is full (Windows)
PACE_S = 0.1  # a slow connection passes its bytes on this often
HEAD_BYTES_MAX = 64 << 10


class Lost(Exception):
    """The connection failed before or during an answer; the cause is the original error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkReply:
    """Head and body of an answer."""

    status: int  # 200 or 206
    headers: Mapping[str, str]  # names in lower case
    body: AsyncIterator[memoryview]  # a piece is valid until the next one is requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """GET request with its time limits."""

    address: Address
    context: ssl.SSLContext
    path: str  # complete path on the server
    headers: Mapping[str, str]
    connect_s: float
    idle_s: float  # longest time without a byte


def direct(address: Address) -> bool:
    """Return True if the environment sets no proxy for the coordinator's address."""
    return not proxy_of(address.url)


@asynccontextmanager
async def got(question: Question) -> AsyncIterator[BulkReply | None]:
    """Return the answer to a GET, or None for an unusual one. Raises Lost, also while the body is
    read.
    """
    wire = await _connect(question)
    try:
        yield await _usual(wire, _begun(wire, question))
    finally:
        wire.close()


async def _connect(question: Question) -> _Wire:
    parts = urlsplit(question.address.url)
    secure = parts.scheme == "https"
    try:
        async with asyncio.timeout(question.connect_s):
            _, wire = await asyncio.get_running_loop().create_connection(
                lambda: _Wire(question.idle_s),
                question.address.host,
                parts.port or (443 if secure else 80),
                ssl=question.context if secure else None,
                happy_eyeballs_delay=0.25,
            )
    except OSError as error:  # includes TimeoutError and the errors of TLS
        raise Lost from error
    return wire


def _begun(wire: _Wire, question: Question) -> h11.Connection:
    """Send the request."""
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
    host = urlsplit(question.address.url).netloc
    headers = {"Host": host, **question.headers, "Connection": "close"}
    request = h11.Request(method="GET", target=question.path, headers=list(headers.items()))
    wire.send(http.send(request) or b"")
    http.send(h11.EndOfMessage())
    return http


async def _usual(wire: _Wire, http: h11.Connection) -> BulkReply | None:
    try:
        head = await _head(wire, http)
    except h11.RemoteProtocolError:
        return None
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    length = found.get("content-length", "")
    strange = found.keys() & {"transfer-encoding", "content-encoding"}
    if head.status_code not in (200, 206) or not length or strange:
        return None
    body = wire.body(http.trailing_data[0], int(length))
    return BulkReply(status=head.status_code, headers=found, body=body)


async def _head(wire: _Wire, http: h11.Connection) -> h11.Response:
    while not isinstance(event := await _event(wire, http), h11.Response):
        if event is None:
            raise Lost from ConnectionError("no reply arrived")
    return event  # informational replies (1xx) are skipped


async def _event(wire: _Wire, http: h11.Connection) -> h11.Event | None:
    """Return the next event; None where h11 does not continue."""
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(bytes(await wire.take(1)))
    return event if isinstance(event, h11.Event) else None


class _Wire(asyncio.BufferedProtocol):
    """Connection with two buffers: one is filled while the reader uses the other."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        room = PIECE_BYTES + SLACK_BYTES
        self._filling, self._other = memoryview(bytearray(room)), memoryview(bytearray(room))
        self._filled = 0
        self._paused = False
        self._ended: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._enough = 1  # bytes that the waiter needs

    def send(self, data: bytes) -> None:
        """Send a few bytes."""
        self._transport.write(data)

    def close(self) -> None:
        self._transport.abort()

    async def body(self, first: bytes, size: int) -> AsyncIterator[memoryview]:
        """Yield `size` bytes; `first` holds the ones that came with the head. Raises Lost."""
        left = size
        piece = memoryview(first)
        while left:
            if not piece:
                piece = await self.take(left)
            if len(piece) > left:
                raise Lost from ConnectionError("more bytes arrived than announced")
            left -= len(piece)
            yield piece
            piece = piece[:0]

    async def take(self, most: int) -> memoryview:
        """Return received bytes: `most`, a whole piece, or less after `PACE_S`. Raises Lost."""
        try:
            await self._until(1, self._idle_s)
        except TimeoutError as error:
            raise Lost from error
        with suppress(TimeoutError):
            await self._until(min(most, PIECE_BYTES), PACE_S)
        if not self._filled:
            raise Lost from self._ended
        came, self._filled = self._filling[: self._filled], 0
        self._filling, self._other = self._other, self._filling
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return came

    async def _until(self, enough: int, seconds: float) -> None:
        """Wait until `enough` bytes have arrived or the connection ends. Raises TimeoutError."""
        self._enough = enough
        if self._filled < enough and self._ended is None:
            await self._woken(seconds)

    async def _woken(self, seconds: float) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- callbacks of asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._filling[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled >= PIECE_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        if self._filled >= self._enough:
            self._wake()

    def eof_received(self) -> None:
        self._end(ConnectionError("the coordinator closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("closed"))

    def _end(self, error: Exception) -> None:
        self._ended = self._ended or error
        self._wake()
