"""Ends of leases: released, dropped or done."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import Gone, Unavailable, VolunteerError
from shared.protocol import endpoints
from shared.protocol.leases import ReleaseRequest
from shared.sentences import Sentence
from volunteer.account.membership import withdraw
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.workplace import Workplace
from volunteer.control import events
from volunteer.net.api import SHORT_S
from volunteer.storage.outbox import QueuedResult

# Longest wait for a lease's unsent parts before its release; the coordinator refuses later parts.
SUBMIT_S = 5.0


@dataclass(eq=False, kw_only=True)
class LeaseEnds:
    """Ends leases, and announces each end."""

    place: Workplace

    async def give_back(self, work: LeaseInWork, reason: str, *, failed: bool) -> None:
        """Release a lease once its results are submitted; `failed` counts against the task."""
        task, attempt = work.key
        if self.place.store.outbox.holds(task, attempt):
            self.place.remote.api.client.hurry()
        await self.place.life.sleep(
            SUBMIT_S, unless=lambda: not self.place.store.outbox.holds(task, attempt)
        )
        # A reason may quote a path, and nothing about a member's own files is sent.
        reason = "" if work.lease.member else reason[:200]
        request = ReleaseRequest(attempt=attempt, reason=reason, failed=failed)
        try:
            await self.place.remote.api.call(
                endpoints.RELEASE, {"task": task}, request, patience_s=SHORT_S
            )
        except (Unavailable, Gone):
            pass  # the lease expires by itself, or has expired
        except VolunteerError as error:
            self.place.bus.notice(
                Sentence(
                    "task {task} could not be given back: {error}", task=task, error=error.message
                )
            )
        self.place.store.leases.drop(work.lease)

    async def end_without_result(self, work: LeaseInWork, how: str, message: str) -> None:
        """End a lease without a contribution; for `how`, see `TaskEnded`."""
        if how in ("released", "failed"):
            await self.give_back(work, message, failed=how == "failed")
        elif how != "saved":
            self.place.store.leases.drop(work.lease)
        self.place.held.put_down(work, counted=False)
        self.place.bus.emit(events.TaskEnded(task=work.key[0], how=how, message=message))

    async def withdraw(self, run: str) -> None:
        """Tell the coordinator that this machine has no usable data of its own for a run."""
        try:
            await withdraw(self.place.remote.api, run, SHORT_S)
        except VolunteerError as error:
            self.place.bus.notice(error.message)

    def complete(self, work: LeaseInWork, result: QueuedResult | None) -> None:
        """End a lease whose last result is in the outbox. `result` is None if an earlier process
        made it.
        """
        self.place.store.leases.drop(work.lease)
        if result is not None:
            job, submit = work.lease.job, result.submit
            self.place.bus.emit(
                events.Trained(
                    task=result.task,
                    run=result.run,
                    steps=job.steps,
                    samples=job.stop - job.start,
                    loss_first=submit.loss_first,
                    loss_last=submit.loss_last,
                    train_s=submit.train_s,
                )
            )
        self.place.held.put_down(work, counted=True)
