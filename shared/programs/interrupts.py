"""Signals that end a command: Ctrl-C while its modules are imported, SIGTERM and SIGHUP while it
works.

Little is imported here, so that a program can call this first.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

# Signals of a system that shuts down, and of a terminal that is closed.
ENDS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process at once, without a traceback: nothing has to be cleaned up."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:
        pass  # only the main thread receives signals


def raise_on_interrupt() -> None:
    """Undo `exit_on_interrupt`: let Ctrl-C raise KeyboardInterrupt, which a command catches."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupt_on_end_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt within the block, as Ctrl-C does, so that it
    deletes its unfinished files. An ignored signal stays ignored.
    """
    changed = []
    try:
        for number in ENDS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _interrupt)
                changed.append(number)
    except ValueError:
        pass  # only the main thread hears signals
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
