"""API keys of the OpenAI-compatible interface, their usage, and gifts of credits."""

from __future__ import annotations

import secrets
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from coordinator.accounts.bearer_tokens import Principal
from coordinator.accounts.suspension import reason_of
from coordinator.database import record, runs
from coordinator.database import volunteers as store
from coordinator.database.inference import api_key_rows, request_rows
from coordinator.database.inference.api_key_rows import KeyRow
from coordinator.database.ledger import gifts, payments
from coordinator.rules import nicknames, secret_codes
from coordinator.rules.reports import line
from shared.decoding import decode
from shared.errors import BadRequest, Conflict, Forbidden, NotFound, TooManyRequests, Unauthorized
from shared.protocol.inference import (
    KEYS_MAX,
    Given,
    GiveRequest,
    KeyInfo,
    KeyRequest,
    KeyState,
    NewKey,
    UsageRow,
)
from shared.text import credit, exact_credit
from shared.units import DAY_S, HOUR_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.config import Settings
    from coordinator.database.engine.open_database import Database
    from shared.clock import Clock

PREFIX = "vk-"  # prefix of every key
SHOWN_CHARS = 10
NAME_CHARS_MAX = 64
# Most keys that an account makes within 24 hours, including those revoked since.
KEYS_A_DAY = 20
GIFTS_A_DAY = 100  # most gifts that an account makes within 24 hours
RETRY_S = HOUR_S  # `retry_after_s` once the limit of a day is reached
MICRO = 1_000_000

WRONG_KEY = "this key is wrong: `volunteer key list` shows yours, `volunteer key create` makes one"
GONE_KEY = "this key was revoked or has expired: `volunteer key create` makes another"


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """Sender of a prompt: an account, by one of its keys or by a machine."""

    volunteer_id: str
    key_id: int | None = None
    runs: tuple[str, ...] = ()  # () = every run
    organiser: bool = False  # its prompts to any run are free, and no tier limits them


class GrantResult(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation of a grant."""

    name: str
    amount_micro: int
    earned_micro: int  # credits that can be spent now


class ApiKeys:
    """The keys of all accounts."""

    def __init__(self, db: Database, clock: Clock, settings: Settings) -> None:
        self._db = db
        self._clock = clock
        self._gift_micro = round(settings.gift_credits_per_day * MICRO)

    async def sign_in(self, key: str) -> Asker:
        """Return the account of a key. Raises Unauthorized, or Forbidden for a banned or suspended
        account.
        """
        hashed, now = _hash(key), self._clock.now()
        key_row = await self._db.read(lambda conn: api_key_rows.by_hash(conn, hashed))
        if key_row is None:
            raise Unauthorized(WRONG_KEY)
        row, allowed = key_row
        if not row.works(now):
            raise Unauthorized(GONE_KEY)
        if not allowed:
            raise Forbidden("the account of this key is banned or suspended")
        return Asker(
            volunteer_id=row.volunteer_id,
            key_id=row.id,
            runs=_runs(row),
            organiser=row.organiser,
        )

    async def create(self, principal: Principal, request: KeyRequest) -> NewKey:
        """Make a key and return it; it is not shown again. Raises Forbidden for an account that is
        suspended or has neither work nor credits, Conflict for too many keys, TooManyRequests,
        BadRequest, NotFound for an unknown run.
        """
        key, now = _new_key(), self._clock.now()
        _check_end(request, now)

        def make(conn: Connection) -> KeyRow:
            account = store.locked(conn, principal.volunteer_id)
            _check_standing(conn, account)
            rows = api_key_rows.of(conn, account.id)
            working_keys = [row for row in rows if row.works(now) and not row.organiser]
            if len(working_keys) >= KEYS_MAX:
                raise Conflict(
                    f"an account has at most {KEYS_MAX} keys: revoke one with `volunteer key "
                    "revoke`"
                )
            if api_key_rows.made_since(conn, account.id, now - DAY_S) >= KEYS_A_DAY:
                raise TooManyRequests(
                    f"an account makes at most {KEYS_A_DAY} keys within 24 hours",
                    retry_after_s=RETRY_S,
                )
            for name in request.runs:
                runs.by_name(conn, name)
            return api_key_rows.add(conn, _values(account.id, key, request, now))

        return NewKey(key=key, info=_info(await self._db.write(make), now))

    async def create_for_organiser(self, name: str, expires_at: float | None) -> NewKey:
        """Make a key whose prompts to any run are free and not limited by a tier. Return the key,
        which is not shown again. Raises NotFound, BadRequest.
        """
        key, now = _new_key(), self._clock.now()
        request = KeyRequest(name="organiser", expires_at=expires_at)
        _check_end(request, now)
        skeleton = nicknames.skeleton(name[:256])

        def make(conn: Connection) -> KeyRow:
            account = store.find(conn, name[:256], skeleton)
            record.append(conn, "organiser", "key.create", account.id, key[:SHOWN_CHARS], now)
            values = _values(account.id, key, request, now) | {"organiser": True}
            return api_key_rows.add(conn, values)

        return NewKey(key=key, info=_info(await self._db.write(make), now))

    async def listing(self, principal: Principal) -> tuple[KeyInfo, ...]:
        """Return every key of an account, revoked ones included, the oldest first."""
        now = self._clock.now()
        rows = await self._db.read(lambda conn: api_key_rows.of(conn, principal.volunteer_id))
        return tuple(_info(row, now) for row in rows)

    async def revoke(self, principal: Principal, key: int) -> KeyInfo:
        """Revoke a key from its next request on. Raises NotFound for another account's key."""
        now = self._clock.now()

        def change(conn: Connection) -> KeyRow:
            row = api_key_rows.existing(conn, key, lock=True)
            if row.volunteer_id != principal.volunteer_id:
                raise NotFound(f"there is no key {key}")
            if row.revoked_at is None:
                api_key_rows.revoke(conn, key, now)
            return api_key_rows.existing(conn, key)

        return _info(await self._db.write(change), now)

    async def usage(self, principal: Principal, *, key: int | None = None) -> tuple[UsageRow, ...]:
        """Return the newest 500 requests of an account, or of one of its keys."""
        who = principal.volunteer_id
        return tuple(await self._db.read(lambda conn: request_rows.listing(conn, who, key)))

    async def give(self, principal: Principal, request: GiveRequest) -> Given:
        """Move earned credits to another account, named by nickname or id.

        Raises NotFound, BadRequest, Forbidden for a suspended giver, too little credit or a spent
        daily cap, TooManyRequests, Conflict for a used id.
        """
        secret_codes.check_id("gift", request.id)
        now, to = self._clock.now(), nicknames.skeleton(request.to[:256])

        def move(conn: Connection) -> Given:
            giver = store.locked(conn, principal.volunteer_id)
            if not giver.takes_part:
                raise Forbidden("a suspended account cannot give credits")
            taker = _taker(conn, request.to[:256], to)
            if taker.id == giver.id:
                raise BadRequest("an account cannot give credits to itself")
            sides = (giver.id, taker.id)
            total_micro, count = gifts.given_since(conn, giver.id, now - DAY_S)
            earned_micro = payments.balances(conn, giver.id).earned_micro
            try:
                new = gifts.give(conn, sides, request.id, request.amount_micro, now)
            except Forbidden as error:
                amount = exact_credit(request.amount_micro)
                has = exact_credit(earned_micro)
                raise Forbidden(f"you have {has} credits to give, not {amount}") from error
            if new and total_micro + request.amount_micro > self._gift_micro:
                raise Forbidden(
                    f"at most {credit(self._gift_micro)} credits may be given within 24 hours, "
                    f"and {credit(total_micro)} were given already"
                )
            if new and count >= GIFTS_A_DAY:
                raise TooManyRequests(
                    f"an account makes at most {GIFTS_A_DAY} gifts within 24 hours",
                    retry_after_s=RETRY_S,
                )
            left = payments.balances(conn, giver.id).earned_micro
            return Given(to=taker.nickname, amount_micro=request.amount_micro, left_micro=left)

        return await self._db.write(move)

    async def grant(self, name: str, amount_micro: int, reason: str) -> GrantResult:
        """Give an account credits on behalf of the organiser. Raises NotFound, BadRequest."""
        why, gift = reason_of(reason), secrets.token_hex(16)
        now, to = self._clock.now(), nicknames.skeleton(name[:256])

        def add(conn: Connection) -> GrantResult:
            taker = store.find(conn, name[:256], to)
            stored_reason = record.reason(conn, taker.id, why)
            gifts.grant(conn, taker.id, gift, amount_micro, stored_reason, now)
            detail = {"reason": stored_reason, "amount_micro": amount_micro}
            record.append(conn, "organiser", "grant", taker.id, detail, now)
            left = payments.balances(conn, taker.id).earned_micro
            return GrantResult(name=taker.nickname, amount_micro=amount_micro, earned_micro=left)

        return await self._db.write(add)


def _new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def _check_end(request: KeyRequest, now: float) -> None:
    if request.expires_at is not None and not now < request.expires_at < now + 1e10:
        raise BadRequest("a key must expire in the future")


def _values(volunteer_id: str, key: str, request: KeyRequest, now: float) -> dict[str, object]:
    """Return the columns of a new key."""
    return {
        "volunteer_id": volunteer_id,
        "name": line(request.name, NAME_CHARS_MAX),
        "key_hash": _hash(key),
        "prefix": key[:SHOWN_CHARS],
        "cap_micro": request.cap_micro,
        "spent_micro": 0,
        "runs": msgspec.json.encode(request.runs).decode(),
        "organiser": False,
        "created_at": now,
        "expires_at": request.expires_at,
        "revoked_at": None,
    }


def _hash(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def _runs(row: KeyRow) -> tuple[str, ...]:
    return decode(row.runs, tuple[str, ...])


def _info(row: KeyRow, now: float) -> KeyInfo:
    state: KeyState = "active" if row.works(now) else "expired"
    return KeyInfo(
        id=row.id,
        name=row.name,
        prefix=row.prefix,
        spent_micro=row.spent_micro,
        cap_micro=row.cap_micro,
        created_at=row.created_at,
        expires_at=row.expires_at,
        state="revoked" if row.revoked_at is not None else state,
        runs=_runs(row),
    )


def _check_standing(conn: Connection, account: store.VolunteerRow) -> None:
    if account.standing == "suspended":
        raise Forbidden("a suspended account cannot make a key")
    if (
        api_key_rows.has_contributed(conn, account.id)
        or payments.balances(conn, account.id).earned_micro > 0
    ):
        return
    raise Forbidden("keys are for those who helped: come back when a contribution is merged")


def _taker(conn: Connection, who: str, key: str) -> store.VolunteerRow:
    """Return the receiving account; a banned or forgotten account counts as missing. Raises
    NotFound.
    """
    try:
        volunteer = store.find(conn, who, key)
    except NotFound:
        volunteer = None
    if volunteer is None or volunteer.state != "active":
        raise NotFound(f'there is no volunteer "{who}"')
    return volunteer
