"""Completion of the commands in backticks within sentences, so that they work as printed.

The writer of a sentence (a service or the coordinator) does not know the options of the reader's
command. The command line that prints the sentence adds them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping


def options(values: Mapping[str, object]) -> str:
    """Return options as a person types them, such as " --data-dir '/srv/my data'"; options with
    empty values are left out.
    """
    pairs = ((name, str(value)) for name, value in values.items() if value not in (None, ""))
    return "".join(f" --{name.replace('_', '-')} {shlex.quote(value)}" for name, value in pairs)


def complete_commands(text: str, program: str, more: str) -> str:
    """Return the text with `more` (from `options`) after each command of `program` in backticks
    that lacks it. A command that asks for help needs no options.
    """

    def complete(match: re.Match[str]) -> str:
        is_complete = more in match[1] or match[1].endswith("--help")
        return match[0] if is_complete else f"`{match[1]}{more}`"

    return re.sub(rf"`({program}(?=[ `])[^`\n]*)`", complete, text) if more else text
