"""Driver for a terminal that may vanish (a closed window, a lost connection), or of which the
program has only standard output.

Textual writes from a thread of its own, through a bounded queue. When a write fails, the thread
dies, the queue fills up, and the event loop blocks for ever in the next write, even for signals.
This driver drops a failed write, and the program runs until it is stopped. The thread that reads
keys ends with the terminal, because it would read the end of input in an endless loop.

Textual draws on standard error, so `volunteer 2>errors` would leave the screen empty. The screen is
drawn on standard output if only that is a terminal.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, cast

from typing_extensions import override

# Window titles (xterm's controls OSC 2, CSI 22 t and 23 t); the kernel's console has no titles.
TITLED = os.environ.get("TERM", "dumb") not in ("linux", "dumb")
KEEP_TITLE, RESTORE_TITLE = "\x1b[22;2t", "\x1b[23;2t"

if TYPE_CHECKING:
    from textual.driver import Driver


class DroppingFile:
    """File of a terminal that drops failed writes; `hang_up` is called if the terminal is gone."""

    def __init__(self, file: IO[str], hang_up: Callable[[], None]) -> None:
        self._file = file
        self._hang_up = hang_up

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if error.errno == errno.EIO:
            self._hang_up()


def _screen_stream(errors: IO[str] | None) -> IO[str]:
    """Return the stream for the screen: standard output if only that is a terminal."""
    output = sys.__stdout__
    only_output = output is not None and output.isatty() and (errors is None or not errors.isatty())
    return cast("IO[str]", output if only_output else errors)


def _in_foreground(terminal: int) -> bool:
    """Return False if this process is in the background of its terminal."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # not this process's controlling terminal
        return True


def lasting_driver() -> type[Driver] | None:
    """Return the driver for a terminal that may vanish; None where Textual's own suffices."""
    if sys.platform == "win32":
        return None
    import termios

    from textual.drivers.linux_driver import LinuxDriver

    class LastingDriver(LinuxDriver):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self._file: Any = DroppingFile(_screen_stream(self._file), self.exit_event.set)
            self._title = ""
            self._raw: list[Any] | None = None  # modes of the terminal while the screen is shown

        @override
        def start_application_mode(self) -> None:
            super().start_application_mode()  # type: ignore[no-untyped-call]
            self._raw = termios.tcgetattr(self.fileno) if self.input_tty else None
            self._title = ""
            if TITLED:
                self.write(KEEP_TITLE)

        @override
        def stop_application_mode(self) -> None:
            if TITLED:
                self.write(RESTORE_TITLE)
            self._raw = None  # another program may have the terminal now
            super().stop_application_mode()

        def entitle(self, title: str) -> None:
            """Set the title of the window, once for each change."""
            if TITLED and title != self._title:
                self._title = title
                self.write(f"\x1b]2;{title}\x07")

        @override
        def _sigcont_application(self, *args: Any) -> None:
            """Continue after a stop, and repaint, because lines of the shell cover the screen.

            The screen's threads still run after SIGSTOP, which cannot be caught; only the
            terminal's mode is restored, which a shell may have changed.
            """
            if self._must_signal_resume:
                super()._sigcont_application(*args)
            elif self._raw is not None and _in_foreground(self.fileno):
                termios.tcsetattr(self.fileno, termios.TCSANOW, self._raw)
            self._app.call_later(self._app.action_repaint)  # type: ignore[attr-defined]

    return LastingDriver
