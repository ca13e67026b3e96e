"""Getting work for one device: which runs to ask for, what to do when there is none, and giving a
lease back.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shared.errors import BadRequest, Gone, StorageFull, Unavailable, VolunteerError
from shared.protocol.accounts import Benchmark, Device, RunInfo
from shared.protocol.leases import ClaimRequest, Idle, Lease, ReleaseRequest
from shared.tensors.quantize import CODECS
from volunteer.agent.context import Parts
from volunteer.agent.shared_state import FATAL, Held
from volunteer.control import events
from volunteer.storage.leases import HeldLease
from volunteer.text import printable

WAIT_S = 30.0  # how long one claim may wait at the coordinator
REFUSED_WAIT_S = 60.0
DISK_WAIT_S = 60.0
HAND_IN_S = 5.0  # for the parts of a lease that is given back: afterwards nobody takes them
KINDS = ("train", "selfplay", "learn", "evaluate")


class Claimer:
    """Claims for one device. `memory_bytes` is what a task may spend there."""

    def __init__(
        self, parts: Parts, device: Device, memory_bytes: int, benchmark: Benchmark | None
    ) -> None:
        self.device = device
        self._parts = parts
        self._desk = parts.desk
        self._memory_bytes = memory_bytes
        self._benchmark = benchmark
        self.busy = False  # the device has other work: being without a next task is no news
        self._untold: events.Idle | None = None
        self._resting = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Take nothing meanwhile, and give up a claim that is under way: others may do the task."""
        self._resting = True
        self._desk.notify()
        try:
            yield
        finally:
            self._resting = False

    def _open(self) -> bool:
        return not self._resting and self._desk.may_claim(self.device.id)

    def at_work(self, busy: bool) -> None:
        """The device began or ended a task; why there is no next one is told when it ends."""
        self.busy = busy
        if not busy and self._untold is not None:
            self._parts.hub.emit(self._untold)
        self._untold = None

    async def take(self) -> Held | None:
        """The next lease; None when nothing may be claimed now."""
        if not self.busy and not self._parts.hub.status.idle:
            self.idle("asking", "asking the coordinator for work")
        known = self.busy  # why there is no work; a person at an idle machine is not to wait for it
        while self._open():
            if self._parts.outbox.full:
                self.idle("outbox_full", "many results wait to be handed in: no new work")
                return None
            runs = self._runs()
            if runs is None:
                self.idle("consent", "say yes to the licence of a run first")
                return None
            try:
                reply = await self._unless_unwanted(runs, WAIT_S if known else 0.0)
            except FATAL as error:
                self._desk.give_up(error)
                return None
            except VolunteerError as error:
                self.idle("refused", error.message, REFUSED_WAIT_S)
                await self.pause(REFUSED_WAIT_S)
                continue
            if isinstance(reply, Lease):
                held = await self._accept(reply)
                if held is not None:
                    return held
            elif reply is not None and known:
                await self._wait(reply)
            elif reply is not None:
                self.idle(reply.reason.value, printable(reply.message))
            known = True
        return None

    async def give_back(self, held: Held, reason: str, *, failed: bool) -> None:
        """Return a lease, after what waits of it to be handed in; `failed` counts it against the
        task.
        """
        task, attempt = held.key
        if self._parts.outbox.holds(task, attempt):
            self._parts.api.client.hurry()
        await self._desk.unless(
            lambda: not self._parts.outbox.holds(task, attempt),
            self._parts.clock.sleep(HAND_IN_S),
        )
        request = ReleaseRequest(attempt=attempt, reason=reason[:200], failed=failed)
        try:
            await self._parts.api.release(task, request)
        except (Unavailable, Gone):
            pass  # it runs out by itself, or has
        except VolunteerError as error:
            self._parts.hub.notice(f"task {task} could not be given back: {error.message}")
        self._parts.leases.drop(held.stored.lease)

    async def agree(self, run: str) -> None:
        """Joining was a yes to the runs of this coordinator: say what to, and have it recorded."""
        home = self._parts.home
        if run in home.memory.consents:
            return
        info = next((r for r in self._parts.hub.status.runs if r.name == run), None)
        if info is None:
            info = await self._parts.api.run(run)
        await self._parts.api.consent(run)
        home.remember(consents=(*home.memory.consents, run))
        contact = f", questions to {info.contact}" if info.contact else ""
        self._parts.hub.notice(
            f'helping "{run}": the model will be published under {info.licence}, '
            f"the data is under {info.dataset_licence or 'no stated licence'}{contact}"
        )

    async def _wait(self, idle: Idle) -> None:
        wait = max(0.2, idle.retry_after_s) * self._parts.rng.uniform(1.0, 1.2)
        self.idle(idle.reason.value, printable(idle.message), wait)
        await self.pause(wait)

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than claiming is allowed."""
        before = self._desk.hurries
        await self._desk.unless(
            lambda: self._desk.hurries > before or not self._desk.may_claim(self.device.id),
            self._parts.clock.sleep(seconds),
        )

    def idle(self, reason: str, message: str, wait: float | None = None) -> None:
        """Say why there is nothing to do, once, and when it is looked at again."""
        until = self._parts.clock.now() + wait if wait is not None else None
        status = self._parts.hub.status
        said = (status.idle, status.idle_message) == (reason, message)
        event = events.Idle(reason=reason, message=message, until=until, repeated=said)
        if self.busy:
            self._untold = event
        elif until is not None or not said:
            self._parts.hub.emit(event)

    async def _unless_unwanted(self, runs: tuple[str, ...], wait_s: float) -> Lease | Idle | None:
        """Claim, but give it up when claiming ends or other runs are chosen meanwhile."""
        return await self._desk.unless(
            lambda: not self._open() or self._runs() != runs,
            self._claim(runs, wait_s),
        )

    async def _claim(self, runs: tuple[str, ...], wait_s: float) -> Lease | Idle | None:
        request = ClaimRequest(
            claim_id=self._parts.leases.claim_id(self.device.id),
            device=self.device.id,
            step_flops=self._benchmark.step_flops * self._desk.share if self._benchmark else 0.0,
            memory_bytes=self._memory_bytes,
            runs=runs,
            kinds=KINDS,
            codecs=tuple(CODECS),
            wait_s=wait_s,
        )
        reply = await self._parts.api.claim(request)
        return reply.lease or reply.idle

    async def _accept(self, lease: Lease) -> Held | None:
        """Store the lease.

        None when it is one we have already answered for, or there is no room for it.
        """
        device, leases = self.device.id, self._parts.leases
        stored = HeldLease(lease=lease, device=device, claim_id=leases.claim_id(device))
        if stored.key in self._desk.held or self._parts.outbox.holds(*stored.key):
            leases.forget_claim(device)
            return None
        self._desk.offset_s = lease.now - self._parts.clock.now()
        held = Held(stored)
        try:
            leases.claimed(stored)
        except StorageFull as error:
            leases.forget_claim(device)
            await self.give_back(held, error.message, failed=False)
            self.idle("disk_full", error.message, DISK_WAIT_S)
            await self.pause(DISK_WAIT_S)
            return None
        if self._desk.exhausted:  # another device was quicker
            await self.give_back(held, "enough tasks were taken", failed=False)
            return None
        self._desk.take(held)
        self.tell(held)
        return held

    def _runs(self) -> tuple[str, ...] | None:
        """Return what to ask for: () is any run, None is nothing."""
        chosen = self._desk.runs
        if self._parts.settings.consent == "all":
            return chosen
        agreed = self._parts.home.memory.consents
        wanted = tuple(run for run in agreed if not chosen or run in chosen)
        return wanted or None

    def tell(self, held: Held) -> None:
        """Announce a lease."""
        lease, job = held.stored.lease, held.stored.lease.job
        self._parts.hub.emit(
            events.Claimed(
                task=lease.task,
                attempt=lease.attempt,
                run=lease.run,
                workload=job.workload,
                device=self.device.id,
                steps=job.steps,
                samples=job.stop - job.start,
                price_micro=lease.price_micro,
                finish_by=self._desk.local(lease.finish_by),
            )
        )


# The runs that the command line names, held against those that the coordinator has.

ENDED = ("completed", "failed")
LISTED_MAX = 20


def check_chosen(chosen: Sequence[str], runs: Sequence[RunInfo]) -> None:
    """Raises BadRequest, with the runs there are, for a name that is none of them or when all that
    are named have ended.
    """
    if not chosen:
        return
    known = {run.name: run for run in runs}
    for name in chosen:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise BadRequest(f'there is no run "{name}" here{hint}; {_listed(runs)}')
    if all(known[name].state in ENDED for name in chosen):
        names = " and ".join(f'"{name}"' for name in chosen)
        verb = "has" if len(chosen) == 1 else "have"
        raise BadRequest(f"{names} {verb} ended: nothing is left to do; {_listed(runs)}")


def _listed(runs: Sequence[RunInfo]) -> str:
    if not runs:
        return "the coordinator has no run yet"
    shown = [f"{printable(run.name)} ({printable(run.workload)}, {run.state})" for run in runs]
    more = f" and {len(shown) - LISTED_MAX} more" if len(shown) > LISTED_MAX else ""
    return f"the runs are: {', '.join(shown[-LISTED_MAX:])}{more}"
