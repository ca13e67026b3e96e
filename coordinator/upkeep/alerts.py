"""Alerts to the organiser: a line in the log, a POST to `alert_webhook`.

Each alert is sent once, again for a newer event or a worse level, and when it is over. Lasting and
undelivered alerts are one value in the database, so that a restart neither repeats nor forgets one,
and only one of several replicas sends it. A failed delivery is retried for some hours.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import urllib.error
import urllib.request
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec
import structlog

from coordinator.database import key_values
from coordinator.rules.health import AlertKind, StandingAlert
from coordinator.rules.standstill_causes import span
from coordinator.upkeep.alert_conditions import (
    LOCAL_KINDS,
    Condition,
    PublicAddress,
    certificate_end,
    failing,
    here,
    in_database,
)
from shared.decoding import decode
from shared.errors import NotFound, VolunteerError, why
from shared.programs.command_hints import complete_commands
from shared.text import printable
from shared.units import HOUR_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from coordinator.platform import Platform
    from coordinator.runs.standstills import Standstills
    from coordinator.traffic import TrafficCounter

LOOK_S = 30.0
REPEAT_S = HOUR_S  # shortest time after which a newer event is sent, too
WINDOW_LOOKS = 10  # checks over which the share of failed requests is counted
UNSEEN_S = 600.0  # alerts about a machine end this long after its last check
STANDING_MAX, LETTERS_MAX = 500, 100
# Waits after each failed delivery; after the last wait the notification is dropped.
RETRY_S = (30.0, 120.0, 600.0, HOUR_S, 4 * HOUR_S)

log = structlog.get_logger("alerts")


SEND_S = 10.0


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert as it is sent: about a trouble, or its end."""

    kind: AlertKind | Literal["test"]
    state: Literal["on", "over"]
    about: str  # a run or a machine; "" = the whole server
    message: str
    server: str
    since: float  # UTC epoch seconds
    at: float


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """Alert waiting for delivery."""

    id: int
    alert: Alert
    tries: int = 0
    next_at: float = 0.0


class AlertState(msgspec.Struct, frozen=True, kw_only=True):
    """Alerts that last, and alerts that wait for delivery, as one stored value."""

    standing: tuple[StandingAlert, ...] = ()
    letters: tuple[Letter, ...] = ()
    letter: int = 0  # number of the newest alert for delivery


class TestDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a test alert."""

    problem: str = ""  # "" = the test arrived


class Alerts:
    """Checks for alert conditions and sends their alerts."""

    def __init__(self, on: Platform, traffic: TrafficCounter, standstills: Standstills) -> None:
        settings = on.settings
        self._db = on.db
        self._clock = on.clock
        self._signals = on.signals
        self._settings = settings
        self._space = on.space
        self._traffic = traffic
        self._standstills = standstills
        self._answered = deque([traffic.answered()], maxlen=WINDOW_LOOKS)
        # the port is named, since one machine may have several replicas
        self._machine = f"{socket.gethostname()[:64]}:{settings.port}"
        self.address = PublicAddress(settings.url)
        self._state = AlertState()
        # tries after the first to send the alert that the database failed; -1 = not yet tried
        self._failure_retries = -1
        self.certificate_ends_at = certificate_end(settings)  # end of the served certificate

    def standing(self) -> Counter[str]:
        """Return the number of lasting alerts of each kind, as of this process's last check."""
        return Counter(alert.kind for alert in self._state.standing if alert.said_at is not None)

    async def run(self, stop: asyncio.Event) -> None:
        """Check until `stop` is set."""
        watch = self._signals.watch("alerts")
        while not stop.is_set():
            await self.look()
            await watch.wait(LOOK_S)

    async def look(self) -> tuple[Alert, ...]:
        """Raise due alerts and deliver waiting alerts; return the raised alerts."""
        if self._db.failed:
            return await self._send_failure(self._db.failed)
        try:
            raised = await self._look()
            await self._deliver()
        except VolunteerError as error:
            log.warning("alerts could not look", error=error.message)
            return ()
        return raised

    async def _look(self) -> tuple[Alert, ...]:
        now = self._clock.now()
        open_now = _open_alerts(self._state)
        local = here(self._space, self.certificate_ends_at, now, self._machine, open_now)
        local += failing(self._lately(), self._machine)
        await asyncio.to_thread(self.address.look)
        local += self.address.condition(self._machine)

        def read(conn: Connection) -> tuple[AlertState, list[Condition]]:
            state = self._stored(conn)
            open_now, answers = _open_alerts(state), self._standstills.read(conn)
            return state, [*local, *in_database(conn, self._settings, now, open_now, answers)]

        before, conditions = await self._db.read(read)
        if self._next(before, conditions, now)[0] == before:
            self._state = before
            return ()

        def write(conn: Connection) -> tuple[AlertState, list[Alert]]:
            key_values.locked(conn, key_values.ALERTS)
            state = self._stored(conn)
            # If another replica has changed the state meanwhile, the conditions are read again, by
            # the thresholds of that state.
            state, raised = self._next(state, conditions if state == before else read(conn)[1], now)
            self._put(conn, state)
            return state, raised

        self._state, raised = await self._db.write(write)
        for alert in raised:
            message = self._addressed(alert.message)
            log.warning("alert", kind=alert.kind, state=alert.state, message=message)
        return tuple(raised)

    def _addressed(self, message: str) -> str:
        """Return a sentence whose commands name this coordinator; the commands of the stored
        sentence do not, since each of its readers reaches the coordinator in another way.
        """
        return complete_commands(message, "coordinator", self._settings.options)

    def _lately(self) -> tuple[int, int]:
        """Return the requests during the last checks, and how many were answered with 5xx."""
        requests, errors = self._traffic.answered()
        before = self._answered[0]
        self._answered.append((requests, errors))
        return requests - before[0], errors - before[1]

    def _next(
        self, state: AlertState, conditions: Sequence[Condition], now: float
    ) -> tuple[AlertState, list[Alert]]:
        """Return the state after a check, and the alerts to send."""
        standing, alerts = advance(state, conditions, now, self._machine, self._settings.name)
        letters, number = list(state.letters), state.letter
        for alert in alerts if self._settings.alert_webhook else ():
            number += 1
            letters.append(Letter(id=number, alert=alert, next_at=now))
        newest_letters = tuple(letters[-LETTERS_MAX:])
        return AlertState(standing=standing, letters=newest_letters, letter=number), alerts

    def _stored(self, conn: Connection) -> AlertState:
        text = key_values.get(conn, key_values.ALERTS)
        return decode(text, AlertState) if text else self._state

    # --- delivery ---

    async def _deliver(self) -> None:
        """Send the due alerts; a failed delivery is retried later."""
        now = self._clock.now()
        if not any(letter.next_at <= now for letter in self._state.letters):
            return
        letters_due = await self._db.write(lambda conn: self._take(conn, now))
        results = await asyncio.gather(*(self._send(letter) for letter in letters_due))
        done = {
            letter.id
            for letter, problem in zip(letters_due, results, strict=True)
            if not problem or letter.tries > len(RETRY_S)
        }
        self._state = await self._db.write(partial(self._drop, ids=done))

    def _take(self, conn: Connection, now: float) -> list[Letter]:
        """Return the due alerts, reserved for this process."""
        key_values.locked(conn, key_values.ALERTS)
        state = self._stored(conn)
        letters_due, letters = [], []
        for letter in state.letters:
            if letter.next_at <= now:
                wait_s = RETRY_S[min(letter.tries, len(RETRY_S) - 1)]
                letter = msgspec.structs.replace(
                    letter, tries=letter.tries + 1, next_at=now + wait_s
                )
                letters_due.append(letter)
            letters.append(letter)
        self._put(conn, msgspec.structs.replace(state, letters=tuple(letters)))
        return letters_due

    def _drop(self, conn: Connection, ids: set[int]) -> AlertState:
        key_values.locked(conn, key_values.ALERTS)
        state = self._stored(conn)
        waiting = tuple(letter for letter in state.letters if letter.id not in ids)
        state = msgspec.structs.replace(state, letters=waiting)
        self._put(conn, state)
        return state

    def _put(self, conn: Connection, state: AlertState) -> None:
        key_values.put(conn, key_values.ALERTS, msgspec.json.encode(state).decode())

    async def _send(self, letter: Letter) -> str:
        """Send one alert; return the failure, or ""."""
        message = self._addressed(letter.alert.message)
        alert = msgspec.structs.replace(letter.alert, message=message)
        problem = await deliver(self._settings.alert_webhook, alert)
        if problem:
            last = letter.tries > len(RETRY_S)
            event = "alert given up" if last else "alert not delivered"
            log.warning(event, kind=alert.kind, tries=letter.tries, error=problem)
        return problem

    async def _send_failure(self, why: str) -> tuple[Alert, ...]:
        """Send the alert that the database failed; its tries are counted in memory."""
        now = self._clock.now()
        first = self._failure_retries < 0
        alert = self._alert("database", why, now)
        if first:
            log.warning("alert", kind=alert.kind, state=alert.state, message=alert.message)
        if self._failure_retries <= len(RETRY_S):
            self._failure_retries += 1
            if not await deliver(self._settings.alert_webhook, alert):
                self._failure_retries = len(RETRY_S) + 1
        return (alert,) if first else ()

    def _alert(self, kind: AlertKind | Literal["test"], message: str, now: float) -> Alert:
        return Alert(
            kind=kind, state="on", about="", message=message, server=self._settings.name,
            since=now, at=now,
        )  # fmt: skip

    # --- for the organiser ---

    async def test(self) -> TestDelivery:
        """Send a test to the webhook. Raises NotFound without a webhook."""
        if not self._settings.alert_webhook:
            raise NotFound("alert_webhook is not set, see docs/monitoring.md")
        alert = self._alert("test", "a test: alerts of this server arrive here", self._clock.now())
        return TestDelivery(problem=await deliver(self._settings.alert_webhook, alert))

    async def list(self) -> tuple[StandingAlert, ...]:
        """Return the sent alerts that are not over."""
        return await self._db.read(standing)


def standing(conn: Connection) -> tuple[StandingAlert, ...]:
    """Return the sent alerts that are not over."""
    text = key_values.get(conn, key_values.ALERTS)
    alerts = decode(text, AlertState).standing if text else ()
    return tuple(alert for alert in alerts if alert.said_at is not None)


def _open_alerts(state: AlertState) -> set[tuple[str, str]]:
    """Return the keys of the sent alerts that are not over."""
    return {alert.key for alert in state.standing if alert.said_at is not None}


def end_sentence(alert: StandingAlert, now: float) -> str:
    """Return the sentence about the end of a trouble: its fact and its duration, without advice."""
    return f"{alert.message}; that lasted {span(now - alert.since)}"


def advance(
    state: AlertState, conditions: Sequence[Condition], now: float, machine: str, server: str
) -> tuple[tuple[StandingAlert, ...], list[Alert]]:
    """Return the lasting conditions after a check, and the alerts to send."""
    before = {alert.key: alert for alert in state.standing}
    after: list[StandingAlert] = []
    alerts: list[Alert] = []
    for condition in conditions[:STANDING_MAX]:
        alert = _updated(condition, before.pop((condition.kind, condition.about), None), now)
        if _due(alert, condition, now):
            alert = msgspec.structs.replace(alert, said_at=now, newest_at=condition.newest_at)
            alerts.append(_alert(alert, "on", alert.sentence, server, now))
        after.append(alert)
    for unseen in before.values():
        if _stands(unseen, now, machine):
            after.append(unseen)
        elif unseen.said_at is not None:
            alerts.append(_alert(unseen, "over", end_sentence(unseen, now), server, now))
    return tuple(after[:STANDING_MAX]), alerts


def _updated(condition: Condition, before: StandingAlert | None, now: float) -> StandingAlert:
    """Return the alert of a condition that a check has found, in the words of that check."""
    alert = StandingAlert(
        kind=condition.kind,
        about=condition.about,
        level=condition.level,
        message=condition.message,
        todo=condition.todo,
        newest_at=condition.newest_at,
        since=now,
        seen_at=now,
    )
    if before is None:
        return alert
    return msgspec.structs.replace(
        alert,
        since=before.since,
        said_at=before.said_at,
        newest_at=before.newest_at,
        said_bad=before.said_bad or (before.said_at is not None and before.level == "bad"),
    )


def _due(alert: StandingAlert, condition: Condition, now: float) -> bool:
    """Return True if an alert is due: once its condition outlasts its patience, once its level
    rises, and for a newer event after a while.
    """
    if alert.said_at is None:
        return now - alert.since >= condition.patience_s
    if alert.level == "bad" and not alert.said_bad:
        return True
    return condition.newest_at > alert.newest_at and now - alert.said_at >= REPEAT_S


def _stands(unseen: StandingAlert, now: float, machine: str) -> bool:
    """Return True if an alert still lasts although this check did not find its condition."""
    elsewhere = unseen.kind in LOCAL_KINDS and unseen.about != machine
    return elsewhere and now - unseen.seen_at < UNSEEN_S


def _alert(
    alert: StandingAlert, state: Literal["on", "over"], message: str, server: str, now: float
) -> Alert:
    return Alert(
        kind=alert.kind,
        about=alert.about,
        since=alert.since,
        state=state,
        message=message,
        server=server,
        at=now,
    )


async def deliver(webhook: str, alert: Alert) -> str:
    """Send an alert; return the failure; "" for a delivered alert, or without a webhook."""
    if not webhook:
        return ""
    try:
        await asyncio.to_thread(_post, webhook, alert)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        return (why(error) if isinstance(error, OSError) else str(error))[:500] or repr(error)
    return ""


def _post(webhook: str, alert: Alert) -> None:
    """Post an alert. Raises URLError, HTTPException, OSError."""
    over = "over: " if alert.state == "over" else ""
    line = printable(f"{alert.server}: {over}{alert.message}", 1000)
    # Most chats read `text`, Discord reads `content`.
    body = msgspec.structs.asdict(alert) | {"text": line, "content": line}
    request = urllib.request.Request(  # http or https, checked by the settings
        webhook,
        data=msgspec.json.encode(body),
        headers={"Content-Type": "application/json", "User-Agent": "volunteer-coordinator"},
    )
    with urllib.request.urlopen(request, timeout=SEND_S) as reply:
        reply.read(1)
