"""A coordinator of this process behind a real socket, its clock running."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn

from coordinator.http.app import create_app
from coordinator.http.server import listen
from tests.support.local_coordinator import LocalCoordinator


async def tick(home: LocalCoordinator) -> None:
    """Advance the coordinator's clock, ten times as fast as real time."""
    while True:
        await asyncio.sleep(0.05)
        await home.clock.advance(0.5)


@contextlib.asynccontextmanager
async def accepting(
    config: uvicorn.Config, listener: socket.socket
) -> AsyncIterator[uvicorn.Server]:
    """A server that accepts connections: before it listens, the kernel refuses them."""
    server = uvicorn.Server(config)
    with pytest.MonkeyPatch.context() as signals:
        signals.setattr(server, "capture_signals", contextlib.nullcontext)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not (server.started or serving.done()):
                await asyncio.sleep(0)
            yield server
        finally:
            server.should_exit = server.force_exit = True
            await serving


@contextlib.asynccontextmanager
async def served(home: LocalCoordinator, *, ticking: bool = True) -> AsyncIterator[str]:
    """Address of a real socket in front of a coordinator; its time passes, or stands."""
    config = uvicorn.Config(create_app(home.coordinator), lifespan="off", log_config=None)
    with listen("127.0.0.1", 0) as listener:
        async with accepting(config, listener):
            passing = asyncio.create_task(tick(home)) if ticking else None
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                if passing is not None:
                    passing.cancel()
                home.coordinator.stopping.set()
