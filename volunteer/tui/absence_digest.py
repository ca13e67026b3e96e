"""Digest of an absence: credits, tasks and versions since the owner last looked at the screen.

The figures of the last visit are kept in the profile, so that the digest covers the time in which
the program did not run, or ran as a service.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from shared.errors import VolunteerError
from shared.text import MICRO, printable
from volunteer.control.status import Status
from volunteer.files import read_record, write_record
from volunteer.i18n.catalogue import _, ngettext
from volunteer.i18n.formats import credit
from volunteer.tui.text import ago

ABSENCE_S = 600.0  # shortest absence that gets a digest
CREDITS_MIN = MICRO // 200  # smaller amounts are shown as 0.00
RUNS_MAX = 2  # runs whose versions a digest names


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of an account when the owner last looked at the screen."""

    volunteer_id: str
    at: float
    earned_micro: int
    accepted: int
    rejected: int
    versions: dict[str, int] = {}  # newest version by run


def visit_of(status: Status, now: float) -> Visit | None:
    """Return the figures of a status; None before the coordinator has sent them."""
    if status.me is None or not status.runs:
        return None
    return Visit(
        volunteer_id=status.me.volunteer_id,
        at=now,
        earned_micro=status.me.earned_micro,
        accepted=status.me.accepted,
        rejected=status.me.rejected,
        versions={run.name: run.version for run in status.runs},
    )


def digest(before: Visit, after: Visit) -> str:
    """Return the news between two visits as one line; "" without news, or after a short absence."""
    if before.volunteer_id != after.volunteer_id or after.at - before.at < ABSENCE_S:
        return ""
    news = []
    if (earned := after.earned_micro - before.earned_micro) >= CREDITS_MIN:
        news.append(_("{credits} credits earned", credits=credit(earned)))
    elif earned <= -CREDITS_MIN:
        news.append(_("{credits} credits taken back", credits=credit(-earned)))
    if (accepted := after.accepted - before.accepted) > 0:
        news.append(ngettext("{n} task accepted", "{n} tasks accepted", accepted))
    if (rejected := after.rejected - before.rejected) > 0:
        news.append(ngettext("{n} task refused", "{n} tasks refused", rejected))
    grown = {
        run: version - max(0, before.versions[run])
        for run, version in after.versions.items()
        if version > before.versions.get(run, version)
    }
    for run in sorted(grown, key=lambda name: -grown[name])[:RUNS_MAX]:
        name, version = printable(run, 40), after.versions[run]
        news.append(_("{run} at version {version} (+{n})", run=name, version=version, n=grown[run]))
    absence = ago(after.at - before.at)
    return (
        _("since your last look {time} ago: {news}", time=absence, news=", ".join(news))
        if news
        else ""
    )


class Visits:
    """Visits of the owner to the screen; the last visit is stored at `path`, or nowhere without a
    path.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last: Visit | None = None
        self._away = path is not None  # no visit has begun since the last absence
        if path is not None:
            with suppress(VolunteerError):  # a damaged file is replaced after this visit
                self._last = read_record(path, Visit)

    def start(self, status: Status, now: float) -> str:
        """Begin a visit if the coordinator has sent the figures; return the digest of the absence
        before it, "" without figures or news.
        """
        after = visit_of(status, now) if self._away else None
        if after is None:
            return ""
        self._away, before = False, self._last
        return digest(before, after) if before is not None else ""

    def end(self, status: Status, now: float) -> None:
        """End the visit: store the figures that the owner saw last."""
        if self._path is None or self._away or (last := visit_of(status, now)) is None:
            return
        self._last, self._away = last, True
        with suppress(VolunteerError, OSError):  # on a full disk only the next digest is lost
            write_record(self._path, last)
