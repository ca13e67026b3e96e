"""Invariants that hold between queue, contributions and versions; each breach is reported as a
sentence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from sqlalchemy import Connection, func, select, text

from coordinator.database.contributions import UPDATES
from coordinator.database.engine.postgres import allow_long_read
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.runs import members, runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.versions import versions
from coordinator.database.tasks import BESIDE
from shared.decoding import decode

BREACHES_MAX = 1000  # enough to see the fault


def breaches(conn: Connection) -> list[str]:
    """Return every breach found, at most `BREACHES_MAX` sentences."""
    sentences: list[str] = []
    allow_long_read(conn)
    for check in (_pages, _passes, _holders, _done, _accepted, _versions, _merged):
        for sentence in check(conn):
            sentences.append(sentence)
            if len(sentences) == BREACHES_MAX:
                return sentences
    return sentences


def counted(conn: Connection) -> dict[str, int]:
    """Return the number of rows in each checked table."""
    tables = {"tasks": tasks, "contributions": contributions, "versions": versions}
    return {
        name: int(conn.execute(select(func.count()).select_from(table)).scalar_one())
        for name, table in tables.items()
    }


def _pages(conn: Connection) -> Iterator[str]:
    """Yield a sentence for each damaged page of an SQLite file."""
    if conn.dialect.name == "sqlite":
        for (row_text,) in conn.execute(text(f"PRAGMA integrity_check({BREACHES_MAX})")):
            if row_text != "ok":
                yield f"the database file is damaged: {row_text.splitlines()[-1]}"


def _passes(conn: Connection) -> Iterator[str]:
    """Check that the tasks of a pass cover its samples from the first to the cursor, each once, and
    that tasks over a machine's own data went to that machine only. A machine's pass over data that
    it has replaced may have ended anywhere.
    """
    about = {row.id: row for row in conn.execute(select(runs)) if row.samples_total}
    t = tasks.c
    query = select(t.run_id, t.home, t.pass_no, t.start, t.stop, t.id, t.worker_id)
    query = query.where(t.kind.not_in(BESIDE))
    ordered = conn.execute(query.order_by(t.run_id, t.home, t.pass_no, t.start))
    ends: dict[tuple[int, str, int], int] = {}
    for run_id, home, pass_no, start, stop, task_id, worker_id in ordered:
        if run_id not in about:
            continue
        at = ends.get((run_id, home, pass_no), 0)
        if start != at:
            word = "repeats" if start < at else "leaves out"
            yield (
                f"task {task_id} {word} samples of pass {pass_no} of run {run_id}: {at} to {start}"
            )
        if home and worker_id not in (home, None):
            yield f"task {task_id} is over data of {home}, but {worker_id} has held it"
        ends[run_id, home, pass_no] = max(stop, at)
    for run_id, row in about.items():
        for pass_no in range(1, row.pass_no + 1):
            until = row.cursor if pass_no == row.pass_no else row.samples_total
            at = ends.get((run_id, "", pass_no), 0)
            if at != until:
                yield f"pass {pass_no} of run {run_id} is cut up to {at}, not {until}"
    yield from _own_passes(conn, ends)


def _own_passes(conn: Connection, ends: Mapping[tuple[int, str, int], int]) -> Iterator[str]:
    """Check that each machine's own passes over its present data are cut up to their cursors."""
    for row in conn.execute(select(members)):
        for pass_no in range(row.first_pass, row.pass_no + 1):
            until = row.cursor if pass_no == row.pass_no else row.samples
            at = ends.get((row.run_id, row.worker_id, pass_no), 0)
            if at != until:
                yield (
                    f"pass {pass_no} of {row.worker_id} in run {row.run_id} is cut up to {at}, not "
                    f"{until}"
                )


def _holders(conn: Connection) -> Iterator[str]:
    """Yield a sentence for each task in `doing` that no worker holds."""
    t = tasks.c
    query = select(t.id).where(t.state == "doing", t.worker_id.is_(None) | (t.attempt < 1))
    for task_id in conn.execute(query).scalars():
        yield f"task {task_id} is being done by nobody"


def _done(conn: Connection) -> Iterator[str]:
    """Yield a sentence for each task that is done without a merged update, or without accepted
    games or sums.
    """
    c, t = contributions.c, tasks.c
    merged = select(c.id).where(c.id == t.contribution_id, c.state == "merged")
    good = c.state.in_(("accepted", "superseded")) & c.kind.not_in(UPDATES)
    other = select(c.id).where(c.task_id == t.id, good)
    done = select(t.id).where(t.state == "done")
    for task_id in conn.execute(done.where(~merged.exists(), ~other.exists())).scalars():
        yield f"task {task_id} is done, but nothing of it was merged"


def _accepted(conn: Connection) -> Iterator[str]:
    """Check that exactly the ranges of accepted updates wait for a merge."""
    c, t = contributions.c, tasks.c
    waits = (c.state == "accepted") & c.kind.in_(UPDATES)
    update = select(c.id).where(c.id == t.contribution_id, waits)
    query = select(t.id).where(t.state == "accepted", ~update.exists())
    for task_id in conn.execute(query).scalars():
        yield f"task {task_id} waits for a merge without an accepted update"
    task = select(t.id).where(t.contribution_id == c.id, t.state == "accepted")
    for number in conn.execute(select(c.id).where(waits, ~task.exists())).scalars():
        yield f"the range of the accepted contribution {number} is not held for it"


def _versions(conn: Connection) -> Iterator[str]:
    """Check that versions are numbered without a gap up to the head of their run."""
    v = versions.c
    query = select(v.run_id, func.count(), func.min(v.version), func.max(v.version))
    heads = {row[0]: row[1:] for row in conn.execute(query.group_by(v.run_id))}
    for run_id, head in conn.execute(select(runs.c.id, runs.c.head)):
        expected = None if head < 0 else (head + 1, 0, head)
        if heads.get(run_id) != expected:
            yield f"the versions of run {run_id} are not 0 to {head}"


def _merged(conn: Connection) -> Iterator[str]:
    """Check that contributions are merged exactly when a version lists them, and no task twice."""
    merged_by_version: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    per_task: defaultdict[int, int] = defaultdict(int)
    c, t = contributions.c, tasks.c
    own = func.coalesce(t.id, c.task_id)  # a split-off part has a task of its own
    query = select(c.id, c.run_id, c.version, own).select_from(
        contributions.outerjoin(tasks, t.contribution_id == c.id)
    )
    for number, run_id, version, task_id in conn.execute(query.where(c.state == "merged")):
        merged_by_version[run_id, version].add(number)
        per_task[task_id] += 1
    for task_id, count in per_task.items():
        if count > 1:
            yield f"task {task_id} was merged {count} times"
    rows = conn.execute(select(versions.c.run_id, versions.c.version, versions.c.contributions))
    for run_id, version, encoded in rows:
        listed = decode(encoded, list[int])
        if len(listed) != len(set(listed)):
            yield f"version {version} of run {run_id} lists a contribution twice"
        if set(listed) != merged_by_version.pop((run_id, version), set()):
            yield f"version {version} of run {run_id} lists other contributions than say so"
    for (run_id, version), numbers in merged_by_version.items():
        yield (
            f"contributions {sorted(numbers)[:5]} are merged into version {version} of run "
            f"{run_id}, which is not there"
        )
