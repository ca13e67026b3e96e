"""Server process: sockets, TLS and signals around the application.

The first stop signal drains: with PostgreSQL, `/ready` answers 503 for a few seconds in which all
requests are still served; waiting claims are answered, open requests get a few seconds, jobs end
their current step, and the exit code is 0. A second signal stops at once; what was acknowledged is
on the disk. SIGHUP is ignored. uvicorn alone would exit 143 after SIGTERM, 129 after SIGHUP and 3
when the port is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from typing_extensions import override

from coordinator import certificates
from coordinator.accounts.invites import ServerInvite
from coordinator.accounts.server_identity import ServerAddress
from coordinator.compute import Compute
from coordinator.config import Settings, without_password
from coordinator.database import runs
from coordinator.database.runs import RunRow
from coordinator.http.app import create_app
from coordinator.http.deadlines import ConnectionGuard, protocol
from coordinator.log import configure
from coordinator.plan.plan import plan
from coordinator.rules import run_file
from coordinator.services import Coordinator, opened
from coordinator.storage.folders import data_directory
from shared.errors import Configuration, Internal, why
from shared.network.links import format_link, is_loopback
from shared.programs import gc_freeze
from shared.units import DAY_S

KEEP_ALIVE_S = 75  # longer than the interval of heartbeats, so that each needs no new connection
# descriptors for the database, blobs, logs and connections that wait to be accepted
DESCRIPTORS_SPARE = 512
BACKLOG = 2048
SHUTDOWN_S = 10  # time that open requests may take after a stop signal
INVITE_USES, INVITE_S = 100, 30 * DAY_S  # uses and validity of the code in the join link
SECOND_SIGNAL_EXIT = 1
STOPPING = b"stopping: requests under way end first; a second signal stops at once\n"
ENDED = ("completed", "failed")
WHO_LOCAL = "anybody on this machine"
WHO_OPEN = "open to strangers: on probation until their work passed checks"
UNGUARDED = "merges by the mean, unsafe with strangers: create it anew with a robust aggregate"
JOIN = "  join    volunteer join "  # begins the line with the join link


def serve(settings: Settings, say: Callable[[str], None] = print) -> int:
    """Serve until a signal; return the exit code. Raises Configuration when the server cannot
    start.
    """
    configure(settings.log_level, as_json=settings.json_logs)
    certificate = _certificate(settings)
    listener = listen(settings.host, settings.port)
    with (
        contextlib.closing(listener),
        asyncio.Runner(debug=False, loop_factory=loop_factory()) as runner,
    ):
        return runner.run(_serve(settings, listener, certificate, say))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's maker of event loops where it is installed; None stands for Python's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _certificate(settings: Settings) -> certificates.Certificate | None:
    """Return the organiser's certificate if there is one; otherwise None on loopback or behind a
    proxy, and elsewhere a certificate made here.
    """
    if settings.tls_cert:
        return certificates.given(Path(settings.tls_cert), Path(settings.tls_key))
    if settings.url or is_loopback(settings.host):
        return None
    return certificates.own(data_directory(settings.directory))


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket. Raises Configuration, with the remedy, when the address is refused."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, number, _, where = addresses[0]
        listener = socket.socket(family, kind, number)
    except OSError as error:
        raise Configuration(f"{host} is not an address of this machine: {why(error)}") from error
    try:
        if os.name != "nt":  # the option would let two servers share a port on Windows
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.set_inheritable(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise Configuration(
                f"port {port} of {host} is in use: stop what uses it, or choose another with --port"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise Configuration(
                f"port {port} needs more rights: choose one above 1023 with --port"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise Configuration(f"{host} is not an address of this machine") from error
        raise Configuration(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def address(
    settings: Settings, listener: socket.socket, certificate: certificates.Certificate | None
) -> ServerAddress:
    """Return the address at which volunteers reach this server."""
    if settings.url:
        return ServerAddress(url=settings.url.rstrip("/"), tls_pin="")
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = outward_address()
    name = f"[{host}]" if ":" in host else host
    if certificate is None:
        return ServerAddress(url=f"http://{name}:{port}")
    return ServerAddress(url=f"https://{name}:{port}", tls_pin=certificate.pin)


def outward_address() -> str:
    """Return the address by which other machines most likely reach this one; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address, RFC 5737
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


async def _serve(
    settings: Settings,
    listener: socket.socket,
    certificate: certificates.Certificate | None,
    say: Callable[[str], None],
) -> int:
    async with opened(settings, exclusive=True, separate=True) as coordinator:
        await coordinator.store_marks.claim()
        if coordinator.blobs.staging is not None:
            await coordinator.blobs.staging.try_calls()
        await coordinator.server.set_address(address(settings, listener, certificate))
        server = _Server(uvicorn_config(coordinator, certificate), coordinator, say)
        gc_freeze.tune_for_server()
        await server.serve(sockets=[listener])
    return 0


def uvicorn_config(
    coordinator: Coordinator, certificate: certificates.Certificate | None = None
) -> uvicorn.Config:
    """Return uvicorn's settings, with deadlines and with the proxies that the organiser trusts."""
    settings = coordinator.settings
    return uvicorn.Config(
        create_app(coordinator),
        http=protocol(
            ConnectionGuard(settings, connections_possible(settings.constants.connections_max))
        ),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.url),
        forwarded_allow_ips=settings.trusted_proxies,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ssl_certfile=certificate.cert if certificate else None,
        ssl_keyfile=certificate.key if certificate else None,
    )


def connections_possible(limit: int) -> int:
    """Return the limit of open connections: `limit`, or less where the system allows less.

    Raises this process's limit of open files as far as the system permits: under the usual 1,024,
    two hostile addresses would take every descriptor, those of the database too.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = limit + DESCRIPTORS_SPARE
    if hard != resource.RLIM_INFINITY:
        need = min(need, hard)
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
        soft = need
    if soft == resource.RLIM_INFINITY:
        return limit
    return max(1, min(limit, soft - DESCRIPTORS_SPARE, soft * 3 // 4))


class _Server(uvicorn.Server):
    """uvicorn's server with other signal handling: one SIGTERM is enough, and no signal is passed
    on afterwards.
    """

    def __init__(
        self, config: uvicorn.Config, coordinator: Coordinator, say: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._coordinator = coordinator
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._signalled = False

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, with a deadline for TLS handshakes, which uvicorn lacks. Raises
        Internal if the background jobs cannot begin.
        """
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise Internal("the background jobs could not begin; the log says why")
        deadline_s = self._coordinator.settings.constants.headers_s if self.config.ssl else None
        self.servers = [
            await self._loop.create_server(
                self._connection,
                sock=listener,
                ssl=self.config.ssl,
                backlog=self.config.backlog,
                ssl_handshake_timeout=deadline_s,
            )
            for listener in sockets or ()
        ]
        self.started = True
        # printed once the server listens, so that the join link works at once
        for line in await welcome(self._coordinator):
            self._say(line)

    def _connection(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        connection: asyncio.Protocol = kind(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=self._loop,
        )
        return connection

    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        handlers = {signal.SIGINT: self.handle_exit, signal.SIGTERM: self.handle_exit}
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        if hasattr(signal, "SIGHUP"):
            previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signalled:
            os.write(sys.stderr.fileno(), b"stopping at once\n")
            os._exit(SECOND_SIGNAL_EXIT)
        self._signalled = True
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), STOPPING)
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        """Report this server as draining while it still serves, and stop a little later."""
        self._coordinator.draining.set()
        self._loop.call_later(self._coordinator.settings.drain_s, self._stop)

    def _stop(self) -> None:
        self.should_exit = True
        self._coordinator.stopping.set()  # waiting claims end now, not when their time is up


async def welcome(coordinator: Coordinator) -> list[str]:
    """Return the first lines for the organiser: address, join link, and the next command."""
    settings, where = coordinator.settings, coordinator.server.address
    invite = None
    if settings.by_invitation and not settings.invite_only:
        invite = await coordinator.volunteers.invites.of_server(
            coordinator.key, uses=INVITE_USES, expires_s=INVITE_S
        )
    link = format_link(coordinator.server.link(invite.code if invite else ""))
    here = settings.options
    lines = [
        f"{settings.name} listens at {where.url}",
        f"  data    {settings.directory}",
        f"  key     {coordinator.server.fingerprint}",
    ]
    if settings.database:
        lines.append(f"  database {without_password(settings.database)}")
    if settings.invite_only:
        lines.append(f"  join    by invitation only: coordinator invite create{here}")
    else:
        lines.append(f"{JOIN}'{link}'")
    if invite is not None:
        lines.append(
            f"  who     {_invite_words(invite)}: coordinator invite create{here} makes more"
        )
    elif not settings.invite_only:
        lines.append(f"  who     {WHO_OPEN if settings.open else WHO_LOCAL}")
    if not Compute.possible():
        lines.append("  serves  requests alone: servers with PyTorch merge, evaluate and check")
    run_rows = await coordinator.db.read(runs.every)
    if settings.open:
        alive = [run for run in run_rows if run.state not in ENDED]
        means = [run for run in alive if plan(run_file.decode(run.file).plan).aggregate == "mean"]
        lines += [f"  mend    {run.name} {UNGUARDED}" for run in means]
    if settings.public_page:
        lines.append(f"  page    {where.url}/")
    if coordinator.server.is_local:
        lines.append(f"  other machines: coordinator serve --host 0.0.0.0{here}")
    if not settings.invite_only and (text := await coordinator.server.message(link)):
        lines += ["", "  To send to those who are to join:", *(f"  | {line}" for line in text), ""]
    lines.append(f"  next    {_next_command(run_rows)}{here}")
    return lines


def _invite_words(invite: ServerInvite) -> str:
    """Return the number of uses and the validity of the join link's code, in words."""
    until = ""
    if invite.expires_at is not None:
        until = time.strftime(" until %Y-%m-%d", time.gmtime(invite.expires_at))
    return f"by invitation; the code in this link lets {invite.uses_left} in{until}"


def _next_command(run_rows: Sequence[RunRow]) -> str:
    """Return the command for the newest run's next step: create, start, or show."""
    newest = run_rows[-1] if run_rows else None
    if newest is None or newest.state in ENDED:
        return "coordinator run create --example"
    step = "start" if newest.state == "draft" else "show"
    return f"coordinator run {step} {newest.name}"
