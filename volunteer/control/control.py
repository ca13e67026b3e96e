"""The one way in: commands in, events out, the same for a volunteer in this process and for one that runs elsewhere here.

control.status                     the state now
with control.subscribe() as new:   every event from now on: `async for event in new`
await control.pause("cuda:0")      commands; each raises what the volunteer answers with
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from shared.protocol.accounts import Benchmark, LinkCode, RunInfo, ServerInfo, WorkerInfo
from shared.protocol.heartbeat import LeaderRow, LedgerRow, LossPoint, Summary
from shared.protocol.work import VersionInfo
from volunteer.control import commands
from volunteer.control.commands import Ask, Command, History, Joined, PublicRun, SettingRow
from volunteer.control.commands import How as How  # part of this interface
from volunteer.control.event_bus import Hub, Subscription
from volunteer.control.status import Status

T = TypeVar("T")


class Execute(Protocol):
    """Carries a command out and gives its answer."""

    def __call__(self, command: Command) -> Awaitable[Any]: ...


class Control:
    """One volunteer. Made by `Engine` in this process, by `attach` (channel.py) for another one."""

    def __init__(self, hub: Hub, execute: Execute, *, remote: bool = False) -> None:
        self.remote = remote  # leaving a remote volunteer does not end it
        self._hub = hub
        self._execute = execute

    @property
    def status(self) -> Status:
        return self._hub.status

    def subscribe(self) -> AbstractContextManager[Subscription]:
        """Every event from now on, until the volunteer ends."""
        return self._hub.subscribe()

    async def probe(self, link: str) -> ServerInfo:
        """Who answers at a join link. Raises BadRequest, Unreachable, Unauthorized with what to do."""
        return await self._ask(commands.Probe(link=link))

    async def join(self, link: str, name: str = "") -> Joined:
        """Make an account and go to work with it. Raises InvalidName with a free suggestion, Forbidden."""
        return await self._ask(commands.Join(link=link, name=name))

    async def choose_runs(self, runs: tuple[str, ...]) -> None:
        """Help only these from the next task on; empty = any."""
        await self._execute(commands.ChooseRuns(runs=runs))

    async def pause(
        self,
        device: str = "",
        *,
        by: str = "you",
        message: str = "paused",
        until: str = "you resume",
    ) -> None:
        """Free the device, keep the task."""
        await self._execute(commands.Pause(device=device, by=by, message=message, until=until))

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
        """Say yes to the licence of a run."""
        await self._execute(commands.Consent(run=run))

    async def measure(self, device: str = "", *, quick: bool = False) -> None:
        """Benchmark a device; progress and result come as events."""
        await self._execute(commands.Measure(device=device, quick=quick))

    async def stop_measuring(self) -> None:
        """End a benchmark that is under way."""
        await self._execute(commands.StopMeasuring())

    async def measured(self) -> tuple[Benchmark, ...]:
        """All benchmarks that are remembered, oldest first."""
        return await self._ask(commands.GetMeasured())

    async def invitation(self) -> str:
        """A link with which others can join the same coordinator."""
        return await self._ask(commands.GetInvitation())

    async def start_practice(self) -> str:
        """The link of a private coordinator on this machine. Raises Unavailable."""
        return await self._ask(commands.StartPractice())

    async def public_runs(self) -> tuple[PublicRun, ...]:
        """Runs that anybody may help, where the owner set an address for such a list."""
        return await self._ask(commands.GetPublicRuns())

    async def settings(self) -> tuple[SettingRow, ...]:
        return await self._ask(commands.GetSettings())

    async def set_settings(self, changes: dict[str, Any]) -> tuple[SettingRow, ...]:
        """Check settings and write them to config.toml. Raises Configuration with what a value must be."""
        return await self._ask(commands.SetSettings(changes=changes))

    async def runs(self) -> tuple[RunInfo, ...]:
        return await self._ask(commands.GetRuns())

    async def versions(self, run: str, cursor: str = "") -> tuple[VersionInfo, ...]:
        return await self._ask(commands.GetVersions(run=run, cursor=cursor))

    async def loss(self, run: str) -> tuple[LossPoint, ...]:
        return await self._ask(commands.GetLoss(run=run))

    async def summary(self, run: str) -> Summary:
        return await self._ask(commands.GetSummary(run=run))

    async def workers(self, run: str) -> tuple[WorkerInfo, ...]:
        return await self._ask(commands.GetWorkers(run=run))

    async def leaders(self, run: str = "", days: int = 0) -> tuple[LeaderRow, ...]:
        return await self._ask(commands.GetLeaders(run=run, days=days))

    async def ledger(self, cursor: str = "") -> tuple[LedgerRow, ...]:
        return await self._ask(commands.GetLedger(cursor=cursor))

    async def history(self, cursor: str = "") -> History:
        return await self._ask(commands.GetHistory(cursor=cursor))

    async def link(self) -> LinkCode:
        """A ten-minute code for another machine of the same account."""
        return await self._ask(commands.MakeLink())

    async def _ask(self, command: Ask[T]) -> T:
        answer: T = await self._execute(command)
        return answer
