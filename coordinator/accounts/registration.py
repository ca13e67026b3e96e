"""Registration of a volunteer: one transaction that may be repeated.

The client makes its ids and its secret before it sends, so that a lost reply does no harm: the same
worker with the same secret is registered once. A link code adds the machine to the code's account,
whatever account the client named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from coordinator.database import invite_rows as code_rows
from coordinator.database import record, runs
from coordinator.database import volunteers as store
from coordinator.database.invite_rows import CodeRow
from coordinator.database.volunteers import Credentials, VolunteerRow, WorkerRow
from coordinator.rules import networks, nicknames, reports, run_file, secret_codes
from coordinator.rules.standing import PROBATION_MACHINES
from shared.errors import (
    BadRequest,
    Banned,
    Conflict,
    Forbidden,
    InvalidCode,
    InvalidName,
    TooManyRequests,
    Unauthorized,
)
from shared.protocol.accounts import RegisterRequest
from shared.protocol.protocol_version import check_client
from shared.units import DAY_S, HOUR_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

MACHINES_MAX = 100  # machines that an account may have at once
ACCEPTS_MAX = 64  # runs whose licences one request may accept
RETRY_S = HOUR_S  # wait of a network that made too many accounts today


class Registration(msgspec.Struct, frozen=True):
    """Identity of a worker; `created` is False when it was registered before."""

    volunteer_id: str
    worker_id: str
    nickname: str
    created: bool


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of admission, and the network of the request."""

    invite_only: bool = False
    open: bool = False  # strangers are let in, on probation
    network: str = ""
    network_most: int = 20  # accounts that the network may make a day without a code


def check(request: RegisterRequest) -> None:
    """Check a registration as far as that needs no database. Raises BadRequest, UpgradeRequired."""
    secret_codes.check_id("volunteer_id", request.volunteer_id)
    secret_codes.check_id("worker_id", request.worker_id)
    secret_codes.check_secret(request.secret)
    check_client(request.protocol)
    if len(request.accepts) > ACCEPTS_MAX:
        raise BadRequest(f"at most {ACCEPTS_MAX} runs can be accepted at once")


def register(
    conn: Connection, request: RegisterRequest, admission: Admission, now: float
) -> Registration:
    """Register a worker with an existing or a new account, or repeat its registration. Raises
    Unauthorized, Banned, NotFound, and the errors of `_admit`.
    """
    credentials = store.credentials(conn, request.worker_id)
    if credentials is None:
        registered = _admit(conn, request, admission, now)
        if registered is not None:
            return registered
        # the same request, sent twice, may have registered it meanwhile
        credentials = store.credentials(conn, request.worker_id)
        if credentials is None:
            raise Unauthorized(
                "this account exists already: add a machine to it with a code that the first one "
                "makes (volunteer link)"
            )
    return _again(conn, credentials, request, now)


def _admit(
    conn: Connection, request: RegisterRequest, admission: Admission, now: float
) -> Registration | None:
    """Register a new volunteer or machine; return None if another request has registered it. Raises
    BadRequest for a malformed code, InvalidCode, InvalidName, Banned, Forbidden, Conflict,
    TooManyRequests, and NotFound for an accepted run that does not exist.
    """
    code = None
    if request.code:
        code = code_rows.usable(conn, secret_codes.code_hash(request.code), now)
    elif admission.invite_only:
        raise InvalidCode(
            "this coordinator is by invitation only: ask the organiser for a join link"
        )
    linking = code is not None and code.kind == "link"
    account = (
        _linked(conn, code) if code and linking else _opened(conn, request, code, admission, now)
    )
    if account is None:
        return None
    if not store.add_worker(conn, _machine(request, account.id, now)):
        if linking:
            return None
        raise Conflict("this machine has just been registered: send the request again")
    if code is not None:
        code_rows.use(conn, code)
    if linking:
        detail = {"worker": request.worker_id}
        record.append(conn, account.id, "volunteer.link", account.id, detail, now)
    _agree(conn, account.id, request.accepts, now)
    return Registration(account.id, request.worker_id, account.nickname, True)


def _linked(conn: Connection, code: CodeRow) -> VolunteerRow:
    """Return the account of a link code. Raises InvalidCode if the account is gone, Banned,
    Forbidden if it has its most machines.
    """
    account = store.by_id(conn, code.volunteer_id or "")
    if account is None or account.state == "forgotten":  # it may be forgotten in this moment
        raise InvalidCode("the account of this code is gone")
    if account.state != "active":
        raise Banned(secret_codes.BANNED)
    most = MACHINES_MAX if account.standing == "vetted" else PROBATION_MACHINES
    if store.live_machines(conn, account.id) >= most:
        raise Forbidden(_no_room(most))
    return account


def _no_room(most: int) -> str:
    """Return the refusal for an account with too many machines, with the remedy."""
    sentence = f"this account may have at most {most} machines, including those that left"
    if most < MACHINES_MAX:
        return f"{sentence}, until its work passed checks or the organiser vouches for it"
    return f"{sentence}: the organiser can make room (coordinator volunteer reissue)"


def _opened(
    conn: Connection,
    request: RegisterRequest,
    code: CodeRow | None,
    admission: Admission,
    now: float,
) -> VolunteerRow | None:
    """Insert an account, vouched for if invited or on a closed server, and return it; None if it
    exists. Raises InvalidName, TooManyRequests.
    """
    invited = code is not None or not admission.open
    if store.by_id(conn, request.volunteer_id) is not None:
        return None
    if not invited:
        _check_network(conn, admission, now)
    nickname = nicknames.normal(request.nickname or (code.label if code else ""))
    key = nicknames.skeleton(nickname)
    row = VolunteerRow(
        id=request.volunteer_id,
        nickname=nickname,
        nickname_key=key,
        state="active",
        public=request.public,
        invite_id=None if code is None else code.id,
        created_at=now,
        standing="vetted" if invited else "probation",
        invited=invited,
        network=admission.network,
    )
    if store.is_nickname_taken(conn, key) or not store.add(conn, row):
        if store.by_id(conn, request.volunteer_id) is not None:
            return None
        raise taken_name_error(conn, nickname)
    return row


def _check_network(conn: Connection, admission: Admission, now: float) -> None:
    """Raise TooManyRequests if strangers of this network used up its accounts of a day."""
    if admission.network == networks.UNKNOWN:
        return
    count = store.strangers_of(conn, admission.network, now - DAY_S)
    if count >= admission.network_most:
        raise TooManyRequests(
            f"{count} accounts were made from your network within a day, which is the limit: come "
            "back tomorrow, or join by an invite",
            retry_after_s=RETRY_S,
        )


def free_name(conn: Connection, volunteer_id: str, raw: str) -> None:
    """Raise InvalidName for a nickname that a new account cannot have."""
    nickname = nicknames.normal(raw)
    if store.by_id(conn, volunteer_id) is None and store.is_nickname_taken(
        conn, nicknames.skeleton(nickname)
    ):
        raise taken_name_error(conn, nickname)


def taken_name_error(conn: Connection, nickname: str) -> InvalidName:
    """Return the error for a taken name, with a free alternative."""
    free = nicknames.suggestion(nickname, lambda key: store.is_nickname_taken(conn, key))
    return InvalidName(f'"{nickname}" is taken, or looks like a name that is: "{free}" is free')


def _machine(request: RegisterRequest, volunteer_id: str, now: float) -> WorkerRow:
    return WorkerRow(
        id=request.worker_id,
        volunteer_id=volunteer_id,
        secret_hash=secret_codes.secret_hash(request.secret),
        benchmark="[]",
        step_flops=0.0,
        state="online",
        last_seen_at=now,
        created_at=now,
        revoked_at=None,
        **_report(request),
    )


def _report(request: RegisterRequest) -> dict[str, Any]:
    """Return a machine's report about itself, each part shortened to its limit."""
    report = reports.hardware(request.hardware)
    return {
        "hostname": report.hostname,
        "hardware": msgspec.json.encode(report).decode(),
        "software": reports.line(request.software, reports.NAME_CHARS_MAX),
        "workloads": msgspec.json.encode(reports.workloads(request.workloads)).decode(),
    }


def _again(
    conn: Connection, credentials: Credentials, request: RegisterRequest, now: float
) -> Registration:
    """Repeat a known worker's registration: update its report and consents, and set it online."""
    authorise(credentials, request.secret)
    store.set_worker(
        conn, credentials.worker_id, state="online", last_seen_at=now, **_report(request)
    )
    _agree(conn, credentials.volunteer_id, request.accepts, now)
    return Registration(
        credentials.volunteer_id, credentials.worker_id, credentials.nickname, False
    )


def authorise(credentials: Credentials | None, secret: str) -> Credentials:
    """Return the credentials if the secret is right. Raises Unauthorized, or Banned for a banned or
    forgotten account. The check takes equally long for an unknown worker.
    """
    secret_hash = credentials.secret_hash if credentials else secret_codes.secret_hash("")
    is_right = secret_codes.same(secret_codes.secret_hash(secret), secret_hash)
    if credentials is None or not is_right:
        raise Unauthorized(secret_codes.WRONG_SECRET)
    if credentials.revoked:
        raise Unauthorized(secret_codes.REVOKED)
    if credentials.state != "active":
        raise Banned(secret_codes.BANNED)
    return credentials


def _agree(conn: Connection, volunteer_id: str, accepts: tuple[str, ...], now: float) -> None:
    """Record consent to the licences of the runs that were shown and accepted. Raises NotFound."""
    for name in dict.fromkeys(accepts):
        agree(conn, volunteer_id, name, now)


def agree(conn: Connection, volunteer_id: str, run: str, now: float) -> None:
    """Record consent to the run's present licence. Raises NotFound."""
    row = runs.by_name(conn, run)
    store.consent(conn, volunteer_id, row.id, run_file.decode(row.file).licence[:255], now)
