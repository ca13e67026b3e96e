"""Versions, what was measured of them, and the merges that made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import (
    LABEL_STYLE_TABLENAME_PLUS_COL,
    Connection,
    bindparam,
    func,
    insert,
    select,
    update,
)

from coordinator.database.engine.statements import its
from coordinator.database.tables.merges import merges
from coordinator.database.tables.versions import evaluations, version_blobs, versions
from shared.errors import NotFound


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `versions`; see tables.py."""

    run_id: int
    version: int
    kind: Literal["initial", "merge", "rollback"]
    parent: int | None
    master_sha256: str
    published_sha256: str
    size: int
    state_sha256: str | None
    manifest: str
    signature: str
    contributions: str
    global_step: int
    tokens: int
    phase: int
    update_norm: float | None
    created_at: float


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `evaluations`."""

    run_id: int
    version: int
    state: Literal["waiting", "running", "done", "skipped", "failed"]
    loss: float | None
    metrics: str
    sample: str
    sample_sha256: str | None
    message: str
    at: float | None
    pruned: bool


class MergeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `merges`."""

    id: int
    run_id: int
    base: int
    shard: int
    state: str
    contributions: str
    owner: str
    fence: int
    lease_until: float
    failures: int
    message: str
    terms: str
    created_at: float
    ended_at: float | None


_ADD = insert(versions)
_ADD_EVALUATION = insert(evaluations)


def add(
    conn: Connection, values: dict[str, Any], *, evaluate: bool = True, ways: Sequence[str] = ()
) -> None:
    """Insert a version, the blobs of shorter ways to its weights, and the place for its
    evaluation.
    """
    conn.execute(_ADD, values)
    if ways:
        key = {"run_id": values["run_id"], "version": values["version"]}
        conn.execute(insert(version_blobs), [key | {"sha256": sha256} for sha256 in set(ways)])
    blank: dict[str, Any] = {
        "loss": None,
        "metrics": "{}",
        "sample": "",
        "sample_sha256": None,
        "message": "",
    }
    blank |= {"at": None, "pruned": False, "state": "waiting" if evaluate else "skipped"}
    key = {"run_id": values["run_id"], "version": values["version"]}
    conn.execute(_ADD_EVALUATION, key | blank)


_GET = select(versions).where(its(versions.c.run_id), its(versions.c.version))


def get(conn: Connection, run_id: int, version: int) -> VersionRow:
    """Raises NotFound."""
    given = {"its_run_id": run_id, "its_version": version}
    row = conn.execute(_GET, given).mappings().first()
    if row is None:
        raise NotFound(f"this run has no version {version}")
    return VersionRow(**row)


def listing(
    conn: Connection, run_id: int, after: int, limit: int
) -> list[tuple[VersionRow, EvaluationRow]]:
    """Versions above `after`, oldest first, each with what was measured."""
    join = versions.join(
        evaluations,
        (evaluations.c.run_id == versions.c.run_id) & (evaluations.c.version == versions.c.version),
    )
    query = (
        select(versions, evaluations)
        .select_from(join)
        .set_label_style(LABEL_STYLE_TABLENAME_PLUS_COL)
    )
    query = (
        query.where(versions.c.run_id == run_id, versions.c.version > after)
        .order_by(versions.c.version)
        .limit(limit)
    )
    return [_pair(row) for row in conn.execute(query).mappings()]


def _pair(row: Any) -> tuple[VersionRow, EvaluationRow]:
    version = {field: row[f"versions_{field}"] for field in VersionRow.__struct_fields__}
    evaluation = {field: row[f"evaluations_{field}"] for field in EvaluationRow.__struct_fields__}
    return VersionRow(**version), EvaluationRow(**evaluation)


# --- evaluations ---


_E = evaluations.c
_NEXT_EVALUATION = (
    select(evaluations)
    .where(_E.state == "waiting", ~_E.pruned)
    .order_by((_E.version == 0).desc(), _E.version.desc())
    .limit(1)
)
_MEASURED = select(_E.loss).where(its(_E.run_id), _E.state == "done", _E.loss.is_not(None))
_NEWEST_LOSS = _MEASURED.order_by(_E.version.desc()).limit(1)
_FIRST_LOSS = _MEASURED.order_by(_E.version).limit(1)


def next_evaluation(conn: Connection) -> EvaluationRow | None:
    """The newest waiting version of the run that waits longest; version 0 goes before all others of
    its run.
    """
    row = conn.execute(_NEXT_EVALUATION).mappings().first()
    return None if row is None else EvaluationRow(**row)


def set_evaluation(conn: Connection, run_id: int, version: int, **values: Any) -> None:
    conn.execute(
        update(evaluations)
        .where(evaluations.c.run_id == run_id, evaluations.c.version == version)
        .values(**values)
    )


def skip_older(conn: Connection, run_id: int, version: int) -> None:
    """Mark what a newer version has overtaken; never version 0."""
    e = evaluations.c
    conn.execute(
        update(evaluations)
        .where(e.run_id == run_id, e.version < version, e.version > 0, e.state == "waiting")
        .values(state="skipped")
    )


def requeue_evaluations(conn: Connection) -> None:
    """After a restart: what was being evaluated waits again."""
    conn.execute(
        update(evaluations).where(evaluations.c.state == "running").values(state="waiting")
    )


def evaluation(conn: Connection, run_id: int, version: int) -> EvaluationRow:
    query = select(evaluations).where(
        evaluations.c.run_id == run_id, evaluations.c.version == version
    )
    return EvaluationRow(**conn.execute(query).mappings().one())


class Measured(NamedTuple):
    """A loss, and the version it is of."""

    version: int
    loss: float
    at: float


def measured(conn: Connection, run_id: int, most: int) -> list[Measured]:
    """Versions with a loss, oldest first: about `most` of them, evenly spread, when there are more;
    always the newest.
    """
    e = evaluations.c
    found = (e.run_id == run_id) & (e.state == "done") & e.loss.is_not(None)
    count = conn.execute(select(func.count()).select_from(evaluations).where(found)).scalar_one()
    place = func.row_number().over(order_by=e.version.desc()) - 1
    every = select(e.version, e.loss, e.at, place.label("place")).where(found).subquery()
    chosen = select(every.c.version, every.c.loss, every.c.at).order_by(every.c.version)
    if count > most:
        chosen = chosen.where(every.c.place % -(-count // most) == 0)
    return [Measured(version, loss, at or 0.0) for version, loss, at in conn.execute(chosen)]


def losses_in_phase(conn: Connection, run_id: int, phase: int, limit: int) -> list[float]:
    """The newest losses measured of versions in a phase, at most `limit`, the oldest first."""
    e, v = evaluations.c, versions.c
    query = select(e.loss).join_from(
        evaluations, versions, (v.run_id == e.run_id) & (v.version == e.version)
    )
    query = query.where(
        e.run_id == run_id, v.phase == phase, e.state == "done", e.loss.is_not(None)
    )
    found = conn.execute(query.order_by(e.version.desc()).limit(limit)).scalars().all()
    return [float(loss) for loss in reversed(found)]


def samples(conn: Connection, run_id: int, version: int | None = None) -> list[EvaluationRow]:
    """Versions with a sample, oldest first, or one of them."""
    e = evaluations.c
    shown = (e.sample != "") | e.sample_sha256.is_not(None)
    query = select(evaluations).where(e.run_id == run_id, e.state == "done", shown)
    if version is not None:
        query = query.where(e.version == version)
    return [EvaluationRow(**row) for row in conn.execute(query.order_by(e.version)).mappings()]


def newest_loss(conn: Connection, run_id: int) -> float | None:
    return conn.execute(_NEWEST_LOSS, {"its_run_id": run_id}).scalar()


def first_loss(conn: Connection, run_id: int) -> float | None:
    return conn.execute(_FIRST_LOSS, {"its_run_id": run_id}).scalar()


def best(conn: Connection, run_id: int) -> int | None:
    """The version with the lowest loss; the earlier one of equals."""
    e = evaluations.c
    query = select(e.version).where(e.run_id == run_id, e.state == "done", e.loss.is_not(None))
    return conn.execute(query.order_by(e.loss, e.version).limit(1)).scalar()


def waiting(conn: Connection, run_id: int) -> int:
    e = evaluations.c
    query = select(func.count()).where(
        e.run_id == run_id, e.state.in_(("waiting", "running")), ~e.pruned
    )
    return int(conn.execute(query).scalar_one())


# --- retention ---


def prunable(
    conn: Connection, run_id: int, keep: Sequence[int], newest: int, every: int
) -> list[VersionRow]:
    """Versions whose files may go: below `newest`, not among `keep`, not an `every`-th, not waiting
    for evaluation.
    """
    join = versions.join(
        evaluations,
        (evaluations.c.run_id == versions.c.run_id) & (evaluations.c.version == versions.c.version),
    )
    query = (
        select(versions)
        .select_from(join)
        .where(
            versions.c.run_id == run_id,
            versions.c.version < newest,
            versions.c.version.not_in(list(keep)),
            ~evaluations.c.pruned,
            evaluations.c.state.not_in(("waiting", "running")),
        )
    )
    if every > 0:
        query = query.where(versions.c.version % every != 0)
    return [VersionRow(**row) for row in conn.execute(query).mappings()]


def blobs_in_use(conn: Connection) -> set[str]:
    """Every blob that a version which is not pruned refers to."""
    join = versions.join(
        evaluations,
        (evaluations.c.run_id == versions.c.run_id) & (evaluations.c.version == versions.c.version),
    )
    v, e = versions.c, evaluations.c
    query = select(v.master_sha256, v.published_sha256, v.state_sha256).select_from(join)
    files = conn.execute(query.where(~e.pruned))
    used = {sha256 for row in files for sha256 in row if sha256}
    used |= set(conn.execute(select(e.sample_sha256).where(e.sample_sha256.is_not(None))).scalars())
    b = version_blobs.c
    kept = version_blobs.join(
        evaluations, (evaluations.c.run_id == b.run_id) & (evaluations.c.version == b.version)
    )
    return used | set(conn.execute(select(b.sha256).select_from(kept).where(~e.pruned)).scalars())


# Each by an index of its own: every download asks.
_PUBLIC = tuple(
    select(column).where(column == bindparam("sha256")).limit(1)
    for column in (version_blobs.c.sha256, versions.c.published_sha256, _E.sample_sha256)
)


def is_published(conn: Connection, sha256: str) -> bool:
    """Return True if volunteers may have this blob: published weights, a shorter way to them, or
    what a version drew.
    """
    given = {"sha256": sha256}
    return any(conn.execute(statement, given).first() is not None for statement in _PUBLIC)


# --- merges ---


class Bid(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the lease of a merge."""

    run_id: int
    base: int
    shard: int = 0
    contributions: str  # JSON list of ids
    terms: str = "{}"  # JSON of what else was settled when it began
    owner: str
    lease_until: float


_M = merges.c
_MERGE = select(merges).where(its(_M.run_id), its(_M.base), its(_M.shard))
_MERGE_LOCKED = _MERGE.with_for_update()
_ADD_MERGE = insert(merges).returning(*_M)
_TAKE_OVER = update(merges).where(its(_M.run_id), its(_M.base), its(_M.shard)).returning(*_M)
_END_MERGE = update(merges).where(its(_M.id), its(_M.fence), _M.state == "leased")


def take_merge(conn: Connection, bid: Bid, now: float) -> MergeRow | None:
    """Lease the merge of `base`, or take it over when its owner is gone.

    None when somebody else is at it.
    """
    key = {"its_run_id": bid.run_id, "its_base": bid.base, "its_shard": bid.shard}
    row = conn.execute(_MERGE_LOCKED, key).mappings().first()
    values = msgspec.structs.asdict(bid) | {"state": "leased", "ended_at": None}
    if row is None:
        fresh = {"fence": 1, "failures": 0, "message": "", "created_at": now}
        return MergeRow(**conn.execute(_ADD_MERGE, fresh | values).mappings().one())
    if row["state"] == "committed" or (
        row["state"] == "leased" and row["lease_until"] > now and row["owner"] != bid.owner
    ):
        return None
    taken = {"fence": row["fence"] + 1} | values
    return MergeRow(**conn.execute(_TAKE_OVER, key | taken).mappings().one())


def merge_of(conn: Connection, run_id: int, base: int) -> MergeRow | None:
    """The merge from a version to the next, whatever became of it."""
    key = {"its_run_id": run_id, "its_base": base, "its_shard": 0}
    row = conn.execute(_MERGE, key).mappings().first()
    return None if row is None else MergeRow(**row)


def merge_by_id(conn: Connection, merge_id: int) -> MergeRow:
    """A merge that is known to be there."""
    return MergeRow(**conn.execute(select(merges).where(merges.c.id == merge_id)).mappings().one())


def renew_merge(conn: Connection, merge: MergeRow, until: float) -> bool:
    m = merges.c
    query = (
        update(merges)
        .where(m.id == merge.id, m.fence == merge.fence, m.state == "leased")
        .values(lease_until=until)
    )
    return conn.execute(query).rowcount == 1


def end_merge(conn: Connection, merge: MergeRow, state: str, now: float, **values: Any) -> bool:
    """Close a merge that is still ours: False when its fence has moved."""
    given = {"its_id": merge.id, "its_fence": merge.fence, "state": state, "ended_at": now}
    return conn.execute(_END_MERGE, given | values).rowcount == 1


def abandon_merges(conn: Connection, now: float) -> None:
    """Free every leased merge. Only for a server that has the database for itself."""
    leased = update(merges).where(merges.c.state == "leased")
    conn.execute(leased.values(state="abandoned", ended_at=now))
