"""Command line of the organiser; each command imports its heavy modules itself."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from cyclopts import App, CycloptsError

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
    trial,
)
from coordinator.cli.target import of_command_line
from shared.errors import BadRequest, VolunteerError, system_error
from shared.programs.help_groups import add_help, group
from shared.programs.interrupts import interrupt_on_end_signals, raise_on_interrupt
from shared.programs.silence_watch import watch_silence
from shared.programs.standard_streams import make_usable
from shared.text import error_line

INTERRUPTED = 130


def _version() -> str:
    from importlib.metadata import version

    return version("volunteer")


app = App(
    name="coordinator",
    help="Train one model with volunteers: serve it, and manage runs, data and people.",
    version=_version,
    help_format="plaintext",  # rendering Markdown took a quarter of the time of --help
    result_action="return_value",
)
for part in (serve, trial, simulate, runs, datasets, tasks, people, checker, record, maintenance):
    part.add_to(app)
app.register_install_completion_command()
add_help(app)
GROUPS = {
    "Begin": ("serve", "try", "demo", "dataset", "run", "invite"),
    "Watch": ("status", "top", "alerts", "task", "settings", "simulate"),
    "People": ("volunteer", "announce", "grant", "trust", "contribution"),
    "Look after": ("check", "backup", "restore", "migrate", "checker", "record"),
}
group(app, GROUPS)


def main() -> None:
    """Run the organiser's command line and exit: 0 done, 1 failed, 2 usage, 75 try again later, 78
    configuration, 130 interrupted. With --json an error is a JSON document on standard error.
    """
    make_usable()
    try:
        raise_on_interrupt()
        words, _, _ = app.parse_commands(sys.argv[1:])
        with interrupt_on_end_signals(), watch_silence(" ".join(("coordinator", *words))):
            result = app(sys.argv[1:], exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        from shared.programs.usage_errors import mistake

        sentence = mistake("coordinator", error, sys.argv[1:], app)
        _fail(sentence, BadRequest.exit_code)
    except VolunteerError as error:
        _fail(error.message, error.exit_code)
    except KeyboardInterrupt:
        sys.stdout.flush()
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (OSError, UnicodeEncodeError) as error:
        _fail(*system_error(error))
    sys.exit(result if isinstance(result, int) else 0)


def _fail(sentence: object, code: int) -> NoReturn:
    """Print an error and exit with `code`. Commands that the sentence shows in backticks get the
    options by which this command line names its coordinator.
    """
    text = of_command_line(sys.argv[1:]).hint(str(sentence))
    print(error_line("coordinator", text, code, json="--json" in sys.argv), file=sys.stderr)
    sys.exit(code)
