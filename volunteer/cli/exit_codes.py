"""Exit codes and error output of the command line; the exit avoids torch's crash at shutdown."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from shared.errors import BadRequest, VolunteerError, system_error
from shared.programs.command_hints import complete_commands, options
from shared.programs.interrupts import exit_on_interrupt, raise_on_interrupt
from shared.programs.silence_watch import pause_watch
from shared.sentences import Sentence
from shared.text import error_line, printable
from volunteer.i18n.catalogue import _, pgettext, translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from volunteer.settings.settings import Directories

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
FLUSH_S = 2.0
ASKS_NOTHING = Sentence("--json asks nothing: add --yes")

_as_json = False  # format of printed errors


def exit_code(command: Callable[[], object]) -> int:
    """Run a command and print its errors; return the exit code, 0 for any result but a number. The
    format of errors that the command chose, JSON or sentences, ends with the command.
    """
    try:
        return _outcome(command)
    finally:
        print_errors_as_json(False)


def _outcome(command: Callable[[], object]) -> int:
    try:
        raise_on_interrupt()
        result = command()
    except VolunteerError as error:
        return print_error(translated(error.message), error.exit_code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has ended
        return 0
    except (OSError, UnicodeEncodeError) as error:
        sentence, code = system_error(error)
        return print_error(translated(sentence), code)
    return result if isinstance(result, int) else 0


def at_terminal() -> bool:
    """Return True if input and output are terminals, so that a person can type and read."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def confirm(question: str) -> bool:
    """Ask the person at the terminal. Return False for enter, or any word but yes.

    Raises BadRequest where nobody can answer.
    """
    import unicodedata

    yes, choice = pgettext("answer", "yes"), pgettext("answer", "[y/N]")
    try:
        with pause_watch():
            line = input(f"{_(question)} {choice} ")
    except EOFError as error:
        raise BadRequest(Sentence("no terminal to confirm in: add --yes")) from error
    answer = unicodedata.normalize("NFD", line.strip().lower())
    plain = unicodedata.normalize("NFD", yes)
    # the word counts without accents too, which some keyboards lack
    bare = "".join(sign for sign in plain if not unicodedata.combining(sign))
    return answer in ("y", "yes", plain, bare, bare[0])


def with_profile(text: str, profile: str) -> str:
    """Return the text with the profile added to our commands in backticks."""
    return complete_commands(text, "volunteer", options({"profile": profile}))


def print_errors_as_json(json: bool) -> None:
    """Print later errors as JSON if `json` is True, else as sentences."""
    global _as_json
    _as_json = json


def print_error(sentence: str, code: int) -> int:
    """Print an error on standard error. Returns `code`."""
    print(error_line("volunteer", sentence, code, json=_as_json), file=sys.stderr, flush=True)
    return code


def with_rename_remark(directories: Directories) -> Directories:
    """Return a profile's directories; print a remark if the machine was renamed since."""
    if directories.former_host:
        remark(
            _(
                'this machine was "{name}" before: it keeps its account',
                name=directories.former_host,
            )
        )
    return directories


def errors_are_json() -> bool:
    """Return True if errors are printed as JSON."""
    return _as_json


def remark(sentence: str) -> None:
    """Print a sentence on standard error at once, without characters that control a terminal."""
    print(f"volunteer: {printable(sentence)}", file=sys.stderr, flush=True)


def end(code: int) -> NoReturn:
    """End the process at once: leaving Python while a thread trains in torch aborts (measured)."""
    exit_on_interrupt()
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)  # a full pipe without a reader would block for ever
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # the reader of the output has gone
