"""Announcements of a device's work, and of the reason why it idles."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.sentences import Sentence
from volunteer.agent.claimer import IdleReason
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.workplace import Workplace
from volunteer.control import events


@dataclass(eq=False, kw_only=True)
class WorkNews:
    """Emits the events of one device; during training, a missing next task is not announced."""

    device: str
    place: Workplace
    at_work: bool = field(default=False, init=False)
    _later: events.Idle | None = field(default=None, init=False)

    def begin_task(self) -> None:
        """Record that the device begins a task."""
        self.at_work, self._later = True, None

    def end_task(self) -> None:
        """Record that the device has ended a task; announce why no task follows, if known."""
        self.at_work = False
        if self._later is not None:
            self.place.bus.emit(self._later)
        self._later = None

    def announce_claim(self) -> None:
        """Announce that the device claims, unless it works or already shows a reason to idle."""
        if not self.at_work and not self.place.bus.status.idle:
            self.announce_idle(
                IdleReason(reason="asking", message=Sentence("asking the coordinator for work"))
            )

    def announce_idle(self, why: IdleReason) -> None:
        """Announce once why there is no work, and the time of the next claim."""
        until = self.place.timing.clock.now() + why.wait_s if why.wait_s else None
        status = self.place.bus.status
        unchanged = (status.idle, status.idle_message) == (why.reason, why.message)
        event = events.Idle(reason=why.reason, message=why.message, until=until, repeated=unchanged)
        if self.at_work:
            self._later = event
        elif until is not None or not unchanged:
            self.place.bus.emit(event)

    def announce_lease(self, work: LeaseInWork) -> None:
        """Announce the task of a lease, its size, price and deadline."""
        lease, job = work.lease, work.lease.job
        self.place.bus.emit(
            events.Claimed(
                task=lease.task,
                attempt=lease.attempt,
                run=lease.run,
                price_micro=lease.price_micro,
                counted=lease.counted,
                workload=job.workload,
                device=self.device,
                steps=job.steps,
                samples=job.stop - job.start,
                finish_by=self.place.server_clock.local(lease.finish_by),
                kind=job.kind if lease.audit is None else events.AUDIT,
            )
        )

    def announce_failures(self, failures: int, message: str) -> None:
        """Announce that several tasks in a row failed."""
        text = Sentence(
            "{failures} tasks in a row failed on {device}: {message}",
            failures=failures,
            device=self.device,
            message=message,
        )
        self.place.bus.notice(text, "error")
