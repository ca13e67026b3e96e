"""A large file on its way down: from the socket straight into the buffer that is written, over a connection of its own.

httpx copies each byte five times and turns the event loop once for every 64 KiB that a socket happens to have: of 40 MiB on
their way into the cache it took 110 ms of CPU, beside 55 for hashing and writing them. This does only what is usual:
one GET, answered by 200 or 206 and a body of a known length. Everything else (an error, a body in chunks, a proxy in
between) is `None` here: the caller asks again through httpx.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from shared.links import is_loopback
from volunteer.tls import Address

PIECE_BYTES = 1 << 20  # handed over at once
SLACK_BYTES = 256 << 10  # one read that comes while a buffer is full (Windows)
PACE_S = 0.1  # a slow connection hands over what it has this often
HEAD_BYTES_MAX = 64 << 10


class Lost(Exception):
    """The connection failed, before or in the middle of an answer; the cause says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The beginning of an answer."""

    status: int  # 200 or 206
    headers: Mapping[str, str]  # names in lower case
    body: AsyncIterator[memoryview]  # each piece is good until the next one is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked for, and how long it may take."""

    address: Address
    context: ssl.SSLContext
    path: str  # with everything before it
    headers: Mapping[str, str]
    connect_s: float
    read_s: float  # between two bytes


def direct(address: Address) -> bool:
    """Whether nothing that the environment names stands between us and the coordinator."""
    if is_loopback(address.host):
        return True
    proxies = urllib.request.getproxies()
    scheme = address.url.partition(":")[0]
    named = scheme in proxies or "all" in proxies
    return not named or bool(urllib.request.proxy_bypass(address.host))


@asynccontextmanager
async def asked(question: Question) -> AsyncIterator[Answer | None]:
    """The answer, or None for one that is not usual. Raises Lost, also while the body is read; then what came was handed over."""
    inbox = await _connect(question)
    try:
        yield await _answer(inbox, question)
    finally:
        inbox.close()


async def _connect(question: Question) -> _Inbox:
    parts = urlsplit(question.address.url)
    secure = parts.scheme == "https"
    try:
        async with asyncio.timeout(question.connect_s):
            _, inbox = await asyncio.get_running_loop().create_connection(
                lambda: _Inbox(question.read_s),
                question.address.host,
                parts.port or (443 if secure else 80),
                ssl=question.context if secure else None,
                happy_eyeballs_delay=0.25,
            )
    except OSError as error:  # a TimeoutError is one, and so are those of TLS
        raise Lost from error
    return inbox


async def _answer(inbox: _Inbox, question: Question) -> Answer | None:
    """Send the request, read the head of the answer."""
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
    headers = {
        "Host": urlsplit(question.address.url).netloc,
        **question.headers,
        "Connection": "close",
    }
    asked = h11.Request(method="GET", target=question.path, headers=list(headers.items()))
    inbox.send((http.send(asked) or b"") + (http.send(h11.EndOfMessage()) or b""))
    try:
        while not isinstance(event := http.next_event(), h11.Response):
            if event is h11.NEED_DATA:
                http.receive_data(bytes(await inbox.take(1)))
    except h11.RemoteProtocolError:
        return None
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
    length = found.get("content-length", "")
    if event.status_code not in (200, 206) or not length or "transfer-encoding" in found:
        return None
    body = inbox.body(http.trailing_data[0], int(length))
    return Answer(status=event.status_code, headers=found, body=body)


class _Inbox(asyncio.BufferedProtocol):
    """Fills one buffer while what was handed over of the other is in use."""

    def __init__(self, read_s: float) -> None:
        self._read_s = read_s
        room = PIECE_BYTES + SLACK_BYTES
        self._filling, self._other = memoryview(bytearray(room)), memoryview(bytearray(room))
        self._filled = 0
        self._paused = False
        self._ended: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._enough = 0  # bytes that the waiter waits for

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.abort()

    async def body(self, first: bytes, size: int) -> AsyncIterator[memoryview]:
        """`size` bytes, of which the first came with the head. Raises Lost."""
        left = size
        piece = memoryview(first)
        while left:
            if not piece:
                piece = await self.take(left)
            if len(piece) > left:
                raise Lost from ConnectionError("more bytes came than were announced")
            left -= len(piece)
            yield piece
            piece = piece[:0]

    async def take(self, most: int) -> memoryview:
        """What came: as soon as it is `most` bytes or a whole piece, else a moment after the first. Raises Lost."""
        try:
            await self._until(1, self._read_s)
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
        """Until so many bytes are there, or the connection has ended. Raises TimeoutError."""
        if self._filled >= enough or self._ended is not None:
            return
        self._enough, self._waiter = enough, asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- what asyncio tells ---

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
        self._end(ConnectionError("the other side closed"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("closed"))

    def _end(self, error: Exception) -> None:
        self._ended = self._ended or error
        self._wake()
