"""Report for support: versions, machine, settings and last events, without secrets. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shared.protocol.accounts import Hardware
from shared.settings import SettingRow
from shared.text import printable
from volunteer.control.event_sentences import words
from volunteer.control.events import AnyEvent
from volunteer.control.status import Status
from volunteer.i18n.formats import size

EVENTS_MAX = 60
# Patterns of codes, tokens and home directories.
_SECRETS = (
    (re.compile(r"(code|token|secret|key|pin)=[^\s+&;]+", re.IGNORECASE), r"\1=***"),
    (re.compile(r"[0-9a-f]{32,}", re.IGNORECASE), "***"),
    (re.compile(r"(/home/|/Users/|\\Users\\)[^/\\\s]+"), r"\1***"),
)


def diagnostics(
    status: Status,
    machine: Hardware,
    *,
    version: str,
    sandbox: Sequence[str],
    settings: Sequence[SettingRow],
    events: Iterable[AnyEvent],
) -> str:
    """Return the report as text, to be sent to people who help."""
    online = "online" if status.online else "offline"
    lines = [
        f"volunteer {version}, Python {machine.python}, torch {machine.torch or 'none'}",
        f"{machine.system}, {machine.cores} cores, {size(machine.memory_bytes)} of memory",
        *(f"confined: {line}" for line in sandbox),
        f"coordinator: {status.server or '-'}, {online} {status.connection}",
    ]
    lines += [
        f"device {d.id}: {d.name}, {size(d.memory_bytes)}{'' if d.usable else ', ' + d.problem}"
        for d in status.devices
    ]
    lines += [
        f"speed {b.device}: {b.step_flops / 1e9:.0f} GFLOP/s in training" for b in status.benchmarks
    ]
    lines += [f"paused by {p.by}: {p.message}; until {p.until}" for p in status.pauses]
    lines += [
        f"task {t.task} of {t.run} on {t.device}: {t.phase}, step {t.step}/{t.steps}"
        for t in status.tasks
    ]
    lines += [
        f"setting {row.name} = {row.value} ({row.source})"
        for row in settings
        if row.source != "default"
    ]
    sentences = [sentence for event in events if (sentence := words(event)) is not None]
    lines += ["", *sentences[-EVENTS_MAX:]]
    return "\n".join(harmless(printable(line)) for line in lines) + "\n"


def harmless(text: str) -> str:
    """Return the text with possible secrets, and the names in home directories, masked."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text
