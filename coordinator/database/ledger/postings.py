"""Double entry: events whose postings sum to zero, and balances updated in the same transaction.

An event is named by its key. Posting it again with the same content changes nothing; other content
is refused. Postings are never altered: another event corrects a mistake. Balances are a projection
of the postings, updated at once so that nobody can spend missing credit. payments.py lists the
kinds of events.

Rows are always locked in one order (events by key, then accounts by owner, the system last, because
all transactions need it), so that two calls cannot deadlock.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from sqlalchemy import (
    CTE,
    BigInteger,
    ClauseElement,
    Connection,
    and_,
    insert,
    select,
    update,
)

from coordinator.database.engine.bulk_statements import BulkStatement
from coordinator.database.engine.statements import among, insert_new
from coordinator.database.tables.ledger import accounts, events, postings
from shared.errors import BadRequest, Conflict, Forbidden

SYSTEM = "system"
MINT = "mint"  # the one account that may be below zero: all credit comes from it
KEY_CHARS_MAX = 128
MEMO_CHARS_MAX = 500
AMOUNT_MAX = (1 << 53) - 1  # limit of one posting: exact in every JSON reader
BALANCE_MAX = 1 << 62  # far below the largest integer of either database
BATCH = 500  # rows in one statement

AccountName = tuple[str, str]  # owner, kind
T = TypeVar("T")


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One side of an event."""

    owner: str
    kind: str
    amount_micro: int


class EventDraft(msgspec.Struct, frozen=True, kw_only=True):
    """Event before it is written."""

    key: str
    kind: str
    moves: tuple[Move, ...]
    run_id: int | None = None
    contribution_id: int | None = None
    memo: str = ""


def digest(draft: EventDraft) -> str:
    """Return the SHA-256 of an event's content, independent of the order of its moves."""
    moves = sorted((m.owner, m.kind, m.amount_micro) for m in draft.moves)
    fields = [draft.key, draft.kind, draft.run_id, draft.contribution_id, draft.memo, moves]
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()


_POST = insert(postings)
_DIGESTS = select(events.c.key, events.c.digest).where(among(events.c.key, "keys"))
_BALANCES = select(accounts.c.id, accounts.c.balance_micro).where(among(accounts.c.id, "ids"))
_ACCOUNTS = (
    select(accounts.c.owner, accounts.c.kind, accounts.c.id)
    .where(among(accounts.c.owner, "owners"), among(accounts.c.kind, "kinds"))
    .order_by(accounts.c.owner == SYSTEM, accounts.c.owner, accounts.c.kind)
    .with_for_update(key_share=True)  # inserts of postings need not wait; SQLite ignores it
)


def post(
    conn: Connection,
    drafts: Sequence[EventDraft],
    now: float,
    allowed: Callable[[Sequence[EventDraft]], None] | None = None,
) -> None:
    """Write the new events and move their balances, in a few statements for any number of drafts.

    `allowed` sees the new events after their accounts are locked, and may refuse: of two opposite
    steps at one moment the second sees the first. Raises Conflict if a key was used with other
    content, Forbidden if an account does not hold enough, BadRequest if an event does not balance.
    """
    by_key = _distinct(drafts)
    ids = _add_events(conn, by_key, now)
    if not ids:
        return
    new = [by_key[key] for key in sorted(ids)]
    deltas: defaultdict[AccountName, int] = defaultdict(int)
    for draft in new:
        for move in draft.moves:
            deltas[move.owner, move.kind] += move.amount_micro
    numbers = _lock_accounts(conn, deltas)
    if allowed is not None:
        allowed(new)
    _move(conn, {numbers[name]: (name, delta) for name, delta in deltas.items()})
    rows = [
        {
            "event_id": ids[d.key],
            "account_id": numbers[m.owner, m.kind],
            "amount_micro": m.amount_micro,
        }
        for d in new
        for m in d.moves
    ]
    conn.execute(_POST, rows)


def lock(conn: Connection, names: Iterable[AccountName]) -> dict[AccountName, int]:
    """Lock accounts, inserted if missing, until the transaction ends; return their balances.

    A caller that decides by a balance needs the lock. It must name all accounts that the
    transaction posts to, so that all are locked in one order, without deadlocks.
    """
    numbers = _lock_accounts(conn, names)
    balances_by_id: dict[int, int] = {}
    for part in _parts(sorted(numbers.values())):
        balances_by_id |= {
            row.id: int(row.balance_micro) for row in conn.execute(_BALANCES, {"ids": part})
        }
    return {name: balances_by_id[number] for name, number in numbers.items()}


def digests(conn: Connection, keys: Iterable[str]) -> dict[str, str]:
    """Return the digests posted under these keys, by key; unused keys are left out."""
    digest_by_key: dict[str, str] = {}
    for part in _parts(sorted(keys)):
        digest_by_key |= {row.key: row.digest for row in conn.execute(_DIGESTS, {"keys": part})}
    return digest_by_key


def _distinct(drafts: Sequence[EventDraft]) -> dict[str, EventDraft]:
    """Check the drafts and index them by key. The same draft twice counts once. Raises Conflict for
    two different drafts with one key.
    """
    by_key: dict[str, EventDraft] = {}
    for draft in drafts:
        if by_key.setdefault(draft.key, draft) != draft:
            raise Conflict(f'two different events in one posting are called "{draft.key}"')
        _check(draft)
    return by_key


def _check(draft: EventDraft) -> None:
    if not 0 < len(draft.key) <= KEY_CHARS_MAX or len(draft.memo) > MEMO_CHARS_MAX:
        raise BadRequest(f'the event "{draft.key[:40]}" has too long a key or memo')
    if any(abs(move.amount_micro) > AMOUNT_MAX for move in draft.moves):
        raise BadRequest(f'the event "{draft.key}" moves more than {AMOUNT_MAX} micro-credits')
    names = {(move.owner, move.kind) for move in draft.moves}
    if len(names) < 2 or len(names) != len(draft.moves):
        raise BadRequest(f'the event "{draft.key}" needs two or more different accounts')
    if sum(move.amount_micro for move in draft.moves) != 0:
        raise BadRequest(f'the two sides of the event "{draft.key}" are not equal')


def _add_events(conn: Connection, by_key: Mapping[str, EventDraft], now: float) -> dict[str, int]:
    """Write the new events; return their numbers by key. Raises Conflict for a key with other
    content.
    """
    digest_by_key = {key: digest(draft) for key, draft in sorted(by_key.items())}
    rows = [
        {
            "key": key,
            "digest": digest_text,
            "kind": by_key[key].kind,
            "run_id": by_key[key].run_id,
            "contribution_id": by_key[key].contribution_id,
            "memo": by_key[key].memo,
            "at": now,
        }
        for key, digest_text in digest_by_key.items()
    ]
    if not rows:
        return {}
    insertion = insert_new(conn, events, "key", "key", "id")
    ids = {row.key: row.id for row in conn.execute(insertion, rows)}
    for key, before in digests(conn, digest_by_key.keys() - ids.keys()).items():
        if before != digest_by_key[key]:
            raise Conflict(f'"{key}" was posted before with other content')
    return ids


def _order(name: AccountName) -> tuple[bool, AccountName]:
    return name[0] == SYSTEM, name


def _lock_accounts(conn: Connection, names: Iterable[AccountName]) -> dict[AccountName, int]:
    """Return the numbers of the accounts, inserted if missing and locked until the transaction
    ends.
    """
    ordered = sorted(names, key=_order)
    ids_found = _find(conn, ordered)
    missing = [name for name in ordered if name not in ids_found]
    if missing:
        rows = [{"owner": owner, "kind": kind, "balance_micro": 0} for owner, kind in missing]
        conn.execute(insert_new(conn, accounts, "owner,kind"), rows)
        ids_found = _find(conn, ordered)
    return ids_found


def _find(conn: Connection, owners_and_kinds: Sequence[AccountName]) -> dict[AccountName, int]:
    names = set(owners_and_kinds)
    ids_found: dict[AccountName, int] = {}
    owners = list(dict.fromkeys(owner for owner, _ in owners_and_kinds))
    kinds = sorted({kind for _, kind in owners_and_kinds})
    for part in _parts(owners):
        rows = conn.execute(_ACCOUNTS, {"owners": part, "kinds": kinds})
        ids_found |= {
            (row.owner, row.kind): row.id for row in rows if (row.owner, row.kind) in names
        }
    return ids_found


def _moved(change: CTE) -> ClauseElement:
    after = accounts.c.balance_micro + change.c.delta
    enough = (after >= 0) | and_(accounts.c.kind == MINT, after >= -BALANCE_MAX)
    return (
        update(accounts)
        .where(accounts.c.id == change.c.id, enough, after <= BALANCE_MAX)
        .values(balance_micro=after)
        .returning(accounts.c.id)
    )


_MOVED = BulkStatement("change", {"id": BigInteger(), "delta": BigInteger()}, _moved, blank=(-1, 0))


def _move(conn: Connection, deltas: Mapping[int, tuple[AccountName, int]]) -> None:
    """Add to balances. Raises Forbidden if a balance would leave its limits."""
    for part in _parts(sorted(deltas)):
        moved = {row.id for row in _MOVED.execute(conn, [(n, deltas[n][1]) for n in part])}
        if short := [number for number in part if number not in moved]:
            (owner, kind), delta = deltas[short[0]]
            raise Forbidden(f"the {kind} account of {owner} does not hold {-delta} micro-credits")


def _parts(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))
