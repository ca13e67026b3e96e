"""Control of a volunteer: commands in, events out, in this process or over the local socket.

control.status                        the present state
with control.subscribe() as new:      all later events: `async for event in new`
await control.do(commands.Finish())   a command; raises the volunteer's error
await control.query(endpoints.RUNS)   read-only queries, forwarded to the coordinator
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from shared.protocol.endpoint import Endpoint
from volunteer.control import commands
from volunteer.control.commands import Command
from volunteer.control.event_bus import EventBus, Subscription
from volunteer.control.status import Status

T = TypeVar("T")


class Execute(Protocol):
    """Executes a command and returns its answer."""

    def __call__(self, command: Command[Any]) -> Awaitable[Any]: ...


class Control:
    """Control of one volunteer, made by `Engine` in this process, else by `local_socket.attach`."""

    def __init__(self, bus: EventBus, execute: Execute, *, remote: bool = False) -> None:
        self.remote = remote  # closing the screen does not end a remote volunteer
        self._bus = bus
        self._execute = execute

    @property
    def status(self) -> Status:
        return self._bus.status

    def subscribe(self) -> AbstractContextManager[Subscription]:
        """Subscribe to all later events, until the volunteer ends."""
        return self._bus.subscribe()

    async def do(self, command: Command[T]) -> T:
        """Execute a command; return its answer. Raises its errors."""
        answer: T = await self._execute(command)
        return answer

    async def query(self, endpoint: Endpoint[T], **args: str | int) -> T:
        """Return the coordinator's reply to a read-only query; `args` are the parameters of the
        endpoint.

        `await control.query(endpoints.LOSS, run="stdlib-gpt")`. Raises BadRequest, NotFound,
        Unreachable, Conflict.
        """
        return (await self.page(endpoint, **args))[0]

    async def page(self, endpoint: Endpoint[T], **args: str | int) -> tuple[T, str]:
        """Return one page of a listing and the cursor of the next page; "" after the last page."""
        return await self.do(commands.Query(endpoint=endpoint.path, args=args))
