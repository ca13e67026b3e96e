"""Episodes, their sealed chunks, the tasks of learners and matches, and match results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    case,
    func,
    insert,
    literal_column,
    select,
    update,
)

from coordinator.database.engine.statements import deletion, equals, one_of, sums, upsert
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.experience import (
    chunks,
    harvests,
    matches,
    metrics,
    rollout_sums,
)
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from shared.decoding import decode
from shared.protocol.base import TaskState
from shared.units import DAY_S
from shared.workloads.experience import CHUNKS_MAX, RolloutSums

KEPT_S = DAY_S  # a retired chunk stays for the learners that still read it
OPEN: tuple[TaskState, ...] = ("todo", "doing")
WAITING: tuple[TaskState, ...] = ("accepted",)  # states of tasks whose update waits for a merge
LATELY = 64  # most chunks, or most reports, from which a figure is computed: the newest
LOOKED_THROUGH = 16 * LATELY  # newest contributions that are searched for reports
# The 0 is written into the statement, so that SQLite uses the partial index.
_OF_NO_PASS = tasks.c.pass_no == literal_column("0")


class HarvestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `harvests`."""

    contribution_id: int
    run_id: int
    sha256: str
    size: int
    episodes: int
    samples: int
    chunk: int | None
    at: float


class ChunkRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `chunks`."""

    run_id: int
    number: int
    sha256: str
    size: int
    episodes: int
    samples: int
    sealed_at: float
    retired_at: float | None


class MatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `matches`."""

    contribution_id: int
    run_id: int
    version: int
    against: int
    wins: int
    draws: int
    losses: int
    at: float


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a run's episodes by stage."""

    sealed: int
    samples: int  # sealed samples
    planned: int  # samples of learn tasks that were neither discarded nor cancelled
    learnt: int  # samples of learn tasks whose updates were merged
    merging: int  # learn tasks whose updates wait for a merge
    learning: int  # learn tasks that have not ended
    measuring: int  # match tasks that have not ended


# --- episodes ---


def add_harvest(conn: Connection, row: HarvestRow) -> None:
    conn.execute(insert(harvests).values(**msgspec.structs.asdict(row)))


def unsealed(conn: Connection, run_id: int, limit: int) -> list[HarvestRow]:
    """Return the unsealed harvests in the order of their arrival."""
    h = harvests.c
    query = select(harvests).where(h.run_id == run_id, h.chunk.is_(None))
    rows = conn.execute(query.order_by(h.contribution_id).limit(limit)).mappings()
    return [HarvestRow(**row) for row in rows]


def newest_files(conn: Connection, run_id: int, limit: int) -> list[str]:
    """Return the hashes of the newest files of valid episodes, newest first: harvests without a
    chunk, then chunks whose files are there.
    """
    h, c = harvests.c, chunks.c
    loose = select(h.sha256).where(h.run_id == run_id, h.chunk.is_(None), h.samples > 0)
    hashes = list(conn.execute(loose.order_by(h.contribution_id.desc()).limit(limit)).scalars())
    sealed_files = select(c.sha256).where(c.run_id == run_id, c.retired_at.is_(None))
    rest = sealed_files.order_by(c.number.desc()).limit(limit - len(hashes))
    return [*hashes, *conn.execute(rest).scalars()]


def seal(conn: Connection, row: ChunkRow, contribution_ids: Sequence[int]) -> bool:
    """Add a chunk of a locked run and mark its harvests as sealed. Return False, with nothing
    changed, if another process has sealed one of these harvests.
    """
    h = harvests.c
    of_contributions = h.contribution_id.in_(contribution_ids) & h.chunk.is_(None)
    if conn.execute(select(func.count()).where(of_contributions)).scalar_one() < len(
        contribution_ids
    ):
        return False
    conn.execute(update(harvests).where(of_contributions).values(chunk=row.number))
    conn.execute(insert(chunks).values(**msgspec.structs.asdict(row)))
    return True


def next_chunk(conn: Connection, run_id: int) -> int:
    query = select(func.coalesce(func.max(chunks.c.number), -1)).where(chunks.c.run_id == run_id)
    return int(conn.execute(query).scalar_one()) + 1


def window(conn: Connection, run_id: int, episodes: int, samples: int) -> list[ChunkRow]:
    """Return the newest chunks with at least this many episodes and samples, oldest first; at most
    the `CHUNKS_MAX` newest.
    """
    query = select(chunks).where(chunks.c.run_id == run_id, chunks.c.retired_at.is_(None))
    query = query.order_by(chunks.c.number.desc()).limit(CHUNKS_MAX)
    window_chunks: list[ChunkRow] = []
    for row in conn.execute(query).mappings():
        if episodes <= 0 and samples <= 0:
            break
        window_chunks.append(ChunkRow(**row))
        episodes -= window_chunks[-1].episodes
        samples -= window_chunks[-1].samples
    return window_chunks[::-1]


def retire(conn: Connection, run_id: int, below: int, now: float) -> None:
    """Retire the chunks below a number, which have left the window."""
    c = chunks.c
    old = (c.run_id == run_id) & (c.number < below) & c.retired_at.is_(None)
    conn.execute(update(chunks).where(old).values(retired_at=now))


def is_chunk(conn: Connection, sha256: str) -> bool:
    query = select(chunks.c.number).where(chunks.c.sha256 == sha256).limit(1)
    return conn.execute(query).first() is not None


def blobs_in_use(conn: Connection, now: float) -> set[str]:
    """Return the files of unsealed harvests, and of chunks that may still be read; a deleted run
    keeps no files.
    """
    deleted_runs = select(runs.c.id).where(runs.c.state == "deleted")
    is_readable = chunks.c.retired_at.is_(None) | (chunks.c.retired_at > now - KEPT_S)
    waiting = select(harvests.c.sha256).where(harvests.c.chunk.is_(None))
    hashes = set(conn.execute(waiting.where(harvests.c.run_id.not_in(deleted_runs))).scalars())
    chunk_hashes = select(chunks.c.sha256).where(is_readable, chunks.c.run_id.not_in(deleted_runs))
    return hashes | set(conn.execute(chunk_hashes).scalars())


def per_hour(conn: Connection, run_id: int, now: float) -> float:
    """Return the episodes sealed an hour; 0 with fewer than two chunks in the last hour."""
    c = chunks.c
    query = select(c.episodes, c.sealed_at).where(c.run_id == run_id).order_by(c.number.desc())
    lately = [row for row in conn.execute(query.limit(LATELY)) if row.sealed_at >= now - 3600.0]
    if len(lately) < 2:
        return 0.0
    *played, oldest = lately
    count = sum(int(row.episodes) for row in played)
    return count * 3600.0 / max(1.0, now - float(oldest.sealed_at))


def reported(
    conn: Connection, run_id: int, name: str, kinds: Collection[str], *, a_second: bool = False
) -> float | None:
    """Return the median of a figure in the newest reports on accepted contributions of these kinds;
    None if no report has it. With `a_second` the figure is one per sample, and is multiplied by the
    report's samples a second.
    """
    values: list[float] = [
        report["metrics"][name]
        * (report["samples"] / max(1e-3, report["train_s"]) if a_second else 1.0)
        for report in _reports(conn, run_id, kinds)
        if name in report.get("metrics", {})
    ]
    return median(values) if values else None


def _reports(conn: Connection, run_id: int, kinds: Collection[str]) -> list[dict[str, Any]]:
    """Return the newest reports on accepted contributions of these kinds."""
    c = contributions.c
    of_run = select(c.id, c.kind, c.state, c.report).where(c.run_id == run_id)
    n = of_run.order_by(c.id.desc()).limit(LOOKED_THROUGH).subquery().c
    good = n.state.in_(("accepted", "merged", "superseded")) & n.kind.in_(kinds)
    newest = select(n.report).where(good).order_by(n.id.desc())
    return [decode(report) for report in conn.execute(newest.limit(LATELY)).scalars()]


def add_rollouts(conn: Connection, run_id: int, versions: Sequence[RolloutSums]) -> None:
    """Add sums over judged answers to the stored sums of their versions."""
    rows = [{"run_id": run_id, **msgspec.structs.asdict(row)} for row in versions]
    if rows:
        rows.sort(key=lambda row: row["version"])  # in one order: no deadlock
        conn.execute(upsert(conn, rollout_sums, sums), rows)


def rollouts(conn: Connection, run_id: int) -> list[RolloutSums]:
    """Return the sums over judged answers by version, oldest first."""
    r = rollout_sums.c
    columns = r.version, r.answers, r.reward, r.tokens, r.surprise, r.cut
    query = select(*columns).where(r.run_id == run_id).order_by(r.version)
    return [RolloutSums(**row) for row in conn.execute(query).mappings()]


def _total(condition: ColumnElement[bool], value: ColumnElement[int] | int) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((condition, value), else_=0)), 0)


_LEARN, _IS_OPEN = tasks.c.kind == "learn", one_of(tasks.c.state, OPEN)
_SIZE = tasks.c.stop - tasks.c.start
_EPISODES = select(
    func.coalesce(func.sum(chunks.c.episodes), 0).label("sealed"),
    func.coalesce(func.sum(chunks.c.samples), 0).label("samples"),
).where(equals(chunks.c.run_id))
_TASKS = select(
    _total(_LEARN & tasks.c.state.not_in(("discarded", "cancelled")), _SIZE).label("planned"),
    _total(_LEARN & (tasks.c.state == "done"), _SIZE).label("learnt"),
    _total(_LEARN & one_of(tasks.c.state, WAITING), 1).label("merging"),
    _total(_LEARN & _IS_OPEN, 1).label("learning"),
    _total((tasks.c.kind == "evaluate") & _IS_OPEN, 1).label("measuring"),
).where(equals(tasks.c.run_id), one_of(tasks.c.kind, ("learn", "evaluate")), _OF_NO_PASS)


def totals(conn: Connection, run_id: int) -> Totals:
    values = {"where_run_id": run_id}
    episodes = conn.execute(_EPISODES, values).mappings().one()
    counts = conn.execute(_TASKS, values).mappings().one()
    return Totals(**{name: int(number) for name, number in {**episodes, **counts}.items()})


# --- tasks ---


def _beside(run_id: int, kind: str) -> ColumnElement[bool]:
    """Return the condition for tasks of a kind that are not cut from a pass."""
    t = tasks.c
    return (t.run_id == run_id) & (t.kind == kind) & _OF_NO_PASS


def next_start(conn: Connection, run_id: int) -> int:
    """Return the start of the next learner's task."""
    query = select(func.coalesce(func.max(tasks.c.stop), 0)).where(_beside(run_id, "learn"))
    return int(conn.execute(query).scalar_one())


def open_matches(conn: Connection, run_id: int) -> list[str]:
    """Return the options of the unfinished evaluations by matches."""
    t = tasks.c
    query = select(t.options).where(
        t.run_id == run_id, t.kind == "evaluate", t.state.in_(("todo", "doing"))
    )
    return list(conn.execute(query).scalars())


# --- strength ---


def add_match(conn: Connection, row: MatchRow) -> None:
    conn.execute(insert(matches).values(**msgspec.structs.asdict(row)))


def matches_of(conn: Connection, run_id: int) -> list[MatchRow]:
    """Return the matches of a run, oldest first."""
    query = select(matches).where(matches.c.run_id == run_id).order_by(matches.c.contribution_id)
    return [MatchRow(**row) for row in conn.execute(query).mappings()]


def count_matches(conn: Connection, run_id: int) -> tuple[int, int]:
    """Return the number of matches and the newest version that played a match, or (0, 0)."""
    newest = func.coalesce(func.max(matches.c.version), 0)
    count, version = conn.execute(
        select(func.count(), newest).where(matches.c.run_id == run_id)
    ).one()
    return int(count), int(version)


def measure(
    conn: Connection, run_id: int, figures: dict[int, dict[str, float]], now: float
) -> None:
    """Store `figures`, by version and name, in place of all stored figures with these names."""
    names = {name for values in figures.values() for name in values}
    m = metrics.c
    conn.execute(deletion(metrics, "replaced").where(m.run_id == run_id, m.name.in_(names)))
    rows = [
        {"run_id": run_id, "version": version, "name": name, "value": value, "at": now}
        for version, values in sorted(figures.items())
        for name, value in values.items()
    ]
    if rows:
        conn.execute(insert(metrics), rows)


def measured(conn: Connection, run_id: int) -> dict[int, dict[str, float]]:
    """Return the figures of every version, by version and name."""
    m = metrics.c
    query = select(m.version, m.name, m.value).where(m.run_id == run_id, m.version.is_not(None))
    figures: dict[int, dict[str, float]] = {}
    for version, label, value in conn.execute(query.order_by(m.id)):
        figures.setdefault(version, {})[label] = value
    return figures
