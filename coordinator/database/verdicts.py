"""Verdicts: every change of a contribution's state, and the verdicts that a worker polls for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

from coordinator.database import tasks
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.bulk_statements import BulkStatement
from coordinator.database.engine.statements import among, equals, one_of
from coordinator.database.tables.contributions import contributions, verdicts
from coordinator.database.tables.ledger import events
from coordinator.database.tables.runs import runs
from coordinator.rules.validation import PAID
from shared.errors import Conflict
from shared.protocol.base import ContributionState
from shared.protocol.contributions import Verdict

# Verdicts younger than this are sent again, since a verdict with a lower number may be committed
# later.
RECENT_S = 60.0
# States of a contribution: received -> checking -> accepted -> merged, or another end.
TRANSITIONS: frozenset[tuple[ContributionState, ContributionState]] = frozenset(
    {
        ("received", "checking"),
        ("received", "rejected"),
        ("checking", "accepted"),
        ("checking", "superseded"),
        ("checking", "rejected"),
        ("accepted", "merged"),
        ("accepted", "superseded"),
        ("accepted", "rejected"),  # set aside after failing merges
    }
)


_DECIDE = sa.update(contributions).where(equals(contributions.c.id), equals(contributions.c.state))


def decide(
    conn: sa.Connection,
    row: ContributionRow,
    state: ContributionState,
    *,
    now: float,
    **values: object,
) -> None:
    """Change the state of `row` and record the verdict. Raises Conflict if that is impossible."""
    if decide_all(conn, [(row, {"state": state} | values)], now) != 1:
        raise Conflict(f"contribution {row.id} has just been decided")


def decide_all(
    conn: sa.Connection, decided: Sequence[tuple[ContributionRow, Mapping[str, object]]], now: float
) -> int:
    """Change the states of contributions and record the verdicts. Several contributions must be
    locked before. The task of a contribution that was accepted, and is not merged after all, goes
    back to the queue. Return the number of changed rows; with several contributions, not every
    database counts them. Raises Conflict for a state that cannot follow the present state.
    """
    if not decided:
        return 0
    for row, values in decided:
        if (row.state, values["state"]) not in TRANSITIONS:
            to = values["state"]
            raise Conflict(f"contribution {row.id} is {row.state}, so it cannot become {to}")
    changes = [
        {"where_id": row.id, "where_state": row.state, "decided_at": now, **values}
        for row, values in decided
    ]
    changed = conn.execute(_DECIDE, changes if len(changes) > 1 else changes[0])
    tasks.return_all(conn, [row.id for row, _ in decided if row.state == "accepted"])
    record(conn, decided, now)
    return changed.rowcount


_MERGE_ALL = (
    sa.update(contributions)
    .where(among(contributions.c.id, "ids"), contributions.c.state == "accepted")
    .values(state="merged", version=sa.bindparam("into"), merged_at=sa.bindparam("now"))
)


def merge_all(
    conn: sa.Connection, rows: Sequence[ContributionRow], version: int, now: float
) -> bool:
    """Mark all rows merged into `version`, and their tasks done; return False if a row was no
    longer accepted.
    """
    ids = [row.id for row in rows]
    changed = conn.execute(_MERGE_ALL, {"ids": ids, "into": version, "now": now})
    if changed.rowcount != len(rows):
        return False
    tasks.finish_merged(conn, ids)
    message = f"merged into version {version}"
    merged = {"state": "merged", "message": message, "version": version}
    record(conn, [(row, merged) for row in rows], now)
    return True


_RECORD = sa.insert(verdicts)


def record(
    conn: sa.Connection, decided: Iterable[tuple[ContributionRow, Mapping[str, object]]], now: float
) -> None:
    """Append verdicts to the history that volunteers read."""
    blank = {"reason": "", "message": "", "version": None}
    lines = [
        blank
        | {name: values[name] for name in ("state", *blank) if name in values}
        | {"contribution_id": row.id, "worker_id": row.worker_id, "at": now}
        | {"volunteer_id": row.volunteer_id}
        for row, values in decided
    ]
    conn.execute(_RECORD, lines)


RECENT_MAX = 4096  # verdicts of one worker that may be sent again
_C = contributions.c
_UNPAID = (
    sa.update(verdicts)
    .where(among(verdicts.c.contribution_id, "ids"), among(verdicts.c.state, "states"))
    .values(
        message=sa.case(
            (
                verdicts.c.message.contains(PAID),
                sa.func.replace(verdicts.c.message, PAID, sa.bindparam("why", type_=sa.String())),
            ),
            else_=verdicts.c.message + "; " + sa.bindparam("why", type_=sa.String()),
        )
    )
)


def note_unpaid(
    conn: sa.Connection,
    ids: Sequence[int],
    why: str,
    states: Sequence[ContributionState] = ("merged", "superseded"),
) -> None:
    """Add the reason why work is not paid to the verdicts of contributions, as far as they have one
    of these states.
    """
    conn.execute(_UNPAID, {"ids": ids, "why": why, "states": states})


# Voided, forfeited and reversed work was paid nothing; each event is looked up by its unique key.
_TAKEN_BACK = (
    sa.select(events.c.id)
    .where(
        sa.or_(
            *(
                events.c.key == sa.literal(f"{kind}:") + sa.cast(_C.id, sa.String)
                for kind in ("void", "forfeit", "reverse")
            )
        )
    )
    .correlate(contributions)
    .exists()
)
_VERDICT = (
    sa.select(
        verdicts.c.id,
        verdicts.c.contribution_id,
        verdicts.c.state,
        verdicts.c.reason,
        verdicts.c.message,
        verdicts.c.version,
        verdicts.c.at,
        contributions.c.task_id,
        contributions.c.weight,
        sa.case(
            (_TAKEN_BACK, 0),
            (
                one_of(verdicts.c.state, ("accepted", "merged", "superseded")),
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
        run=row["run"],
        state=row["state"],
        reason=row["reason"],
        message=row["message"],
        weight=row["weight"],
        version=row["version"],
        credits_micro=row["credits_micro"],
        at=row["at"],
        contribution=row["contribution_id"],
        task=row["task_id"],
    )


_V = verdicts.c
_NEWS = (
    _VERDICT.where(equals(_V.worker_id), _V.id > sa.bindparam("since"))
    .order_by(_V.id)
    .limit(sa.bindparam("most"))
)


def _newest(lines: sa.CTE) -> sa.ClauseElement:
    """Return the query of the verdicts of each worker after a number given with it."""
    newer = (_V.worker_id == lines.c.worker) & (_V.id > lines.c.since)
    return (
        _VERDICT.add_columns(_V.worker_id)
        .join(lines, newer)
        .where(_V.at > sa.bindparam("recent_at", type_=sa.Float()))
        .order_by(_V.id)
    )


def _last(lines: sa.CTE) -> sa.ClauseElement:
    """Return the query of the newest verdict of each worker."""
    last = sa.select(sa.func.max(_V.id)).where(_V.worker_id == lines.c.worker).correlate(lines)
    return sa.select(lines.c.worker, _V.id, _V.at, lines.c.since).join_from(
        lines, verdicts, _V.id == last.scalar_subquery()
    )


_SINCE: dict[str, TypeEngine[Any]] = {"worker": sa.String(), "since": sa.BigInteger()}
_NEWEST = BulkStatement("asked", _SINCE, _newest, blank=("", 0))
_LAST = BulkStatement("asked", _SINCE, _last, blank=("", 0))
_RECENT = (
    sa.select(_V.id)
    .where(equals(_V.worker_id), _V.id <= sa.bindparam("until"), _V.at > sa.bindparam("recent_at"))
    .order_by(_V.id.desc())
    .limit(RECENT_MAX)
)
_THESE = _VERDICT.where(among(_V.id, "ids"))


def news(
    conn: sa.Connection,
    worker_id: str,
    since: int,
    recent_at: float,
    limit: int,
    sent_counts: Counter[int],
) -> tuple[list[Verdict], int]:
    """Return a worker's unseen verdicts, and the number to pass as `since` in the next call.

    Rows are numbered before their commit, so a row may appear below `since`. If there is no unseen
    verdict, verdicts younger than `recent_at` are returned again, first those that were sent least
    often by `sent_counts`, which is updated. The client drops the verdicts that it has.
    """
    values = {"where_worker_id": worker_id, "since": since, "most": limit}
    rows = list(conn.execute(_NEWS, values).mappings())
    verdict_by_id = {row["id"]: _verdict(row) for row in rows}
    until = rows[-1]["id"] if len(rows) == limit else max(since, *verdict_by_id, newest(conn)[0])
    if len(rows) < limit:
        values |= {"until": since, "recent_at": recent_at}
        recent = list(conn.execute(_RECENT, values).scalars())
        for number in sent_counts.keys() - recent:
            del sent_counts[number]
        again = sorted(recent, key=sent_counts.__getitem__)[: limit - len(rows)]
        recent_rows = conn.execute(_THESE, {"ids": again}).mappings() if again else ()
        verdict_by_id |= {row["id"]: _verdict(row) for row in recent_rows}
    sent_counts.update([*verdict_by_id])
    # `until` also passes other workers' verdicts, so that the next call need not look at them.
    return [verdict_by_id[number] for number in sorted(verdict_by_id)], until


def newest_of(
    conn: sa.Connection, since: Mapping[str, int], recent_at: float
) -> dict[str, list[tuple[int, Verdict]]]:
    """Return each worker's verdicts after its number in `since` that are younger than `recent_at`,
    in order and with their numbers.
    """
    by_worker: dict[str, list[tuple[int, Verdict]]] = {worker: [] for worker in since}
    if since:
        for row in _NEWEST.execute(conn, [*since.items()], recent_at=recent_at).mappings():
            by_worker[row["worker_id"]].append((row["id"], _verdict(row)))
    return by_worker


def concerned(conn: sa.Connection, since: Mapping[str, int], recent_at: float) -> set[str]:
    """Return the workers whose newest verdict is after their number in `since`, or after the
    instant `recent_at`.
    """
    rows: Any = _LAST.execute(conn, [*since.items()])
    return {worker for worker, number, at, after in rows if number > after or at > recent_at}


_LATEST_VERDICT = (
    _VERDICT.where(equals(verdicts.c.contribution_id)).order_by(verdicts.c.id.desc()).limit(1)
)


def latest_verdict(conn: sa.Connection, contribution_id: int) -> Verdict | None:
    values = {"where_contribution_id": contribution_id}
    row = conn.execute(_LATEST_VERDICT, values).mappings().first()
    return None if row is None else _verdict(row)


def history(
    conn: sa.Connection, volunteer_id: str, before: int | None, limit: int
) -> list[tuple[int, Verdict]]:
    """Return verdicts newest first, each with the number that continues the listing as `before`."""
    query = _VERDICT.where(verdicts.c.volunteer_id == volunteer_id)
    if before is not None:
        query = query.where(verdicts.c.id < before)
    rows = conn.execute(query.order_by(verdicts.c.id.desc()).limit(limit)).mappings()
    return [(row["id"], _verdict(row)) for row in rows]


def newest(conn: sa.Connection) -> tuple[int, float]:
    """Return number and instant of the newest verdict; (0, 0.0) without a verdict."""
    query = sa.select(verdicts.c.id, verdicts.c.at).order_by(verdicts.c.id.desc()).limit(1)
    row = conn.execute(query).first()
    return (0, 0.0) if row is None else (int(row[0]), float(row[1]))
