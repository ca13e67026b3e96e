"""End of the terminal application: by key, by signal, or with its volunteer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from volunteer.control import commands
from volunteer.control.commands import How
from volunteer.control.event_sentences import words

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp


def handle_end_signals(end: Callable[[], None], interrupt: Callable[[], None]) -> None:
    """Call `interrupt` at SIGINT and `end` at other signals that end a program, which would leave
    the terminal without echo.
    """
    loop = asyncio.get_running_loop()
    for name, handler in (("SIGTERM", end), ("SIGHUP", end), ("SIGINT", interrupt)):
        try:
            loop.add_signal_handler(getattr(signal, name), handler)
        except (AttributeError, NotImplementedError, RuntimeError, ValueError):
            continue  # not on this system, or not in the main thread


class AppExit:
    """Ends the program, at once or after the end of its volunteer."""

    def __init__(self, app: VolunteerApp) -> None:
        self._app = app
        self.how: How | None = None  # set when the end of the volunteer was requested
        self.at_once = False  # a second request: the program does not wait for the volunteer
        self._terminal_lent = False

    def catch_signals(self) -> None:
        """Let the first signal end the volunteer and then the program; a second signal ends the
        program without waiting for the volunteer.
        """
        handle_end_signals(self._on_signal, self._on_interrupt)

    @contextmanager
    def terminal_lent(self) -> Iterator[None]:
        """Leave Ctrl-C to another program, which has the terminal within the block: the terminal
        interrupts both.
        """
        self._terminal_lent = True
        try:
            yield
        finally:
            self._terminal_lent = False

    def _on_interrupt(self) -> None:
        if not self._terminal_lent:
            self._on_signal()

    def _on_signal(self) -> None:
        if self._nothing_to_end:
            self._exit()
        else:
            self.stop("release")

    @property
    def _nothing_to_end(self) -> bool:
        """Return True if no volunteer has to end, or its end was requested already."""
        control = self._app.control
        return self.how is not None or control is None or control.remote

    def leave(self) -> None:
        """End the program and a volunteer of this process; ask first if a task is running."""
        if self._nothing_to_end or self._app.ended:
            self._exit()
        else:
            self.confirm()

    def confirm(self) -> None:
        """End the volunteer, here or in the background; ask first if a task is running."""
        from volunteer.tui.screens.confirm_quit import Quit

        app = self._app
        if not app.latest.status.tasks:
            self.stop("release")
        elif not isinstance(app.screen, Quit):
            app.redraw()
            app.push_screen(Quit(app.scene()), self._stop_as_chosen)

    def _stop_as_chosen(self, how: How | None) -> None:
        if how is not None:
            self.stop(how)

    def stop(self, how: How) -> None:
        """Request the end of the volunteer, after which the program ends."""
        app = self._app
        if app.control is None or app.ended:
            app.exit(self.exit_code)
            return
        self.how = how
        app.expect_end()
        app.command(app.control.do(commands.Stop(how=how)))
        app.redraw()

    def volunteer_ended(self) -> None:
        """End the program if its volunteer ended by request, or in this process without an error.
        Otherwise the screen stays open.
        """
        control, ended = self._app.control, self._app.latest.ended
        local = control is not None and not control.remote
        if self.how is not None or (local and ended is not None and not ended.code):
            self._app.exit(self.exit_code)

    def _exit(self) -> None:
        self.at_once = self.how is not None and not self._app.ended
        self._app.exit(self.exit_code)

    @property
    def exit_code(self) -> int:
        """Return the volunteer's exit code; 0 if it has not ended."""
        ended = self._app.latest.ended
        return ended.code if ended is not None else 0

    @property
    def farewell(self) -> str:
        """Return the sentence that stays in the terminal after the volunteer's end; "" before the
        end.
        """
        ended = self._app.latest.ended
        return (words(ended) or "") if ended is not None else ""
