"""Alert conditions, each with a sentence, most with a remedy.

failed check   a recompute proved that work was made up
refusals       a third of the newest contributions were refused
sybil wave     many strangers registered within minutes
rollback       a fifth of a version came from accounts suspended since
standstill     a run does not go on; see rules/standstill_causes.py
disk           free space is low: soon nothing new is accepted
read only      nothing new is accepted: too little is free, or a disk cannot be written
errors         requests are answered with 5xx
server         another serving process is silent
address        the public address does not lead here: for example, its proxy answers 502
backup         the newest backup is old, or no backup was made, or the next has no room
certificate    the TLS certificate ends soon
database       its file is damaged, was removed, or its disk failed: nothing is written any more;
               or a run's stored file cannot be read, or its workload is not installed here; or
               it lost its newest transactions
store          the blob store belongs to another database, or to a second one: nothing is deleted
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator import certificates
from coordinator.database import key_values, runs, standings
from coordinator.database.monitoring import replicas
from coordinator.merging import rollback_proposal
from coordinator.rules.health import SILENT_S, STOPPED_S, AlertKind
from coordinator.rules.standstill_causes import HANDLING, span
from coordinator.upkeep.store_mark import TAKE_OVER
from shared.errors import VolunteerError, why
from shared.network.links import is_loopback
from shared.text import duration, printable, size
from shared.units import DAY_S

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from sqlalchemy import Connection

    from coordinator.config import Settings
    from coordinator.rules.overview import Level
    from coordinator.storage.disk_space import Space
    from shared.protocol.base import Standstill

LOCAL_KINDS: frozenset[AlertKind] = frozenset(
    {"disk", "read only", "errors", "address", "certificate"}
)  # kinds about one replica

ANSWER_S = 10.0
# Two thresholds for each alert: it is sent at the first, and ends at the second, harmless one, so
# that a figure near one threshold does not send it again and again.
REFUSED_SHARE, CALM_SHARE, DECISIONS_MIN = 1 / 3, 1 / 4, 30
# multiples of the disk's floor at which space becomes low, and at which it is enough again
LOW_FLOORS, ENOUGH_FLOORS = 4, 5
# a certificate that ends within the first time ends soon, within the second nearly at once
CERTIFICATE_S, CERTIFICATE_BAD_S = 21 * DAY_S, 7 * DAY_S
CHECK_S = DAY_S  # a failed check is a trouble for this time
NOWHERE_S = 60.0  # a server that can work on a run ends the alert of another that cannot
WAVE_S, WAVE_MIN = 600.0, 25  # a wave: WAVE_MIN strangers or more register within WAVE_S
ERRORS_SHARE, ERRORS_MIN = 0.01, 10  # share and least number of requests answered with 5xx


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """Present trouble; an alert is sent once it has lasted for `patience_s`."""

    kind: AlertKind
    message: str
    todo: str = ""  # what the organiser should do about it
    about: str = ""
    level: Level = "bad"  # "watch" = no work is stopped yet
    patience_s: float = 0.0
    newest_at: float = 0.0  # newest event; a newer event is sent even while the alert lasts


def certificate_end(settings: Settings) -> float | None:
    """Return when this server's certificate expires; None without a certificate."""
    own_certificate = settings.directory / certificates.CERT_FILE
    path = Path(settings.tls_cert) if settings.tls_cert else own_certificate
    beyond = settings.tls_cert or not (settings.url or is_loopback(settings.host))
    if not beyond or not path.is_file():
        return None
    try:
        return certificates.ends_at(path)
    except VolunteerError:  # the server's start reports what is wrong with the certificate
        return None


def here(
    space: Space,
    ends_at: float | None,
    now: float,
    machine: str,
    open_now: Collection[tuple[str, str]],
) -> list[Condition]:
    """Return the troubles of this machine; `open_now` as in `in_database`."""
    conditions = []
    open_before = ("disk", machine) in open_now
    try:
        free = space.free_bytes()
    except OSError:
        free = 0
    if space.read_only:
        message = f"nothing new is accepted on {machine}: {space.why}"
        todo = ("make it writable" if space.broken else "free space") + "; work then continues"
        conditions.append(Condition(kind="read only", about=machine, message=message, todo=todo))
    if free < (ENOUGH_FLOORS if open_before else LOW_FLOORS) * space.floor_bytes:
        floor = size(space.floor_bytes)
        message = f"{size(free)} are free on {machine}, and below {floor} nothing is accepted"
        conditions.append(Condition(kind="disk", about=machine, message=message, level="watch"))
    if ends_at is not None and (left := ends_at - now) < CERTIFICATE_S:
        ends = f"ends in {span(left)}" if left > 0 else "has ended, nobody can connect"
        condition = Condition(
            kind="certificate",
            about=machine,
            message=f"the TLS certificate of {machine} {ends}",
            todo="renew it and start again",
            level="watch" if left >= CERTIFICATE_BAD_S else "bad",
        )
        conditions.append(condition)
    return conditions


def failing(answered: tuple[int, int], machine: str) -> list[Condition]:
    """Return the trouble that too many requests were answered with 5xx, if they were."""
    requests, errors = answered
    if errors < ERRORS_MIN or errors <= ERRORS_SHARE * requests:
        return []
    message = f"{errors:,} of {requests:,} requests to {machine} failed"
    todo = "its log says why"
    return [Condition(kind="errors", about=machine, message=message, todo=todo, level="watch")]


class PublicAddress:
    """Asks whether the public address of the settings answers without a server error."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._asked = self._reached = False
        self.failure = ""  # the address and the fault of its answer; "" = no fault

    def look(self) -> None:
        """Ask the public address once. The first failure is ignored, since a balancer may not have
        seen this server yet. Silence before the first reply is ignored too, since not every router
        leads a machine back to itself.
        """
        if not self._url:
            return
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        failure = ""
        try:
            with opener.open(f"{self._url}/health", timeout=ANSWER_S):
                self._reached = True
        except urllib.error.HTTPError as error:
            failure = f"answers {error.code}" if error.code >= 500 else ""
            error.close()
        # no connection, no valid reply, or a name that cannot be looked up
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = why(error) if isinstance(error, OSError) else repr(error)
            failure = f"does not answer ({cause})" if self._reached else ""
        self.failure = f"{self._url} {failure}" if failure and self._asked else ""
        self._asked = True

    def condition(self, machine: str) -> list[Condition]:
        """Return the condition of an address that fails while `machine` serves."""
        if not self.failure:
            return []
        message = f"{self.failure}, and {machine} serves"
        return [Condition(kind="address", about=machine, message=message, todo="look at its proxy")]


def in_database(
    conn: Connection,
    settings: Settings,
    now: float,
    open_now: Collection[tuple[str, str]],
    answers: Mapping[str, Standstill],
) -> Iterator[Condition]:
    """Yield the troubles that the database shows, troubles of single runs last; `open_now` are the
    sent alerts that are not over, `answers` the standstills by run.
    """
    yield from _of_servers(conn, now)
    yield from _of_losses(conn)
    yield from _of_store(conn)
    yield from _of_backup(conn, settings.alert_backup_days, now)
    yield from _of_work(conn, now, open_now)
    yield from _of_runs(conn, answers)
    yield from _of_rollbacks(conn)


def _of_work(
    conn: Connection, now: float, open_now: Collection[tuple[str, str]]
) -> Iterator[Condition]:
    failed = standings.failed_recomputes(conn, now - CHECK_S)
    if failed:
        numbers = [str(number) for number, _ in failed[:5]] + ["..."] * (len(failed) > 5)
        yield Condition(
            kind="failed check",
            message=f"a recompute refuted contribution {', '.join(numbers)}:"
            " the account was suspended",
            todo="see `coordinator trust`",
            level="watch",
            newest_at=failed[0][1],
        )
    refused, decided = standings.refusals(conn)
    if many_refused(refused, decided, open_before=("refusals", "") in open_now):
        message = f"{refused} of the newest {decided} contributions were refused"
        todo = "`coordinator task list --failed` shows why"
        yield Condition(kind="refusals", message=message, todo=todo)
    strangers = standings.registered(conn, now - WAVE_S)
    if strangers >= (WAVE_MIN / 2 if ("sybil wave", "") in open_now else WAVE_MIN):
        message = f"{strangers} strangers registered within {WAVE_S / 60:.0f} minutes"
        todo = "raise `proof_of_work_bits`, or serve by invitation for a while"
        yield Condition(kind="sybil wave", message=message, todo=todo, level="watch")


def _of_runs(conn: Connection, answers: Mapping[str, Standstill]) -> Iterator[Condition]:
    for name, damage in runs.damaged(conn):
        yield Condition(
            kind="database",
            about=name,
            message=f"{name} stands still: {damage.why}",
            todo=damage.todo,
            patience_s=NOWHERE_S if damage.here_only else 0.0,
        )
    for name, still in answers.items():
        handling = HANDLING[still.cause]
        if handling.patience_s is not None:
            yield Condition(
                kind="standstill",
                about=name,
                message=f"{name} does not go on: {still.message}",
                todo=still.todo,
                level=handling.level,
                patience_s=handling.patience_s,
                newest_at=still.since or 0.0,
            )


def _of_rollbacks(conn: Connection) -> Iterator[Condition]:
    for run in runs.every(conn, runs.OPEN):
        if heal := rollback_proposal.proposal(conn, run):
            spoilt = f"{run.name}@{heal.version}"
            message = f"{heal.share:.0%} of {spoilt} came from accounts suspended since"
            todo = f"`{heal.command}` goes back"
            yield Condition(
                kind="rollback", about=spoilt, message=message, todo=todo, level="watch"
            )


def _of_servers(conn: Connection, now: float) -> Iterator[Condition]:
    # The newest of the processes at one address replaced the others.
    beats = {
        printable(replica.figures.where or replica.id[:8], 80): replica.beat_at
        for replica in reversed(replicas.listing(conn))  # the newest beat last
    }
    for where, beat_at in beats.items():
        if (silent_s := now - beat_at) > SILENT_S:
            yield Condition(
                kind="server",
                about=where,
                message=f"{where} has been silent for {duration(silent_s)}",
                todo="look at its log, and start it again",
                level="bad" if silent_s < STOPPED_S else "watch",
            )


def _of_losses(conn: Connection) -> Iterator[Condition]:
    if lost := key_values.get(conn, key_values.LOST):
        yield Condition(
            kind="database",
            about="losses",
            message=f"the database lost its newest transactions: {lost}",
            todo="put a newer copy in its place, or let the volunteers go on with this one by "
            "`coordinator migrate --recovered`; nothing is deleted meanwhile",
        )


def _of_store(conn: Connection) -> Iterator[Condition]:
    if trouble := key_values.get(conn, key_values.STORE_TROUBLE):
        yield Condition(kind="store", about="store", message=trouble, todo=TAKE_OVER)


def _of_backup(conn: Connection, most_days: float, now: float) -> Iterator[Condition]:
    open_runs = runs.every(conn, runs.OPEN)
    if not open_runs:
        return
    text = key_values.get(conn, key_values.BACKUP)
    oldest = min(run.started_at or now for run in open_runs)
    age_s = now - float(text or oldest)
    if room := key_values.get(conn, key_values.BACKUP_ROOM):
        todo = "free space there, or keep fewer backups with `--keep`"
        yield Condition(kind="backup", about="room", message=room, todo=todo, level="watch")
    if is_old(age_s, most_days):
        problem = f"the newest backup is {span(age_s)} old" if text else "no backup was ever made"
        todo = "`coordinator backup DIR` makes one"
        yield Condition(kind="backup", message=problem, todo=todo, level="watch")


def many_refused(refused: int, decided: int, *, open_before: bool = False) -> bool:
    """Return True if too many of the newest decisions are refusals; `open_before` is True while the
    alert is open.
    """
    share = CALM_SHARE if open_before else REFUSED_SHARE
    return decided >= DECISIONS_MIN and refused > share * decided


def is_old(age_s: float, most_days: float) -> bool:
    """Return True if a backup of this age is too old, or a run of this age without a backup."""
    return bool(most_days) and age_s >= most_days * DAY_S
