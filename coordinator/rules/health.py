"""Health of a coordinator: its present troubles, worst first, each with a remedy."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.rules.overview import (
    Level,
    MergeLine,
    Overview,
    ReplicaLine,
    RunLine,
    Trouble,
)
from coordinator.rules.thresholds import (
    CERTIFICATE_SOON_S,
    DEFAULT,
    ERRORS_MIN,
    ERRORS_SHARE,
    IDLE_S,
    Thresholds,
    certificate_ends,
    disk_is_low,
    many_refused,
)
from shared.text import counted, duration, printable, size
from shared.units import DAY_S, HOUR_S

BEAT_S = 5.0  # interval of the beats of a serving process
SILENT_S = 4 * BEAT_S
VERDICTS_MAX = 200  # waiting contributions above which the verdicts count as late
GONE_S = HOUR_S  # a server silent for this long is no longer the worst trouble if others serve
CLOCK_S = 60.0  # harmless difference of clocks
CHECK_S = DAY_S  # time for which a failed check is shown
_ORDER: dict[Level, int] = {"bad": 0, "watch": 1, "good": 2}


def judge(seen: Overview, limits: Thresholds = DEFAULT) -> tuple[Trouble, tuple[Trouble, ...]]:
    """Return the verdict in one line, and all troubles behind it."""
    found = [*_servers(seen), *_storage(seen), *_work(seen), *_trust(seen)]
    for run in seen.runs:
        found += _run(run, seen.at, limits)
    found += _records(seen, limits)
    found.sort(key=lambda trouble: _ORDER[trouble.level])
    if not found:
        return Trouble(level="good", subject="", text=_well(seen)), ()
    first = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    text = f"{first.subject}: {first.text}{more}"
    return Trouble(level=first.level, subject="", text=text, todo=first.todo), tuple(found)


def alive(replica: ReplicaLine, now: float) -> bool:
    """Return True if a serving process has sent a recent beat."""
    return now - replica.beat_at <= SILENT_S


def _well(seen: Overview) -> str:
    at_work = sum(seen.workers.get(state, 0) for state in ("training", "online"))
    running = [run for run in seen.runs if run.state == "running"]
    merged = max((run.head_at or 0.0 for run in running if run.version > 0), default=0.0)
    newest = f", a version {duration(seen.at - merged)} ago" if merged else ""
    return (
        f"all is well: {counted(at_work, 'worker')} on {counted(len(running), 'running run')}"
        f"{newest}"
    )


def _servers(seen: Overview) -> Iterator[Trouble]:
    living = [each for each in seen.replicas if alive(each, seen.at)]
    if not living:
        last = max((each.beat_at for each in seen.replicas), default=None)
        silent = "" if last is None else f", the last one was seen {duration(seen.at - last)} ago"
        yield Trouble(
            level="bad",
            subject="server",
            text=f"no server is running{silent}",
            todo="start it with `coordinator serve`",
        )
    for each in seen.replicas:
        where = printable(each.figures.where or each.id[:8], 80)
        if living and not alive(each, seen.at):
            silent_s = seen.at - each.beat_at
            yield Trouble(
                # such a process has probably stopped for good
                level="bad" if silent_s < GONE_S else "watch",
                subject="server",
                text=f"{where} has been silent for {duration(silent_s)}",
                todo="look at its log, and start it again",
            )
        figures = each.figures
        if figures.address_failure and alive(each, seen.at):
            yield Trouble(
                level="bad",
                subject="address",
                text=printable(figures.address_failure, 120),
                todo="look at its proxy: the server itself is up",
            )
        if figures.errors >= ERRORS_MIN and figures.errors > ERRORS_SHARE * figures.requests:
            yield Trouble(
                level="watch",
                subject="server",
                text=f"{where} failed {figures.errors:,} of {figures.requests:,} requests",
                todo="its log says why",
            )


def _storage(seen: Overview) -> Iterator[Trouble]:
    if seen.database.failed:
        yield Trouble(level="bad", subject="database", text=seen.database.failed)
    ahead_s = seen.database.ahead_s
    if abs(ahead_s) > CLOCK_S:
        kind = "ahead of" if ahead_s > 0 else "behind"
        yield Trouble(
            level="watch",
            subject="clock",
            text=f"the database's time is {duration(abs(ahead_s))} {kind} this machine's clock",
            todo="set the clocks right; until then no time stored in SQLite advances",
        )
    for each in seen.replicas:
        figures = each.figures
        if not figures.disk_total or not alive(each, seen.at):
            continue
        if figures.read_only:
            yield Trouble(
                level="bad",
                subject="disk",
                text=f"{figures.read_only_why or size(figures.disk_free) + ' are free'}: "
                "nothing new is accepted",
                todo=("make it writable" if figures.read_only_why else "free space")
                + "; work then continues",
            )
        elif disk_is_low(figures.disk_free, figures.disk_floor):
            yield Trouble(
                level="watch",
                subject="disk",
                text=f"{size(figures.disk_free)} are free, at {size(figures.disk_floor)} "
                "nothing new is accepted",
                todo="free space, or give the blobs another disk",
            )


def _work(seen: Overview) -> Iterator[Trouble]:
    if not any(run.state == "running" for run in seen.runs):
        draft = next((run.name for run in seen.runs if run.state == "draft"), "")
        paused = next((run.name for run in seen.runs if run.state == "paused"), "")
        todo = "`coordinator run create --example` makes one"
        if paused:
            todo = f"`coordinator run resume {paused}` hands out its tasks again"
        elif draft:
            todo = f"`coordinator run start {draft}` begins"
        yield Trouble(level="watch", subject="runs", text="no run is running", todo=todo)
    waiting = seen.queues.get("verdicts", 0)
    if waiting > VERDICTS_MAX:
        yield Trouble(
            level="watch",
            subject="verdicts",
            text=f"{counted(waiting, 'contribution')} wait for a verdict",
            todo="the server has too few cores for its checks: lower `[trust]` rates, or add some",
        )
    for merge in _last_merges(seen):
        if merge.state == "failed":
            yield Trouble(
                level="bad",
                subject=merge.run,
                text=f"the merge to version {merge.version} failed: {printable(merge.message, 90)}",
                todo=f"`coordinator run show {merge.run}`; the log says more",
            )


def _last_merges(seen: Overview) -> Iterator[MergeLine]:
    """Return the newest merge of each running run."""
    running = {run.name for run in seen.runs if run.state == "running"}
    for merge in seen.merges:  # newest first
        if merge.run in running:
            running.discard(merge.run)
            yield merge


def _run(run: RunLine, now: float, limits: Thresholds) -> Iterator[Trouble]:
    if run.failed and run.state in ("running", "paused"):
        yield Trouble(
            level="watch",
            subject=run.name,
            text=f"{counted(run.failed, 'task')} failed for good",
            todo="`coordinator task list --failed` shows why, `coordinator task requeue --all` "
            "tries again",
        )
    if run.state != "running" or run.head_at is None:
        return
    silent = now - run.head_at
    if not run.workers and not run.accepted and silent > SILENT_S:
        yield Trouble(
            level="bad" if silent >= IDLE_S else "watch",
            subject=run.name,
            text=f"nobody works on it, its newest version is {duration(silent)} old",
            todo="`coordinator invite create` lets somebody in",
        )
    usual = 3600 / run.versions_an_hour if run.versions_an_hour else 0.0
    if (run.workers or run.accepted) and limits.stalled(silent, usual):
        yield Trouble(
            level="bad",
            subject=run.name,
            text=f"no new version for {duration(silent)}, with {counted(run.workers, 'worker')} "
            f"at it and {counted(run.accepted, 'update')} to merge",
            todo=f"`coordinator run show {run.name}`; refusals and merges say why",
        )


def _trust(seen: Overview) -> Iterator[Trouble]:
    if many_refused(seen.newest_refused, seen.newest_decided):
        most = seen.refusals[0].reason if seen.refusals else "other"
        yield Trouble(
            level="bad",
            subject="refusals",
            text=f"{seen.newest_refused:,} of the newest {seen.newest_decided:,} contributions "
            f"were refused, most for {most}",
            todo="the workers with refusals say whose they are",
        )
    failed_at = seen.recompute.newest_failed_at
    if failed_at is not None and seen.at - failed_at < CHECK_S:
        yield Trouble(
            level="watch",
            subject="checks",
            text=f"{duration(seen.at - failed_at)} ago a recompute proved that work was made up: "
            "its account is suspended",
            todo="`coordinator trust` shows whose",
        )


def _records(seen: Overview, limits: Thresholds) -> Iterator[Trouble]:
    opened = [run.started_at or seen.at for run in seen.runs if run.state in ("running", "paused")]
    age = seen.at - min(opened, default=seen.at)
    if opened and seen.backup_at is None and limits.backup_is_old(age):
        yield Trouble(
            level="watch",
            subject="backup",
            text="no backup was ever made",
            todo="`coordinator backup FOLDER` makes one while the server works",
        )
    elif opened and seen.backup_at is not None and limits.backup_is_old(seen.at - seen.backup_at):
        yield Trouble(
            level="watch",
            subject="backup",
            text=f"the last backup is {(seen.at - seen.backup_at) / DAY_S:.0f} days old",
            todo="`coordinator backup FOLDER` makes one while the server works",
        )
    for each in seen.replicas:
        ends = each.figures.certificate_ends_at
        left = None if ends is None else ends - seen.at
        if left is not None and certificate_ends(left):
            end = f"ends in {left / DAY_S:.0f} days" if left > 0 else "has ended"
            yield Trouble(
                level="bad" if left < CERTIFICATE_SOON_S else "watch",
                subject="certificate",
                text=f"the certificate of {printable(each.figures.where, 80)} {end}",
                todo="renew the files of tls_cert and tls_key, and start the server again",
            )
