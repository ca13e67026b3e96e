"""Feed of one volunteer's events, folded into the newest view."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from shared.clock import Clock
from shared.errors import VolunteerError
from shared.protocol import endpoints
from volunteer.control import events
from volunteer.control.control import Control
from volunteer.control.status import fold
from volunteer.i18n.catalogue import _
from volunteer.tui.agent_view import (
    add_past_loss,
    add_past_losses,
    initial_view,
    loss_event,
    reduce,
)

# Events that a person waits for.
URGENT = (
    events.Announced,
    events.Paused,
    events.Resumed,
    events.Finishing,
    events.Connection,
    events.Claimed,
    events.Judged,
    events.Stopped,
)


class Listener(msgspec.Struct, frozen=True, kw_only=True):
    """Callbacks of the screen, called on the event loop."""

    urgent: Callable[[], None]  # the view has news that a person waits for
    tell: Callable[[str, str], None]  # a warning or an error: message, level
    ended: Callable[[], None]  # no more events
    failed: Callable[[BaseException], None]  # a fault in our own code


class EventFeed:
    """Follows the volunteer's events for the screens; `view` is the newest view."""

    def __init__(self, control: Control, clock: Clock, listener: Listener) -> None:
        self.control = control
        self.view = initial_view(control.status)
        self.end_expected = False  # True once this program has requested the end
        self._clock = clock
        self._listener = listener
        self._history_runs: set[str] = set()  # runs whose history was requested
        self._history_tasks: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._follow(), name="follow-events")
        self._task.add_done_callback(self._report_end)

    @property
    def ended(self) -> bool:
        """Return True if the volunteer has ended."""
        return self._task.done() or self.view.ended is not None

    def close(self) -> None:
        """Cancel the tasks that follow events and load history."""
        for task in (self._task, *self._history_tasks):
            task.cancel()

    def _request_history(self) -> None:
        """Request the history of this machine's run, once for each run."""
        run = self.view.run()
        if run and run not in self._history_runs and self.view.status.online:
            self._history_runs.add(run)
            task = asyncio.create_task(self._add_history(run), name="recall-versions")
            self._history_tasks.add(task)
            task.add_done_callback(self._history_tasks.discard)

    async def _add_history(self, run: str) -> None:
        """Add the losses of the versions before the start; without a reply the curve lacks them.

        A reply has the oldest versions with their samples; of a longer history the losses follow.
        """
        try:
            versions = await self.control.query(endpoints.VERSIONS, run=run)
            for row in versions:
                if row.loss is not None:
                    self.view = add_past_loss(self.view, loss_event(run, row))
            info = self.view.info(run)
            if versions and info is not None and info.version > versions[-1].version:
                losses = await self.control.query(endpoints.LOSS, run=run)
                self.view = add_past_losses(self.view, run, losses)
        except VolunteerError:
            return

    async def _follow(self) -> None:
        with self.control.subscribe() as stream:
            self._request_history()
            async for event in stream:
                self.view = reduce(self.view, event, self.control.status)
                self._request_history()
                if isinstance(event, URGENT):
                    self._listener.urgent()
                if isinstance(event, events.Notice) and event.level != "info":
                    self._listener.tell(event.message, event.level)
        if self.view.ended is None and not self.end_expected:
            end = self._end_event()
            self.view = reduce(self.view, end, fold(self.control.status, end))

    def _report_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._listener.failed(error)
        elif not task.cancelled():
            self._listener.ended()

    def _end_event(self) -> events.Stopped:
        """Return the end event of a volunteer whose events stopped without an end event."""
        status, now = self.control.status, self._clock.now()
        local_message = _("the volunteer ended and gave no reason")
        background_message = _("the volunteer in the background ended and gave no reason")
        return events.Stopped(
            at=now,
            code=1,
            message=background_message if self.control.remote else local_message,
            tasks=status.done,
            credits_micro=status.me.earned_micro if status.me else 0,
            sent_bytes=status.sent_bytes,
            received_bytes=status.received_bytes,
            seconds=max(0.0, now - status.since) if status.since else 0.0,
        )
