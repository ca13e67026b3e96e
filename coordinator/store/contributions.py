"""Contributions and their verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, case, func, insert, or_, select, update

from coordinator.store.tables import contributions, runs, tasks, verdicts, versions
from shared.errors import Conflict, NotFound
from shared.protocol import ContributionState, Verdict

# received -> checking -> accepted -> merged, with the ways out.
TRANSITIONS: frozenset[tuple[ContributionState, ContributionState]] = frozenset(
    {
        ("received", "checking"),
        ("received", "rejected"),
        ("checking", "accepted"),
        ("checking", "superseded"),
        ("checking", "rejected"),
        ("accepted", "merged"),
        ("accepted", "superseded"),
        ("accepted", "rejected"),  # set aside by a merge that failed with it
    }
)


UPDATES = ("delta", "gradient")  # kinds that are merged; games and evaluations are not


class ContributionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `contributions`; see tables.py."""

    id: int
    run_id: int
    task_id: int
    attempt: int
    part: int
    tries: int
    worker_id: str
    volunteer_id: str
    digest: str
    kind: str
    codec: str
    sha256: str
    size: int
    base_version: int
    steps: int
    samples: int
    price_micro: int
    loss_first: float | None
    loss_last: float | None
    train_s: float
    norm: float | None
    clip: float
    weight: float | None
    state: ContributionState
    reason: str
    message: str
    version: int | None
    report: str
    received_at: float
    decided_at: float | None
    merged_at: float | None


def _row(mapping: Any) -> ContributionRow:
    return ContributionRow(**mapping)


def add(conn: Connection, values: dict[str, Any], *, last: bool = True) -> ContributionRow:
    """Insert as `checking`; with the last part its task no longer expires, it waits for the verdict."""
    row = (
        conn.execute(insert(contributions).values(**values).returning(*contributions.c))
        .mappings()
        .one()
    )
    if last:
        its = tasks.c.id == values["task_id"]
        conn.execute(update(tasks).where(its).values(renew_by=None, finish_by=None))
    return _row(row)


def by_key(
    conn: Connection, task_id: int, attempt: int, part: int, tries: int
) -> ContributionRow | None:
    row = (
        conn.execute(
            select(contributions).where(
                contributions.c.task_id == task_id,
                contributions.c.attempt == attempt,
                contributions.c.part == part,
                contributions.c.tries == tries,
            )
        )
        .mappings()
        .first()
    )
    return None if row is None else _row(row)


def by_id(
    conn: Connection, contribution_id: int, volunteer_id: str | None = None, *, lock: bool = False
) -> ContributionRow:
    """Raises NotFound, also when it belongs to somebody else."""
    query = select(contributions).where(contributions.c.id == contribution_id)
    if lock:
        query = query.with_for_update()
    if volunteer_id is not None:
        query = query.where(contributions.c.volunteer_id == volunteer_id)
    row = conn.execute(query).mappings().first()
    if row is None:
        raise NotFound(f"there is no contribution {contribution_id} of yours")
    return _row(row)


def by_ids(conn: Connection, ids: Sequence[int]) -> list[ContributionRow]:
    """In the order of the task, then part: the order of a merge."""
    query = select(contributions).where(contributions.c.id.in_(ids))
    query = query.order_by(contributions.c.task_id, contributions.c.part, contributions.c.tries)
    return [_row(row) for row in conn.execute(query).mappings()]


def in_state(
    conn: Connection, state: ContributionState, run_id: int | None = None, limit: int = 1000
) -> list[ContributionRow]:
    query = select(contributions).where(contributions.c.state == state)
    if run_id is not None:
        query = query.where(contributions.c.run_id == run_id)
    query = query.order_by(
        contributions.c.task_id, contributions.c.part, contributions.c.tries
    ).limit(limit)
    return [_row(row) for row in conn.execute(query).mappings()]


def mergeable(conn: Connection, run_id: int, limit: int = 1000) -> list[ContributionRow]:
    """Accepted updates in the order of a merge."""
    c = contributions.c
    query = select(contributions).where(
        c.run_id == run_id, c.state == "accepted", c.kind.in_(UPDATES)
    )
    rows = conn.execute(query.order_by(c.task_id, c.part, c.tries).limit(limit)).mappings()
    return [_row(row) for row in rows]


def left_behind(conn: Connection, run_id: int, base: int, kind: str) -> list[ContributionRow]:
    """Updates that wait for a merge though they began below version `base`, or are not of the kind that is merged now."""
    c = contributions.c
    query = select(contributions).where(
        c.run_id == run_id,
        c.state == "accepted",
        c.kind.in_(UPDATES),
        (c.base_version < base) | (c.kind != kind),
    )
    return [_row(row) for row in conn.execute(query.order_by(c.task_id, c.part)).mappings()]


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """What waits for the next merge of a run."""

    count: int
    steps: int
    samples: int
    oldest_at: float | None
    workers: int


def pending(conn: Connection, run_id: int) -> Pending:
    c = contributions.c
    query = select(
        func.count(),
        func.coalesce(func.sum(c.steps), 0),
        func.coalesce(func.sum(c.samples), 0),
        func.min(c.decided_at),
        func.count(func.distinct(c.worker_id)),
    ).where(c.run_id == run_id, c.state == "accepted", c.kind.in_(UPDATES))
    count, steps, samples, oldest, workers = conn.execute(query).one()
    return Pending(
        count=count, steps=int(steps), samples=int(samples), oldest_at=oldest, workers=workers
    )


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """What others are compared with of one accepted contribution."""

    norm: float
    steps: int
    global_step: int  # of its base version


def cohort(conn: Connection, run_id: int, kind: str, limit: int) -> list[Peer]:
    """The newest accepted contributions of a kind."""
    c, v = contributions.c, versions.c
    based = and_(v.run_id == c.run_id, v.version == c.base_version)
    query = select(c.norm, c.steps, v.global_step).join_from(contributions, versions, based)
    query = query.where(
        c.run_id == run_id,
        c.kind == kind,
        c.norm.is_not(None),
        c.state.in_(("accepted", "merged", "superseded")),
    )
    rows = conn.execute(query.order_by(c.id.desc()).limit(limit))
    return [Peer(norm=norm, steps=steps, global_step=at) for norm, steps, at in rows]


def is_waiting(conn: Connection, run_id: int, worker_id: str) -> bool:
    """Whether something of a worker waits to be merged into a run."""
    c = contributions.c
    waiting = c.state.in_(("received", "checking", "accepted")) & c.kind.in_(UPDATES)
    query = select(c.id).where(c.run_id == run_id, c.worker_id == worker_id, waiting).limit(1)
    return conn.execute(query).first() is not None


def seen_before(conn: Connection, row: ContributionRow) -> bool:
    """Whether the same bytes were handed in for another task, or for another part of it."""
    c = contributions.c
    other = (c.task_id != row.task_id) | ((c.attempt == row.attempt) & (c.part != row.part))
    query = select(c.id).where(c.sha256 == row.sha256, c.run_id == row.run_id, other)
    return conn.execute(query.limit(1)).first() is not None


def decide(
    conn: Connection, row: ContributionRow, state: ContributionState, *, now: float, **values: Any
) -> None:
    """Change the state and record the verdict. Raises Conflict when it is no longer where `row` says."""
    if (row.state, state) not in TRANSITIONS:
        raise Conflict(f"contribution {row.id} is {row.state}, so it cannot become {state}")
    changed = conn.execute(
        update(contributions)
        .where(contributions.c.id == row.id, contributions.c.state == row.state)
        .values(state=state, decided_at=now, **values)
    )
    if changed.rowcount != 1:
        raise Conflict(f"contribution {row.id} has just been decided")
    ruling = Ruling(
        state=state,
        reason=str(values.get("reason", "")),
        message=str(values.get("message", "")),
        version=values.get("version"),
    )
    record(conn, [row], ruling, now)


def merge_all(conn: Connection, rows: Sequence[ContributionRow], version: int, now: float) -> bool:
    """Mark every one merged into `version`: all of them, or False."""
    changed = conn.execute(
        update(contributions)
        .where(
            contributions.c.id.in_([row.id for row in rows]), contributions.c.state == "accepted"
        )
        .values(state="merged", version=version, merged_at=now)
    )
    if changed.rowcount != len(rows):
        return False
    message = f"merged into version {version}"
    record(conn, rows, Ruling(state="merged", message=message, version=version), now)
    return True


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """What a verdict says."""

    state: ContributionState
    reason: str = ""
    message: str = ""
    version: int | None = None


def record(conn: Connection, rows: Iterable[ContributionRow], ruling: Ruling, now: float) -> None:
    """Append to the history that volunteers read."""
    conn.execute(
        insert(verdicts),
        [
            {
                "contribution_id": row.id,
                "worker_id": row.worker_id,
                "volunteer_id": row.volunteer_id,
                **msgspec.structs.asdict(ruling),
                "at": now,
            }
            for row in rows
        ],
    )


_VERDICT = (
    select(
        verdicts.c.id,
        verdicts.c.contribution_id,
        verdicts.c.state,
        verdicts.c.reason,
        verdicts.c.message,
        verdicts.c.version,
        verdicts.c.at,
        contributions.c.task_id,
        contributions.c.weight,
        case(
            (
                verdicts.c.state.in_(("accepted", "merged", "superseded")),
                contributions.c.price_micro,
            ),
            else_=0,
        ).label("credits_micro"),
        runs.c.name.label("run"),
    )
    .join(contributions, contributions.c.id == verdicts.c.contribution_id)
    .join(runs, runs.c.id == contributions.c.run_id)
)


def _verdict(row: Any) -> Verdict:
    return Verdict(
        contribution=row["contribution_id"],
        task=row["task_id"],
        run=row["run"],
        state=row["state"],
        reason=row["reason"],
        message=row["message"],
        weight=row["weight"],
        version=row["version"],
        credits_micro=row["credits_micro"],
        at=row["at"],
    )


def news(
    conn: Connection, worker_id: str, since: int, recent_at: float, limit: int
) -> tuple[list[Verdict], int]:
    """Verdicts a worker has not seen, and the number to ask from next time.

    Numbers are given before a transaction commits, so one may appear below `since`: what is younger than `recent_at` is sent
    again and the client drops what it knows.
    """
    query = _VERDICT.where(verdicts.c.worker_id == worker_id)
    query = (
        query.where(or_(verdicts.c.id > since, verdicts.c.at > recent_at))
        .order_by(verdicts.c.id)
        .limit(limit)
    )
    rows = list(conn.execute(query).mappings())
    return [_verdict(row) for row in rows], max([since, *(row["id"] for row in rows)])


def latest_verdict(conn: Connection, contribution_id: int) -> Verdict | None:
    query = (
        _VERDICT.where(verdicts.c.contribution_id == contribution_id)
        .order_by(verdicts.c.id.desc())
        .limit(1)
    )
    row = conn.execute(query).mappings().first()
    return None if row is None else _verdict(row)


def history(
    conn: Connection, volunteer_id: str, before: int | None, limit: int
) -> list[tuple[int, Verdict]]:
    """Newest first; the number beside each continues the listing."""
    query = _VERDICT.where(verdicts.c.volunteer_id == volunteer_id)
    if before is not None:
        query = query.where(verdicts.c.id < before)
    rows = conn.execute(query.order_by(verdicts.c.id.desc()).limit(limit)).mappings()
    return [(row["id"], _verdict(row)) for row in rows]


def counts(conn: Connection, run_id: int) -> dict[str, int]:
    query = select(contributions.c.state, func.count()).where(contributions.c.run_id == run_id)
    return dict(conn.execute(query.group_by(contributions.c.state)).all())


def merged_by(conn: Connection, run_id: int, volunteer_id: str) -> dict[int, int]:
    """How many of a volunteer's contributions went into each version."""
    c = contributions.c
    query = select(c.version, func.count()).where(
        c.run_id == run_id, c.volunteer_id == volunteer_id, c.state == "merged"
    )
    return dict(conn.execute(query.group_by(c.version)).all())
