"""Where `volunteer` begins.

Without a word after it there is nothing to parse, and the screen comes up without the command line being loaded, which
takes a quarter of the time to the first paint.
"""

from __future__ import annotations

import sys

from volunteer import process


def main() -> None:
    """Run what the command line says, and end the process with its exit code."""
    if sys.argv[1:]:
        from volunteer.cli import run_command

        process.end(run_command(sys.argv[1:]))
    process.end(process.exit_code(_screen))


def _screen() -> int:
    from volunteer.work import Options, work

    return work(Options())


if __name__ == "__main__":
    main()
