"""Text of the monitor, made of the overview: verdict, troubles, runs, facts, tables.

Foreign text (names, reasons, messages) is made printable here, and is a cell, never markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any

from coordinator.rules.health import alive
from coordinator.rules.overview import Level, MergeLine, Overview, ReplicaLine, WorkerLine
from shared.text import duration, left, printable, size, table_lines
from shared.units import DAY_S

MARKS: dict[Level, str] = {"good": "✓", "watch": "!", "bad": "✗"}
WORDS: dict[Level, str] = {"good": "good", "watch": "look", "bad": "bad"}

ROWS_MAX = 20  # rows of a table
NARROWEST = 40  # columns below which lines are cut, not wrapped
TODO_MAX = 400  # characters of a remedy, which may name a long path
WIDE = 120  # columns from which a trouble and its remedy share a line
PARTS = ("audits", "answered audits")  # queues that the queue of recomputes includes


@dataclass(frozen=True, slots=True)
class MonitorColumn:
    """Column, and the screen width from which it is shown."""

    name: str
    of: Callable[[Any], str]
    number: bool = False
    from_width: int = 0


def count(number: float) -> str:
    """Return a number in at most six cells: 1,234, 56.7 k, 8.9 M."""
    if number < 10_000:
        return f"{number:,.0f}"
    for unit in ("k", "M", "G"):
        number /= 1000
        if number < 999.5:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:.3g} T"


def age(at: float | None, now: float) -> str:
    """Return an age: 12 s, 3:05 min, 2:10 h, 4 d; - for never."""
    if at is None:
        return "-"
    passed = max(0.0, now - at)
    return f"{passed // DAY_S:.0f} d" if passed >= 2 * DAY_S else duration(passed)


def flops(speed: float) -> str:
    """Return the GFLOP/s of a machine's best device, "-" if not measured."""
    return f"{speed / 1e9:,.3g}" if speed else "-"


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _text(text: str, limit: int = 80) -> str:
    return printable(text, limit)


def _table(
    title: str,
    columns: Sequence[MonitorColumn],
    items: Iterable[tuple[object, Level]],
    empty: str,
    width: int,
) -> Iterator[str]:
    """Yield the lines of a titled table of items with their levels; `empty` stands for no item."""
    yield title
    visible = [column for column in columns if column.from_width <= width]
    rows = [_marked([column.of(item) for column in visible], level) for item, level in items]
    if not rows:
        yield f"  {empty}"
        return
    numbers = [at for at, column in enumerate(visible) if column.number]
    for line in table_lines([column.name for column in visible], rows[:ROWS_MAX], numbers):
        yield f"  {line}"
    if len(rows) > ROWS_MAX:
        yield f"  ... {len(rows) - ROWS_MAX} more"


def _wrap(text: str, width: int, first: str, next_lines: str) -> list[str]:
    """Return a text in lines of the screen's width, the first and the next with their indents."""
    width = max(width, NARROWEST)
    return wrap(text, width, initial_indent=first, subsequent_indent=next_lines)


def _marked(cells: list[str], level: Level) -> list[str]:
    """Return the cells with a mark for the level, which is never shown by colour alone."""
    if level != "good" and cells[0]:
        cells[0] = f"{MARKS[level]} {cells[0]}"
    return cells


def runs(overview: Overview, width: int = 1000) -> Iterator[str]:
    """Return the table of runs, the open ones first."""
    now = overview.at
    name_cells = 32 if width >= 110 else 14
    columns = [
        MonitorColumn("run", lambda r: _text(r.name, name_cells)),
        MonitorColumn("workers", lambda r: count(r.workers), True),
        MonitorColumn("todo", lambda r: count(r.todo), True),
        MonitorColumn("doing", lambda r: count(r.doing), True),
        MonitorColumn("merging", lambda r: count(r.accepted), True),
        MonitorColumn("failed", lambda r: count(r.failed), True),
        MonitorColumn("newest", lambda r: age(r.head_at, now), True),
        MonitorColumn("state", lambda r: r.state),
        MonitorColumn("version", lambda r: "-" if r.version < 0 else str(r.version), True, 90),
        MonitorColumn("loss", lambda r: loss(r.loss), True, 100),
        MonitorColumn("versions/h", lambda r: f"{r.versions_an_hour:.3g}", True, 110),
        MonitorColumn("pushed/h", lambda r: count(r.pushed.samples), True, 110),
        MonitorColumn("pulled/h", lambda r: count(r.pulled.samples), True, 110),
        MonitorColumn(
            "made/h", lambda r: count(r.pushed.episodes) if r.pushed.episodes else "-", True, 130
        ),
    ]
    levels = {trouble.subject: trouble.level for trouble in reversed(overview.troubles)}
    rows = [(run, levels.get(run.name, "good")) for run in overview.runs]
    more = overview.runs_total - len(overview.runs)
    title = "Runs" + (f" ({more:,} more)" if more else "")
    return _table(title, columns, rows, "No run yet: `coordinator run create --example`", width)


def workers(overview: Overview, width: int = 1000) -> Iterator[str]:
    """Return the table of workers: failing workers first, then by newest heartbeat."""
    now = overview.at
    columns = [
        MonitorColumn("volunteer", lambda w: _text(w.volunteer, 32)),
        MonitorColumn("machine", lambda w: _text(w.hostname, 20), False, 90),
        MonitorColumn("state", lambda w: w.state),
        MonitorColumn("seen", lambda w: age(w.last_seen, now), True),
        MonitorColumn("gflop/s", lambda w: flops(w.step_flops), True),
        MonitorColumn("good", lambda w: count(w.good), True, 72),
        MonitorColumn("refused", lambda w: count(w.refused), True),
        MonitorColumn("failed", lambda w: count(w.failures), True),
        MonitorColumn("task", lambda w: "-" if w.task is None else str(w.task), True, 90),
        MonitorColumn("run", lambda w: _text(w.run, 24) or "-", False, 72),
    ]
    rows = [(worker, _worker_level(worker)) for worker in overview.machines]
    total = sum(overview.workers.values())
    title = "Workers" + (f" ({len(rows)} of {total:,})" if total > len(rows) else "")
    return _table(title, columns, rows, "No worker yet: `coordinator invite create`", width)


def _worker_level(worker: WorkerLine) -> Level:
    bad = worker.refused + worker.failures
    if not bad:
        return "good"
    return "bad" if bad > worker.good else "watch"


def merges(overview: Overview, width: int = 1000) -> Iterator[str]:
    """Return the table of the newest merges of all runs."""
    now = overview.at

    def staleness(merge: MergeLine) -> str:
        return "-" if merge.staleness is None else f"{merge.staleness:.2g}"

    columns = [
        MonitorColumn("run", lambda m: _text(m.run, 32)),
        MonitorColumn("version", lambda m: str(m.version), True),
        MonitorColumn("state", lambda m: "merged" if m.state == "committed" else m.state),
        MonitorColumn("ago", lambda m: age(m.at, now), True),
        MonitorColumn("took", lambda m: f"{m.seconds:.1f} s", True),
        MonitorColumn("updates", lambda m: str(m.contributions), True),
        MonitorColumn("stale", staleness, True, 72),
        MonitorColumn(
            "most",
            lambda m: "-" if m.staleness_max is None else str(m.staleness_max),
            True,
            72,
        ),
        MonitorColumn("message", lambda m: _text(m.message, 60), False, 100),
    ]
    levels: dict[str, Level] = {"failed": "bad", "abandoned": "watch"}
    rows = [(merge, levels.get(merge.state, "good")) for merge in overview.merges]
    return _table("Merges", columns, rows, "Nothing was merged yet", width)


def refusals(overview: Overview, width: int = 1000) -> Iterator[str]:
    """Return the table of refused contributions by reason."""
    now = overview.at
    columns = [
        MonitorColumn("reason", lambda r: _text(r.reason, 32)),
        MonitorColumn("count", lambda r: count(r.count), True),
        MonitorColumn("newest", lambda r: age(r.at, now), True),
        MonitorColumn("it said", lambda r: _text(r.newest, 100), False, 72),
    ]
    rows: list[tuple[Any, Level]] = [(refusal, "watch") for refusal in overview.refusals]
    return _table("Refusals", columns, rows, "None was refused", width)


def task_counts(overview: Overview, width: int = 1000) -> Iterator[str]:
    """Return the table of open tasks by kind and state."""
    kinds = sorted({task.kind for task in overview.tasks})
    counted = {(task.kind, task.state): task.count for task in overview.tasks}
    columns = [
        MonitorColumn("kind", lambda kind: kind),
        MonitorColumn("todo", lambda kind: count(counted.get((kind, "todo"), 0)), True),
        MonitorColumn("doing", lambda kind: count(counted.get((kind, "doing"), 0)), True),
    ]
    return _table("Open tasks", columns, [(kind, "good") for kind in kinds], "No open task", width)


def failed_tasks(overview: Overview, width: int = 1000) -> Iterator[str]:
    """Return the table of discarded tasks, the newest first."""
    columns = [
        MonitorColumn("task", lambda t: str(t.id), True),
        MonitorColumn("run", lambda t: _text(t.run, 24)),
        MonitorColumn("kind", lambda t: t.kind, False, 72),
        MonitorColumn("failures", lambda t: str(t.failures), True),
        MonitorColumn("timeouts", lambda t: str(t.timeouts), True, 72),
        MonitorColumn("last", lambda t: _text(t.message, 100)),
    ]
    rows: list[tuple[Any, Level]] = [(task, "watch") for task in overview.failed]
    return _table("Failed tasks", columns, rows, "No task has failed for good", width)


def replicas(overview: Overview, width: int = 1000) -> Iterator[str]:
    """Return the table of serving processes."""
    now = overview.at

    def rate(bytes_a_second: float) -> str:
        return f"{size(bytes_a_second)}/s"

    columns = [
        MonitorColumn("server", lambda r: _text(r.figures.where or r.id[:8], 40)),
        MonitorColumn("heard", lambda r: age(r.beat_at, now), True),
        MonitorColumn("up", lambda r: age(r.started_at, now), True),
        MonitorColumn("cpu", lambda r: f"{r.figures.cpu_share:.0%}", True),
        MonitorColumn("memory", lambda r: size(r.figures.memory), True, 72),
        MonitorColumn("requests/s", lambda r: f"{r.figures.requests_a_second:.3g}", True),
        MonitorColumn("in", lambda r: rate(r.figures.in_a_second), True, 90),
        MonitorColumn("out", lambda r: rate(r.figures.out_a_second), True, 90),
        MonitorColumn("5xx", lambda r: count(r.figures.errors), True, 90),
        MonitorColumn("claims", lambda r: count(r.figures.claims_waiting), True, 90),
        MonitorColumn("version", lambda r: _text(r.figures.software, 16), False, 110),
    ]
    rows = [(replica, _replica_level(replica, now)) for replica in overview.replicas]
    return _table("Servers", columns, rows, "No server is running", width)


def _replica_level(replica: ReplicaLine, now: float) -> Level:
    return "good" if alive(replica, now) else "bad"


def troubles(overview: Overview, width: int = 1000) -> Iterator[str]:
    """Yield the troubles behind the verdict; on a narrow screen each remedy has its own lines."""
    if width < WIDE:
        yield "Health"
        for trouble in overview.troubles[:ROWS_MAX]:
            subject = f"{_text(trouble.subject, 24)}: " if trouble.subject else ""
            text = f"{MARKS[trouble.level]} {subject}{_text(trouble.text, 160)}"
            yield from _wrap(text, width, "  ", "    ")
            yield from _wrap(_text(trouble.todo, TODO_MAX), width, "    - ", "      ")
        return
    columns = [
        MonitorColumn("", lambda t: WORDS[t.level]),
        MonitorColumn("about", lambda t: _text(t.subject, 24)),
        MonitorColumn("what is wrong", lambda t: _text(t.text, 160)),
        MonitorColumn("what to do", lambda t: _text(t.todo, TODO_MAX)),
    ]
    rows = [(trouble, trouble.level) for trouble in overview.troubles]
    yield from _table("Health", columns, rows, "Nothing is wrong", width)


def verdict_lines(overview: Overview, width: int = 1000) -> list[str]:
    """Return the health verdict with its remedy, wrapped to the screen."""
    verdict = overview.verdict
    todo = f" - {verdict.todo}" if verdict.todo else ""
    text = f"{MARKS[verdict.level]} {_text(verdict.text + todo, 2 * TODO_MAX)}"
    return _wrap(text, width, "", "  ")


def facts(overview: Overview) -> Iterator[tuple[str, str]]:
    """Yield name and value of the one-line facts."""
    yield "workers", _counts(overview.workers, ("training", "online", "paused", "offline", "left"))
    yield "volunteers", _counts(overview.volunteers, ("vetted", "probation", "suspended", "banned"))
    yield "tasks", _tasks(overview)
    whole = tuple(name for name in overview.queues if name not in PARTS)
    yield "queues", _counts(overview.queues, whole, zero=False) or "all empty"
    yield "an hour", _flows(overview)
    yield "verdicts", _verdicts(overview)
    yield (
        "refusals",
        ", ".join(f"{count(r.count)} {_text(r.reason, 24)}" for r in overview.refusals),
    )
    yield "draws", overview.recompute.words
    if overview.backlog.waiting:
        waits = [f"{number} wait: {reason}" for reason, number in overview.backlog.reasons]
        yield "to be done again", _text("; ".join([overview.backlog.words, *waits]), 400)
    yield from _machine(overview)


def _verdicts(overview: Overview) -> str:
    window = overview.window
    if not window.contributions:
        return "none in the last hour"
    return (
        f"{count(window.good)} good, {count(window.refused)} refused, {count(window.undecided)} "
        f"open of the {count(window.contributions)} of the last {age(window.since, overview.at)}"
    )


def _counts(counts: dict[str, int], order: Sequence[str], zero: bool = True) -> str:
    named = [name for name in order if counts.get(name) or (zero and name == order[0])]
    named += [name for name in counts if name not in order and counts[name]]
    return ", ".join(f"{count(counts.get(name, 0))} {name}" for name in named)


def _tasks(overview: Overview) -> str:
    totals = dict.fromkeys(("todo", "doing"), 0)
    for task in overview.tasks:
        totals[task.state] = totals.get(task.state, 0) + task.count
    failed = sum(run.failed for run in overview.runs)
    return f"{count(totals['todo'])} todo, {count(totals['doing'])} doing, {count(failed)} failed"


def _flows(overview: Overview) -> str:
    pushed, pulled = [run.pushed for run in overview.runs], [run.pulled for run in overview.runs]
    episodes = sum(flow.episodes for flow in pushed)
    played = f", {count(episodes)} games or problems" if episodes else ""
    return (
        f"pushed {count(sum(flow.samples for flow in pushed))} samples{played}, "
        f"{size(overview.window.bytes_an_hour)}; pulled "
        f"{count(sum(flow.samples for flow in pulled))} samples"
    )


def _machine(overview: Overview) -> Iterator[tuple[str, str]]:
    """Return facts of the machinery: disk, database, traffic, inference, backup, certificate."""
    living = [replica.figures for replica in overview.replicas if alive(replica, overview.at)]
    if living:
        first = living[0]
        yield "disk", f"{size(first.disk_free)} free of {size(first.disk_total)}"
    yield "database", f"{overview.database.kind}, {size(overview.database.bytes)}"
    if living:
        yield (
            "traffic",
            f"{sum(f.requests_a_second for f in living):.3g} requests/s, "
            f"{size(sum(f.in_a_second for f in living))}/s in, "
            f"{size(sum(f.out_a_second for f in living))}/s out; "
            f"{count(sum(f.claims_waiting for f in living))} claims wait",
        )
        yield "inference", "; ".join(dict.fromkeys(_answers(figures) for figures in living))
    never = overview.backup_at is None
    yield "last backup", "never" if never else f"{age(overview.backup_at, overview.at)} ago"
    ends = [f.certificate_ends_at for f in living if f.certificate_ends_at is not None]
    if ends:
        ended = min(ends) <= overview.at
        yield "certificate", "has ended" if ended else f"ends in {age(overview.at, min(ends))}"


def _answers(figures: Any) -> str:
    if figures.answers == "off":
        return "off"
    first = figures.first_token_s
    first_token = "" if first is None else f", first token after {first:.2f} s"
    machines = figures.answering_machines
    machines_text = f", {machines} machines of volunteers" if machines else ""
    engine = "upstream" if "://" in figures.answers else figures.answers
    return (
        f"{engine}, {figures.answers_waiting} under way, "
        f"{count(figures.answer_tokens)} tokens{first_token}{machines_text}"
    )


def lines(overview: Overview, width: int = 1000) -> Iterator[str]:
    """Yield the lines of the monitor, the most important first: verdict, troubles, runs, refused
    and failed work.
    """
    at = datetime.fromtimestamp(overview.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield f"{printable(overview.server, 60)}  {at}"
    yield from verdict_lines(overview, width)
    first = [troubles, runs] if len(overview.troubles) > 1 else [runs]  # else in the verdict
    first += [refusals] if overview.refusals else []
    first += [failed_tasks] if overview.failed else []
    for table in first:
        yield ""
        yield from table(overview, width)
    yield ""
    pairs = [(name, value) for name, value in facts(overview) if value]
    room = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        yield from _wrap(value, width, f"{left(name, room)}  ", " " * (room + 2))
    for table in (workers, merges, task_counts, replicas):
        yield ""
        yield from table(overview, width)
