"""Local socket of a running volunteer: one JSON message per line, accessible to this user only.

It is a Unix socket in a private directory, or a loopback port on systems without Unix sockets. The
file `control.json` of the profile has its address and token. A client receives the status first,
then every event, and may send commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from shared.clock import Clock
from shared.decoding import MALFORMED, decode
from shared.errors import BadRequest, Unreachable, VolunteerError, error_of_code
from shared.files.deletions import delete_file
from shared.sentences import Sentence, encode_parts
from volunteer.control.commands import (
    Command,
    CommandLine,
    EventLine,
    ReplyLine,
    StatusSnapshot,
    reply_type,
)
from volunteer.control.control import Control, Execute
from volunteer.control.event_bus import EventBus, Subscription
from volunteer.files import private_directory, read_record, write_record

LINE_BYTES_MAX = 4 << 20
CLIENTS_MAX = 16
SOCKET_PATH_MAX = 100  # longest path of a Unix socket that every system allows
HELLO_S = 5.0


class SilentVolunteer(Unreachable):
    """The running volunteer does not answer."""


class SocketAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a running volunteer and its access token, kept in a private file."""

    path: str = ""  # path of the Unix socket
    port: int = 0  # port on 127.0.0.1, where there are no Unix sockets
    token: str = ""
    pid: int = 0


class Hello(msgspec.Struct, frozen=True):
    """First line to the volunteer."""

    token: str


class ControlServer:
    """Serves one volunteer's control to other processes of the same user."""

    def __init__(
        self, bus: EventBus, execute: Execute, listener: socket.socket | None = None
    ) -> None:
        self._bus = bus
        self._listener = listener
        self._execute = execute
        self._clients: set[asyncio.Task[None]] = set()
        self._token = secrets.token_hex(16)

    @asynccontextmanager
    async def serve(self, record: Path) -> AsyncIterator[None]:
        """Serve until the block ends; the address is written to `record`."""
        if hasattr(socket, "AF_UNIX"):
            listener = self._listener or listen(record)
            server = await asyncio.start_unix_server(
                self._serve_client, sock=listener, limit=LINE_BYTES_MAX
            )
            path = listener.getsockname()
            endpoint = SocketAddress(path=path, token=self._token, pid=os.getpid())
        else:
            server = await asyncio.start_server(
                self._serve_client, "127.0.0.1", 0, limit=LINE_BYTES_MAX
            )
            port = server.sockets[0].getsockname()[1]
            endpoint = SocketAddress(port=port, token=self._token, pid=os.getpid())
        write_record(record, endpoint)
        try:
            yield
        finally:
            _remove(record)
            server.close()
            for client in self._clients:
                client.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)
            if endpoint.path:
                _remove(Path(endpoint.path))

    async def _serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._clients) >= CLIENTS_MAX:
            writer.close()
            return
        self._clients.add(task)
        try:
            hello = await asyncio.wait_for(_line(reader, Hello), HELLO_S)
            if hello is None or not hmac.compare_digest(hello.token, self._token):
                return
            with self._bus.subscribe() as events:
                await self._talk(reader, writer, events)
        except (ConnectionError, TimeoutError, BadRequest, asyncio.CancelledError):
            pass  # the client left or sent an invalid line, or the server ends
        finally:
            self._clients.discard(task)
            with contextlib.suppress(ConnectionError):
                writer.close()

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, events: Subscription
    ) -> None:
        await _send(writer, StatusSnapshot(status=self._bus.status))
        sender = asyncio.create_task(self._send_events(writer, events))
        try:
            while (request := await _line(reader, CommandLine)) is not None:
                await _send(writer, await self._answer(request))
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send_events(self, writer: asyncio.StreamWriter, events: Subscription) -> None:
        async for event in events:
            await _send(writer, EventLine(event=event))
        writer.close()  # the volunteer has ended

    async def _answer(self, request: CommandLine) -> ReplyLine:
        try:
            value = await self._execute(request.command)
        except VolunteerError as error:
            return ReplyLine(id=request.id, code=error.code, message=error.message)
        return ReplyLine(
            id=request.id, value=msgspec.Raw(msgspec.json.encode(value, enc_hook=encode_parts))
        )


class RemoteVolunteer:
    """Connection to the volunteer of another process."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bus: EventBus
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._bus = bus
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._last = 0
        self._ended = False  # True after the connection has ended

    async def execute(self, command: Command[Any]) -> Any:
        """Send a command and wait for its answer. Raises the volunteer's error, or Unreachable."""
        kind = reply_type(command)
        if self._ended:
            raise Unreachable(Sentence("the volunteer has ended"))
        self._last += 1
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[self._last] = answer
        try:
            await _send(self._writer, CommandLine(id=self._last, command=command))
            raw = await answer
        except ConnectionError as error:
            raise Unreachable(Sentence("the volunteer has ended")) from error
        return None if kind is None else decode(raw, kind)

    async def read(self) -> None:
        """Read events and answers until the volunteer ends."""
        try:
            while (line := await _line(self._reader, ReplyLine | EventLine)) is not None:
                if isinstance(line, EventLine):
                    self._bus.emit(line.event)
                elif waiting := self._waiting.pop(line.id, None):
                    if waiting.done():  # the caller was cancelled meanwhile
                        continue
                    if line.code:
                        waiting.set_exception(error_of_code(line.code, line.message))
                    else:
                        waiting.set_result(line.value)
        except (ConnectionError, BadRequest):
            pass
        finally:
            self._ended = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(Unreachable(Sentence("the volunteer has ended")))
            self._bus.close()


@asynccontextmanager
async def attach(record: Path, clock: Clock) -> AsyncIterator[Control]:
    """Connect to this profile's running volunteer. Raises Unreachable if no volunteer runs or
    answers.
    """
    endpoint = read_record(record, SocketAddress)
    not_running = Sentence("no volunteer is running on this profile: start one with `volunteer`")
    if endpoint is None:
        raise Unreachable(not_running)
    try:
        if endpoint.path:
            reader, writer = await asyncio.open_unix_connection(endpoint.path, limit=LINE_BYTES_MAX)
        else:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", endpoint.port, limit=LINE_BYTES_MAX
            )
    except OSError as error:
        raise Unreachable(not_running) from error
    try:
        try:
            await _send(writer, Hello(endpoint.token))
            first = await asyncio.wait_for(_line(reader, StatusSnapshot), HELLO_S)
        except (ConnectionError, TimeoutError) as error:
            raise SilentVolunteer(_silent(endpoint)) from error
        if first is None:
            raise SilentVolunteer(_silent(endpoint))
        bus = EventBus(clock, first.status)
        remote = RemoteVolunteer(reader, writer, bus)
        reading = asyncio.create_task(remote.read())
        try:
            yield Control(bus, remote.execute, remote=True)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    finally:
        with contextlib.suppress(ConnectionError):
            writer.close()


async def _send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    writer.write(msgspec.json.encode(message, enc_hook=encode_parts) + b"\n")
    await writer.drain()


async def _line(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Return the next message; None at the end. Raises BadRequest."""
    try:
        line = await reader.readline()
    except ValueError as error:
        raise BadRequest(Sentence("a line of the control socket is too long")) from error
    if not line:
        return None
    try:
        return decode(line, kind)
    except MALFORMED as error:
        raise BadRequest(
            Sentence("a line of the control socket is invalid: {error}", error=error)
        ) from error


def _remove(path: Path) -> None:
    delete_file(path, "ended")


class _Listener(socket.socket):
    """Socket that listens already. Its `listen`, which asyncio calls, does nothing: the kernel
    refuses the call of a confined process.
    """

    @override
    def listen(self, backlog: int = 0, /) -> None:
        pass


def listen(record: Path) -> socket.socket:
    """Return the listening Unix socket of a profile, made before the process is confined."""
    path = _socket_path(record)
    delete_file(path, "ended")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(CLIENTS_MAX)
    return _Listener(fileno=listener.detach())


def _socket_path(record: Path) -> Path:
    """Return a socket path beside the record; if that is too long, one in a private directory."""
    path = record.with_suffix(".sock")
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX:
        return path
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    private = private_directory(base / f"volunteer-{os.getuid()}")
    if private.stat().st_uid != os.getuid() or private.stat().st_mode & 0o077:
        private = Path(tempfile.mkdtemp(prefix="volunteer-"))
    return private / f"{secrets.token_hex(6)}.sock"


def _silent(endpoint: SocketAddress) -> Sentence:
    return Sentence(
        "the running volunteer (process {process}) does not answer: it is busy, or was stopped",
        process=endpoint.pid,
    )
