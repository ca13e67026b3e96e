"""Recomputes: tasks that the coordinator does again, from asking for the evidence to the result."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec
from sqlalchemy import (
    Connection,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    select,
    update,
)

from coordinator.database import volunteers as store
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import among, its, one_of
from coordinator.database.tables.contributions import contributions, uploads
from coordinator.database.tables.trust import auditors, recomputes
from coordinator.database.tables.versions import versions
from coordinator.rules import standing
from coordinator.rules.checks import (
    ACCOUNT_OPEN_MAX,
    AUDIT_TRIES_MAX,
    AUDITS_WAITING_MAX,
    HERE,
    HOLD_S,
    NEWCOMERS_OPEN_MAX,
    OPEN_MAX,
    Result,
    is_served,
)
from shared.decoding import decode
from shared.protocol.contributions import Commitment, SubmitRequest
from shared.workloads.base import DatasetManifest

FORGOTTEN_S = 30 * 86_400.0  # an auditor that was not seen since
State = Literal["asked", "revealed", "done"]
COUNTED = ("accepted", "merged")  # what others overtook is as if it had never been made
CHAIN_MAX = 64  # newest contributions of a machine among which its state must be found


class RecomputeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `recomputes`."""

    contribution_id: int
    run_id: int
    volunteer_id: str
    state: State
    wanted: str
    work: str
    withheld: bool
    result: str
    measured: str
    message: str
    asked_at: float
    due_at: float
    ended_at: float | None
    kind: str = ""
    hold: str = ""
    held_until: float = 0.0
    tries: int = 0


class _Work(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the stored work that names files."""

    window: DatasetManifest | None = None


_R = recomputes.c
_OPEN = one_of(_R.state, ("asked", "revealed"))  # never "not done": no index finds that
_ADD = insert(recomputes)
_GET = select(recomputes).where(its(_R.contribution_id))
_CROWD = (
    select(
        func.count(),
        func.coalesce(func.sum(case((contributions.c.vetted, 0), else_=1)), 0),
        func.coalesce(func.sum(case((_R.volunteer_id == bindparam("volunteer"), 1), else_=0)), 0),
    )
    .join_from(recomputes, contributions, contributions.c.id == _R.contribution_id)
    .where(_OPEN)
)
_FREE = (_R.state == "revealed") & (_R.held_until <= bindparam("now"))
# Left to auditors: what was computed on their classes of devices, until some could not do it.
_LEFT = among(_R.kind, "served") & (_R.tries < AUDIT_TRIES_MAX)
_FIRST = select(recomputes).where(_FREE, ~_LEFT).order_by(_R.contribution_id).limit(1)
_HELD = select(recomputes).where(its(_R.hold), _R.state == "revealed")
# An auditor's own class first; then what neither the server nor another auditor can compare.
_FOR_AUDITOR = (
    select(recomputes)
    .where(_FREE, _R.tries < AUDIT_TRIES_MAX)
    .where((_R.kind == bindparam("own")) | ~among(_R.kind, "others"))
    .order_by(case((_R.kind == bindparam("own"), 0), else_=1), _R.contribution_id)
    .limit(1)
)
_HOLD = (
    update(recomputes)
    .where(its(_R.contribution_id), _FREE)
    .values(hold=bindparam("holder"), held_until=bindparam("until"))
)
_RENEW = (
    update(recomputes)
    .where(its(_R.contribution_id), its(_R.hold), _R.state == "revealed")
    .values(held_until=bindparam("until"))
)
_GIVE_BACK = (
    update(recomputes)
    .where(its(_R.contribution_id), its(_R.hold), _R.state == "revealed")
    .values(hold="", held_until=0.0, tries=_R.tries + bindparam("more"))
)
_AGAIN = (
    update(recomputes)
    .where(its(_R.contribution_id), _R.state == "revealed", _R.tries < AUDIT_TRIES_MAX)
    .values(hold="", held_until=0.0, tries=_R.tries + 1)
)
_WAITING = select(_R.state, func.count()).where(_OPEN).group_by(_R.state)
_LATE = select(recomputes).where(_R.state == "asked", _R.due_at < bindparam("now"))
_REVEALED = (
    update(recomputes).where(its(_R.contribution_id), _R.state == "asked").values(state="revealed")
)
_END = update(recomputes).where(its(_R.contribution_id), _R.state != "done").values(state="done")
_ARRIVED = select(uploads.c.sha256).where(
    uploads.c.evidence_of == bindparam("number"), uploads.c.complete
)
_FORGET = delete(uploads).where(uploads.c.evidence_of == bindparam("number"))
_OF_MACHINE = (
    select(contributions.c.report, contributions.c.state)
    .where(
        its(contributions.c.worker_id),
        its(contributions.c.run_id),
        contributions.c.id < bindparam("before"),
        contributions.c.state != literal_column("'rejected'"),  # of those no check is drawn
    )
    .order_by(contributions.c.id.desc())
    .limit(CHAIN_MAX)
)
_BLOBS = (
    select(contributions.c.sha256, versions.c.published_sha256, _R.work)
    .join_from(recomputes, contributions, contributions.c.id == _R.contribution_id)
    .outerjoin(
        versions,
        (versions.c.run_id == contributions.c.run_id)
        & (versions.c.version == contributions.c.base_version),
    )
    .where(_OPEN)
)


def has_room(conn: Connection, row: ContributionRow) -> bool:
    """Return True if one more may be ordered: neither newcomers nor one account fill all places."""
    counts = conn.execute(_CROWD, {"volunteer": row.volunteer_id}).one()
    everybody, newcomers, own = (int(count) for count in counts)
    return (
        everybody < OPEN_MAX
        and own < ACCOUNT_OPEN_MAX
        and (row.vetted or newcomers < NEWCOMERS_OPEN_MAX)
    )


def add(
    conn: Connection,
    row: ContributionRow,
    of: tuple[list[str], str],
    *,
    withheld: bool,
    due_at: float,
    kind: str = HERE,
) -> None:
    """Order a recompute of (files to reveal, work) of a class of devices; without files it may
    begin at once.
    """
    wanted, work = of
    conn.execute(
        _ADD,
        {
            "contribution_id": row.id,
            "run_id": row.run_id,
            "volunteer_id": row.volunteer_id,
            "state": "asked" if wanted else "revealed",
            "wanted": msgspec.json.encode(wanted).decode(),
            "work": work,
            "withheld": withheld,
            "result": "",
            "measured": "{}",
            "message": "",
            "asked_at": row.received_at,
            "due_at": due_at,
            "kind": kind,
        },
    )


def get(conn: Connection, contribution_id: int) -> RecomputeRow | None:
    """Return the recompute of a contribution; None where there is none."""
    row = conn.execute(_GET, {"its_contribution_id": contribution_id}).mappings().first()
    return None if row is None else RecomputeRow(**row)


def wants(conn: Connection, contribution_id: int, volunteer_id: str, sha256: str) -> bool:
    """Return True if a volunteer is asked for this file as evidence for its contribution."""
    row = get(conn, contribution_id)
    if row is None or row.volunteer_id != volunteer_id or row.state != "asked":
        return False
    return sha256 in decode(row.wanted, tuple[str, ...])


def arrive(conn: Connection, contribution_id: int) -> bool:
    """Note that evidence has arrived; True when it is all there now."""
    row = get(conn, contribution_id)
    if row is None or row.state != "asked":
        return False
    there = set(conn.execute(_ARRIVED, {"number": contribution_id}).scalars())
    if not there.issuperset(decode(row.wanted, tuple[str, ...])):
        return False
    conn.execute(_REVEALED, {"its_contribution_id": contribution_id})
    return True


def first(conn: Connection, now: float, served: Collection[str] = ()) -> RecomputeRow | None:
    """Return the oldest whose evidence is here, that no auditor has, and that is of no class of
    devices that auditors serve.
    """
    row = conn.execute(_FIRST, {"now": now, "served": sorted(served)}).mappings().first()
    return None if row is None else RecomputeRow(**row)


def hold(
    conn: Connection, holder: str, own: str, served: Collection[str], now: float
) -> RecomputeRow | None:
    """Return the recompute that an auditor has under this name, or gets now: the oldest of its own
    class of devices, or of one that nobody else can compare; None where none waits for it.
    """
    known = conn.execute(_HELD, {"its_hold": holder}).mappings().first()
    if known is not None:
        return RecomputeRow(**known)
    others = {HERE, *served} - {own}
    for _ in range(OPEN_MAX):
        given = {"now": now, "own": own, "others": sorted(others)}
        row = conn.execute(_FOR_AUDITOR, given).mappings().first()
        if row is None:
            return None
        number = {"its_contribution_id": row["contribution_id"], "now": now}
        until = now + HOLD_S
        if conn.execute(_HOLD, number | {"holder": holder, "until": until}).rowcount:
            return RecomputeRow(**{**row, "hold": holder, "held_until": until})
    return None


def renew(conn: Connection, contribution_id: int, holder: str, now: float) -> bool:
    """Let an auditor keep what it has for longer; False if that is another's by now, or done."""
    given = {"its_contribution_id": contribution_id, "its_hold": holder, "until": now + HOLD_S}
    return bool(conn.execute(_RENEW, given).rowcount)


def give_back(conn: Connection, contribution_id: int, holder: str, *, failed: bool) -> bool:
    """Let others do what an auditor had; a try is counted where it `failed`."""
    given = {"its_contribution_id": contribution_id, "its_hold": holder, "more": int(failed)}
    return bool(conn.execute(_GIVE_BACK, given).rowcount)


def again(conn: Connection, row: RecomputeRow) -> bool:
    """Have a task done once more that was just done; False after as many tries as it has."""
    return bool(conn.execute(_AGAIN, {"its_contribution_id": row.contribution_id}).rowcount)


def waiting(conn: Connection) -> dict[str, int]:
    """Return how many recomputes wait, by their state."""
    return {state: int(count) for state, count in conn.execute(_WAITING)}


def overdue(conn: Connection, now: float) -> list[RecomputeRow]:
    """Return those whose evidence has not come in time."""
    return [RecomputeRow(**row) for row in conn.execute(_LATE, {"now": now}).mappings()]


def commitment_of(row: ContributionRow) -> Commitment:
    """Return what a contribution was committed to."""
    return decode(row.report, SubmitRequest).commitment


def follows(conn: Connection, row: ContributionRow) -> bool:
    """Return True if the state and the residual that a task began with are none, or such as earlier
    tasks of the same machine left, which were good and which no task went on from since: made up, a
    residual turns honest work into anything, and left once it must not do so many times.
    """
    said = commitment_of(row)
    if not (said.inner or said.residual):
        return True
    given = {"its_worker_id": row.worker_id, "its_run_id": row.run_id, "before": row.id}
    states, residuals = {""}, {""}
    for report, state in reversed(conn.execute(_OF_MACHINE, given).all()):  # oldest first
        one = decode(report, SubmitRequest).commitment
        if state in COUNTED:
            states -= {one.inner} - {""}
            residuals -= {one.residual} - {""}
        states.add(one.left)
        residuals.add(one.kept)
    return said.inner in states and said.residual in residuals


def end(
    conn: Connection, row: RecomputeRow, result: Result, message: str, measured: str, now: float
) -> bool:
    """Record a result and what it moves of the account, but a suspension; False if there was one
    before.

    One that is unclear though there are figures was computed by what this server cannot compare.
    """
    given = {"its_contribution_id": row.contribution_id}
    values = {"result": result, "message": message, "measured": measured, "ended_at": now}
    if conn.execute(_END, given | values).rowcount != 1:
        return False
    conn.execute(_FORGET, {"number": row.contribution_id})
    account = store.locked(conn, row.volunteer_id)
    before = standing.Account(
        state=account.standing,
        invited=account.invited,
        passed=account.passed,
        trust=account.trust,
        unproven=0 if result == "passed" else account.unproven,
    )
    after = standing.after_check(before, result, "recompute")
    counters = {"passed": after.passed}
    if result == "passed":
        streak = account.recompute_streak + 1
        counters |= {"recompute_streak": streak, "unproven": 0, "uncompared": 0}
    elif result == "unclear" and measured != "{}":
        uncompared = account.uncompared + 1
        after = standing.after_uncompared(after, uncompared)
        # Its next updates are measured, each, until one passes.
        counters |= {"uncompared": uncompared, "passed": after.passed, "forward_streak": 0}
    elif result == "unproven":
        counters |= {"recompute_streak": 0, "unproven": account.unproven + 1}
    store.set_volunteer(conn, account.id, **counters)
    if after.state == "vetted" != before.state:
        store.vet(conn, account.id)
    elif before.state == "vetted" and after.state == "probation":
        store.doubt(conn, account.id)
    return True


def close(conn: Connection, contribution_id: int, result: Result, message: str, now: float) -> None:
    """Record a result that moves nothing of the account."""
    values = {"result": result, "message": message, "measured": "{}", "ended_at": now}
    conn.execute(_END, {"its_contribution_id": contribution_id} | values)
    conn.execute(_FORGET, {"number": contribution_id})


def blobs_in_use(conn: Connection) -> set[str]:
    """Return the updates, base weights and games that recomputes without a result need."""
    found: set[str] = set()
    for update_sha256, base_sha256, work in conn.execute(_BLOBS):
        window = decode(work, _Work).window
        found |= {update_sha256, base_sha256 or ""}
        found |= {chunk.sha256 for chunk in window.chunks} if window else set()
    return found - {""}


# --- auditors of the organiser's own, which do tasks again ---

_A = auditors.c
_SEEN = update(auditors).where(its(_A.name))
_NEWEST = select(_A.kind, func.max(_A.seen_at)).group_by(_A.kind)


def see_auditor(conn: Connection, name: str, kind: str, now: float) -> bool:
    """Note that an auditor is at work; True if it was not known. Those long gone are forgotten."""
    told = {"kind": kind, "seen_at": now}
    if conn.execute(_SEEN.values(**told), {"its_name": name}).rowcount:
        return False
    conn.execute(delete(auditors).where(_A.seen_at < now - FORGOTTEN_S))
    conn.execute(insert(auditors).values(name=name, **told))
    return True


def served(conn: Connection, now: float) -> frozenset[str]:
    """Return the classes of devices whose tasks are left to auditors."""
    return frozenset(kind for kind, seen in conn.execute(_NEWEST) if is_served(kind, seen, now))


def left_to_auditors(conn: Connection, now: float) -> frozenset[str]:
    """Return the classes of devices whose tasks the server does not do: none where too many wait
    already, for a class is what a worker names it.
    """
    crowded = waiting(conn).get("revealed", 0) >= AUDITS_WAITING_MAX
    return frozenset() if crowded else served(conn, now)
