"""Ctrl-C at the edges of a command: while its modules are imported, and while it ends.

Only `signal` is imported here, so that the first moment of a program without this is short.
"""

from __future__ import annotations

import signal


def end_quietly() -> None:
    """Let Ctrl-C end the process at once, without a traceback: nothing has to be cleaned up."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:
        pass  # only the main thread hears signals


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which a command catches."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
