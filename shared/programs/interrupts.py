"""Ctrl-C while the modules of a command are imported, and while the command ends.

Only `signal` is imported here, so that a program can call this first.
"""

from __future__ import annotations

import signal


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
