"""Evaluations: the queue of versions to measure, and their losses and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import sqlalchemy as sa

from coordinator.database import runs
from coordinator.database.engine.leased_jobs import LeasedJobs
from coordinator.database.engine.statements import deletion, equals
from coordinator.database.tables.versions import evaluations, suite_scores

_S = suite_scores.c


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `evaluations`."""

    run_id: int
    version: int
    state: Literal["waiting", "running", "done", "skipped", "failed"]
    owner: str
    attempt: int
    lease_until: float
    loss: float | None
    metrics: str
    sample: str
    sample_sha256: str | None
    message: str
    at: float | None
    pruned: bool


_E = evaluations.c
JOBS = LeasedJobs(evaluations, EvaluationRow, free="waiting", leased="running")
_WAITING = sa.select(evaluations).where(~_E.pruned)
_WAITING = _WAITING.order_by((_E.version == 0).desc(), _E.version.desc())
_MEASURED = sa.select(_E.loss).where(equals(_E.run_id), _E.state == "done", _E.loss.is_not(None))
NEWEST_LOSS = _MEASURED.order_by(_E.version.desc()).limit(1)
_FIRST_LOSS = _MEASURED.order_by(_E.version).limit(1)


def _ready(conn: sa.Connection, now: float) -> sa.ColumnElement[bool]:
    return JOBS.ready(now) & _E.run_id.not_in(runs.damaged_ids(conn))


def waits(conn: sa.Connection, now: float) -> bool:
    """Return True if a version waits for its evaluation, or the process that evaluates a version
    has been silent.
    """
    query = sa.select(sa.exists().where(_ready(conn, now), ~_E.pruned))
    return conn.execute(query).scalar_one()


def take(conn: sa.Connection, owner: str, now: float, lease_s: float) -> EvaluationRow | None:
    """Lease the evaluation of a waiting version 0, or else of the highest waiting version of any
    run, and skip the older waiting versions of that run. Return None if no version waits.
    """
    row = JOBS.take(conn, _WAITING.where(_ready(conn, now)), owner, now + lease_s)
    if row is not None:
        skip_older(conn, row.run_id, row.version)
    return row


def set_evaluation(conn: sa.Connection, run_id: int, version: int, **values: object) -> None:
    conn.execute(
        sa.update(evaluations)
        .where(evaluations.c.run_id == run_id, evaluations.c.version == version)
        .values(**values)
    )


def prune_all(conn: sa.Connection, run_id: int) -> None:
    """Release the files of every version of a run, samples included."""
    conn.execute(
        sa.update(evaluations)
        .where(evaluations.c.run_id == run_id)
        .values(pruned=True, sample_sha256=None)
    )


def skip_older(conn: sa.Connection, run_id: int, version: int) -> None:
    """Mark the waiting evaluations of versions below `version` as skipped, except that of version
    0.
    """
    e = evaluations.c
    conn.execute(
        sa.update(evaluations)
        .where(e.run_id == run_id, e.version < version, e.version > 0, e.state == "waiting")
        .values(state="skipped")
    )


def evaluation(conn: sa.Connection, run_id: int, version: int) -> EvaluationRow:
    query = sa.select(evaluations).where(
        evaluations.c.run_id == run_id, evaluations.c.version == version
    )
    return EvaluationRow(**conn.execute(query).mappings().one())


class VersionLoss(NamedTuple):
    """Loss of a version."""

    version: int
    loss: float
    at: float


def measured(conn: sa.Connection, run_id: int, most: int) -> list[VersionLoss]:
    """Return up to `most` evenly spread versions with a loss, oldest first, including the
    newest.
    """
    e = evaluations.c
    measured_rows = (e.run_id == run_id) & (e.state == "done") & e.loss.is_not(None)
    count = conn.execute(
        sa.select(sa.func.count()).select_from(evaluations).where(measured_rows)
    ).scalar_one()
    place = sa.func.row_number().over(order_by=e.version.desc()) - 1
    numbered = (
        sa.select(e.version, e.loss, e.at, place.label("place")).where(measured_rows).subquery()
    )
    selection = sa.select(numbered.c.version, numbered.c.loss, numbered.c.at).order_by(
        numbered.c.version
    )
    if count > most:
        selection = selection.where(numbered.c.place % -(-count // most) == 0)
    return [VersionLoss(version, loss, at or 0.0) for version, loss, at in conn.execute(selection)]


class VersionSample(NamedTuple):
    """Sample of a version: a picture by its hash, or a text."""

    version: int
    text: str
    sha256: str | None


def _shown(run_id: int) -> sa.ColumnElement[bool]:
    return sa.and_(
        _E.run_id == run_id,
        _E.state == "done",
        sa.or_(_E.sample != "", _E.sample_sha256.is_not(None)),
    )


def some_measured(conn: sa.Connection, run_id: int, numbers: Sequence[int]) -> list[VersionLoss]:
    """Return the losses of these versions, if measured, and of the newest version, oldest first."""
    columns = sa.select(_E.version, _E.loss, _E.at, _E.state).where(_E.run_id == run_id)
    newest = columns.where(_E.state == "done", _E.loss.is_not(None)).order_by(_E.version.desc())
    # Measured rows are picked here: in the query SQLite would read an index of all losses.
    rows = {*conn.execute(columns.where(_E.version.in_(numbers))), *conn.execute(newest.limit(1))}
    return [
        VersionLoss(version, loss, at or 0.0)
        for version, loss, at, state in sorted(rows, key=lambda row: row[0])
        if state == "done" and loss is not None
    ]


def some_sampled(conn: sa.Connection, run_id: int, numbers: Sequence[int]) -> list[int]:
    """Return the versions of `numbers` with a sample, and the first and the newest version with a
    sample.
    """
    query = sa.select(_E.version).where(_shown(run_id))
    versions_sampled = {*conn.execute(query.where(_E.version.in_(numbers))).scalars()}
    for order in (_E.version, _E.version.desc()):
        versions_sampled.update(conn.execute(query.order_by(order).limit(1)).scalars())
    return sorted(versions_sampled)


def samples(conn: sa.Connection, run_id: int, numbers: Sequence[int]) -> list[VersionSample]:
    """Return the samples of these versions, oldest first."""
    query = sa.select(_E.version, _E.sample, _E.sample_sha256)
    query = query.where(_E.run_id == run_id, _E.version.in_(numbers))
    return [VersionSample(*row) for row in conn.execute(query.order_by(_E.version))]


def neighbours(conn: sa.Connection, run_id: int, version: int) -> tuple[int | None, int | None]:
    """Return the nearest earlier and the nearest later version with a sample, each None if no
    version there has a sample.
    """
    older = sa.select(sa.func.max(_E.version)).where(_shown(run_id), _E.version < version)
    newer = sa.select(sa.func.min(_E.version)).where(_shown(run_id), _E.version > version)
    return conn.execute(older).scalar(), conn.execute(newer).scalar()


def newest_loss(conn: sa.Connection, run_id: int) -> float | None:
    return conn.execute(NEWEST_LOSS, {"where_run_id": run_id}).scalar()


def first_loss(conn: sa.Connection, run_id: int) -> float | None:
    return conn.execute(_FIRST_LOSS, {"where_run_id": run_id}).scalar()


def metrics_of_ends(conn: sa.Connection, run_id: int) -> tuple[str, str]:
    """Return the metrics of the first and the newest version that have a loss, as JSON."""
    first, newest = (
        conn.execute(query.with_only_columns(_E.metrics), {"where_run_id": run_id}).scalar() or "{}"
        for query in (_FIRST_LOSS, NEWEST_LOSS)
    )
    return first, newest


def best(conn: sa.Connection, run_id: int) -> int | None:
    """Return the version with the lowest loss; of several versions with that loss the newest, since
    training may leave the loss of version 0 unchanged. None without a loss.
    """
    e = evaluations.c
    query = sa.select(e.version).where(e.run_id == run_id, e.state == "done", e.loss.is_not(None))
    return conn.execute(query.order_by(e.loss, e.version.desc()).limit(1)).scalar()


class SuiteScoreRow(NamedTuple):
    """Score of one version on one suite."""

    suite: str
    version: int
    correct: int
    examples: int
    cut: int


def put_scores(conn: sa.Connection, run_id: int, scores: list[SuiteScoreRow], now: float) -> None:
    """Store scores, which replace older ones of the same version and suite."""
    for score in scores:
        of_score = (_S.run_id == run_id, _S.suite == score.suite, _S.version == score.version)
        conn.execute(deletion(suite_scores, "replaced").where(*of_score))
        row: dict[str, object] = {"run_id": run_id, "at": now, **score._asdict()}
        conn.execute(sa.insert(suite_scores).values(**row))


def last_version(conn: sa.Connection, run_id: int) -> int | None:
    """Return the newest version that a suite measured; None if no suite has measured a version."""
    return conn.execute(sa.select(sa.func.max(_S.version)).where(_S.run_id == run_id)).scalar()


def course(
    conn: sa.Connection, run_id: int, up_to: int | None = None
) -> dict[str, tuple[SuiteScoreRow, SuiteScoreRow]]:
    """Return the first and the newest score of each suite among versions up to `up_to`."""
    where = [_S.run_id == run_id]
    if up_to is not None:
        where.append(_S.version <= up_to)
    ends = (
        sa.select(
            _S.suite, sa.func.min(_S.version).label("low"), sa.func.max(_S.version).label("high")
        )
        .where(*where)
        .group_by(_S.suite)
        .subquery()
    )
    query = (
        sa.select(_S.suite, _S.version, _S.correct, _S.examples, _S.cut)
        .join(ends, _S.suite == ends.c.suite)
        .where(_S.run_id == run_id, _S.version.in_((ends.c.low, ends.c.high)))
        .order_by(_S.suite, _S.version)
    )
    by_suite: dict[str, list[SuiteScoreRow]] = {}
    for row in conn.execute(query):
        by_suite.setdefault(row[0], []).append(SuiteScoreRow(*row))
    return {name: (rows[0], rows[-1]) for name, rows in by_suite.items()}
