"""Entry point of `volunteer`.

If there are no arguments, the screen starts without loading the command line, which would take a
quarter of the time to the first paint.
"""

from __future__ import annotations

import sys

from shared.programs.interrupts import exit_on_interrupt


def main() -> None:
    """Run the command line, or without arguments the screen; end the process with the exit code."""
    exit_on_interrupt()
    from shared.programs.standard_streams import make_usable
    from volunteer.cli import exit_codes

    make_usable()
    if sys.argv[1:]:
        from volunteer.cli.main import run_command

        exit_codes.end(run_command(sys.argv[1:]))
    exit_codes.end(exit_codes.exit_code(_screen))


def _screen() -> int:
    from volunteer.cli.start import StartOptions, work

    return work(StartOptions())


if __name__ == "__main__":
    main()
