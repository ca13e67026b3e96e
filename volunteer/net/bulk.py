"""Downloads of large files, each over its own connection, in pieces of 1 MiB.

httpx copies each byte five times and needs a turn of the event loop for every 64 KiB: a 40 MiB
download takes 55 to 61 ms of CPU with httpx, 20 ms with this module. Only the common case is
handled: a GET answered by 200 or 206 with a body of known length. Any other answer (an error, a
chunked body) gives None, and the caller repeats the request through httpx. Connections behind a
proxy do not use this module (`direct`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from shared.network.proxy import proxy_of
from volunteer.net.tls import Address

PIECE_BYTES = 1 << 20  # passed on at once
PACE_S = 0.1  # a slow connection passes its bytes on this often
HEAD_BYTES_MAX = 64 << 10


class BulkFailure(Exception):
    """The connection failed before or during an answer; the cause is the original error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkReply:
    """Head and body of an answer."""

    status: int  # 200 or 206
    headers: Mapping[str, str]  # names in lower case
    body: AsyncIterator[bytes]


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
    """Return the answer to a GET, or None for an unusual one. Raises BulkFailure, also while the
    body is read.
    """
    reader, writer = await _connect(question)
    try:
        yield await _usual(_Wire(reader, question.idle_s), _begun(writer, question))
    finally:
        writer.transport.abort()


async def _connect(question: Question) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(question.address.url)
    secure = parts.scheme == "https"
    try:
        async with asyncio.timeout(question.connect_s):
            return await asyncio.open_connection(
                question.address.host,
                parts.port or (443 if secure else 80),
                ssl=question.context if secure else None,
                happy_eyeballs_delay=0.25,
                limit=PIECE_BYTES,
            )
    except OSError as error:  # includes TimeoutError and the errors of TLS
        raise BulkFailure from error


def _begun(writer: asyncio.StreamWriter, question: Question) -> h11.Connection:
    """Send the request; return the state of the HTTP connection."""
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
    host = urlsplit(question.address.url).netloc
    headers = {"Host": host, **question.headers, "Connection": "close"}
    request = h11.Request(method="GET", target=question.path, headers=list(headers.items()))
    writer.write(http.send(request) or b"")
    http.send(h11.EndOfMessage())
    return http


async def _usual(wire: _Wire, http: h11.Connection) -> BulkReply | None:
    try:
        head = await _head(wire, http)
    except h11.RemoteProtocolError:
        return None
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    length = headers.get("content-length", "")
    strange = headers.keys() & {"transfer-encoding", "content-encoding"}
    if head.status_code not in (200, 206) or not length or strange:
        return None
    body = wire.body(http.trailing_data[0], int(length))
    return BulkReply(status=head.status_code, headers=headers, body=body)


async def _head(wire: _Wire, http: h11.Connection) -> h11.Response:
    while not isinstance(event := await _event(wire, http), h11.Response):
        if event is None:
            raise BulkFailure from ConnectionError("no reply arrived")
    return event  # informational replies (1xx) are skipped


async def _event(wire: _Wire, http: h11.Connection) -> h11.Event | None:
    """Return the next event; None where h11 does not continue."""
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await wire.some(HEAD_BYTES_MAX))
    return event if isinstance(event, h11.Event) else None


class _Wire:
    """Receiving side of a connection."""

    def __init__(self, reader: asyncio.StreamReader, idle_s: float) -> None:
        self._reader = reader
        self._idle_s = idle_s

    async def body(self, first: bytes, size: int) -> AsyncIterator[bytes]:
        """Yield `size` bytes; `first` holds the ones that came with the head. Raises BulkFailure."""
        left, piece = size, first
        while left:
            piece = piece or await self._piece(min(left, PIECE_BYTES))
            left -= len(piece)
            if left < 0 or (not left and await self._more()):
                raise BulkFailure from ConnectionError("more bytes arrived than announced")
            yield piece
            piece = b""

    async def _more(self) -> bool:
        """Return True if further bytes are there."""
        try:
            async with asyncio.timeout(0):
                return bool(await self._reader.read(1))
        except OSError:  # includes TimeoutError
            return False

    async def _piece(self, size: int) -> bytes:
        """Return `size` bytes, or less after `PACE_S` and at the connection's end. Raises
        BulkFailure.
        """
        try:
            async with asyncio.timeout(PACE_S):
                return await self._reader.readexactly(size)
        except TimeoutError:
            return await self.some(size)
        except asyncio.IncompleteReadError as error:
            return error.partial or await self.some(size)
        except OSError as error:
            raise BulkFailure from error

    async def some(self, most: int) -> bytes:
        """Return received bytes; wait for the first. Raises BulkFailure."""
        try:
            async with asyncio.timeout(self._idle_s):
                data = await self._reader.read(most)
        except OSError as error:  # includes TimeoutError
            raise BulkFailure from error
        if not data:
            raise BulkFailure from ConnectionError("the coordinator closed the connection")
        return data
