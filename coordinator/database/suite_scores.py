"""Scores of versions on the task suites of their run."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, func, insert, select

from coordinator.database.tables.versions import suite_scores

_S = suite_scores.c


class SuiteScoreRow(NamedTuple):
    """Score of one version on one suite."""

    suite: str
    version: int
    correct: int
    examples: int
    cut: int


def put(conn: Connection, run_id: int, scores: list[SuiteScoreRow], now: float) -> None:
    """Store scores; one of the same version on the same suite gives way."""
    for score in scores:
        its = (_S.run_id == run_id, _S.suite == score.suite, _S.version == score.version)
        conn.execute(delete(suite_scores).where(*its))
        row: dict[str, Any] = {"run_id": run_id, "at": now, **score._asdict()}
        conn.execute(insert(suite_scores).values(**row))


def last_version(conn: Connection, run_id: int) -> int | None:
    """Return the newest version that was measured on a suite."""
    return conn.execute(select(func.max(_S.version)).where(_S.run_id == run_id)).scalar()


def course(
    conn: Connection, run_id: int, up_to: int | None = None
) -> dict[str, tuple[SuiteScoreRow, SuiteScoreRow]]:
    """Return the first and the newest score of each suite; none of a version above `up_to`."""
    where = [_S.run_id == run_id]
    if up_to is not None:
        where.append(_S.version <= up_to)
    ends = (
        select(_S.suite, func.min(_S.version).label("low"), func.max(_S.version).label("high"))
        .where(*where)
        .group_by(_S.suite)
        .subquery()
    )
    query = (
        select(_S.suite, _S.version, _S.correct, _S.examples, _S.cut)
        .join(ends, _S.suite == ends.c.suite)
        .where(_S.run_id == run_id, _S.version.in_((ends.c.low, ends.c.high)))
        .order_by(_S.suite, _S.version)
    )
    found: dict[str, list[SuiteScoreRow]] = {}
    for row in conn.execute(query):
        found.setdefault(row[0], []).append(SuiteScoreRow(*row))
    return {name: (rows[0], rows[-1]) for name, rows in found.items()}
