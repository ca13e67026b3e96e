"""Invites: codes that admit volunteers, shown once when made; only a hash is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from coordinator.database import invite_rows as store
from coordinator.database import key_values, record
from coordinator.rules import nicknames, reports, secret_codes
from shared.errors import BadRequest, Forbidden
from shared.units import DAY_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from coordinator.database.invite_rows import CodeRow
    from shared.clock import Clock
    from shared.proofs.signing import SigningKey

COUNT_MAX = 1000  # invites made at once
USES_MAX = 10_000  # most accounts that one invite admits
ALIKE_SHOWN = 5  # equal names that an error lists
EXPIRES_S_MAX = 10 * 365 * DAY_S

InviteState = Literal["open", "used", "expired", "withdrawn"]


class NewCode(msgspec.Struct, frozen=True, kw_only=True):
    """Code, shown only once. `label` names the invited person."""

    id: int
    label: str
    code: str
    expires_at: float | None


class ServerInvite(msgspec.Struct, frozen=True, kw_only=True):
    """The invite that the join link of a server carries."""

    code: str
    uses_left: int
    expires_at: float | None


class InviteInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An invite as the organiser sees it later."""

    id: int
    label: str
    state: InviteState
    uses_left: int
    joined: tuple[str, ...]  # nicknames
    created_at: float
    expires_at: float | None


class Invites:
    """Makes, lists and withdraws invites."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def create(
        self,
        names: Sequence[str] = (),
        *,
        count: int = 1,
        uses: int = 1,
        expires_s: float | None = None,
    ) -> tuple[NewCode, ...]:
        """Make an invite for each name of a class, or `count` invites without a name. Raises
        BadRequest.
        """
        labels = [reports.line(name) for name in names[: COUNT_MAX + 1]] or [""] * min(
            count, COUNT_MAX + 1
        )
        _check(labels, bool(names), uses, expires_s)
        now = self._clock.now()
        until = None if expires_s is None else now + expires_s
        codes_made = [(label, secret_codes.new_code(secret_codes.INVITE_CHARS)) for label in labels]
        hashes = {secret_codes.code_hash(code): label for label, code in codes_made}
        numbers = await self._db.write(lambda conn: self._add(conn, hashes, uses, now, until))
        return tuple(
            NewCode(id=number, label=label, code=code, expires_at=until)
            for number, (label, code) in zip(numbers, codes_made, strict=True)
        )

    async def of_server(self, key: SigningKey, *, uses: int, expires_s: float) -> ServerInvite:
        """Return the invite of the join link that `serve` prints, the same on every replica.

        A restarted server uses the same invite while it is valid, else a new one. The code is
        derived from the key and the invite's number; the database holds the number and the hash.
        """
        now = self._clock.now()

        def find_or_add(conn: Connection) -> ServerInvite:
            number = int(key_values.locked(conn, key_values.INVITE) or 0)
            code = secret_codes.derived(key.secret(f"invite {number}"), secret_codes.INVITE_CHARS)
            try:
                row = store.usable(conn, secret_codes.code_hash(code), now)
            except Forbidden:
                number += 1
                code = secret_codes.derived(
                    key.secret(f"invite {number}"), secret_codes.INVITE_CHARS
                )
                self._add(conn, {secret_codes.code_hash(code): ""}, uses, now, now + expires_s)
                key_values.put(conn, key_values.INVITE, str(number))
                row = store.usable(conn, secret_codes.code_hash(code), now)
            return ServerInvite(code=code, uses_left=row.uses_left, expires_at=row.expires_at)

        return await self._db.write(find_or_add)

    def _add(
        self,
        conn: Connection,
        hashes: dict[str, str],
        uses: int,
        now: float,
        until: float | None,
    ) -> list[int]:
        """Store invites, given as labels by hash, with a line of the record; return their
        numbers.
        """
        numbers = store.add_invites(conn, hashes, uses, until, now)
        detail = {"first": numbers[0], "count": len(numbers), "uses": uses}
        record.append(conn, "organiser", "invite.create", str(numbers[0]), detail, now)
        return numbers

    async def list(self) -> tuple[InviteInfo, ...]:
        """Return every invite, the oldest first, without its code."""
        now = self._clock.now()
        rows = await self._db.read(store.invites)
        return tuple(_info(row, joined, now) for row, joined in rows)

    async def revoke(self, invite_id: int) -> InviteInfo:
        """Revoke an invite; volunteers admitted by it stay. Raises NotFound."""
        now = self._clock.now()

        def write(conn: Connection) -> CodeRow:
            row = store.revoke(conn, invite_id, now)
            record.append(conn, "organiser", "invite.revoke", str(invite_id), "", now)
            return row

        return _info(await self._db.write(write), (), now)


def _check(labels: Sequence[str], named: bool, uses: int, expires_s: float | None) -> None:
    if not 1 <= len(labels) <= COUNT_MAX:
        raise BadRequest(f"between 1 and {COUNT_MAX} invites can be made at once")
    if named and not all(labels):
        raise BadRequest("every name of the list needs at least one printable character")
    if named and (lookalikes := _lookalikes(labels)):
        raise BadRequest(
            f"these names are the same, or look the same: {'; '.join(lookalikes)}."
            " Tell them apart, since each becomes a nickname"
        )
    if not 1 <= uses <= USES_MAX:
        raise BadRequest(f"an invite lets in between 1 and {USES_MAX} people")
    if expires_s is not None and not 0 < expires_s <= EXPIRES_S_MAX:
        raise BadRequest("an invite must expire in the future, within ten years")


def _lookalikes(labels: Sequence[str]) -> list[str]:
    """Return the first few names that collide as nicknames, each with its places in the list."""
    places: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(nicknames.skeleton(label) or label, []).append(place)
    collisions = [group for group in places.values() if len(group) > 1]
    return [
        " and ".join(f'"{labels[place]}" (number {place + 1})' for place in group)
        for group in collisions[:ALIKE_SHOWN]
    ]


def _info(row: CodeRow, joined: tuple[str, ...], now: float) -> InviteInfo:
    state: InviteState = "open"
    if row.revoked_at is not None:
        state = "withdrawn"
    elif row.uses_left < 1:
        state = "used"
    elif row.expires_at is not None and row.expires_at <= now:
        state = "expired"
    return InviteInfo(
        id=row.id,
        label=row.label,
        uses_left=row.uses_left,
        created_at=row.created_at,
        expires_at=row.expires_at,
        state=state,
        joined=joined,
    )
