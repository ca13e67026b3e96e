"""Volunteers (accounts) and their workers (machines)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, bindparam, exists, func, or_, select, update

from coordinator.database.engine.statements import among, deletion, equals, insert_new
from coordinator.database.tables.accounts import codes, consents, volunteers, workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.inference import api_keys
from coordinator.database.tables.record import reasons
from coordinator.database.tables.tasks import failures
from coordinator.database.tables.trust import recomputes
from coordinator.rules.standing import State
from shared.decoding import decode
from shared.errors import NotFound
from shared.protocol.accounts import Device, Hardware
from shared.protocol.heartbeat import OwnOrder
from shared.protocol.limits import RENEW_S
from shared.units import DAY_S

VolunteerState = Literal["active", "banned", "forgotten"]
WorkerState = Literal["online", "training", "paused", "offline", "left"]

# a worker silent for this long is offline; its leases expire at the same time
OFFLINE_S = RENEW_S


ORDERS_MAX = 10_000  # most orders of owners to machines that are read at once
DEVICES_OF = 1000  # workers whose devices are counted, the latest seen first


class VolunteerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `volunteers`; see tables/accounts.py."""

    id: str
    nickname: str
    nickname_key: str
    state: VolunteerState
    public: bool
    invite_id: int | None
    created_at: float
    standing: State = "vetted"
    invited: bool = True
    network: str = ""
    accepted: int = 0
    accepted_micro: int = 0
    draws: int = 0
    proofs: int = 0
    unproved_to: int = 0
    suspended_reason: str = ""
    unproven: int = 0
    rest_until: float | None = None

    @property
    def takes_part(self) -> bool:
        """Return True if the account is neither banned, forgotten nor suspended."""
        return self.state == "active" and self.standing != "suspended"


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `workers`; see tables/accounts.py."""

    id: str
    volunteer_id: str
    secret_hash: str
    hostname: str
    hardware: str
    benchmark: str
    step_flops: float
    software: str
    workloads: str
    state: WorkerState
    last_seen_at: float
    rate: float | None = None
    celsius: float | None = None
    created_at: float
    revoked_at: float | None
    rests: str = "{}"
    ordered: str = ""
    ordered_at: float | None = None


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's stored credentials."""

    worker_id: str
    secret_hash: str
    revoked: bool
    left: bool  # the worker has signed off
    volunteer_id: str
    nickname: str
    state: VolunteerState


def worker_state(state: str, last_seen_at: float, now: float) -> WorkerState:
    """Return the state of a worker as its last heartbeat said, or offline if that is too old."""
    if state == "left":
        return "left"
    if now - last_seen_at > OFFLINE_S:
        return "offline"
    return "training" if state == "training" else "paused" if state == "paused" else "online"


# --- credentials ---


def credentials(conn: Connection, worker_id: str) -> Credentials | None:
    """Return the credentials of a worker; None for an unregistered worker."""
    v, w = volunteers.c, workers.c
    query = (
        select(w.id.label("worker_id"), w.secret_hash, w.revoked_at, w.state.label("machine"))
        .add_columns(v.id.label("volunteer_id"), v.nickname, v.state)
        .join(volunteers, v.id == w.volunteer_id)
        .where(w.id == worker_id)
    )
    row = conn.execute(query).first()
    if row is None:
        return None
    return Credentials(
        worker_id=row.worker_id,
        secret_hash=row.secret_hash,
        volunteer_id=row.volunteer_id,
        nickname=row.nickname,
        state=row.state,
        revoked=row.revoked_at is not None,
        left=row.machine == "left",
    )


_BY_ID = select(volunteers).where(equals(volunteers.c.id))


def by_id(conn: Connection, volunteer_id: str) -> VolunteerRow | None:
    """Return an account; None for an unknown id."""
    row = conn.execute(_BY_ID, {"where_id": volunteer_id}).mappings().first()
    return None if row is None else VolunteerRow(**row)


def existing(conn: Connection, volunteer_id: str) -> VolunteerRow:
    """Return an account. Raises NotFound."""
    row = by_id(conn, volunteer_id)
    if row is None:
        raise NotFound(f'there is no volunteer "{volunteer_id}"')
    return row


_LOCKED = _BY_ID.with_for_update(key_share=True)


def locked(conn: Connection, volunteer_id: str) -> VolunteerRow:
    """Return an account, locked until the transaction ends. Raises NotFound."""
    row = conn.execute(_LOCKED, {"where_id": volunteer_id}).mappings().first()
    if row is None:
        raise NotFound(f'there is no volunteer "{volunteer_id}"')
    return VolunteerRow(**row)


_IS_WAITING = contributions.c.state.in_(("received", "checking", "accepted"))
_WAITING = update(contributions).where(equals(contributions.c.volunteer_id), _IS_WAITING)


def vet(conn: Connection, volunteer_id: str) -> None:
    """Vet an account and its waiting contributions, which would otherwise wait for vetted work."""
    set_volunteer(conn, volunteer_id, standing="vetted", suspended_reason="")
    conn.execute(_WAITING, {"where_volunteer_id": volunteer_id, "vetted": True})


def doubt(conn: Connection, volunteer_id: str) -> None:
    """Put an account and its waiting contributions on probation again."""
    set_volunteer(conn, volunteer_id, standing="probation")
    conn.execute(_WAITING, {"where_volunteer_id": volunteer_id, "vetted": False})


_DRAW = update(volunteers).where(equals(volunteers.c.id)).values(draws=volunteers.c.draws + 1)


def count_draw(conn: Connection, volunteer_id: str) -> None:
    """Count a draw of an account."""
    conn.execute(_DRAW, {"where_id": volunteer_id})


def find(conn: Connection, who: str, key: str) -> VolunteerRow:
    """Find a volunteer by the id or nickname `who`; `key` is the nickname's skeleton. Raises
    NotFound.
    """
    row = by_id(conn, who)
    if row is None and key:
        query = select(volunteers).where(volunteers.c.nickname_key == key)
        mapping = conn.execute(query).mappings().first()
        row = None if mapping is None else VolunteerRow(**mapping)
    if row is None:
        raise NotFound(f'there is no volunteer "{who}": `coordinator volunteer list` shows all')
    return row


def is_nickname_taken(conn: Connection, key: str) -> bool:
    """Return True if an account has a nickname with this skeleton."""
    return bool(conn.execute(select(exists().where(volunteers.c.nickname_key == key))).scalar())


_STRANGERS = select(func.count()).where(
    equals(volunteers.c.network),
    volunteers.c.created_at > bindparam("since"),
    volunteers.c.invited.is_(False),
)


def strangers_of(conn: Connection, network: str, since: float) -> int:
    """Return how many accounts registered without a code since a time, from one network."""
    values = {"where_network": network, "since": since}
    return int(conn.execute(_STRANGERS, values).scalar_one())


# --- coming and going ---


def add(conn: Connection, row: VolunteerRow) -> bool:
    """Insert an account; return False if its id is taken, or a nickname that looks alike."""
    statement = insert_new(conn, volunteers, "").values(**msgspec.structs.asdict(row))
    return conn.execute(statement.returning(volunteers.c.id)).first() is not None


def add_worker(conn: Connection, row: WorkerRow) -> bool:
    """Insert a machine; return False if its id is taken."""
    statement = insert_new(conn, workers, "").values(**msgspec.structs.asdict(row))
    return conn.execute(statement.returning(workers.c.id)).first() is not None


def devices_since(conn: Connection, since: float) -> list[Device]:
    """Return the devices of workers seen since an instant, of the thousand workers seen last at
    most.
    """
    w = workers.c
    query = select(w.hardware).where(w.last_seen_at >= since, w.revoked_at.is_(None))
    rows = conn.execute(query.order_by(w.last_seen_at.desc()).limit(DEVICES_OF)).scalars()
    return [device for text in rows for device in decode(text, Hardware).devices]


def live_machines(conn: Connection, volunteer_id: str) -> int:
    """Return how many machines of an account may still ask for work."""
    query = select(func.count()).where(workers.c.volunteer_id == volunteer_id)
    return int(conn.execute(query.where(workers.c.revoked_at.is_(None))).scalar_one())


_SET_WORKER = update(workers).where(equals(workers.c.id))
_SET_VOLUNTEER = update(volunteers).where(equals(volunteers.c.id))


def order(conn: Connection, volunteer_id: str, worker_id: str, order: str, now: float) -> bool:
    """Store the owner's order for a machine that has not left; return False if there is no such
    machine.
    """
    return (
        conn.execute(
            update(workers)
            .where(workers.c.id == worker_id, workers.c.volunteer_id == volunteer_id)
            .where(workers.c.revoked_at.is_(None), workers.c.state != "left")
            .values(ordered=order, ordered_at=now)
        ).rowcount
        == 1
    )


def orders(conn: Connection, since: float) -> dict[str, OwnOrder]:
    """Return the newest orders of owners given since an instant, by machine."""
    selection = select(workers.c.id, workers.c.ordered, workers.c.ordered_at)
    newest = selection.where(workers.c.ordered_at > since).order_by(workers.c.ordered_at.desc())
    rows = conn.execute(newest.limit(ORDERS_MAX))
    return {row.id: OwnOrder(order=row.ordered, at=row.ordered_at) for row in rows}


def set_worker(conn: Connection, worker_id: str, **values: object) -> None:
    """Update the row of a machine."""
    conn.execute(_SET_WORKER, {"where_id": worker_id} | values)


def set_volunteer(conn: Connection, volunteer_id: str, **values: object) -> None:
    """Change an account."""
    conn.execute(_SET_VOLUNTEER, {"where_id": volunteer_id} | values)


def rename(conn: Connection, volunteer_id: str, nickname: str, key: str) -> bool:
    """Rename an account; return False if another account has a nickname that looks alike."""
    other = select(
        exists().where(volunteers.c.nickname_key == key, volunteers.c.id != volunteer_id)
    )
    if conn.execute(other).scalar():
        return False
    set_volunteer(conn, volunteer_id, nickname=nickname, nickname_key=key)
    return True


def revoke(conn: Connection, volunteer_id: str, now: float) -> int:
    """Revoke every secret and key of an account; return the number of secrets."""
    of_account = (api_keys.c.volunteer_id == volunteer_id) & api_keys.c.revoked_at.is_(None)
    conn.execute(update(api_keys).where(of_account).values(revoked_at=now))
    live = (workers.c.volunteer_id == volunteer_id) & workers.c.revoked_at.is_(None)
    return int(conn.execute(update(workers).where(live).values(revoked_at=now)).rowcount)


def forget(conn: Connection, volunteer_id: str, nickname: str, key: str, now: float) -> None:
    """Delete an account's identifying data; its id stays, and its network while a limit counts it."""
    revoke(conn, volunteer_id, now)
    invite = select(volunteers.c.invite_id).where(volunteers.c.id == volunteer_id).scalar_subquery()
    conn.execute(update(codes).where(codes.c.id == invite).values(label=""))
    conn.execute(update(api_keys).where(api_keys.c.volunteer_id == volunteer_id).values(name=""))
    conn.execute(deletion(codes, "asked").where(codes.c.volunteer_id == volunteer_id))
    for table in (consents, reasons):
        conn.execute(deletion(table, "asked").where(table.c.volunteer_id == volunteer_id))
    of_account = workers.c.volunteer_id == volunteer_id
    by_workers = failures.c.worker_id.in_(select(workers.c.id).where(of_account))
    conn.execute(update(failures).where(by_workers).values(message=""))
    wiped = {"hostname": "", "hardware": "{}", "benchmark": "[]", "software": "", "secret_hash": ""}
    conn.execute(update(workers).where(of_account).values(**wiped, state="left"))
    set_volunteer(
        conn,
        volunteer_id,
        nickname=nickname,
        nickname_key=key,
        state="forgotten",
        public=False,
        invite_id=None,
        suspended_reason="",
    )
    clear_networks(conn, now)


_V, _R = volunteers.c, recomputes.c
_IN_LINE = or_(_R.ended_at.is_(None), _R.ended_at > bindparam("since"))
_UNCOUNTED = (
    select(_V.id)
    .where(_V.state == "forgotten", _V.network != "", _V.created_at <= bindparam("since"))
    .where(~exists().where(contributions.c.volunteer_id == _V.id, _IS_WAITING))
    .where(~exists().where(_R.volunteer_id == _V.id, _IN_LINE))
)


def clear_networks(conn: Connection, now: float) -> None:
    """Clear the networks of forgotten accounts that no limit counts by network any more: a day
    after they registered and their last recompute ended, with no work left to merge.
    """
    ids = list(conn.execute(_UNCOUNTED, {"since": now - DAY_S}).scalars())
    for table, owner in ((contributions, contributions.c.volunteer_id), (volunteers, _V.id)):
        conn.execute(update(table).where(among(owner, "ids")).values(network=""), {"ids": ids})


def consent(conn: Connection, volunteer_id: str, run_id: int, licence: str, now: float) -> None:
    """Record the consent to a run's licence; another licence later is recorded again."""
    c = consents.c
    of_consent = (c.volunteer_id == volunteer_id) & (c.run_id == run_id)
    if conn.execute(select(c.licence).where(of_consent)).scalar() == licence:
        return
    conn.execute(deletion(consents, "replaced").where(of_consent))
    values = {"volunteer_id": volunteer_id, "run_id": run_id, "licence": licence, "given_at": now}
    conn.execute(
        insert_new(conn, consents, ""), values
    )  # the same consent may arrive twice at once


# --- standing ---


def takes_part() -> ColumnElement[bool]:
    """Return the condition that an account takes part, like `VolunteerRow.takes_part`."""
    return and_(_V.state == "active", _V.standing != "suspended")


_HARDWARE = select(workers.c.hardware).where(equals(workers.c.id))


def model_of(conn: Connection, worker_id: str, device: str) -> str:
    """Return the registered model of a device; "" if the machine registered no such device."""
    text = conn.execute(_HARDWARE, {"where_id": worker_id}).scalar() or "{}"
    return next((d.name for d in decode(text, Hardware).devices if d.id == device), "")


_LOCK = select(_V.id).where(among(_V.id, "ids")).order_by(_V.id).with_for_update(key_share=True)


def lock(conn: Connection, ids: Collection[str]) -> None:
    """Lock accounts until the transaction ends; SQLite's single writer waits for nobody.

    All transactions lock rows in one order, so that no two of them wait for each other: first runs,
    then the accounts of all work that they change, by id, then contributions, recomputes, merges
    and tasks, and last the accounts of the ledger. `tests/support/lock_order.py` checks each
    transaction.
    """
    if ids and conn.dialect.name == "postgresql":
        conn.execute(_LOCK, {"ids": sorted(ids)})


_COUNT = (
    update(volunteers)
    .where(equals(_V.id))
    .values(accepted=_V.accepted + 1, accepted_micro=_V.accepted_micro + bindparam("pay_micro"))
)


def count_accepted(conn: Connection, accepted: Sequence[tuple[str, int]]) -> None:
    """Count accepted contributions, each given by its account and pay, since draws depend on the
    mean pay.
    """
    if accepted:
        in_order = sorted(accepted)  # no two transactions wait for each other
        conn.execute(_COUNT, [{"where_id": name, "pay_micro": pay} for name, pay in in_order])
