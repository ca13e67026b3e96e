"""The command line of the organiser. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import sys

from cyclopts import App

from coordinator.cli import (
    checker,
    datasets,
    maintenance,
    people,
    record,
    runs,
    serve,
    simulate,
    tasks,
)
from shared.errors import VolunteerError, of_system

INTERRUPTED = 130


def _version() -> str:
    from importlib.metadata import version

    return version("volunteer")


app = App(
    name="coordinator",
    help="Train one model with volunteers: serve it, and manage runs, data and people.",
    version=_version,
    help_format="plaintext",  # to render Markdown took a quarter of the time of --help
    result_action="return_value",
)
for part in (serve, simulate, runs, datasets, tasks, people, checker, record, maintenance):
    part.add_to(app)


def main() -> None:
    """The console script: 0 done, 1 failed, 2 usage, 75 try again later, 78 configuration."""
    try:
        result = app(sys.argv[1:])
        sys.stdout.flush()
    except VolunteerError as error:
        print(f"coordinator: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (OSError, UnicodeEncodeError) as error:
        sentence, code = of_system(error)
        print(f"coordinator: {sentence}", file=sys.stderr)
        sys.exit(code)
    sys.exit(result if isinstance(result, int) else 0)
