"""Contributions and their verdicts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, get_args
from typing import cast as cast_type

import msgspec
import sqlalchemy as sa

from coordinator.database.engine.statements import among, equals, one_of
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.ledger import events
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.versions import versions
from coordinator.database.volunteers import takes_part
from shared.errors import NotFound
from shared.protocol.base import ContributionState, Reason

STATES = get_args(ContributionState)
UPDATES = ("delta", "gradient")  # the only kinds that are merged


class ContributionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `contributions`; see tables/contributions.py."""

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
    vetted: bool
    network: str
    unproven: bool = False
    checked_s: float = 0.0


def _row(mapping: Any) -> ContributionRow:
    return ContributionRow(**mapping)


_C = contributions.c
_ADD = sa.insert(contributions).returning(*_C)
_KEEP = sa.update(tasks).where(among(tasks.c.id, "ids")).values(renew_by=None, finish_by=None)
_BY_ID = sa.select(contributions).where(equals(_C.id))
_BY_ID_LOCKED = _BY_ID.with_for_update()
_MERGE_ORDER = (_C.task_id, _C.part, _C.tries)
_BY_IDS = sa.select(contributions).where(among(_C.id, "ids")).order_by(*_MERGE_ORDER)
_IS_UPDATE = one_of(_C.kind, UPDATES)
_TO_MERGE = sa.and_(equals(_C.run_id), _C.state == "accepted", _IS_UPDATE)
LEFT_OVER_MAX = 1000  # contributions of a batch
_LEFT_OVER = (
    sa.select(contributions)
    .where(_TO_MERGE, among(_C.volunteer_id, "owners"))
    .order_by(*_MERGE_ORDER)
    .limit(sa.bindparam("most"))
)
_LEFT_OVER_OWNERS = sa.select(_C.volunteer_id).where(_TO_MERGE).distinct()
_ROLLBACK, _KEPT = versions.alias("rollback"), versions.alias("kept")
# A rollback after the base reverted it: no version from the base up to the rollback has the weights
# that the rollback brought back.
_REVERTED = (
    sa.exists()
    .where(_ROLLBACK.c.run_id == _C.run_id, _ROLLBACK.c.kind == "rollback")
    .where(_ROLLBACK.c.version > _C.base_version)
    .where(
        ~sa.exists()
        .where(_KEPT.c.run_id == _C.run_id, _KEPT.c.version >= _C.base_version)
        .where(_KEPT.c.version < _ROLLBACK.c.version)
        .where(_KEPT.c.master_sha256 == _ROLLBACK.c.master_sha256)
        .correlate(contributions, _ROLLBACK)
    )
    .correlate(contributions)
)
_WAITS = _TO_MERGE & _C.unproven.is_(False)
_TURN = sa.func.row_number().over(partition_by=_C.volunteer_id, order_by=_MERGE_ORDER)
_IN_TURN = (
    sa.select(_C.id, _C.task_id, _C.part, _C.tries, _TURN.label("turn"))
    .where(_WAITS, ~_REVERTED)
    .subquery()
)
_BATCH = (
    sa.select(_IN_TURN.c.id)
    .order_by(_IN_TURN.c.turn, _IN_TURN.c.task_id, _IN_TURN.c.part, _IN_TURN.c.tries)
    .limit(sa.bindparam("most"))
)
_MERGEABLE = sa.select(contributions).where(_C.id.in_(_BATCH)).order_by(*_MERGE_ORDER)
_WAITING_ACCOUNTS = sa.select(_C.volunteer_id).where(_WAITS).distinct().limit(sa.bindparam("most"))
_LEFT_BEHIND = (
    sa.select(contributions)
    .where(
        _TO_MERGE,
        (_C.base_version < sa.bindparam("base")) | (_C.kind != sa.bindparam("kind")) | _REVERTED,
    )
    .order_by(_C.task_id, _C.part)
)


def add(
    conn: sa.Connection, new: Sequence[dict[str, object]], last: Sequence[int]
) -> dict[int, ContributionRow]:
    """Insert contributions as `checking`; return them by task. The tasks in `last`, which have had
    their last part, stop expiring and wait for the verdict.
    """
    rows = [_row(row) for row in conn.execute(_ADD, new).mappings()] if new else []
    if last:
        conn.execute(_KEEP, {"ids": last})
    return {row.task_id: row for row in rows}


def by_id(
    conn: sa.Connection,
    contribution_id: int,
    volunteer_id: str | None = None,
    *,
    lock: bool = False,
) -> ContributionRow:
    """Return a contribution. Raises NotFound, also for a contribution of another account."""
    query = _BY_ID_LOCKED if lock else _BY_ID
    row = conn.execute(query, {"where_id": contribution_id}).mappings().first()
    if row is None or volunteer_id not in (None, row["volunteer_id"]):
        raise NotFound(f"you have no contribution {contribution_id}")
    return _row(row)


def by_ids(conn: sa.Connection, ids: Sequence[int]) -> list[ContributionRow]:
    """Return contributions in the order of a merge: by task, part and try."""
    return [_row(row) for row in conn.execute(_BY_IDS, {"ids": ids}).mappings()]


_SUBMITTED = sa.select(_C.task_id, _C.attempt, _C.part, _C.tries, _C.sha256, _C.worker_id).where(
    among(_C.task_id, "tasks"), among(_C.sha256, "hashes")
)


def submitted(conn: sa.Connection, task_ids: Sequence[int], hashes: Sequence[str]) -> set[object]:
    """Return task, attempt, part, try, hash and worker of the contributions with these bytes."""
    return {*map(tuple, conn.execute(_SUBMITTED, {"tasks": task_ids, "hashes": hashes}))}


_CHECKING = (
    sa.select(contributions)
    .where(among(_C.id, "ids"), _C.state == "checking")
    .order_by(_C.id)
    .with_for_update()
)


def undecided(conn: sa.Connection, ids: Iterable[int]) -> list[ContributionRow]:
    """Lock and return the contributions with these numbers that have no verdict yet."""
    return [_row(row) for row in conn.execute(_CHECKING, {"ids": sorted(ids)}).mappings()]


def unchecked(conn: sa.Connection, after: int, limit: int) -> list[ContributionRow]:
    """Return the oldest contributions above a number that have no verdict yet."""
    query = sa.select(contributions).where(_C.state == "checking", _C.id > after)
    return [_row(row) for row in conn.execute(query.order_by(_C.id).limit(limit)).mappings()]


def mergeable(conn: sa.Connection, run_id: int, limit: int = 1000) -> list[ContributionRow]:
    """Return the accepted updates that may be merged now, in merge order. Of more than `limit` the
    accounts take turns: the oldest update of each comes before a second one of any.
    """
    rows = conn.execute(_MERGEABLE, {"where_run_id": run_id, "most": limit}).mappings()
    return [_row(row) for row in rows]


def waiting_accounts(conn: sa.Connection, run_id: int, limit: int) -> frozenset[str]:
    """Return accounts with an update that waits for a run's next merge; all, if fewer than
    `limit`.
    """
    values = {"where_run_id": run_id, "most": limit}
    return frozenset(conn.execute(_WAITING_ACCOUNTS, values).scalars())


def left_over_owners(conn: sa.Connection, run_id: int) -> frozenset[str]:
    """Return the accounts of a run's accepted updates, as in `left_over`."""
    return frozenset(conn.execute(_LEFT_OVER_OWNERS, {"where_run_id": run_id}).scalars())


def left_over(conn: sa.Connection, run_id: int, owners: Collection[str]) -> list[ContributionRow]:
    """Return accepted updates of accounts in merge order, including updates that wait for their
    recompute.
    """
    values = {"where_run_id": run_id, "owners": sorted(owners), "most": LEFT_OVER_MAX}
    return [_row(row) for row in conn.execute(_LEFT_OVER, values).mappings()]


_SET_UNPROVEN = sa.update(contributions).where(equals(_C.id)).values(unproven=sa.bindparam("waits"))
_PROVED = (
    sa.update(contributions)
    .where(equals(_C.id), _C.state == "accepted")
    .values(unproven=False, weight=sa.bindparam("present_weight"))
)


def wait_for_proof(conn: sa.Connection, contribution_id: int) -> None:
    """Exclude an accepted update from merging until its recompute has passed."""
    conn.execute(_SET_UNPROVEN, {"where_id": contribution_id, "waits": True})


def proved(conn: sa.Connection, contribution_id: int, weight: float) -> None:
    """Release a proven update for merging, with its present weight."""
    conn.execute(_PROVED, {"where_id": contribution_id, "present_weight": weight})


_UNPROVEN_OF = (
    sa.select(contributions)
    .where(equals(_C.volunteer_id), _C.state == "accepted", _C.unproven.is_(True))
    .where(_C.id < sa.bindparam("before"))
    .order_by(_C.id)
)


def unproven_of(conn: sa.Connection, volunteer_id: str, before: int) -> list[ContributionRow]:
    """Return an account's updates below a number that wait for their proof."""
    values = {"where_volunteer_id": volunteer_id, "before": before}
    return [_row(row) for row in conn.execute(_UNPROVEN_OF, values).mappings()]


def left_behind(conn: sa.Connection, run_id: int, base: int, kind: str) -> list[ContributionRow]:
    """Return accepted updates that began below version `base` or at a version that a rollback has
    reverted, or are of another kind.
    """
    values = {"where_run_id": run_id, "base": base, "kind": kind}
    return [_row(row) for row in conn.execute(_LEFT_BEHIND, values).mappings()]


_GOOD_OF = (
    sa.select(contributions)
    .where(equals(_C.volunteer_id), _C.state.in_(("accepted", "merged", "superseded")))
    .where(_C.received_at >= sa.bindparam("since"), _C.id > sa.bindparam("after"))
    .order_by(_C.id)
    .limit(sa.bindparam("most"))
    .with_for_update()
)
_ACCEPTED_OF = (
    sa.select(contributions)
    .where(equals(_C.volunteer_id), _C.state == "accepted", _IS_UPDATE)  # other kinds never merge
    .order_by(_C.id)
    .with_for_update()
)
_AT_HOME = sa.exists().where(tasks.c.id == _C.task_id, tasks.c.home != "")
_ACCEPTED_AT_HOME = _ACCEPTED_OF.where(_AT_HOME)


def good_of(
    conn: sa.Connection, volunteer_id: str, since: float, after: int, limit: int
) -> list[ContributionRow]:
    """Lock and return a volunteer's accepted contributions in the order of their numbers, at most
    `limit`: received from `since` on, and numbered above `after`.
    """
    values = {"where_volunteer_id": volunteer_id, "since": since, "after": after, "most": limit}
    return [_row(row) for row in conn.execute(_GOOD_OF, values).mappings()]


def accepted_of(conn: sa.Connection, volunteer_id: str) -> list[ContributionRow]:
    """Return a volunteer's accepted, unmerged updates, locked."""
    rows = conn.execute(_ACCEPTED_OF, {"where_volunteer_id": volunteer_id})
    return [_row(row) for row in rows.mappings()]


def accepted_at_home(conn: sa.Connection, volunteer_id: str) -> list[ContributionRow]:
    """Return a volunteer's accepted, unmerged updates of runs on members' data, locked."""
    rows = conn.execute(_ACCEPTED_AT_HOME, {"where_volunteer_id": volunteer_id})
    return [_row(row) for row in rows.mappings()]


_NEWEST_OF = sa.select(sa.func.max(_C.id)).where(equals(_C.volunteer_id))


def newest_of(conn: sa.Connection, volunteer_id: str) -> int:
    """Return the number of a volunteer's newest contribution; 0 without a contribution."""
    return int(conn.execute(_NEWEST_OF, {"where_volunteer_id": volunteer_id}).scalar() or 0)


class PeerContribution(NamedTuple):
    """Earlier contribution, with which a new contribution is compared."""

    volunteer_id: str
    norm: float
    steps: int
    global_step: int  # optimiser steps of the run at its base version


_V = versions.c
_COHORT = (
    sa.select(_C.volunteer_id, _C.norm, _C.steps, _V.global_step)
    .join_from(
        contributions, versions, sa.and_(_V.run_id == _C.run_id, _V.version == _C.base_version)
    )
    .where(equals(_C.run_id), equals(_C.kind), _C.norm.is_not(None))
    .where(_C.vetted.is_(True), sa.exists().where(volunteers.c.id == _C.volunteer_id, takes_part()))
    # Contributions refused for their norm count too; otherwise a cohort whose first members were
    # outliers would never recover.
    .where(
        one_of(_C.state, ("accepted", "merged", "superseded"))
        | (one_of(_C.state, ("rejected",)) & one_of(_C.reason, (Reason.NORM.value,)))
    )
    .order_by(_C.id.desc())
    .limit(sa.bindparam("most"))
)


def cohort(conn: sa.Connection, run_id: int, kind: str, limit: int) -> Sequence[PeerContribution]:
    """Return the newest contributions of vetted accounts that take part: accepted, or refused for
    their norm.
    """
    values = {"where_run_id": run_id, "where_kind": kind, "most": limit}
    # Rows have the struct's fields in order; building structs would take as long as the query.
    return cast_type("Sequence[PeerContribution]", conn.execute(_COHORT, values).all())


_TAKEN_BACK = sa.exists().where(
    events.c.key.in_([kind + sa.cast(_C.id, sa.String) for kind in ("reverse:", "forfeit:")])
)
_DISCREDITED = (
    sa.select(_C.version, _C.id)
    .join(volunteers, volunteers.c.id == _C.volunteer_id)
    .where(equals(_C.run_id), _C.version >= sa.bindparam("first"), _C.state == "merged")
    .where((volunteers.c.standing == "suspended") | _TAKEN_BACK)
)


def discredited(conn: sa.Connection, run_id: int, first: int) -> dict[int, frozenset[int]]:
    """Return the merged contributions, by version, whose account is suspended or whose pay was
    reversed or forfeited.
    """
    by_version: dict[int, set[int]] = {}
    for version, number in conn.execute(_DISCREDITED, {"where_run_id": run_id, "first": first}):
        by_version.setdefault(version, set()).add(number)
    return {version: frozenset(numbers) for version, numbers in by_version.items()}


_IS_WAITING = (
    sa.select(_C.id)
    .where(equals(_C.run_id), equals(_C.worker_id), _IS_UPDATE)
    .where(one_of(_C.state, ("received", "checking", "accepted")))
    .limit(1)
)


def is_waiting(conn: sa.Connection, run_id: int, worker_id: str) -> bool:
    """Return True if a worker has an update that waits to be merged into a run."""
    values = {"where_run_id": run_id, "where_worker_id": worker_id}
    return conn.execute(_IS_WAITING, values).first() is not None


def counts(conn: sa.Connection, run_id: int) -> dict[str, int]:
    c = contributions.c
    query = sa.select(c.state, sa.func.count()).where(c.run_id == run_id, c.state.in_(STATES))
    return dict(conn.execute(query.group_by(contributions.c.state)).all())


_ACCEPTED_SINCE = sa.select(sa.func.count()).where(
    equals(_C.run_id),
    one_of(_C.state, ("accepted", "merged", "superseded")),
    _IS_UPDATE,
    _C.received_at >= sa.bindparam("since"),
)


def accepted_since(conn: sa.Connection, run_id: int, since: float) -> int:
    """Return how many updates of a run that were received since an instant were accepted."""
    values = {"where_run_id": run_id, "since": since}
    return int(conn.execute(_ACCEPTED_SINCE, values).scalar_one())


_CHECKED = (
    sa.update(contributions)
    .where(equals(_C.id))
    .values(checked_s=_C.checked_s + sa.bindparam("seconds"))
)


def checked(conn: sa.Connection, contribution_id: int, seconds: float) -> None:
    """Add seconds to the duration of a contribution's checks."""
    conn.execute(_CHECKED, {"where_id": contribution_id, "seconds": seconds})


def merged_by(
    conn: sa.Connection, run_id: int, volunteer_id: str, first: int, last: int
) -> dict[int, int]:
    """Return how many of a volunteer's contributions were merged into each version, from `first` to
    `last`.
    """
    c = contributions.c
    of_account = (c.volunteer_id == volunteer_id) & (c.run_id == run_id)
    query = sa.select(c.version, sa.func.count()).where(of_account, c.version.between(first, last))
    return dict(conn.execute(query.where(c.state == "merged").group_by(c.version)).all())
