"""Invites and link codes. The table holds only their hashes (see `rules/secret_codes`)."""

from __future__ import annotations

from typing import Literal

import msgspec
from sqlalchemy import Connection, insert, select, update

from coordinator.database.engine.statements import deletion
from coordinator.database.tables.accounts import codes, volunteers
from shared.errors import InvalidCode, NotFound

CodeKind = Literal["invite", "link"]
LISTING_MAX = 10_000


class CodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `codes`; see tables/accounts.py."""

    id: int
    kind: CodeKind
    label: str
    volunteer_id: str | None
    uses_left: int
    created_at: float
    expires_at: float | None
    revoked_at: float | None


_COLUMNS = [codes.c[name] for name in CodeRow.__struct_fields__]


def add_invites(
    conn: Connection, hashes: dict[str, str], uses: int, expires_at: float | None, now: float
) -> list[int]:
    """Insert invites, given as labels by hash; return their numbers in the same order."""
    rows = [
        {
            "code_hash": code_hash,
            "kind": "invite",
            "label": label,
            "volunteer_id": None,
            "uses_left": uses,
            "created_at": now,
            "expires_at": expires_at,
            "revoked_at": None,
        }
        for code_hash, label in hashes.items()
    ]
    statement = insert(codes).returning(codes.c.id, sort_by_parameter_order=True)
    return [int(number) for number in conn.execute(statement, rows).scalars()]


def add_link(
    conn: Connection, volunteer_id: str, code_hash: str, expires_at: float, now: float
) -> None:
    """Insert a link code, which replaces the account's earlier link code."""
    conn.execute(
        deletion(codes, "replaced").where(
            codes.c.kind == "link", codes.c.volunteer_id == volunteer_id
        )
    )
    conn.execute(
        insert(codes).values(
            code_hash=code_hash,
            kind="link",
            label="",
            volunteer_id=volunteer_id,
            uses_left=1,
            created_at=now,
            expires_at=expires_at,
        )
    )


def usable(conn: Connection, code_hash: str, now: float) -> CodeRow:
    """Return the code with a hash. Raises InvalidCode with the reason why it is not valid."""
    row = conn.execute(select(*_COLUMNS).where(codes.c.code_hash == code_hash)).mappings().first()
    if row is None:
        raise InvalidCode("this server does not know this code: check it, or ask for a new one")
    code = CodeRow(**row)
    if code.revoked_at is not None:
        raise InvalidCode("this code was withdrawn: ask the organiser for a new one")
    if code.expires_at is not None and code.expires_at <= now:
        raise InvalidCode("this code has expired: ask for a new one")
    if code.uses_left < 1:
        raise InvalidCode("this code was used already: ask for a new one")
    return code


def use(conn: Connection, code: CodeRow) -> None:
    """Count one use of a code. Raises InvalidCode if the code was revoked, or used up by another
    request.
    """
    spent = (
        update(codes)
        .where(codes.c.id == code.id, codes.c.uses_left > 0, codes.c.revoked_at.is_(None))
        .values(uses_left=codes.c.uses_left - 1)
    )
    if conn.execute(spent).rowcount != 1:
        raise InvalidCode("this code was used already: ask for a new one")


def invites(conn: Connection) -> list[tuple[CodeRow, tuple[str, ...]]]:
    """Return the invites, oldest first, with the nicknames of the volunteers that each admitted."""
    nicknames: dict[int, list[str]] = {}
    query = select(volunteers.c.invite_id, volunteers.c.nickname).where(
        volunteers.c.invite_id.is_not(None)
    )
    for number, nickname in conn.execute(query.order_by(volunteers.c.created_at)):
        nicknames.setdefault(number, []).append(nickname)
    rows = conn.execute(
        select(*_COLUMNS).where(codes.c.kind == "invite").order_by(codes.c.id).limit(LISTING_MAX)
    ).mappings()
    return [(CodeRow(**row), tuple(nicknames.get(row["id"], ()))) for row in rows]


def revoke(conn: Connection, invite_id: int, now: float) -> CodeRow:
    """Revoke an invite; volunteers admitted by it stay. Raises NotFound."""
    of_invite = (codes.c.id == invite_id) & (codes.c.kind == "invite")
    conn.execute(
        update(codes).where(of_invite, codes.c.revoked_at.is_(None)).values(revoked_at=now)
    )
    row = conn.execute(select(*_COLUMNS).where(of_invite)).mappings().first()
    if row is None:
        raise NotFound(f"there is no invite {invite_id}: `coordinator invite list` shows all")
    return CodeRow(**row)
