"""The volunteer at work: finds its devices, gives each a lane, beats, hands in, and ends in good
order.

It emits events and never draws; it is told what to do by `pause`, `resume`, `finish` and `stop`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.errors import VolunteerError
from shared.protocol.accounts import Device
from shared.protocol.limits import PROTOCOL
from volunteer.account.join import check_server
from volunteer.agent.benchmarks import Speeds
from volunteer.agent.claimer import check_chosen
from volunteer.agent.context import Parts
from volunteer.agent.device_loop import Lane
from volunteer.agent.gradient_series import comes_in_parts
from volunteer.agent.heartbeat import Beat
from volunteer.agent.run_watcher import Follower, keep_counting
from volunteer.agent.shared_state import YOU, Pause
from volunteer.agent.submitter import Sender
from volunteer.agent.supervisor import Loop, Shift, broken
from volunteer.control import events
from volunteer.control.commands import How
from volunteer.machine.devices import choose, detect
from volunteer.machine.policy_loop import Guard, Read, Watched
from volunteer.machine.sensors import Sensors, keep_telling
from volunteer.machine.surroundings import Senses
from volunteer.settings.work_rules import Rules
from volunteer.storage.leases import HeldLease
from volunteer.text import clock_words
from volunteer.training.trainer import Trainer

log = logging.getLogger(__name__)

JOIN_S = 2.0
LAPSED = "its time ran out while this volunteer was away, so it is not gone on with"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Interface to the machine that the agent needs; tests give their own."""

    trainer: Callable[[str], Trainer]  # a new thread for a device
    detect: Callable[[], tuple[Device, ...]] = detect
    measure: bool = True  # benchmark a device that has not been measured
    read: Read | None = None  # what else goes on here; None: by the sensors of this machine
    sense: Callable[[Sequence[str]], tuple[events.Sensed, ...]] = field(
        default_factory=lambda: Sensors().read
    )


class Agent:
    """Runs the loops of a volunteer and obeys its commands."""

    def __init__(
        self,
        parts: Parts,
        machine: Machine,
        *,
        start_paused: bool = False,
        demanded: tuple[str, ...] = (),
    ) -> None:
        """`demanded` are runs named on the command line: without them nothing begins."""
        self.parts = parts
        self._demanded = demanded
        self.clean_end = True  # False: a thread is still at it, leave by os._exit
        self._machine = machine
        self._desk = parts.desk
        self._hub = parts.hub
        self._started = parts.clock.monotonic()
        self._trainers: dict[str, Trainer] = {}
        self._lanes: list[Lane] = []
        self._follower = Follower(parts)
        self._sender = Sender(parts)
        self._beat = Beat(parts, self._follower.beats, self._follower.credits, self._ordered_pause)
        self._speeds = Speeds(parts)
        self._guard = Guard(parts.settings, self._watched(), self)
        self._limit(parts.settings)
        parts.api.client.watch = self._connection
        if start_paused:
            self.pause(message="press space to start", until="you start")

    # Commands.

    def pause(
        self,
        device: str = "",
        *,
        by: str = YOU,
        message: str = "paused",
        until: str = "you resume",
    ) -> None:
        """Free a device (all, without a name) and keep its task; the heartbeats say so."""
        self._desk.pause(device, Pause(by=by, message=message, until=until))
        self._apply_pauses()
        self._hub.emit(events.Paused(device=device, by=by, message=message, until=until))

    def resume(self, device: str = "", *, by: str = YOU) -> None:
        """Take away one reason for a pause; work goes on when none is left. Also ends `finish`.

        Where only the rules of the owner hold work back, the owner's word lifts those that are a
        matter of taste.
        """
        finishing = self._desk.finishing and by == YOU
        if finishing:
            self._desk.finishing = False
        was = self._desk.resume(device, by)
        self._apply_pauses()
        left = self._desk.paused(device)
        over = f"paused by {by}, still" if was or not finishing else "finishing, but paused"
        said = f"no longer {over} by {left.by}: {left.message}" if left else ""
        if was or finishing or left is None:
            self._hub.emit(events.Resumed(device=device, by=by, message=said))
        still = any(YOU in self._desk.pauses.get(name, {}) for name in ("", device))
        if by == YOU and not (was or still or finishing):
            self._guard.go_on()  # nobody but the rules held it back

    def change_rules(self, rules: Rules) -> None:
        """Other rules on when and how hard to work hold from now on."""
        self._guard.change(rules)
        self._limit(rules)

    def finish(self) -> None:
        """Complete the tasks in work, hand them in, and take no more."""
        self._desk.finishing = True
        self._hub.emit(events.Finishing(message="finishing: no new work after the current task"))
        self._desk.notify()

    def stop(self, how: How = "release") -> None:
        """End: give tasks back, save them for the next start, or finish them first."""
        if how == "finish":
            self.finish()
        if self._desk.closing in (None, "finish"):
            self._desk.closing = how
        self._desk.notify()

    def retry(self) -> None:
        """Do not wait for the next try."""
        self._desk.hurries += 1
        self._desk.notify()
        self.parts.api.client.hurry()

    async def consent(self, run: str) -> None:
        """Say yes to the licence of a run. Raises NotFound."""
        await self.parts.api.consent(run)
        memory = self.parts.home.memory
        if run not in memory.consents:
            self.parts.home.remember(consents=(*memory.consents, run))
        self._desk.notify()

    def choose_runs(self, runs: tuple[str, ...]) -> None:
        """Help only these from the next task on; empty = any."""
        self._desk.runs = runs
        self._desk.notify()

    def show_name(self, public: bool) -> None:
        """Let others see the nickname, or not: the coordinator is told as soon as it answers."""
        self.parts.home.remember(show_name=public)
        self._follower.credits()

    async def measure(self, device: str, *, quick: bool) -> None:
        """Benchmark a device again, after the task it is at.

        Raises Configuration for one that is not lent.
        """
        chosen = choose(device or "auto", self._hub.status.devices)[0]
        trainer = self._trainers.get(chosen.id) or self._thread(chosen.id)
        await self._speeds.measure(chosen, trainer, quick=quick)
        await self._speeds.publish()

    def stop_measuring(self) -> None:
        """End a benchmark that is under way; what it had is forgotten."""
        self._speeds.cancel()

    # Life.

    async def run(self) -> int:
        """Work until told to stop or nothing can go on. Returns the exit code."""
        try:
            found = await self._desk.unless(lambda: self._desk.ending, self._open())
            if found is not None:
                await self._work(found)
        except VolunteerError as error:
            self._desk.give_up(error)
        except Exception as error:
            self._desk.give_up(broken("the volunteer", error))
        return await self._close()

    async def _open(self) -> list[tuple[Device, Trainer]]:
        """Meet the coordinator and the devices, both at once."""
        first = self._thread("first")
        _, devices = await asyncio.gather(
            self._hello(), asyncio.wrap_future(first.call(self._machine.detect))
        )
        self._hub.emit(events.DevicesFound(devices=devices))
        chosen = choose(self.parts.settings.device, devices)
        self._trainers = {chosen[0].id: first}
        pairs = [(d, self._trainers.get(d.id) or self._thread(d.id)) for d in chosen]
        first.device = chosen[0].id
        await self._speeds.know(pairs, measure=self._machine.measure)
        return pairs

    def _thread(self, device: str) -> Trainer:
        trainer = self._machine.trainer(device)
        trainer.share = self._desk.share
        trainer.start()
        self._trainers[device] = trainer
        return trainer

    async def _hello(self) -> None:
        parts = self.parts
        server = await parts.api.server()
        check_server(server, parts.identity.public_key)
        if server.protocol_min_next > PROTOCOL:
            self._hub.notice(
                "the coordinator will soon need a newer version: pipx upgrade volunteer", "warning"
            )
        check_chosen(self._demanded, server.runs)
        self._hub.emit(
            events.Started(
                coordinator=parts.identity.url,
                server=server.name,
                nickname=parts.identity.nickname,
                fingerprint=parts.identity.fingerprint,
                volunteer_id=parts.identity.volunteer_id,
            )
        )
        self._follower.listed(server.runs)
        if wrong := clock_words(server.now - parts.clock.now()):
            self._hub.notice(wrong, "warning")

    async def _work(self, pairs: list[tuple[Device, Trainer]]) -> None:
        """Until every lane has come to its end."""
        speeds = {b.device: b for b in self.parts.home.memory.benchmarks}
        self._lanes = [Lane(self.parts, d, t, speeds.get(d.id)) for d, t in pairs]
        await self._guard.look()  # nothing begins that the rules would stop at once
        self._apply_pauses()
        revived = await self._desk.unless(lambda: self._desk.ending, self._revive())
        if revived is None:
            return
        lanes = [
            Loop(
                name=f"the work on {lane.device.id}",
                work=lane.run([held for held in revived if held.device == lane.device.id]),
            )
            for lane in self._lanes
        ]
        await Shift(self.parts).run(lanes, self._loops())

    def _loops(self) -> list[Loop]:
        """Return what goes on beside the work, until its end."""
        clock, devices = self.parts.clock, self._watched().devices
        sensing = keep_telling(self._hub, clock, devices, self._machine.sense)
        return [
            Loop(name="the heartbeat", work=self._beat.run()),
            Loop(name="handing in", work=self._sender.run()),
            Loop(name="the news of runs", work=self._follower.run()),
            Loop(name="your rules", work=self._guard.run()),
            Loop(name="the count of bytes", work=keep_counting(self.parts), vital=False),
            Loop(name="the sensors", work=sensing, vital=False),
        ]

    async def _revive(self) -> tuple[HeldLease, ...]:
        """The leases of an earlier process that are still ours."""
        leases, outbox = self.parts.leases, self.parts.outbox
        stored = leases.stored()
        leases.forget_answered(stored)
        open_ = tuple(
            held for held in stored if comes_in_parts(held.lease) or not outbox.holds(*held.key)
        )
        alive = await self._beat.alive(open_) if open_ or len(outbox) else ()
        lent = {lane.device.id for lane in self._lanes}
        kept = tuple(held for held in alive if held.device in lent)
        for held in stored:
            if held in kept:
                self._hub.notice(f"going on with task {held.lease.task}")
                continue
            leases.drop(held.lease)
            if held in open_:
                why = f"{held.device} is not lent any more" if held in alive else LAPSED
                task = held.lease.task
                self._hub.emit(events.TaskEnded(task=task, how="gone", message=why))
        return kept

    async def _close(self) -> int:
        for trainer in self._trainers.values():
            closed = await asyncio.to_thread(trainer.close, JOIN_S)
            self.clean_end = self.clean_end and closed
        error, client, me = self._desk.fatal, self.parts.api.client, self._hub.status.me
        code = error.exit_code if error is not None else 0
        self._hub.emit(
            events.Stopped(
                code=code,
                message=error.message if error is not None else "ended",
                tasks=self._desk.handed_in,
                credits_micro=me.earned_micro if me else 0,
                sent_bytes=client.sent_bytes,
                received_bytes=client.received_bytes,
                seconds=self.parts.clock.monotonic() - self._started,
            )
        )
        await client.close()
        return code

    # What the parts ask and tell.

    def _watched(self) -> Watched:
        return Watched(
            read=self._machine.read or Senses(self.parts.cache.root).read,
            devices=lambda: tuple(lane.device.id for lane in self._lanes),
            busy=self._busy,
            share=self._share,
            say=self._hub.notice,
            clock=self.parts.clock,
        )

    def _busy(self) -> bool:
        held = self._desk.held.values()
        return any(self._desk.paused(lease.stored.device) is None for lease in held)

    def _share(self, share: float) -> None:
        self._desk.share = share
        for trainer in self._trainers.values():
            trainer.share = share

    def _limit(self, rules: Rules) -> None:
        client = self.parts.api.client
        client.up.limit(rules.upload_mbit)
        client.down.limit(rules.download_mbit)

    def _apply_pauses(self) -> None:
        for lane in self._lanes:
            if self._desk.paused(lane.device.id):
                lane.trainer.pause()
            else:
                lane.trainer.resume()

    def _ordered_pause(self, device: str, wanted: bool, message: str) -> None:
        if wanted:
            self.pause(device, by="coordinator", message=message, until="the coordinator says so")
        else:
            self.resume(device, by="coordinator")

    def _connection(self, online: bool, message: str, retry_at: float | None) -> None:
        if not online:
            log.debug("no answer: %s", message)
        self._hub.emit(
            events.Connection(
                online=online,
                message=message,
                retry_at=retry_at,
                queued=len(self.parts.outbox),
                since=self._hub.status.away_since,
            )
        )
