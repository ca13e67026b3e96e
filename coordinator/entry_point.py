"""Entry point of `coordinator`."""

from __future__ import annotations

import os

from shared.programs.interrupts import exit_on_interrupt


def main() -> None:
    """Run the command line, and exit with its code; after Ctrl-C immediately, without waiting for
    threads that still build a dataset.
    """
    exit_on_interrupt()
    from coordinator.cli.main import INTERRUPTED
    from coordinator.cli.main import main as command_line

    try:
        command_line()
    except SystemExit as ending:
        if ending.code == INTERRUPTED:
            os._exit(INTERRUPTED)
        raise
    finally:
        exit_on_interrupt()
