"""Alerts to the organiser: a line in the log, and a POST to `alert_webhook` where one is set.

    failed check   a recompute proved that work was made up
    refusals       a third of the newest contributions were refused
    sybil wave     many strangers registered within minutes
    database       its file is damaged, was removed, or its disk failed: nothing is written any more

Each kind is silent for an hour after it was said; the state of the accounts is in `coordinator
trust`.
"""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec
import structlog

from coordinator.database import standings
from shared.clock import Clock

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.config import Settings
    from coordinator.database.engine.open import Database

LOOK_S = 30.0
SILENT_S = 3600.0
WAVE_S, WAVE_MIN = 600.0, 25  # strangers registered within this time
REFUSED_SHARE, DECISIONS_MIN = 1 / 3, 30
POST_S = 10.0

Kind = Literal["failed check", "refusals", "sybil wave", "database"]
log = structlog.get_logger("alerts")


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a POST to the webhook."""

    kind: Kind
    message: str
    server: str
    at: float  # UTC epoch seconds


class Alerts:
    """Looks for what the organiser should know."""

    def __init__(self, db: Database, clock: Clock, settings: Settings) -> None:
        self._db = db
        self._clock = clock
        self._server = settings.name
        self._webhook = settings.alert_webhook
        self._looked_at = clock.now()
        self._said: dict[str, float] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Look until `stop` is set."""
        while not stop.is_set():
            await self.look()
            stopped = asyncio.ensure_future(stop.wait())
            pause = asyncio.ensure_future(self._clock.sleep(LOOK_S))
            try:
                await asyncio.wait((stopped, pause), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.cancel()
                pause.cancel()

    async def look(self) -> tuple[Alert, ...]:
        """Raise what is due; return it."""
        now, since = self._clock.now(), self._looked_at
        if self._db.failed:
            found: dict[Kind, str] = {"database": self._db.failed}
        else:
            found = await self._db.read(lambda conn: dict(_found(conn, since, now)))
        due = tuple(
            Alert(kind=kind, message=message, server=self._server, at=now)
            for kind, message in found.items()
            if now - self._said.get(kind, -SILENT_S) >= SILENT_S
        )
        silent = found.keys() - {alert.kind for alert in due}
        if "failed check" not in silent:  # else they are told when the hour is over
            self._looked_at = now
        for alert in due:
            self._said[alert.kind] = now
            log.warning("alert", kind=alert.kind, message=alert.message)
            if self._webhook:
                await asyncio.to_thread(self._post, alert)
        return due

    def _post(self, alert: Alert) -> None:
        """Send an alert; what fails is logged."""
        request = urllib.request.Request(  # http or https, checked by the settings
            self._webhook,
            data=msgspec.json.encode(alert),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=POST_S) as reply:
                reply.read(1)
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            log.warning("alert not delivered", kind=alert.kind, error=str(error))


def _found(conn: Connection, since: float, now: float) -> Iterator[tuple[Kind, str]]:
    failed = standings.failed_recomputes(conn, since)
    if failed:
        numbers = ", ".join(map(str, failed[:5])) + (", ..." if len(failed) > 5 else "")
        yield (
            "failed check",
            f"done again, contribution {numbers} is not what was submitted: the account is"
            " suspended, see `coordinator trust`",
        )
    refused, decided = standings.refusals(conn)
    if decided >= DECISIONS_MIN and refused > REFUSED_SHARE * decided:
        yield (
            "refusals",
            f"{refused} of the newest {decided} contributions were refused: `coordinator task list"
            " --failed` shows why",
        )
    strangers = standings.registered(conn, now - WAVE_S)
    if strangers >= WAVE_MIN:
        yield (
            "sybil wave",
            f"{strangers} strangers registered within {WAVE_S / 60:.0f} minutes: raise"
            " `proof_of_work_bits`, or serve by invitation for a while",
        )
