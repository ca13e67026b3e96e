"""Agent of the volunteer: finds its devices, runs a loop for each, sends heartbeats and results,
and ends all loops.

The agent emits events and never draws; commands are methods, such as `pause` and `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from shared.clock import ServerClock
from shared.errors import BadRequest, VolunteerError
from shared.protocol import endpoints
from shared.protocol.accounts import Device
from shared.protocol.protocol_version import PROTOCOL, check_server
from shared.sentences import Sentence
from shared.workloads.base import Workload
from shared.workloads.base import load as load_any
from volunteer.account.membership import declare_all
from volunteer.account.record_check import RecordCheck
from volunteer.agent.answering import Answering
from volunteer.agent.benchmarks import Benchmarks
from volunteer.agent.device_loops import DeviceLoops
from volunteer.agent.heartbeat_loop import Heartbeat
from volunteer.agent.held_leases import HeldLeases
from volunteer.agent.lease_parts import LeasePlan
from volunteer.agent.lifecycle import Lifecycle
from volunteer.agent.model_steps import ModelSteps
from volunteer.agent.pause_board import YOU, PauseBoard
from volunteer.agent.receipt_keeper import ReceiptKeeper
from volunteer.agent.run_choice import RunChoice, check_run_names
from volunteer.agent.run_watcher import RunWatcher, announce_traffic
from volunteer.agent.submitter import Submitter
from volunteer.agent.supervisor import Loop, Supervisor, fault_of
from volunteer.agent.verdict_news import Verdicts
from volunteer.agent.workplace import (
    LentDevice,
    RemoteCoordinator,
    Store,
    Timing,
    Workplace,
)
from volunteer.control import events
from volunteer.control.commands import How, Pause
from volunteer.control.event_bus import EventBus
from volunteer.machine import memory_limit
from volunteer.machine.device_memory import usable_bytes, usable_host_bytes
from volunteer.machine.devices import choose, detect, hardware, rank_groups
from volunteer.machine.policy_loop import PolicyGuard, PolicyInputs, Read
from volunteer.machine.sensors import Sense, Sensors, SensorWatch
from volunteer.machine.surroundings import SurroundingsReader
from volunteer.settings.settings import Settings
from volunteer.settings.work_rules import WorkRules
from volunteer.storage.leases import HeldLease
from volunteer.text import clock_words
from volunteer.training.trainer import Trainer

log = logging.getLogger(__name__)

JOIN_S = 2.0
FINISHING = Sentence("finishing: no new work after the current task")
LAPSED = Sentence("its time ran out while this volunteer was away, so it is dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Interface to the machine that the agent needs; tests provide their own."""

    trainer: Callable[[str], Trainer]  # makes the thread of a device
    # loads an enabled workload by its name
    load: Callable[[str], Workload] = load_any
    detect: Callable[[], tuple[Device, ...]] = detect
    measure: bool = True  # benchmark a device that has not been measured
    read: Read | None = None  # reads the sensors; None = those of this machine
    sense: Sense = field(default_factory=lambda: Sensors().read)
    snapshot_s: float = 30.0  # a half-done task is saved this often
    quit_s: float = 20.0  # at the end, a task that needs less time than this is finished


class Agent:
    """Makes the loops of a volunteer from their collaborators, runs them, and obeys commands."""

    def __init__(
        self,
        remote: RemoteCoordinator,
        store: Store,
        settings: Settings,
        bus: EventBus,
        machine: Machine,
        timing: Timing,
    ) -> None:
        self.remote = remote
        self.store = store
        # False: a thread still runs, so the process must end by os._exit
        self.clean_end = True
        self._settings = settings
        self._bus = bus
        self._machine = machine
        self._timing = timing
        self._started = timing.clock.monotonic()
        self._trainers: dict[str, Trainer] = {}
        self._lent_ids: tuple[str, ...] = ()
        self._lent_devices: list[LentDevice] = []
        self._host_bytes = 0  # memory of the host for a task on a device with memory of its own
        self._life = life = Lifecycle(timing.clock)
        self._place = place = Workplace(
            remote=remote,
            store=store,
            bus=bus,
            life=life,
            held=HeldLeases(life, settings.max_tasks),
            timing=timing,
            server_clock=ServerClock(timing.clock),
        )
        self._pauses = PauseBoard(life, bus)
        self.choice = RunChoice(settings, place)
        verdicts = Verdicts(store.home, bus)
        self.watcher = RunWatcher(place=place, verdicts=verdicts)
        self.heartbeat = Heartbeat(
            place=place,
            pauses=self._pauses,
            watcher=self.watcher,
            obey_owner=self._obey_owner,
            celsius=lambda: self.sensors.celsius(),
        )
        self.benchmarks = Benchmarks(place=place, settings=settings)
        self._steps = ModelSteps(home=store.home, bus=bus, clock=timing.clock, settings=settings)
        self._guard = PolicyGuard(settings.rules, self._policy_inputs(), self._pauses)
        self.sensors = SensorWatch(bus, timing.clock, lambda: machine.sense(self._lent_ids))
        self._limit_bandwidth(settings.rules)
        remote.api.client.watch = self._announce_connection

    # Commands.

    def pause(self, order: Pause) -> None:
        """Pause a device, or all devices if the order names none, and keep the tasks; heartbeats
        report it. Raises BadRequest for a device that is not lent.
        """
        self._pauses.pause(
            self._lent_device(order.device),
            by=order.by,
            message=order.message,
            until=order.until,
            ends_at=order.ends_at,
        )

    def resume(self, device: str = "", *, by: str = YOU) -> None:
        """Remove the reason `by` for a pause; work continues when no other reason is left. The
        owner's resume also ends `finish`.

        If only the owner's rules pause work, the owner's resume lifts those rules that a person may
        lift. Raises BadRequest for a device that is not lent.
        """
        device = self._lent_device(device)
        finishing = by == YOU and self._life.take_work_again()
        was_paused = self._pauses.resume(device, by=by, finishing=finishing)
        still_paused = self._pauses.paused_by(device, YOU)
        if by == YOU and not (was_paused or still_paused or finishing):
            self._guard.lift_holds()  # only the rules paused it

    def _lent_device(self, name: str) -> str:
        """Return the id of the lent device that a person names; "" names all devices. Raises
        BadRequest.
        """
        lent = self._bus.status.lent_bytes
        if name in ("", *lent):
            return name
        if f"{name}:0" in lent:
            return f"{name}:0"
        if not lent:
            raise BadRequest(Sentence("the devices are not found yet: try again in a moment"))
        raise BadRequest(
            Sentence(
                'no device "{name}" is lent here: {lent}', name=name[:40], lent=", ".join(lent)
            )
        )

    def _obey_owner(self, order: Literal["pause", "resume", "finish"]) -> None:
        """Carry out an order that the owner sent from another machine of the account."""
        if order == "pause":
            sentence = Sentence("paused from another of your machines")
            self._pauses.pause(by=YOU, message=sentence, until="you resume")
        elif order == "resume":
            self.resume()
        else:
            self.finish()

    def change_rules(self, rules: WorkRules) -> None:
        """Apply new work rules from now on."""
        self._guard.change(rules)
        self.choice.change_rules(rules)
        self._limit_bandwidth(rules)

    def finish(self) -> None:
        """Complete and submit the tasks that have begun; begin and claim no more tasks."""
        self._life.finish()
        for work in self._place.held:
            work.finish()
        self._bus.emit(events.Finishing(message=FINISHING))

    def stop(self, how: How = "release") -> None:
        """End the agent: release its tasks, save them for the next start, or finish them first."""
        if how == "finish":
            self.finish()
        self._life.close(how)

    def count_own_data(self) -> None:
        """Announce how much data of its own this machine keeps, if that has changed."""
        samples = {record.run: record.numbers.samples for record in self.store.own_data.records()}
        if samples != self._bus.status.own_samples:
            self._bus.emit(events.OwnDataCounted(samples=samples))

    def retry(self) -> None:
        """End all retry delays now, and count the own data again."""
        self.count_own_data()
        self._life.retry()
        self.remote.api.client.hurry()

    def show_name(self, public: bool) -> None:
        """Show or hide the nickname; sent when the coordinator answers."""
        self.store.home.remember(show_name=public)
        self.watcher.request_balance()

    async def measure(self, device: str) -> None:
        """Benchmark a device after its present task. Raises Configuration for an unusable device,
        BenchmarkCancelled if the agent ends.
        """
        target = choose(device or "auto", self._bus.status.devices)[0]
        trainer = self._trainers.get(target.id) or self._thread(target.id)
        await self.benchmarks.measure(target, trainer, quick=False)
        await self.benchmarks.publish()

    # Running and ending.

    async def run(self, named_runs: tuple[str, ...] = ()) -> int:
        """Work until the agent ends or nothing can continue. Return the exit code.

        `named_runs` are runs named on the command line; no work begins if one is unknown.
        """
        life = self._life
        try:
            pairs = await life.unless(lambda: life.ending, self._open(named_runs))
            if pairs is not None:
                await self._work(pairs)
        except VolunteerError as error:
            life.give_up(error)
        except Exception as error:
            life.give_up(fault_of("the volunteer", error))
        return await self._close()

    async def _open(self, named_runs: tuple[str, ...]) -> list[tuple[Device, Trainer]]:
        """Connect to the coordinator and find the devices, in parallel; return each lent device
        with its trainer.
        """
        first = self._thread("first")
        detecting = asyncio.wrap_future(first.call(self._machine.detect))
        await self._connect(named_runs)
        self._bus.notice(Sentence("loading PyTorch to find the devices of this machine"))
        news = asyncio.create_task(self._send_first_heartbeat())
        try:
            devices = await detecting
        finally:
            news.cancel()
        memory_gb = self._settings.memory_gb
        memory_limit.adjust(memory_gb)
        groups = rank_groups(choose(self._settings.device, devices))
        first_of_groups = {device.id: device for device, _ in groups}
        twins = {twin for _, more in groups for twin in more}
        devices = tuple(
            first_of_groups.get(device.id, device) for device in devices if device.id not in twins
        )
        lent = {device.id: usable_bytes(device, memory_gb) for device in first_of_groups.values()}
        processes = sum(1 + len(more) for _, more in groups)  # each has a state of its own
        self._host_bytes = usable_host_bytes(devices, processes, memory_gb)
        self._bus.emit(events.devices_found(devices, lent, self._host_bytes, hardware().torch))
        self._trainers = {groups[0][0].id: first}
        pairs = [
            (d, self._trainers.get(d.id) or self._thread(d.id)) for d in first_of_groups.values()
        ]
        for (_, trainer), (_, more) in zip(pairs, groups, strict=True):
            trainer.rank_devices = more
        first.device = pairs[0][0].id
        self._steps.announce()
        self.choice.announce()
        await self.benchmarks.ensure_measured(pairs, measure=self._machine.measure)
        return pairs

    def _thread(self, device: str) -> Trainer:
        trainer = self._machine.trainer(device)
        trainer.share = self._pauses.share(device)
        trainer.start()
        self._trainers[device] = trainer
        return trainer

    async def _connect(self, named_runs: tuple[str, ...]) -> None:
        identity = self.remote.identity
        self._bus.notice(Sentence("connecting to {url}", url=identity.url))
        await self.remote.api.client.recognise()
        server = await self.remote.api.call(endpoints.SERVER)
        check_server(server.protocol, server.protocol_min)
        self.remote.transfers.store = server.store
        self.remote.transfers.mirrors = dict.fromkeys(server.mirrors, math.inf)
        if server.protocol_min_next > PROTOCOL:
            self._bus.notice(
                Sentence("the coordinator will soon need a newer version: `volunteer update`"),
                "warning",
            )
        check_run_names(named_runs, server.runs)
        self._bus.emit(
            events.Started(
                coordinator=identity.url,
                server=server.name,
                nickname=identity.nickname,
                fingerprint=identity.fingerprint,
                volunteer_id=identity.volunteer_id,
                worker_id=identity.worker_id,
            )
        )
        self._bus.emit(events.RunsListed(runs=server.runs))
        if warning := clock_words(server.now - self._timing.clock.now()):
            self._bus.notice(warning, "warning")

    async def _send_first_heartbeat(self) -> None:
        """Send the first heartbeat at once, while torch is imported and the devices are not known
        yet.
        """
        with contextlib.suppress(VolunteerError):  # the heartbeat loop tries again
            await self.heartbeat.confirm_leases(self.store.leases.stored())

    async def _work(self, pairs: list[tuple[Device, Trainer]]) -> None:
        """Work until the loop of every device has ended."""
        life = self._life
        device_loops = DeviceLoops(
            place=self._place,
            settings=self._settings,
            load=self._machine.load,
            snapshot_s=self._machine.snapshot_s,
            record=self._record_check,
            pauses=self._pauses,
            choice=self.choice,
            verdicts=self.watcher.verdicts,
            steps=self._steps,
        )
        loops = []
        for device, trainer in pairs:
            self._pauses.watch(device.id, trainer)
            memory = usable_bytes(device, self._settings.memory_gb)
            lent = LentDevice(
                device=device,
                trainer=trainer,
                speed=partial(self.benchmarks.speed, device.id),
                memory_bytes=memory,
                host_bytes=self._host_bytes if device.kind not in ("cpu", "mps") else 0,
            )
            loops.append(device_loops.loop(lent))
            self._lent_devices.append(lent)
        self._lent_ids = tuple(loop.device.id for loop in loops)
        await self._guard.look()  # no work begins that the rules would pause at once
        await life.unless(lambda: life.ending, declare_all(self.remote.api, self.store.own_data))
        revived = await life.unless(lambda: life.ending, self._leases_to_continue())
        if revived is None:
            return
        work = [
            Loop(
                name=f"the work on {loop.device.id}",
                work=loop.run([lease for lease in revived if lease.device == loop.device.id]),
            )
            for loop in loops
        ]
        supervisor = Supervisor(place=self._place, pauses=self._pauses, quit_s=self._machine.quit_s)
        await supervisor.run(work, self._loops())

    def _loops(self) -> list[Loop]:
        """Return the background loops that run until the work ends."""
        clock, bus, remote = self._timing.clock, self._bus, self.remote
        counting = announce_traffic(remote.transfers, remote.api.client, bus, clock)
        keeper = ReceiptKeeper(self._record_check(), self.store.receipts, bus, clock)
        submitter = Submitter(place=self._place, verdicts=self.watcher.verdicts)
        loops = [
            Loop(name="the heartbeat", work=self.heartbeat.run()),
            Loop(name="submitting", work=submitter.run()),
            Loop(name="the news of runs", work=self.watcher.run()),
            Loop(name="your rules", work=self._guard.run()),
            Loop(name="the end of pauses", work=self._pauses.keep_time()),
            Loop(name="the receipts", work=keeper.run(), vital=False),
            Loop(name="the count of bytes", work=counting, vital=False),
            Loop(name="the sensors", work=self.sensors.run(), vital=False),
        ]
        if self._settings.serve:
            answering = Answering(
                place=self._place,
                devices=self._lent_devices,
                pauses=self._pauses,
                choice=self.choice,
                load=self._machine.load,
            )
            loops.append(Loop(name="answering", work=answering.run(), vital=False))
        return loops

    # Parts of the loops.

    def _record_check(self) -> RecordCheck:
        identity = self.remote.identity
        return RecordCheck(
            self.remote.api, self.store.receipts, identity.public_key, identity.volunteer_id
        )

    async def _leases_to_continue(self) -> tuple[HeldLease, ...]:
        """Return the leases of an earlier process that this machine still holds."""
        leases, outbox = self.store.leases, self.store.outbox
        leases_stored = leases.stored()
        leases.forget_answered_claims(leases_stored)
        open_leases = tuple(
            lease
            for lease in leases_stored
            if LeasePlan.of(lease.lease).is_divided or not outbox.holds(*lease.key)
        )
        alive = (
            await self.heartbeat.confirm_leases(open_leases) if open_leases or len(outbox) else ()
        )
        revived = tuple(lease for lease in alive if lease.device in self._lent_ids)
        for lease in leases_stored:
            if lease in revived:
                self._bus.notice(Sentence("continuing task {task}", task=lease.lease.task))
                continue
            leases.drop(lease.lease)
            if lease in open_leases:
                lent = Sentence("{device} is not lent any more", device=lease.device)
                why, task = lent if lease in alive else LAPSED, lease.lease.task
                self._bus.emit(events.TaskEnded(task=task, how="gone", message=why))
        return revived

    async def _close(self) -> int:
        for trainer in self._trainers.values():
            closed = await asyncio.to_thread(trainer.close, JOIN_S)
            self.clean_end = self.clean_end and closed
        error, client, me = self._life.fatal, self.remote.api.client, self._bus.status.me
        code = error.exit_code if error is not None else 0
        self._bus.emit(
            events.Stopped(
                code=code,
                message=error.message if error is not None else "ended",
                tasks=self._place.held.submitted,
                credits_micro=me.earned_micro if me else 0,
                sent_bytes=client.sent_bytes,
                received_bytes=client.received_bytes,
                seconds=self._timing.clock.monotonic() - self._started,
            )
        )
        await client.close()
        return code

    def _policy_inputs(self) -> PolicyInputs:
        return PolicyInputs(
            read=self._machine.read or SurroundingsReader(self.store.cache.root).read,
            devices=lambda: self._lent_ids,
            share=self._pauses.set_shares,
            say=self._bus.notice,
            clock=self._timing.clock,
        )

    def _limit_bandwidth(self, rules: WorkRules) -> None:
        client = self.remote.api.client
        client.up.limit(rules.upload_mbit)
        client.down.limit(rules.download_mbit)

    def _announce_connection(self, online: bool, message: str, retry_at: float | None) -> None:
        if not online:
            log.debug("no answer: %s", message)
        before = self._bus.status
        self._bus.emit(
            events.Connection(
                online=online,
                message=message,
                retry_at=retry_at,
                queued=len(self.store.outbox),
                since=before.away_since,
                repeated=not online
                and before.away_since is not None
                and before.connection == message,
            )
        )
