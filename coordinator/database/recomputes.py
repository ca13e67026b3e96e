"""Recomputes: drawn contributions, from the draw to the result.

All waiting recomputes wait in one queue for the server, the organiser's own machines, or
volunteers' audits. A place in it is the time at which the recompute would end if its account had a
processor of its own; accounts of one network count as one. Unproven accounts get half of the
capacity, so that an account with one passed draw does not wait behind a crowd of new accounts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Literal

import msgspec
import sqlalchemy as sa

from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.leased_jobs import LeasedJobs
from coordinator.database.engine.statements import among, deletion, equals, one_of
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.trust import checkers, recomputes
from coordinator.database.tables.versions import versions
from coordinator.rules.draws import (
    CHECKER_TRIES_MAX,
    CORE_FLOPS,
    HERE,
    HOLD_S,
    OVERTAKES_FROM,
    RECOMPUTE_FLOPS_MAX,
    SHARED_S,
    Result,
    is_served,
)
from coordinator.rules.refusals import ADVICE
from shared.decoding import decode
from shared.workloads.base import DatasetManifest, Job

FORGOTTEN_S = 30 * 86_400.0  # a checker not seen for this long is deleted
State = Literal["waiting", "leased", "done"]
CHECKER = "checker-"  # prefix of the owner of a checker's lease
SPEED_OF = 32  # most recomputes from which the speed is estimated: the newest


class RecomputeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `recomputes`."""

    contribution_id: int
    run_id: int
    task_id: int
    volunteer_id: str
    worker_id: str
    state: State
    work: str
    flops: float
    kind: str
    result: str
    measured: str
    message: str
    drawn_at: float
    ended_at: float | None
    owner: str
    attempt: int
    lease_until: float
    tries: int
    seed: int
    audit_id: int | None  # task of its audit
    declined: str
    answer_id: int | None
    auditor_id: str
    sums: bytes | None
    agrees: bool | None
    refusal: str = ""

    @property
    def accounts(self) -> set[str]:
        """Return the accounts that its result concerns: the worker's, and an auditor's."""
        return {self.volunteer_id, self.auditor_id} - {""}


class StoredCase(msgspec.Struct, frozen=True, kw_only=True):
    """Stored task of a recompute, as its worker was leased it."""

    job: Job
    base_sha256: str
    chunks: tuple[int, ...]
    device: str = ""  # device that the task was leased for
    model: str = ""  # model of that device, as its machine registered it
    window: DatasetManifest | None = None  # games that the task learnt from, in place of a dataset


_R, _V = recomputes.c, volunteers.c
IS_OPEN = one_of(_R.state, ("waiting", "leased"))
JOBS = LeasedJobs(recomputes, RecomputeRow, free="waiting", leased="leased")
_ADD = sa.insert(recomputes).returning(*_R)
_GET = sa.select(recomputes).where(equals(_R.contribution_id))

# --- the queue ---

_NOW: sa.BindParameter[float] = sa.bindparam("now")
_LOT = sa.case((_V.network == "", _V.id), else_=_V.network)
_B = recomputes.alias("before").c
_PROVEN = sa.exists().where(
    _B.volunteer_id == _R.volunteer_id,
    _B.state == "done",
    _B.result == "passed",
    _B.refusal == "",
    _B.contribution_id < _R.contribution_id,
)
_IS_NEW = sa.case(((_V.standing == "vetted") | _PROVEN, 0), else_=1)
_SPENT = (
    sa.select(_LOT.label("lot"), sa.func.sum(_R.flops).label("flops"))
    .join_from(recomputes, volunteers, _V.id == _R.volunteer_id)
    .where(_R.ended_at > _NOW - SHARED_S, _R.measured != "{}")
    .group_by(_LOT)
    .subquery()
)
_SHARES = (
    sa.select(_IS_NEW, sa.func.sum(_R.flops))
    .join_from(recomputes, volunteers, _V.id == _R.volunteer_id)
    .where(_R.ended_at > _NOW - SHARED_S, _R.measured != "{}")
    .group_by(_IS_NEW)
)
_IS_OF_NEWCOMER = (
    sa.select(_IS_NEW)
    .select_from(recomputes)
    .join(volunteers, _V.id == _R.volunteer_id)
    .where(equals(_R.contribution_id))
)
_PLACE = _R.drawn_at + (sa.func.coalesce(_SPENT.c.flops, 0.0) + _R.flops) / CORE_FLOPS
_AUDITED = sa.exists().where(tasks.c.id == _R.audit_id, tasks.c.state == "doing")


def _queue(able: sa.ColumnElement[bool]) -> sa.Select[*tuple[object, ...]]:
    """Return the query of the ready recomputes that an owner is able to make, in queue order."""
    return (
        sa.select(recomputes)
        .join(volunteers, _V.id == _R.volunteer_id)
        .outerjoin(_SPENT, _SPENT.c.lot == _LOT)
        .where(JOBS.ready(_NOW), able, ~_AUDITED)
        .order_by(
            sa.case((sa.bindparam("newcomers") == _IS_NEW, 0), else_=1), _PLACE, _R.contribution_id
        )
    )


# Recomputes left to checkers: recomputes of their classes of devices, unless enough checkers failed
# at the recompute, or a checker of the class is busy with a much larger recompute.
_H = recomputes.alias("leased").c
_BUSY = sa.exists().where(
    _H.kind == _R.kind,
    _H.owner.startswith(CHECKER),
    _H.state == "leased",
    _H.lease_until > _NOW,
    _H.flops >= OVERTAKES_FROM * _R.flops,
)
_LEFT = among(_R.kind, "served") & (_R.tries < CHECKER_TRIES_MAX) & ~_BUSY
_FOR_SERVER = _queue(~_LEFT & (_R.flops <= sa.bindparam("most")))
# Recomputes of a checker's own class, or that neither the server nor another checker can compare.
_FOR_CHECKER = _queue(
    (_R.tries < CHECKER_TRIES_MAX) & ((_R.kind == sa.bindparam("own")) | ~among(_R.kind, "others"))
)


def _turn(conn: sa.Connection, now: float, under_way: RecomputeRow | None = None) -> int:
    """Return 1 (a newcomer's recompute is next) while unproven accounts had less than half of the
    recent and running operations, else 0.
    """
    done = {int(is_new): float(flops) for is_new, flops in conn.execute(_SHARES, {"now": now})}
    if under_way is not None:
        number = {"where_contribution_id": under_way.contribution_id}
        is_new = int(conn.execute(_IS_OF_NEWCOMER, number).scalar_one())
        done[is_new] = done.get(is_new, 0.0) + under_way.flops
    return int(done.get(1, 0.0) < done.get(0, 0.0))


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Process that asks for a recompute, and its lease."""

    owner: str
    now: float
    until: float

    @classmethod
    def checker(cls, hold: str, now: float) -> Holder:
        """Return a checker that names its lease `hold`."""
        return cls(owner=CHECKER + hold, now=now, until=now + HOLD_S)


def take(
    conn: sa.Connection,
    holder: Holder,
    served: Collection[str] = (),
    under_way: RecomputeRow | None = None,
) -> RecomputeRow | None:
    """Lease to a server the next recompute that no checker or auditor has taken and that is not
    left to checkers (of the classes `served`); None if no recompute is due. With `under_way`, the
    recompute that the server makes now, only a much smaller recompute is leased, which overtakes
    it.
    """
    most = RECOMPUTE_FLOPS_MAX if under_way is None else under_way.flops / OVERTAKES_FROM
    values = {"now": holder.now, "served": sorted(served), "most": most}
    values["newcomers"] = _turn(conn, holder.now, under_way)
    return JOBS.take(conn, _FOR_SERVER.params(values), holder.owner, holder.until)


_LEASED_TO = sa.select(recomputes).where(equals(_R.owner), _R.state == "leased")


def take_for_checker(
    conn: sa.Connection, holder: Holder, kind: str, served: Collection[str]
) -> RecomputeRow | None:
    """Return the recompute that a checker has, or lease it the next one of its own class of
    devices, or of a class that no other machine can compare; None if no recompute is due.
    """
    row = conn.execute(_LEASED_TO, {"where_owner": holder.owner}).mappings().first()
    if row is not None:
        return RecomputeRow(**row)
    values = {"now": holder.now, "own": kind, "others": sorted({HERE, *served} - {kind})}
    values["newcomers"] = _turn(conn, holder.now)
    return JOBS.take(conn, _FOR_CHECKER.params(values), holder.owner, holder.until)


# --- one draw: stored, ended ---


class DrawTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Terms of the recompute of a draw, or of a refused update."""

    work: str
    flops: float
    kind: str
    seed: int = 0  # seed of an audit's sums; 0 if it must not be audited
    refusal: str = ""  # reason of a refused update; "" for a draw


def add(conn: sa.Connection, row: ContributionRow, order: DrawTerms) -> RecomputeRow:
    """Add the recompute of a drawn contribution, or of a refused update, to the queue."""
    values = msgspec.structs.asdict(order) | {
        "contribution_id": row.id,
        "run_id": row.run_id,
        "task_id": row.task_id,
        "volunteer_id": row.volunteer_id,
        "worker_id": row.worker_id,
        "state": "waiting",
        "result": "",
        "measured": "{}",
        "message": "",
        "drawn_at": row.received_at,
    }
    return RecomputeRow(**conn.execute(_ADD, values).mappings().one())


def get(conn: sa.Connection, contribution_id: int, *, lock: bool = False) -> RecomputeRow | None:
    """Return the recompute of a contribution; None if it has no recompute."""
    query = _GET.with_for_update() if lock else _GET
    row = conn.execute(query, {"where_contribution_id": contribution_id}).mappings().first()
    return None if row is None else RecomputeRow(**row)


_END = (
    sa.update(recomputes).where(equals(_R.contribution_id), _R.state != "done").values(state="done")
)


def end(
    conn: sa.Connection, contribution_id: int, result: Result, messages: tuple[str, str], now: float
) -> bool:
    """Record the result of a draw; return False if the draw had a result before. `messages` are its
    sentence and its measurement (a `Redone`, as JSON).
    """
    message, measured = messages
    values = {"result": result, "message": message, "measured": measured, "ended_at": now}
    return conn.execute(_END, {"where_contribution_id": contribution_id} | values).rowcount == 1


# --- the draws of an account ---

_IS_DRAW = _R.refusal == ""
_OPEN_OF = (
    sa.select(_R.contribution_id)
    .where(equals(_R.volunteer_id), IS_OPEN, _IS_DRAW)
    .order_by(_R.contribution_id)
)
# An audit's answer is an open draw of its auditor, too, until the recompute has a result.
_ANSWERED_OF = sa.select(sa.func.min(_R.answer_id)).where(equals(_R.auditor_id), IS_OPEN)
_PROVEN_TO = (
    sa.select(_R.contribution_id)
    .where(equals(_R.volunteer_id), one_of(_R.state, ("done",)), _R.result == "passed", _IS_DRAW)
    .where(_R.contribution_id > sa.bindparam("after"), _R.contribution_id < sa.bindparam("before"))
    .order_by(_R.contribution_id.desc())
    .limit(1)
)
_SAME_TASK = (
    sa.select(_R.contribution_id)
    .where(equals(_R.task_id), equals(_R.volunteer_id), _R.result == "passed", _IS_DRAW)
    .where(_R.contribution_id != sa.bindparam("but"))
    .limit(1)
)
NO_ID = 2**62


_OPEN_COUNTS = (
    sa.select(_R.volunteer_id, sa.func.count())
    .where(among(_R.volunteer_id, "volunteers"), IS_OPEN, _IS_DRAW)
    .group_by(_R.volunteer_id)
)


def open_counts(conn: sa.Connection, volunteer_ids: Iterable[str]) -> dict[str, int]:
    """Return the number of draws without a result, by account; 0 is left out."""
    rows = conn.execute(_OPEN_COUNTS, {"volunteers": [*volunteer_ids]})
    return {who: int(count) for who, count in rows}


_OLDEST_OPEN = (
    sa.select(_R.volunteer_id, sa.func.min(_R.contribution_id))
    .where(among(_R.volunteer_id, "volunteers"), IS_OPEN, _IS_DRAW)
    .group_by(_R.volunteer_id)
)


def oldest_open(conn: sa.Connection, volunteer_ids: Iterable[str]) -> dict[str, int]:
    """Return the oldest draw without a result of each account that has one."""
    rows = conn.execute(_OLDEST_OPEN, {"volunteers": [*volunteer_ids]})
    return {who: int(number) for who, number in rows}


def open_of(conn: sa.Connection, volunteer_id: str) -> list[int]:
    """Return the draws of an account without a result, by their contributions."""
    return list(conn.execute(_OPEN_OF, {"where_volunteer_id": volunteer_id}).scalars())


class Proven(msgspec.Struct, frozen=True, kw_only=True):
    """Contributions of an account that its draws prove, above `after` and up to `last`."""

    after: int  # no draw frees the pay of contributions up to this one
    last: int  # newest passed draw above `after` and below `before`; 0 without one
    before: int  # oldest open draw; `NO_ID` without one


def proven(conn: sa.Connection, volunteer_id: str, after: int) -> Proven:
    """Return the contributions above `after` that the draws of an account prove."""
    before = conn.execute(_ANSWERED_OF, {"where_auditor_id": volunteer_id}).scalar() or NO_ID
    before = min([before, *open_of(conn, volunteer_id)[:1]])
    values = {"where_volunteer_id": volunteer_id, "after": after, "before": before}
    last = int(conn.execute(_PROVEN_TO, values).scalar() or 0)
    return Proven(after=after, last=last, before=before)


_PROVEN_OWNERS = (
    sa.select(contributions.c.volunteer_id)
    .where(among(contributions.c.id, "ids"))
    .where(
        sa.exists()
        .where(_R.volunteer_id == contributions.c.volunteer_id, _R.state == "done")
        .where(_R.result == "passed", _IS_DRAW, _R.contribution_id >= contributions.c.id)
    )
    .distinct()
    .order_by(contributions.c.volunteer_id)
)


def proven_owners(conn: sa.Connection, ids: Sequence[int]) -> list[str]:
    """Return the accounts of these contributions of which a draw of the same contribution, or of a
    later contribution of the account, passed.
    """
    return list(conn.execute(_PROVEN_OWNERS, {"ids": ids}).scalars()) if ids else []


def passed_of(conn: sa.Connection, row: ContributionRow, most: int) -> list[str]:
    """Return the stored tasks of the newest draws of a contribution's run, account and kind, newest
    first, up to the first draw that did not pass.
    """
    c, drawn = recomputes.c, contributions.c
    of_account = (
        (c.run_id == row.run_id) & (c.volunteer_id == row.volunteer_id) & (c.state == "done")
    )
    query = sa.select(c.work, c.result).join(contributions, drawn.id == c.contribution_id)
    query = query.where(of_account, drawn.kind == row.kind)
    query = query.order_by(c.contribution_id.desc()).limit(most)
    return [row.work for row in takewhile(lambda row: row.result == "passed", conn.execute(query))]


def is_fresh(conn: sa.Connection, row: RecomputeRow) -> bool:
    """Return True if no other draw of this task and account passed."""
    values = {"where_task_id": row.task_id, "where_volunteer_id": row.volunteer_id}
    return conn.execute(_SAME_TASK, values | {"but": row.contribution_id}).first() is None


# --- refused updates ---

_ASKED_OF_RUN = sa.select(sa.func.count()).where(equals(_R.run_id), IS_OPEN, ~_IS_DRAW)
_ASKED_OF_ACCOUNT = sa.select(sa.func.count()).where(equals(_R.volunteer_id), IS_OPEN, ~_IS_DRAW)
_REPEATED = sa.select(sa.func.count()).where(
    equals(_R.run_id),
    one_of(_R.refusal, sorted(ADVICE)),
    _R.result == "passed",
    _R.drawn_at >= sa.bindparam("since"),
)


def open_refusals(conn: sa.Connection, run_id: int, volunteer_id: str) -> tuple[int, int]:
    """Return how many refused tasks of a run, and of an account, wait to be done again."""
    of_run = conn.execute(_ASKED_OF_RUN, {"where_run_id": run_id}).scalar_one()
    of_account = conn.execute(_ASKED_OF_ACCOUNT, {"where_volunteer_id": volunteer_id}).scalar_one()
    return int(of_run), int(of_account)


def repeated_refusals(conn: sa.Connection, run_id: int, since: float) -> int:
    """Return how many refusals of a run's work since an instant a recompute repeated."""
    values = {"where_run_id": run_id, "since": since}
    return int(conn.execute(_REPEATED, values).scalar_one())


# --- reads for other services ---

_NEWEST_WORK = (
    sa.select(_R.work)
    .where(equals(_R.run_id), _R.flops > 0)
    .order_by(_R.contribution_id.desc())
    .limit(1)
)


def newest_work(conn: sa.Connection, run_id: int) -> str | None:
    """Return the stored task of a run's newest draw of an update; None without such a draw."""
    return conn.execute(_NEWEST_WORK, {"where_run_id": run_id}).scalar()


_WAITING = sa.select(sa.func.count()).where(IS_OPEN)
_BLOBS = (
    sa.select(contributions.c.sha256, versions.c.published_sha256, _R.work)
    .join_from(recomputes, contributions, contributions.c.id == _R.contribution_id)
    .outerjoin(
        versions,
        (versions.c.run_id == contributions.c.run_id)
        & (versions.c.version == contributions.c.base_version),
    )
    .where(IS_OPEN)
)
_NEWEST_DONE = (
    sa.select(_R.flops, contributions.c.checked_s)
    .join(contributions, contributions.c.id == _R.contribution_id)
    .where(_R.ended_at > _NOW - SHARED_S, _R.measured != "{}")
    .order_by(_R.ended_at.desc())
    .limit(SPEED_OF)
    .subquery()
)
_DONE_LATELY = sa.select(sa.func.sum(_NEWEST_DONE.c.flops), sa.func.sum(_NEWEST_DONE.c.checked_s))
_ABLE = (_R.flops <= RECOMPUTE_FLOPS_MAX) | among(_R.kind, "served")
_BEHIND = sa.select(sa.func.sum(_R.flops)).where(IS_OPEN, _ABLE)
_STUCK = sa.select(_R.contribution_id).where(
    equals(_R.volunteer_id), IS_OPEN, ~_ABLE | (_R.message != "")
)


def waiting(conn: sa.Connection) -> int:
    """Return how many recomputes wait."""
    return int(conn.execute(_WAITING).scalar_one())


def backlog_s(
    conn: sa.Connection, now: float, served: Collection[str], of: str | None = None
) -> float | None:
    """Return the seconds that the recompute backlog takes at the recent speed; None if unknown, or
    if a draw of the account `of` waits for another machine.
    """
    flops, seconds = conn.execute(_DONE_LATELY, {"now": now}).one()
    values = {"served": sorted(served), "where_volunteer_id": of}
    if not (flops and seconds) or (of and conn.execute(_STUCK, values).first() is not None):
        return None
    return float(conn.execute(_BEHIND, values).scalar() or 0.0) * float(seconds) / float(flops)


def blobs_in_use(conn: sa.Connection) -> set[str]:
    """Return the updates, base weights and games that recomputes without a result need."""
    hashes: set[str] = set()
    for update_sha256, base_sha256, work in conn.execute(_BLOBS):
        window = decode(work, StoredCase).window
        hashes |= {update_sha256, base_sha256 or ""}
        hashes |= {chunk.sha256 for chunk in window.chunks} if window else set()
    return hashes - {""}


# --- the organiser's own machines, which make recomputes ---

_K = checkers.c
_SEEN = sa.update(checkers).where(equals(_K.name))
_NEWEST = sa.select(_K.kind, sa.func.max(_K.seen_at)).group_by(_K.kind)


def see_checker(conn: sa.Connection, name: str, kind: str, now: float) -> bool:
    """Store that a checker is active; return True if it is new. Checkers absent for long are
    deleted.
    """
    values = {"kind": kind, "seen_at": now}
    if conn.execute(_SEEN.values(**values), {"where_name": name}).rowcount:
        return False
    conn.execute(deletion(checkers, "expired").where(_K.seen_at < now - FORGOTTEN_S))
    conn.execute(sa.insert(checkers).values(name=name, **values))
    return True


def served(conn: sa.Connection, now: float) -> frozenset[str]:
    """Return the classes of devices that checkers cover."""
    return frozenset(
        kind for kind, seen_at in conn.execute(_NEWEST) if is_served(kind, seen_at, now)
    )
