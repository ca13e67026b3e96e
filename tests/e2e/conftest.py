"""Real processes for the tests of this directory."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import Settings
from coordinator.http.app import Coordinator, opened
from shared.decoding import convert
from tests.support.command_line import (  # noqa: F401 # fixtures of this directory
    busy,
    busy_once,
    here,
    process_as_it_was,
    run,
)
from tests.support.forkserver import Child, ForkServer
from tests.support.local_coordinator import RUN
from tests.support.server_process import Process, forked_command
from tests.support.sums import build_sums


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


Forked = Callable[..., Process]


@pytest.fixture
def forked(fork_server: ForkServer) -> Forked:
    """Make processes of `coordinator serve` by the fork server."""
    return partial(Process, command=fork_server)


Commanded = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def commanded(fork_server: ForkServer) -> Commanded:
    """Run commands of the organiser by the fork server."""
    return partial(forked_command, fork_server)


@dataclass
class ServedCoordinator:
    """A data directory, a port and a database, and whatever process serves them at the moment."""

    fork_server: ForkServer
    settings: dict[str, Any]
    log: Path
    children: list[Child] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings['port']}"

    @property
    def child(self) -> Child:
        return self.children[-1]

    async def serve(self, *faults: object) -> Child:
        """A new coordinator process, which may not listen yet."""
        self.children.append(await self.fork_server.serve(self.settings, self.log, faults))
        return self.child

    async def listening(self, timeout_s: float = 60.0) -> None:
        """Wait until somebody accepts connections."""
        async with asyncio.timeout(timeout_s):
            while self.child.alive:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.settings["port"])
                except OSError:
                    await asyncio.sleep(0.005)
                else:
                    writer.close()
                    return
        raise AssertionError(f"the coordinator ended: {self.child.said()[-3000:]}")

    async def stop(self) -> int:
        """End the server as its organiser would."""
        self.child.kill(15)
        return await self.child.ended()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Coordinator]:
        """The services, in this process."""
        async with opened(convert(self.settings, Settings)) as coordinator:
            yield coordinator

    async def start_run(self, text: str = RUN) -> str:
        """A tiny dataset and a running run on it; its name."""
        async with self.opened() as coordinator:
            await coordinator.datasets.add(build_sums)
            run = await coordinator.runs.create(text)
            await coordinator.runs.start(run.name)
        return run.name


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def twin(served: ServedCoordinator) -> Iterator[ServedCoordinator]:
    """A second coordinator on the same database, files and keys."""
    made = ServedCoordinator(
        served.fork_server, served.settings | {"port": free_port()}, served.log
    )
    yield made
    for child in made.children:
        child.kill()
        child.death.result(120)


@pytest.fixture
def served(
    fork_server: ForkServer, tmp_path: Path, database_url: str
) -> Iterator[ServedCoordinator]:
    """A place for a coordinator, on each kind of database."""
    quiet: dict[str, Any] = {"rate_ip": "off", "rate_worker": "off", "rate_register": "off"}
    settings = quiet | {
        "data_dir": str(tmp_path / "coordinator"),
        "database": database_url,
        "port": free_port(),
        "space_floor_bytes": 0,
        "log_level": "warning",
        "constants": {"merge_threads": 1, "job_lease_s": 0.5},
    }
    made = ServedCoordinator(fork_server, settings, tmp_path / "log")
    yield made
    for child in made.children:
        child.kill()
        child.death.result(120)
