"""Health of a coordinator: its present troubles, worst first, most with a remedy.

Troubles come from the standing alerts, which a server checked within the last half minute, and from
the overview of this moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from coordinator.rules.overview import Level, Overview, ReplicaLine, RunLine, Trouble
from coordinator.rules.standstill_causes import HANDLING
from shared.protocol.base import Cause
from shared.text import counted, duration
from shared.units import HOUR_S

BEAT_S = 5.0  # interval of the beats of a serving process
SILENT_S = 4 * BEAT_S  # a server without a beat for longer is silent
VERDICTS_MAX = 200  # waiting contributions above which the verdicts count as late
STOPPED_S = HOUR_S  # a server silent for this long has probably been stopped
CLOCK_S = 60.0  # harmless difference of clocks
_ORDER: dict[Level, int] = {"bad": 0, "watch": 1, "good": 2}

AlertKind = Literal[
    "failed check",
    "refusals",
    "sybil wave",
    "standstill",
    "disk",
    "read only",
    "errors",
    "server",
    "address",
    "rollback",
    "backup",
    "certificate",
    "database",
    "store",
]
OF_RUNS: frozenset[AlertKind] = frozenset({"standstill"})  # the lines of the runs show these


class StandingAlert(msgspec.Struct, frozen=True, kw_only=True):
    """Trouble that lasts, as of its last check, and the time at which its alert was sent."""

    kind: AlertKind
    about: str
    level: Level = "bad"
    message: str
    todo: str = ""
    since: float
    seen_at: float
    said_at: float | None = None
    newest_at: float = 0.0  # time of the newest event that was sent
    said_bad: bool = False  # the alert was sent while its level was "bad"

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.about

    @property
    def sentence(self) -> str:
        """Return the fact, and its remedy."""
        return f"{self.message}: {self.todo}" if self.todo else self.message


def judge(
    overview: Overview, standing: Sequence[StandingAlert] = ()
) -> tuple[Trouble, tuple[Trouble, ...]]:
    """Return the verdict in one line, and all its reasons: the troubles that the overview shows,
    and the standing alerts.
    """
    if not any(alive(replica, overview.at) for replica in overview.replicas):
        standing = ()  # without a server, no check keeps the alerts up to date
    alerts = [_trouble_of(alert) for alert in standing if alert.kind not in OF_RUNS]
    troubles = [*_servers(overview), *_database(overview), *_work(overview)]
    troubles += [alert for alert in alerts if alert.level == "bad"]
    if any(alive(replica, overview.at) for replica in overview.replicas):
        troubles += [trouble for run in overview.runs for trouble in _run(run)]
    troubles += [alert for alert in alerts if alert.level != "bad"]  # these stop no work yet
    troubles.sort(key=lambda trouble: _ORDER[trouble.level])
    if not troubles:
        return Trouble(level="good", subject="", text=_well(overview)), ()
    first = troubles[0]
    more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
    text = f"{first.subject}: {first.text}{more}"
    return Trouble(level=first.level, subject="", text=text, todo=first.todo), tuple(troubles)


def alive(replica: ReplicaLine, now: float) -> bool:
    """Return True if a serving process has sent a recent beat."""
    return now - replica.beat_at <= SILENT_S


def _well(overview: Overview) -> str:
    at_work = sum(overview.workers.get(state, 0) for state in ("training", "online"))
    running = [run for run in overview.runs if run.state == "running"]
    merged = max((run.head_at or 0.0 for run in running if run.version > 0), default=0.0)
    newest = f", a version {duration(overview.at - merged)} ago" if merged else ""
    return (
        f"all is well: {counted(at_work, 'worker')} on {counted(len(running), 'running run')}"
        f"{newest}"
    )


def _trouble_of(alert: StandingAlert) -> Trouble:
    """Return the trouble that an alert is about."""
    return Trouble(
        level=alert.level,
        subject=alert.kind,
        text=alert.message,
        todo=alert.todo,
    )


def _servers(overview: Overview) -> Iterator[Trouble]:
    """Yield the trouble that no server sends beats; a server with a full disk cannot send them."""
    stills = (run.standstill for run in overview.runs if run.standstill is not None)
    closed = next((still for still in stills if still.cause == Cause.CLOSED), None)
    silent_all = not any(alive(replica, overview.at) for replica in overview.replicas)
    if closed is not None and silent_all:
        yield Trouble(level="bad", subject="server", text=closed.message, todo=closed.todo)
    elif silent_all:
        last = max((replica.beat_at for replica in overview.replicas), default=None)
        silent = (
            "" if last is None else f", the last one was seen {duration(overview.at - last)} ago"
        )
        yield Trouble(
            level="bad",
            subject="server",
            text=f"no server is running{silent}",
            todo="start it with `coordinator serve`",
        )


def _database(overview: Overview) -> Iterator[Trouble]:
    if overview.database.failed:
        yield Trouble(level="bad", subject="database", text=overview.database.failed)
    ahead_s = overview.database.ahead_s
    if abs(ahead_s) > CLOCK_S:
        kind = "ahead of" if ahead_s > 0 else "behind"
        yield Trouble(
            level="watch",
            subject="clock",
            text=f"the database's time is {duration(abs(ahead_s))} {kind} this machine's clock",
            todo="set the clocks right; until then no time stored in SQLite advances",
        )


def _work(overview: Overview) -> Iterator[Trouble]:
    if not any(run.state == "running" for run in overview.runs):
        draft = next((run.name for run in overview.runs if run.state == "draft"), "")
        paused = next((run.name for run in overview.runs if run.state == "paused"), "")
        todo = "`coordinator run create --example` makes one"
        if paused:
            todo = f"`coordinator run resume {paused}` hands out its tasks again"
        elif draft:
            todo = f"`coordinator run start {draft}` begins"
        yield Trouble(level="watch", subject="runs", text="no run is running", todo=todo)
    waiting = overview.queues.get("verdicts", 0)
    if waiting > VERDICTS_MAX:
        yield Trouble(
            level="watch",
            subject="verdicts",
            text=f"{counted(waiting, 'contribution')} wait for a verdict",
            todo="the server has too few cores for its checks: lower `[trust]` rates, or add some",
        )


def _run(run: RunLine) -> Iterator[Trouble]:
    """Yield the troubles of a run: its standstill, and its failed tasks."""
    still = run.standstill
    if still is not None and (level := HANDLING[still.cause].level) != "good":
        yield Trouble(level=level, subject=run.name, text=still.message, todo=still.todo)
    if run.failed and run.state in ("running", "paused"):
        yield Trouble(
            level="watch",
            subject=run.name,
            text=f"{counted(run.failed, 'task')} failed for good",
            todo="`coordinator task list --failed` shows why, `coordinator task requeue --all` "
            "tries again",
        )
