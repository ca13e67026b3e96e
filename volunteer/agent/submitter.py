"""Submitter of results from the outbox, oldest first, until the coordinator accepts or refuses
them. A result that failed waits behind those that failed less often, and gives way to a new one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shared.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    Forbidden,
    Gone,
    InvalidFrame,
    OffsetMismatch,
    TooLarge,
    UnknownTask,
    Unreachable,
    VolunteerError,
)
from shared.protocol import endpoints
from shared.protocol.contributions import SubmitReply, UploadRequest
from shared.sentences import Sentence
from shared.text import printable
from volunteer.agent.lifecycle import FATAL
from volunteer.agent.verdict_news import Verdicts
from volunteer.agent.workplace import Workplace
from volunteer.control import events
from volunteer.net.retry import is_temporary
from volunteer.storage.outbox import QueuedResult

# Errors for which a result is dropped: they come from the coordinator itself and concern this task.
# After any other error, or no answer, the result is kept and submitted again.
REFUSALS: dict[type[VolunteerError], str] = {
    Cancelled: "the run has ended, or the task was cancelled",
    Gone: "another volunteer holds the task now",
    UnknownTask: "the coordinator knows no such task of this machine",
    Conflict: "another result of this task was submitted before",
    BadRequest: "the coordinator does not understand this result",
    InvalidFrame: "the file here is damaged",
    TooLarge: "the result is larger than its task grants",
    Forbidden: "this account may not submit it",
}
ONE_S = 120.0  # longest time of retries for one result while others wait
UNEXPECTED_S = 60.0  # wait before the next try after an unexpected reply
EVENT_S = 0.25


@dataclass(eq=False, kw_only=True)
class Submitter:
    """Uploads and submits results from the outbox."""

    place: Workplace
    verdicts: Verdicts
    _failures: Counter[str] = field(default_factory=Counter, init=False)  # by the name of a result
    _sending: bool = field(default=False, init=False)
    _progress_at: float = field(default=float("-inf"), init=False)  # time of the last event

    async def run(self) -> None:
        """Submit until cancelled."""
        while True:
            await self.place.life.until(lambda: len(self.place.store.outbox) > 0)
            await self.place.life.files_allowed()
            first = min(self._ready(), key=lambda entry: self._failures[entry.name])
            await self._submit(first)

    def _ready(self) -> list[QueuedResult]:
        """Return the results that no earlier part of their lease precedes, oldest first."""
        return [
            entry
            for entry in self.place.store.outbox.entries()
            if not any(e.submit.part < entry.submit.part for e in self._same_lease(entry))
        ]

    def _gives_way(self, entry: QueuedResult) -> bool:
        """Return True if a result has failed, and another waits that was never sent."""
        if self._sending or not self._failures[entry.name]:
            return False
        return any(not self._failures[other.name] for other in self._ready())

    def _same_lease(self, entry: QueuedResult) -> list[QueuedResult]:
        """Return the waiting results of the lease of `entry`."""
        key = (entry.task, entry.submit.attempt)
        return [e for e in self.place.store.outbox.entries() if (e.task, e.submit.attempt) == key]

    async def _submit(self, entry: QueuedResult) -> None:
        """Submit one result, with retries until it gives way or others have waited long enough."""
        patience = ONE_S if len(self.place.store.outbox) > 1 else ONE_S * 10
        life, client = self.place.life, self.place.remote.api.client
        retries = client.retrying(lambda: self._try(entry), patience)
        try:
            reply = await life.unless(lambda: self._gives_way(entry), retries)
        except FATAL as error:
            life.give_up(error)
            await life.clock.sleep(UNEXPECTED_S)
        except VolunteerError as error:
            if is_temporary(error):
                return  # the result stays and is tried again
            if type(error) not in REFUSALS:
                self.place.bus.notice(
                    Sentence(
                        "task {task} could not be submitted yet: {error}",
                        task=entry.task,
                        error=error.message,
                    ),
                    "warning",
                )
                await life.sleep(UNEXPECTED_S, unless=lambda: self._gives_way(entry))
                return
            self._drop_refused(entry, error)
        else:
            if reply is not None:
                self._apply_reply(entry, reply)

    async def _try(self, entry: QueuedResult) -> SubmitReply:
        """Send one result once and return the reply; count a failure."""
        self._sending = True
        try:
            return await self._send(entry)
        except VolunteerError:
            self._failures[entry.name] += 1
            raise
        finally:
            self._sending = False
            self.place.life.notify()

    async def _send(self, entry: QueuedResult) -> SubmitReply:
        submit, remote = entry.submit, self.place.remote
        request = UploadRequest(
            attempt=submit.attempt,
            part=submit.part,
            tries=submit.tries,
            sha256=submit.sha256,
            size=submit.size,
            task=entry.task,
        )
        payload = self.place.store.outbox.payload(entry.name)
        try:
            await remote.transfers.upload(
                request, payload, lambda done: self._progress(entry, done)
            )
        except Gone:
            # The coordinator may have accepted this result already, and its reply was lost: then
            # SUBMIT returns the verdict.
            pass
        try:
            # `retrying` schedules the next try
            return await remote.api.call(
                endpoints.SUBMIT, {"task": entry.task}, submit, patience_s=0
            )
        except OffsetMismatch as error:  # the server has lost the bytes
            raise Unreachable(Sentence("the upload continues at another offset")) from error

    def _apply_reply(self, entry: QueuedResult, reply: SubmitReply) -> None:
        verdict, home = reply.verdict(), self.place.store.home
        refused = verdict.state == "rejected" and not verdict.redo
        last = entry.last and (refused or verdict.state != "rejected")
        if last:
            home.remember(tasks=home.memory.tasks + 1)
            self.place.held.submitted += 1
        self.place.bus.emit(
            events.Submitted(
                task=entry.task,
                contribution=verdict.contribution,
                bytes=entry.submit.size,
                last=last,
            )
        )
        self.verdicts.apply((verdict,), me=reply.me, result=entry, news=reply.news)
        self._drop(entry)
        if refused:
            message = printable(verdict.message)
            done = self._end_lease(entry, "gone", message)
            if done and not entry.last:
                self._announce_loss(entry, "gone", message)
        self.verdicts.resolve(entry.name, verdict)

    def _drop_refused(self, entry: QueuedResult, error: VolunteerError) -> None:
        """Drop a result that the coordinator refused with an error of `REFUSALS`, and its lease."""
        how = "refused"
        if isinstance(error, Gone):
            how = "cancelled" if isinstance(error, Cancelled) else "gone"
        self._drop(entry)
        if self._end_lease(entry, how, error.message):
            self._announce_loss(entry, how, error.message)
        self.verdicts.resolve(entry.name, error)

    def _end_lease(self, entry: QueuedResult, how: str, message: str) -> bool:
        """Drop the waiting results of the lease of `entry`, and end the work on the lease.

        Return True if the lease is no longer in work and its last result was `entry` or is dropped
        here; for a lease in work the device loop announces the end.
        """
        later_results = self._same_lease(entry)
        for result in later_results:
            self._drop(result)
        held = self.place.held.get((entry.task, entry.submit.attempt))
        if held is not None:
            held.end("cancelled" if how == "cancelled" else "gone", message)
            return False
        return any(result.last for result in (entry, *later_results))

    def _announce_loss(self, entry: QueuedResult, how: str, message: str) -> None:
        """Announce that the work of a lease is lost."""
        self.place.held.uncount((entry.task, entry.submit.attempt))
        self.place.bus.emit(events.TaskEnded(task=entry.task, how=how, message=message))

    def _drop(self, entry: QueuedResult) -> None:
        self.place.store.outbox.drop(entry)
        del self._failures[entry.name]
        self.place.held.late.discard((entry.task, entry.submit.attempt))
        self.place.life.notify()

    def _progress(self, entry: QueuedResult, done: int) -> None:
        now, total = self.place.life.clock.monotonic(), entry.submit.size
        if now - self._progress_at >= EVENT_S or done >= total:
            self._progress_at = now
            self.place.bus.emit(
                events.Uploading(task=entry.task, done_bytes=done, total_bytes=total)
            )
