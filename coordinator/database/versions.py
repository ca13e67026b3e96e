"""Versions, references to their blobs, and the choice of versions to prune."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from coordinator.database.engine.statements import equals
from coordinator.database.evaluations import EvaluationRow
from coordinator.database.tables.runs import runs
from coordinator.database.tables.versions import evaluations, version_blobs, versions
from shared.errors import NotFound
from shared.protocol.endpoint import INTEGER_MAX

PACE_VERSIONS = 20  # most versions from which the pace of a run is computed: the newest


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `versions`; see tables/versions.py."""

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
    update_norm: float | None
    created_at: float


_ADD = sa.insert(versions)
_ADD_EVALUATION = sa.insert(evaluations)


def add(
    conn: sa.Connection,
    values: dict[str, object],
    *,
    evaluate: bool = True,
    ways: Sequence[str] = (),
) -> None:
    """Insert a version, the blobs of shorter routes to its weights, and its evaluation."""
    conn.execute(_ADD, values)
    if ways:
        key = {"run_id": values["run_id"], "version": values["version"]}
        conn.execute(sa.insert(version_blobs), [key | {"sha256": sha256} for sha256 in set(ways)])
    blank: dict[str, object] = {
        "loss": None,
        "metrics": "{}",
        "sample": "",
        "sample_sha256": None,
        "message": "",
    }
    blank |= {"at": None, "pruned": False, "state": "waiting" if evaluate else "skipped"}
    key = {"run_id": values["run_id"], "version": values["version"]}
    conn.execute(_ADD_EVALUATION, key | blank)


_GET = sa.select(versions).where(equals(versions.c.run_id), equals(versions.c.version))


def get(conn: sa.Connection, run_id: int, version: int) -> VersionRow:
    """Return a version. Raises NotFound."""
    values = {"where_run_id": run_id, "where_version": version}
    # PostgreSQL refuses a number that the column cannot hold
    row = conn.execute(_GET, values).mappings().first() if 0 <= version <= INTEGER_MAX else None
    if row is None:
        raise NotFound(f"this run has no version {version}")
    return VersionRow(**row)


class HeadRow(msgspec.Struct, frozen=True, kw_only=True):
    """Newest version of a run, with the signature of its manifest."""

    name: str
    version: int
    signature: str


_HEADS = sa.select(runs.c.id, runs.c.name, versions.c.version, versions.c.signature).join(
    versions, (versions.c.run_id == runs.c.id) & (versions.c.version == runs.c.head)
)


def heads(conn: sa.Connection) -> dict[int, HeadRow]:
    """Return the newest version of each started run; no row of `versions` is ever deleted."""
    return {
        row.id: HeadRow(name=row.name, version=row.version, signature=row.signature)
        for row in conn.execute(_HEADS)
    }


_EVALUATED = versions.join(
    evaluations,
    (evaluations.c.run_id == versions.c.run_id) & (evaluations.c.version == versions.c.version),
)


def listing(
    conn: sa.Connection, run_id: int, after: int, limit: int
) -> list[tuple[VersionRow, EvaluationRow]]:
    """Return versions above `after`, oldest first, each with its evaluation."""
    query = (
        sa.select(versions, evaluations)
        .select_from(_EVALUATED)
        .set_label_style(sa.LABEL_STYLE_TABLENAME_PLUS_COL)
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


def pace(conn: sa.Connection, run_id: int, head: int) -> tuple[float, float]:
    """Return the newest version's time and the mean seconds between recent versions (0 for a single
    version). Raises NotFound for a run without a version.
    """
    v, first = versions.c, max(0, head - PACE_VERSIONS)
    query = sa.select(v.created_at).where(v.run_id == run_id, v.version.in_((first, head)))
    times = [float(at) for at in conn.execute(query.order_by(v.version)).scalars()]
    if not times:
        raise NotFound(f"there is no version {head}")
    return times[-1], (times[-1] - times[0]) / max(1, head - first)


def count_merges(conn: sa.Connection, run_id: int, up_to: int | None = None) -> int:
    """Return the number of versions that merges made in a run, rolled back or not."""
    made = (versions.c.run_id == run_id) & (versions.c.kind == "merge")
    made &= sa.true() if up_to is None else versions.c.version <= up_to
    return int(conn.execute(sa.select(sa.func.count()).where(made)).scalar_one())


def content_before(conn: sa.Connection, row: VersionRow) -> int | None:
    """Return a rollback's target: the newest earlier version of equal weights; None for weights
    that no earlier version has.
    """
    v = versions.c
    query = sa.select(sa.func.max(v.version)).where(
        v.run_id == row.run_id, v.version < row.version, v.master_sha256 == row.master_sha256
    )
    version: int | None = conn.execute(query).scalar()
    return version


# --- retention ---


def prunable(
    conn: sa.Connection, run_id: int, keep: Sequence[int], newest: int, interval: int
) -> list[VersionRow]:
    """Return the versions whose files may be deleted: below `newest`, not in `keep`, not a multiple
    of `interval`, and with no evaluation waiting or running.
    """
    query = (
        sa.select(versions)
        .select_from(_EVALUATED)
        .where(
            versions.c.run_id == run_id,
            versions.c.version < newest,
            versions.c.version.not_in(list(keep)),
            ~evaluations.c.pruned,
            evaluations.c.state.not_in(("waiting", "running")),
        )
    )
    if interval > 0:
        query = query.where(versions.c.version % interval != 0)
    return [VersionRow(**row) for row in conn.execute(query).mappings()]


def bytes_kept(conn: sa.Connection, run_id: int) -> int:
    """Return the approximate size of a run's files in bytes."""
    v, e = versions.c, evaluations.c
    query = sa.select(sa.func.coalesce(sa.func.sum(v.size), 0)).select_from(_EVALUATED)
    return int(conn.execute(query.where(v.run_id == run_id, ~e.pruned)).scalar_one())


def blobs_in_use(conn: sa.Connection) -> set[str]:
    """Return the blobs of all versions that still have their files, and all samples."""
    v, e = versions.c, evaluations.c
    query = sa.select(v.master_sha256, v.published_sha256, v.state_sha256).select_from(_EVALUATED)
    files = conn.execute(query.where(~e.pruned))
    used = {sha256 for row in files for sha256 in row if sha256}
    used |= set(
        conn.execute(sa.select(e.sample_sha256).where(e.sample_sha256.is_not(None))).scalars()
    )
    b = version_blobs.c
    unpruned = version_blobs.join(
        evaluations, (evaluations.c.run_id == b.run_id) & (evaluations.c.version == b.version)
    )
    return used | set(
        conn.execute(sa.select(b.sha256).select_from(unpruned).where(~e.pruned)).scalars()
    )


# Each part uses an index of its own, since every download runs this query.
_PUBLIC = tuple(
    sa.select(column).where(column == sa.bindparam("sha256")).limit(1)
    for column in (version_blobs.c.sha256, versions.c.published_sha256, evaluations.c.sample_sha256)
)


def is_published(conn: sa.Connection, sha256: str) -> bool:
    """Return True if volunteers may fetch this blob: weights, a link or snapshot, or a sample."""
    values = {"sha256": sha256}
    return any(conn.execute(statement, values).first() is not None for statement in _PUBLIC)
