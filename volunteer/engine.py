"""Engine of a volunteer: profile, settings and agent behind one control, joined or not."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shared.clock import Clock, SystemClock
from shared.errors import BadRequest, Conflict, NotFound, VolunteerError
from shared.network.links import JoinLink, format_link, parse_link
from shared.proofs.proof_of_work import search_time_text
from shared.protocol import endpoints
from shared.protocol.accounts import MachineOrder
from shared.sentences import Sentence
from shared.settings import FLAG, SettingRow
from shared.units import GIB
from shared.workloads.base import Workload, load
from volunteer.account.join import Connect, Enrolment, connector, join, probe, register
from volunteer.account.profile_directory import Identity, Profile
from volunteer.agent.agent import Agent, Machine
from volunteer.agent.workplace import RemoteCoordinator, Store, Timing
from volunteer.control import commands, events
from volunteer.control.commands import Command
from volunteer.control.control import Control
from volunteer.control.event_bus import EventBus
from volunteer.control.event_sentences import START
from volunteer.control.local_socket import ControlServer
from volunteer.control.status import VERDICTS_MAX, Status
from volunteer.i18n.catalogue import choose, use
from volunteer.machine import sandbox_helper
from volunteer.machine.devices import default_threads
from volunteer.net.api import ASK_S, Api
from volunteer.net.transfers import Transfers, hub_address
from volunteer.net.weights import Weights
from volunteer.settings import settings as config
from volunteer.settings.settings import Directories, LoadedSettings, Settings
from volunteer.storage.blob_cache import Cache
from volunteer.storage.leases import Leases
from volunteer.storage.outbox import Outbox
from volunteer.storage.own_data import OwnData
from volunteer.storage.receipts import ReceiptBook
from volunteer.training.trainer import Trainer

PICTURE_BYTES_MAX = 2 << 20  # largest PNG whose base64 fits a line of the control socket
ACCOUNT = (endpoints.CONTRIBUTIONS, endpoints.LEDGER, endpoints.LEADERBOARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """External dependencies of an engine; tests bring their own."""

    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random = field(default_factory=random.Random)
    connect: Connect | None = None
    load: Callable[[str], Workload] | None = None
    machine: Machine | None = None
    listen: bool = True  # serve the local control socket
    listener: socket.socket | None = None  # made before the process was confined


class Engine:
    """One volunteer. `control` is for a front end, `run` does the work."""

    def __init__(
        self,
        directories: Directories,
        flags: Mapping[str, object] | None = None,
        *,
        world: World | None = None,
        start_paused: bool = False,
        ask_first: bool = False,
    ) -> None:
        """Read the profile; with `ask_first` the devices stay unused until the owner has set the
        limits (`commands.Begin`, or the first `commands.Resume`).
        """
        self.world = world or World()
        self.profile = Profile(directories.profile)
        self.clean_end = True
        self._directories = directories
        self._flags = dict(flags or {})
        self._start_paused = start_paused
        self._connect = self.world.connect or connector(self.world.clock)
        self._joined = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._begun = asyncio.Event()
        if not ask_first:
            self._begun.set()
        self._agent: Agent | None = None
        identity = _identity_or_none(self.profile)
        status = Status(
            profile=directories.profile.name,
            pid=os.getpid(),
            joined=self.profile.joined,
            coordinator=identity.url if identity else "",
            server=identity.server if identity else "",
            nickname=identity.nickname if identity else "",
            verdicts=self.profile.verdicts()[-VERDICTS_MAX:],
        )
        self._bus = EventBus(self.world.clock, status)
        self.control = Control(self._bus, self.execute)

    @property
    def loaded(self) -> LoadedSettings:
        """Read the effective settings. Raises Configuration."""
        return config.load(self._flags, path=self._directories.config / "config.toml")

    async def run(self) -> int:
        """Wait until this profile has joined, work for its coordinator, return the exit code."""
        refusals = asyncio.create_task(self._announce_refused_calls())
        try:
            if not self.world.listen:
                return await self._run_and_announce_end()
            server = ControlServer(self._bus, self.execute, self.world.listener)
            async with server.serve(self.profile.endpoint):
                return await self._run_and_announce_end()
        finally:
            refusals.cancel()
            self._bus.close()

    async def _announce_refused_calls(self) -> None:
        async for call in sandbox_helper.refused_calls():
            sentence = Sentence(
                "the sandbox refused the system call {call}: if work fails, start with "
                "`--set sandbox=false`, and report the name",
                call=call,
            )
            self._bus.notice(sentence, "warning")

    async def _run_and_announce_end(self) -> int:
        """Run to the end, then emit `Stopped` with the exit code to every subscriber."""
        try:
            code = await self._run()
            if not self._bus.status.stopped:  # the engine ended before it made an agent
                self._bus.emit(events.Stopped(code=code, message="ended"))
        except VolunteerError as error:
            self._bus.emit(events.Stopped(code=error.exit_code, message=error.message))
            code = error.exit_code
        self._bus.close()
        return code

    async def _run(self) -> int:
        loaded = self.loaded  # a mistake in the settings is reported at once
        identity = self.profile.current()
        while identity is None and not self._stop_asked.is_set():
            self._joined.clear()
            await self._joined.wait()
            identity = self.profile.current()
        await self._begun.wait()
        loaded = self.loaded  # with the limits that the owner has set meanwhile
        if identity is None or self._stop_asked.is_set():
            return 0
        identity = await self._identity_once_registered(identity, loaded.settings)
        if identity is None:
            return 0
        self._agent = self._agent_of(identity, loaded)
        if self._start_paused:
            self._agent.pause(commands.Pause(message=START, until="you start"))
        runs_from_flag = loaded.sources["runs"] == FLAG
        try:
            return await self._agent.run(loaded.settings.runs if runs_from_flag else ())
        finally:
            self.clean_end = self._agent.clean_end

    async def _identity_once_registered(
        self, identity: Identity, settings: Settings
    ) -> Identity | None:
        """Return the identity once it is registered; None if the volunteer is stopped before."""
        work = asyncio.ensure_future(self._registered(identity, settings))
        stop = asyncio.ensure_future(self._stop_asked.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            stop.cancel()
            work.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)

    async def _registered(self, identity: Identity, settings: Settings) -> Identity:
        if identity.registered:
            return identity
        return await register(identity, self._enrolment(settings))

    def _enrolment(self, settings: Settings) -> Enrolment:
        return Enrolment(
            profile=self.profile,
            settings=settings,
            connect=self._connect,
            progress=self._announce_proof_of_work,
        )

    def _announce_proof_of_work(self, bits: int, done: float) -> None:
        """Announce the proof of work of a registration; `done` is the probability of success so
        far, 1 after success.
        """
        if done == 0.0:
            self._bus.notice(
                Sentence(
                    "this coordinator is open: about {time} of computing",
                    time=search_time_text(bits),
                )
            )
        self._bus.emit(events.Registering(done=done))

    def _machine(self, loaded: LoadedSettings) -> Machine:
        settings, world = loaded.settings, self.world
        threads = settings.threads or default_threads()
        machine = world.machine or Machine(
            trainer=lambda device: Trainer(
                device, threads=threads, clock=world.clock, low=settings.priority == "low"
            )
        )
        enabled = world.load or (lambda name: load(name, settings.workloads))
        return replace(machine, load=enabled)

    def _agent_of(self, identity: Identity, loaded: LoadedSettings) -> Agent:
        settings, world = loaded.settings, self.world
        home = self.profile.home(identity)
        api = Api(self._connect(identity.address, identity.token))
        cache = Cache(self._directories.cache, int(settings.cache_gb * GIB))
        transfers = Transfers(api, cache, hub_address if settings.hub else None)
        remote = RemoteCoordinator(
            identity=identity,
            api=api,
            transfers=transfers,
            weights=Weights(transfers, cache, self._bus.notice),
        )
        store = Store(
            home=home,
            cache=cache,
            outbox=Outbox(home.outbox, lambda message: self._bus.notice(message, "warning")),
            leases=Leases(home.tasks),
            receipts=ReceiptBook(home.receipts),
            own_data=OwnData(home.own_data),
        )
        timing = Timing(clock=world.clock, rng=world.rng)
        agent = Agent(remote, store, settings, self._bus, self._machine(loaded), timing)
        agent.count_own_data()
        return agent

    # Commands.

    async def execute(self, command: Command[Any]) -> Any:
        """Execute a command and return its answer. Raises the command's errors."""
        local_handler = self._local_handlers.get(type(command))
        if local_handler is not None:
            return await _awaited(local_handler(command))
        if not self._begun.is_set() and self.profile.joined:
            return self._end_wait_for_owner(command)
        if self._agent is None:
            raise Conflict(Sentence("this needs a coordinator: join one first"))
        if isinstance(command, commands.Query):
            return await self._query(self._agent, command)
        if (agent_handler := AGENT_HANDLERS.get(type(command))) is not None:
            return await _awaited(agent_handler(self._agent, command))
        raise Conflict(Sentence("this version has no command {name}", name=type(command).__name__))

    @cached_property
    def _local_handlers(self) -> dict[type[Command[Any]], Callable[[Any], Any]]:
        """Return the handlers of the commands that need no coordinator."""
        return {
            commands.GetStatus: lambda _: self._bus.status,
            commands.Probe: lambda command: probe(parse_link(command.link), self._connect),
            commands.Join: self._join,
            commands.GetSettings: lambda _: self.loaded.rows,
            commands.SetSettings: lambda command: self._set(command.changes),
            commands.Stop: lambda command: self.stop(command.how),
            commands.Begin: lambda _: self._begun.set(),
            commands.ChooseRuns: self._choose_runs,
        }

    def _choose_runs(self, command: commands.ChooseRuns) -> None:
        self._set({"runs": command.runs})
        if self._agent is not None:
            self._agent.choice.choose(command.runs)

    def _end_wait_for_owner(self, command: Command[Any]) -> None:
        """Begin work if the command is Resume. Raises Conflict for another command in a first
        start.
        """
        if not isinstance(command, commands.Resume):
            raise Conflict(
                Sentence("the first start waits for your answers: finish them on its screen")
            )
        self._start_paused = False
        self._begun.set()

    def stop(self, how: commands.How = "release") -> None:
        """End the volunteer, with or without an account."""
        self._stop_asked.set()
        self._begun.set()
        self._joined.set()
        if self._agent is not None:
            self._agent.stop(how)

    async def _query(self, agent: Agent, command: commands.Query) -> tuple[Any, str]:
        """Return a reply of the coordinator and the cursor of the next page, "" after the last
        page.

        A list of runs also goes to all subscribers as an event, and a query about the account also
        sends a heartbeat, which refreshes the account, so that no other page shows an older state.
        """
        endpoint = commands.query_of(command)
        if endpoint in ACCOUNT:
            agent.heartbeat.send_soon()
        reply: tuple[Any, str] = await agent.remote.api.page(endpoint, **command.args)
        if endpoint is endpoints.RUNS:
            self._bus.emit(events.RunsListed(runs=reply[0]))
        return reply

    async def _join(self, command: commands.Join) -> commands.Joined:
        if self._agent is not None:
            raise Conflict(
                Sentence("this volunteer already works for a coordinator: stop it first")
            )
        enrolment = self._enrolment(self.loaded.settings)
        joined = await join(parse_link(command.link), command.name, enrolment)
        self._joined.set()
        return joined

    def _set(self, changes: Mapping[str, object]) -> tuple[SettingRow, ...]:
        sandbox_helper.do(config.save, self._directories.config / "config.toml", changes)
        loaded = self.loaded
        if "language" in changes:
            use(choose(loaded.settings.display.language))
        if self._agent is not None:
            self._agent.change_rules(loaded.settings.rules)
            if "public" in changes:
                self._agent.show_name(loaded.settings.public)
        return loaded.rows


def _invitation(identity: Identity) -> str:
    """Return the join link of the coordinator that this volunteer works for."""
    return format_link(
        JoinLink(url=identity.url, fingerprint=identity.fingerprint, tls_pin=identity.tls_pin)
    )


async def _awaited(answer: Any) -> Any:
    """Return the answer to a command; await it first if its handler is asynchronous."""
    return await answer if inspect.isawaitable(answer) else answer


async def sample_picture(remote: RemoteCoordinator, run: str, version: int) -> bytes:
    """Return the PNG that a version drew, from the cache if it was viewed before.

    Raises NotFound if the version drew no picture, BadRequest if the PNG is too large.
    """
    cursor = version - 1 if version > 0 else ""
    rows = await remote.api.query(endpoints.VERSIONS, run=run, cursor=cursor)
    ref = next((row.picture for row in rows if row.version == version), None)
    if ref is None:
        raise NotFound(
            Sentence("version {version} of {run} has no picture", version=version, run=run[:64])
        )
    if ref.size > PICTURE_BYTES_MAX:
        raise BadRequest(
            Sentence("the picture of version {version} is too large to be shown", version=version)
        )
    path = await remote.transfers.fetch(ref, lambda _: None)
    return await asyncio.to_thread(path.read_bytes)


# Handlers of the commands that need the agent.
AGENT_HANDLERS: dict[type[Command[Any]], Callable[[Agent, Any], Any]] = {
    commands.Pause: Agent.pause,
    commands.Resume: lambda agent, command: agent.resume(command.device, by=command.by),
    commands.Finish: lambda agent, _: agent.finish(),
    commands.Retry: lambda agent, _: agent.retry(),
    commands.Consent: lambda agent, command: agent.choice.consent(command.run),
    commands.ReadAnnouncements: lambda agent, _: agent.watcher.read_announcements(),
    commands.OrderMachine: lambda agent, command: agent.remote.api.call(
        endpoints.ORDER_MACHINE,
        body=MachineOrder(worker_id=command.worker_id, order=command.order),
        patience_s=ASK_S,
    ),
    commands.Measure: lambda agent, command: agent.measure(command.device),
    commands.StopMeasuring: lambda agent, _: agent.benchmarks.cancel(),
    commands.LookAtDevices: lambda agent, _: agent.sensors.look(),
    commands.GetInvitation: lambda agent, _: _invitation(agent.remote.identity),
    commands.GetPicture: lambda agent, command: sample_picture(
        agent.remote, command.run, command.version
    ),
    commands.MakeLink: lambda agent, _: agent.remote.api.link_code(),
}


def _identity_or_none(profile: Profile) -> Identity | None:
    """Return the identity in use; None if there is no identity or it is damaged (the start reports
    damage).
    """
    try:
        return profile.current()
    except VolunteerError:
        return None
