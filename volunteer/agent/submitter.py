"""Hands in what lies in the outbox, oldest first, until the coordinator has said what becomes of
it.
"""

from __future__ import annotations

import msgspec

from shared.errors import Cancelled, Gone, NotFound, VolunteerError
from shared.protocol.contributions import UploadRequest, Verdict
from volunteer.agent.context import Parts
from volunteer.agent.offline_begin import tell
from volunteer.agent.shared_state import FATAL
from volunteer.control import events
from volunteer.net.retry import passing
from volunteer.storage.outbox import Entry
from volunteer.text import printable

ONE_S = 120.0  # patience with one result while others wait
ODD_S = 60.0  # before the next try after an answer nobody expects
EVENT_S = 0.25


class Sender:
    """Submits results from the outbox."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._told = float("-inf")

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            change = self._parts.desk.change()
            entries = self._parts.outbox.entries()
            if not entries:
                await change
                continue
            change.close()
            for entry in entries:
                if entry.name in self._parts.outbox and not self._behind(entry):
                    await self._hand_in(entry)

    def _behind(self, entry: Entry) -> bool:
        """Return True if an earlier part of the same lease has not been handed in yet."""
        return any(e.submit.part < entry.submit.part for e in self._same_lease(entry))

    def _same_lease(self, entry: Entry) -> list[Entry]:
        """Return what waits of the lease of an entry."""
        key = (entry.task, entry.submit.attempt)
        return [e for e in self._parts.outbox.entries() if (e.task, e.submit.attempt) == key]

    async def _hand_in(self, entry: Entry) -> None:
        """One result, tried until there is an answer or others have waited long enough."""
        patience = ONE_S if len(self._parts.outbox) > 1 else ONE_S * 10
        missed = 0

        async def once() -> Verdict:
            nonlocal missed
            try:
                return await self._send(entry)
            except NotFound:
                missed += 1  # the upload may have been thrown away in between: once more
                if missed > 1:
                    raise
                return await self._send(entry)

        try:
            verdict = await self._parts.api.client.retrying(once, patience)
        except FATAL as error:
            self._parts.desk.give_up(error)
            await self._parts.clock.sleep(ODD_S)
        except VolunteerError as error:
            if passing(error):
                return  # it stays, and has its turn again
            if type(error) is VolunteerError:
                self._parts.hub.notice(
                    f"task {entry.task} could not be handed in yet: {error.message}", "warning"
                )
                await self._parts.clock.sleep(ODD_S)
                return
            self._refused(entry, error)
        else:
            self._answered(entry, verdict)

    async def _send(self, entry: Entry) -> Verdict:
        said = entry.submit
        if entry.early:
            await tell(self._parts.api, entry.task, said.attempt, said.base_version, patience_s=0)
        request = UploadRequest(
            task=entry.task,
            attempt=said.attempt,
            part=said.part,
            tries=said.tries,
            sha256=said.sha256,
            size=said.size,
        )
        payload = self._parts.outbox.payload(entry.name)
        try:
            await self._parts.transfers.upload(
                request, payload, lambda done: self._tell(entry, done)
            )
        except Gone:
            pass  # perhaps because it was handed in before and the reply was lost: submitting tells
        return await self._parts.api.submit(entry.task, said)

    def _answered(self, entry: Entry, verdict: Verdict) -> None:
        parts = self._parts
        verdict = msgspec.structs.replace(verdict, message=printable(verdict.message))
        parts.home.remember_verdicts((verdict,), 0)
        refused = verdict.state == "rejected"
        if entry.last and not (refused and verdict.redo):
            parts.home.remember(tasks=parts.home.memory.tasks + 1)
            parts.desk.handed_in += 1
        parts.hub.emit(
            events.Submitted(
                task=entry.task, contribution=verdict.contribution, bytes=entry.submit.size
            )
        )
        parts.hub.emit(events.Judged(verdict=verdict))
        parts.residuals.judged(verdict, (entry.device,), entry.name)
        self._drop(entry)
        if refused and not verdict.redo:
            done = self._end(entry, "gone", verdict.message)
            if done and not entry.last:
                self._tell_lost(entry, "gone", verdict.message)
        parts.desk.answered(entry.name, verdict)

    def _refused(self, entry: Entry, error: VolunteerError) -> None:
        """A definitive no: the work of this lease is lost, and the reason said."""
        how = "refused"
        if isinstance(error, Gone):
            how = "cancelled" if isinstance(error, Cancelled) else "gone"
        self._lose(entry)
        if self._end(entry, how, error.message):
            self._tell_lost(entry, how, error.message)
        self._parts.desk.answered(entry.name, error)

    def _end(self, entry: Entry, how: str, message: str) -> bool:
        """Nothing more of this lease is wanted: drop what waits of it, and end what is still worked
        on.

        Returns whether all of it was done here already. If not, whoever works on it, or did, tells
        of its end.
        """
        later = self._same_lease(entry)
        for other in later:
            self._lose(other)
        held = self._parts.desk.held.get((entry.task, entry.submit.attempt))
        if held is not None:
            held.end("cancelled" if how == "cancelled" else "gone", message)
            return False
        return any(each.last for each in (entry, *later))

    def _tell_lost(self, entry: Entry, how: str, message: str) -> None:
        """A lease that was done here brings nothing."""
        self._parts.desk.lost((entry.task, entry.submit.attempt))
        self._parts.hub.emit(events.TaskEnded(task=entry.task, how=how, message=message))

    def _lose(self, entry: Entry) -> None:
        """It is as if this result had never been made."""
        self._parts.residuals.lost(entry.run, entry.task, (entry.device,), entry.name)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._parts.outbox.drop(entry)
        self._parts.desk.late.discard((entry.task, entry.submit.attempt))
        self._parts.desk.notify()

    def _tell(self, entry: Entry, done: int) -> None:
        now, total = self._parts.clock.monotonic(), entry.submit.size
        if now - self._told >= EVENT_S or done >= total:
            self._told = now
            self._parts.hub.emit(
                events.Uploading(task=entry.task, done_bytes=done, total_bytes=total)
            )
