"""A whole volunteer and a whole coordinator in this process, over a network that a test can cut.

Only the network and the clock are a test's own: the clock runs a hundred times as fast, so that
waits are short.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from typing_extensions import override

from shared.protocol.accounts import Device
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator
from volunteer.agent.agent import Machine
from volunteer.control import commands, events
from volunteer.control.commands import Joined
from volunteer.control.events import AnyEvent, Event
from volunteer.engine import Engine, World
from volunteer.machine.policy import MachineFacts
from volunteer.machine.policy_loop import Read
from volunteer.machine.sensors import Sense, Sensors
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.settings.settings import Directories
from volunteer.training.trainer import Trainer

SPEED = 100.0
URL = "http://127.0.0.1:1"
CPU = Device(id="cpu", kind="cpu", name="a processor", memory_bytes=8 << 30)
LONG = RUN.replace("local_steps = 2", "local_steps = 400").replace("quorum = 2", "quorum = 1")
SHORT = RUN.replace("quorum = 2", "quorum = 1")

E = TypeVar("E", bound=Event)


class FastClock:
    """The machine's clock, sped up."""

    def __init__(self, speed: float = SPEED) -> None:
        self._speed = speed
        self._start = time.time()
        self._began = time.monotonic()

    def now(self) -> float:
        return self._start + self.monotonic() - self._began * self._speed

    def monotonic(self) -> float:
        return time.monotonic() * self._speed

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._speed)


class Network(httpx.AsyncBaseTransport):
    """The way to the coordinator. `cut` breaks it; `lose` drops the next reply that fits."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.cut = False
        self.failure: type[httpx.TransportError] = httpx.ConnectError
        self.seen: list[str] = []  # "METHOD path" of everything that arrived
        self.inner = inner
        self._lose: list[str] = []
        self._refuse: list[str] = []

    def lose(self, part: str) -> None:
        """The next request with `part` in its path arrives; its reply does not."""
        self._lose.append(part)

    def refuse(self, part: str) -> None:
        """Drop requests with `part` in their path from now on."""
        self._refuse.append(part)

    def heal(self) -> None:
        self.cut = False
        self._refuse.clear()

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if self.cut or any(part in path for part in self._refuse):
            raise self.failure("the network is down")
        self.seen.append(f"{request.method} {path}")
        response = await self.inner.handle_async_request(request)
        for part in self._lose:
            if part in path:
                self._lose.remove(part)
                raise httpx.ReadError("the reply was lost")
        return response


class LocalMachine:
    """One machine that is lent to a coordinator: its files outlive its processes."""

    def __init__(self, path: Path, home: LocalCoordinator) -> None:
        self.home = home
        self.path = path
        self.speed = SPEED
        self.sense: Sense = Sensors().read
        self.read: Read = lambda rules, devices: MachineFacts()
        self.devices: tuple[Device, ...] = (CPU,)
        self.clients: list[Client] = []  # of all its processes
        self.detect: Callable[[], tuple[Device, ...]] = lambda: self.devices
        self.directories = Directories(config=path, profile=path / "profile", cache=path / "cache")
        path.mkdir(exist_ok=True)

    def engine(
        self,
        network: Network | None = None,
        load: Any = None,
        *,
        ask_first: bool = False,
        **flags: Any,
    ) -> Engine:
        """A new process on this machine's files."""
        clock = FastClock(self.speed)
        given = ("snapshot_s", "quit_s", "measure")
        options = {"measure": False} | {name: flags.pop(name) for name in given if name in flags}
        machine = Machine(
            **options,
            trainer=lambda device: Trainer(device, threads=1, clock=clock),
            detect=lambda: self.detect(),
            read=self.read,
            sense=self.sense,
        )
        world = World(
            clock=clock,
            rng=random.Random(1),
            connect=self.connect(network, clock),
            machine=machine,
            load=load,
            listen=False,
        )
        return Engine(self.directories, flags, world=world, ask_first=ask_first)

    def connect(
        self, network: Network | None = None, clock: FastClock | None = None
    ) -> Callable[[Address, str], Client]:
        """Return the factory of clients of the coordinator, over `network`."""
        network = network or Network(self.home.transport)
        clock = clock or FastClock(self.speed)

        def made(address: Address, token: str) -> Client:
            client = Client(
                address, clock=clock, rng=random.Random(1), token=token, transport=network
            )
            self.clients.append(client)
            return client

        return made

    @property
    def link(self) -> str:
        return f"{URL}/join#key={self.home.coordinator.server.link().fingerprint}"

    async def join(self, name: str = "Ann", network: Network | None = None) -> Joined:
        return await self.engine(network).control.do(commands.Join(link=self.link, name=name))

    async def work(self, tasks: int) -> Process:
        """Join, do tasks and hear of a verdict; return the ended process."""
        await self.join()
        async with self.working(max_tasks=tasks) as process:
            await process.until(events.Judged)
            assert await process.ended() == 0
        return process

    @asynccontextmanager
    async def working(self, load: Any = None, **flags: Any) -> AsyncIterator[Process]:
        """A process at work; at the end of the block it is killed, if it has not ended."""
        network = Network(self.home.transport)
        process = Process(self.engine(network, load, **flags), network, self.path)
        try:
            yield process
        finally:
            await process.kill()


class Process:
    """A running engine and everything it has told."""

    def __init__(self, engine: Engine, network: Network, files: Path) -> None:
        self.network = network
        self._files = files
        self.engine = engine
        self.control = engine.control
        self.told: list[AnyEvent] = []
        self._more = asyncio.Event()
        self._listening = asyncio.ensure_future(self._listen())
        self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> int:
        await asyncio.sleep(0)  # the listener is there first
        return await self.engine.run()

    async def _listen(self) -> None:
        with self.control.subscribe() as new:
            async for event in new:
                self.told.append(event)
                self._more.set()
        self._more.set()

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.told if isinstance(event, kind)]

    async def until(
        self, kind: type[E], fits: Callable[[E], bool] = lambda event: True, timeout_s: float = 120
    ) -> E:
        """The first event of a kind that fits, told already or within the time."""
        async with asyncio.timeout(timeout_s):
            while True:
                self._more.clear()
                for event in self.all(kind):
                    if fits(event):
                        return event
                if self._running.done():
                    self._running.result()
                    raise AssertionError(f"the volunteer ended without {kind.__name__}")
                await self._more.wait()

    @asynccontextmanager
    async def eventually(self, timeout_s: float = 120) -> AsyncIterator[None]:
        """Fail if the block takes longer than the time."""
        async with asyncio.timeout(timeout_s):
            yield

    async def tick(self) -> None:
        """Wait for the next event."""
        self._more.clear()
        await self._more.wait()

    async def heartbeats(self, count: int) -> None:
        """Wait for `count` more heartbeats."""
        async with self.heartbeat(count):
            pass

    @asynccontextmanager
    async def heartbeat(self, count: int = 1) -> AsyncIterator[None]:
        """Wait after the block for a heartbeat, or several, since its beginning."""

        def arrived() -> int:
            return sum("/heartbeat" in seen for seen in self.network.seen)

        wanted = arrived() + count
        yield
        async with self.eventually():
            while arrived() < wanted:
                await asyncio.sleep(0.01)

    async def ended(self, timeout_s: float = 120) -> int:
        """The exit code."""
        async with asyncio.timeout(timeout_s):
            code = await asyncio.shield(self._running)
            await self._listening
        return code

    async def kill(self) -> None:
        """End at once, with files as after a kill -9: no lease is returned, nothing is sent."""
        if self._running.done():
            return
        self.network.cut = True
        left = self._files.with_suffix(".left")
        # Before anything is tidied up; a partial file may be renamed while it is copied.
        shutil.copytree(self._files, left, copy_function=_copy_if_there)
        self._running.cancel()
        self._listening.cancel()
        await asyncio.gather(self._running, self._listening, return_exceptions=True)
        async with self.eventually():
            while self._files.exists():  # a thread may still be writing
                await asyncio.to_thread(shutil.rmtree, self._files, ignore_errors=True)
        left.rename(self._files)


def _copy_if_there(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


async def worked(home: LocalCoordinator, path: Path, tasks: int = 1) -> Process:
    """Let a new machine do tasks of a short run; return its ended process."""
    await home.start_run(SHORT)
    async with home.coordinator.working():
        return await LocalMachine(path, home).work(tasks)


@asynccontextmanager
async def local_machine(path: Path, run: str = SHORT) -> AsyncIterator[LocalMachine]:
    """A coordinator with one run, at work, and a machine that has joined it."""
    async with local_coordinator(path / "coordinator") as home:
        await home.start_run(run)
        async with home.coordinator.working():
            machine = LocalMachine(path / "machine", home)
            await machine.join()
            yield machine
