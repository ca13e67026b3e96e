"""Control of a volunteer: commands in, events out, in this process or over the local socket.

control.status                        the state now
with control.subscribe() as new:      every event from now on: `async for event in new`
await control.pause("cuda:0")         commands; each raises the volunteer's error
await control.query(endpoints.RUNS)   read-only queries, forwarded to the coordinator
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

from shared.protocol.accounts import Benchmark, LinkCode, MachineOrder, ServerInfo
from shared.protocol.endpoints import Endpoint
from volunteer.control import commands
from volunteer.control.commands import Ask, Command, Joined, SettingRow
from volunteer.control.commands import How as How  # part of this interface
from volunteer.control.event_bus import EventBus, Subscription
from volunteer.control.status import Status

T = TypeVar("T")


class Execute(Protocol):
    """Executes a command and returns its answer."""

    def __call__(self, command: Command) -> Awaitable[Any]: ...


class Control:
    """Control of one volunteer, made by `Engine` in this process, else by `local_socket.attach`."""

    def __init__(self, hub: EventBus, execute: Execute, *, remote: bool = False) -> None:
        self.remote = remote  # leaving a remote volunteer does not end it
        self._hub = hub
        self._execute = execute

    @property
    def status(self) -> Status:
        return self._hub.status

    def subscribe(self) -> AbstractContextManager[Subscription]:
        """Subscribe to every event from now on, until the volunteer ends."""
        return self._hub.subscribe()

    async def probe(self, link: str) -> ServerInfo:
        """Return the identity of the coordinator at a join link.

        Raises BadRequest, Unreachable, Unauthorized; the message says what to do.
        """
        return await self._ask(commands.Probe(link=link))

    async def join(self, link: str, name: str = "") -> Joined:
        """Make an account and start to work with it. Raises InvalidName (a free one), Forbidden."""
        return await self._ask(commands.Join(link=link, name=name))

    async def begin(self) -> None:
        """Find and measure the devices; at a first start nothing is measured before this."""
        await self._execute(commands.Begin())

    async def choose_runs(self, runs: tuple[str, ...]) -> None:
        """Help only these runs from the next task on; empty = any."""
        await self._execute(commands.ChooseRuns(runs=runs))

    async def pause(
        self,
        device: str = "",
        *,
        by: str = "you",
        message: str = "paused",
        until: str = "you resume",
        ends_at: float = 0.0,
    ) -> None:
        """Pause the device, keep the task; `ends_at` is a local time or NEXT_LOGIN."""
        await self._execute(
            commands.Pause(device=device, by=by, message=message, until=until, ends_at=ends_at)
        )

    async def resume(self, device: str = "", *, by: str = "you") -> None:
        await self._execute(commands.Resume(device=device, by=by))

    async def finish(self) -> None:
        """Complete the tasks in work and take no more."""
        await self._execute(commands.Finish())

    async def stop(self, how: How = "release") -> None:
        """End the volunteer."""
        await self._execute(commands.Stop(how=how))

    async def retry(self) -> None:
        """Try the coordinator again now."""
        await self._execute(commands.Retry())

    async def consent(self, run: str) -> None:
        """Accept the licence of a run."""
        await self._execute(commands.Consent(run=run))

    async def read_announcements(self) -> None:
        """Show the organiser's announcements of now no more."""
        await self._execute(commands.ReadAnnouncements())

    async def measure(self, device: str = "", *, quick: bool = False) -> None:
        """Benchmark a device; progress and result arrive as events."""
        await self._execute(commands.Measure(device=device, quick=quick))

    async def stop_measuring(self) -> None:
        """Cancel a running benchmark."""
        await self._execute(commands.StopMeasuring())

    async def look_at_devices(self) -> None:
        """Read the sensors now; changes arrive as events."""
        await self._execute(commands.LookAtDevices())

    async def measured(self) -> tuple[Benchmark, ...]:
        """Return all benchmarks that are remembered, oldest first."""
        return await self._ask(commands.GetMeasured())

    async def invitation(self) -> str:
        """Return a link with which others can join the same coordinator."""
        return await self._ask(commands.GetInvitation())

    async def settings(self) -> tuple[SettingRow, ...]:
        return await self._ask(commands.GetSettings())

    async def set_settings(self, changes: dict[str, Any]) -> tuple[SettingRow, ...]:
        """Check settings and write them to config.toml. Raises Configuration with valid values."""
        return await self._ask(commands.SetSettings(changes=changes))

    async def query(self, endpoint: Endpoint[T], **args: str | int) -> T:
        """Return the coordinator's reply to a read-only query; `args` are the parameters of the
        endpoint.

        `await control.query(endpoints.LOSS, run="stdlib-gpt")`. Raises BadRequest, NotFound,
        Unreachable, Conflict.
        """
        return (await self.page(endpoint, **args))[0]

    async def page(self, endpoint: Endpoint[T], **args: str | int) -> tuple[T, str]:
        """Return one page of a listing and the cursor of the next one; "" after the last."""
        return await self._ask(commands.Query(endpoint=endpoint.path, args=args))

    async def picture(self, run: str, version: int) -> bytes:
        """Return the PNG that a version drew. Raises NotFound for one without a picture."""
        return await self._ask(commands.GetPicture(run=run, version=version))

    async def link(self) -> LinkCode:
        """Return a ten-minute code for another machine of the same account."""
        return await self._ask(commands.MakeLink())

    async def order_machine(
        self, machine: str, order: Literal["pause", "resume", "finish"]
    ) -> None:
        """Let another machine of the account obey with its next heartbeat. Raises NotFound."""
        await self._execute(
            commands.OrderMachine(request=MachineOrder(worker_id=machine, order=order))
        )

    async def _ask(self, command: Ask[T]) -> T:
        answer: T = await self._execute(command)
        return answer
