"""A coordinator of this process behind a real socket, its clock running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvicorn

from coordinator.http.app import create_app
from coordinator.http.server import listen
from tests.support.local_coordinator import LocalCoordinator


async def tick(home: LocalCoordinator) -> None:
    """Let its time pass, ten times as fast."""
    while True:
        await asyncio.sleep(0.05)
        await home.clock.advance(0.5)


@contextlib.asynccontextmanager
async def served(home: LocalCoordinator, *, ticking: bool = True) -> AsyncIterator[str]:
    """Address of a real socket in front of a coordinator; its time passes, or stands."""
    with listen("127.0.0.1", 0) as listener:
        config = uvicorn.Config(create_app(home.coordinator), lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        with contextlib.ExitStack() as signals:
            signals.enter_context(pytest.MonkeyPatch.context()).setattr(
                server, "capture_signals", contextlib.nullcontext
            )
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            passing = asyncio.create_task(tick(home)) if ticking else None
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                if passing is not None:
                    passing.cancel()
                home.coordinator.stopping.set()
                server.should_exit = server.force_exit = True
                await serving
