"""Ctrl-C at the edges of a command: while its modules are imported, and while it ends."""

from __future__ import annotations

import signal
import threading


def end_quietly() -> None:
    """Let Ctrl-C end the process at once, without a traceback: nothing has to be cleaned up."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which a command catches."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
