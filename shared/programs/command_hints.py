"""Commands in backticks within sentences, completed so that they work as printed.

The writer of a sentence (a service or the coordinator) does not know the options of the reader's
command; the command line that prints the sentence knows them, and adds them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping


def options(values: Mapping[str, object]) -> str:
    """Return options as typed, empty values left out: " --data-dir '/srv/my data'" or ""."""
    pairs = ((name, str(value)) for name, value in values.items() if value not in (None, ""))
    return "".join(f" --{name.replace('_', '-')} {shlex.quote(value)}" for name, value in pairs)


def completed(text: str, program: str, more: str) -> str:
    """Return the text with `more` (from `options`) after each command of `program` in backticks
    that lacks it; help is the same for all.
    """

    def more_of(match: re.Match[str]) -> str:
        whole = more in match[1] or match[1].endswith("--help")
        return match[0] if whole else f"`{match[1]}{more}`"

    return re.sub(rf"`({program}(?=[ `])[^`\n]*)`", more_of, text) if more else text
