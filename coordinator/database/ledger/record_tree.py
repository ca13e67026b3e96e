"""Record as a Merkle tree: leaves, heads, proofs.

Rows become leaves after they were written, in batches, under the tree's own lock, so that writers
of the ledger and the record never wait for it. The leaves of one log are in the order of their
numbers. A changed, dropped, added or swapped row breaks the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, Table, func, insert, select, text, update

from coordinator.database.engine.statements import among, equals, insert_new
from coordinator.database.ledger import ledger_check as ledger
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.ledger import accounts, events, postings
from coordinator.database.tables.record import RECORD_SEALED, meta, record_lines
from coordinator.database.tables.runs import runs
from coordinator.database.tables.transparency import merkle_leaves, merkle_nodes
from shared.decoding import decode
from shared.errors import Internal, NotFound
from shared.proofs import merkle
from shared.protocol.transparency import PAID, LedgerEntry, TreeHead, leaf_hash

KEY = "tree"
BATCH = 500  # rows in one transaction: about 15 ms
LOGS: dict[str, tuple[Table, Sequence[Column[Any]]]] = {
    "events": (events, ledger.SEALED),
    "record": (record_lines, RECORD_SEALED),
}


_AT_LEVEL = select(merkle_nodes.c.place, merkle_nodes.c.hash).where(
    equals(merkle_nodes.c.level), among(merkle_nodes.c.place, "places")
)


class RecordRoot(msgspec.Struct, frozen=True, kw_only=True):
    """Size and root of the tree, and the last row of each log that it contains."""

    size: int = 0
    root: str = merkle.EMPTY.hex()
    events: int = 0
    record: int = 0


class Paid(msgspec.Struct, frozen=True, kw_only=True):
    """Ledger entry that paid a contribution."""

    entry: LedgerEntry
    run: str
    version: int | None
    place: int  # number of its leaf


_HEAD = select(meta.c.value).where(meta.c.key == KEY)


def head(conn: Connection) -> RecordRoot:
    """Return the state of the tree."""
    return _read(conn.execute(_HEAD).scalar())


def tree_head(conn: Connection, now: float) -> TreeHead:
    """Return the head of the record's tree, ready for its signature."""
    tree = head(conn)
    return TreeHead(size=tree.size, root=tree.root, at=now)


def counts(conn: Connection) -> tuple[int, int]:
    """Return the number of entries of the ledger and of lines of the record."""
    entries, lines = (
        int(conn.execute(select(func.count()).select_from(table)).scalar_one())
        for table, _ in LOGS.values()
    )
    return entries, lines


def has_backlog(conn: Connection) -> bool:
    """Return True if rows wait to be added to the tree; locks nothing."""
    tree = head(conn)
    done = {"events": tree.events, "record": tree.record}
    return any(_has_more(conn, table, done[name]) for name, (table, _) in LOGS.items())


def extend(conn: Connection, limit: int = BATCH) -> int:
    """Add the next rows to the tree; return their number. Must be the first statement of its
    transaction.
    """
    # Another process that extends the tree is waited for here, before `_settled` blocks writers.
    conn.execute(insert_new(conn, meta, "key").values(key=KEY, value="{}"))
    locked = select(meta.c.value).where(meta.c.key == KEY).with_for_update()
    tree = _read(conn.execute(locked).scalar())
    edge = merkle.Frontier(_nodes(conn, merkle.peaks(tree.size)), tree.size)
    nodes: list[dict[str, object]] = []
    leaves: list[dict[str, object]] = []
    last = {"events": tree.events, "record": tree.record}
    for name in LOGS:
        for row in _next(conn, name, last[name], limit - len(leaves)):
            leaves.append({"place": edge.size, "log": name, "row_id": row[0]})
            for level, place, hashed in edge.append_leaf(leaf_hash(name, row)):
                nodes.append({"level": level, "place": place, "hash": hashed})
            last[name] = row[0]
    if leaves:
        conn.execute(insert(merkle_leaves), leaves)
        conn.execute(insert(merkle_nodes), nodes)
        new = RecordRoot(size=edge.size, root=edge.root().hex(), **last)
        value = msgspec.json.encode(new).decode()
        conn.execute(update(meta).where(meta.c.key == KEY).values(value=value))
    return len(leaves)


def inclusions(conn: Connection, places: Sequence[int], size: int) -> list[list[bytes]]:
    """Return the proofs that existing leaves are in the tree of `size` entries, each node read
    once.
    """
    return _proofs(conn, [partial(merkle.inclusion_proof, index=at, size=size) for at in places])


def consistency(conn: Connection, old: int, new: int) -> list[bytes]:
    """Return the proof that the tree of `new` entries begins with the tree of `old` entries. Raises
    NotFound.
    """
    _check_size(conn, new)
    if not 0 < old <= new:
        raise NotFound(f"a record of {new} entries does not begin with one of {old}")
    return _proofs(conn, [partial(merkle.consistency_proof, old=old, new=new)])[0]


def payments(conn: Connection, volunteer_id: str, after: int, limit: int) -> list[Paid]:
    """Return a volunteer's payments that are in the tree, oldest first, after event `after`."""
    own_accounts = select(accounts.c.id).where(
        accounts.c.owner == volunteer_id, accounts.c.kind.in_(("earned", "escrow"))
    )
    numbers = (
        select(postings.c.event_id)
        .where(postings.c.account_id.in_(own_accounts), postings.c.event_id > after)
        .where(postings.c.amount_micro > 0)
    )
    query = (
        select(events, runs.c.name.label("run"), contributions.c.version, merkle_leaves.c.place)
        .join(merkle_leaves, (merkle_leaves.c.row_id == events.c.id))
        .join(contributions, contributions.c.id == events.c.contribution_id, isouter=True)
        .join(runs, runs.c.id == func.coalesce(contributions.c.run_id, events.c.run_id))
        .where(merkle_leaves.c.log == "events", events.c.kind.in_(PAID))
        .where(events.c.id.in_(numbers))
        .order_by(events.c.id)
        .limit(limit)
    )
    rows = conn.execute(query).all()
    moves = _moves(conn, [row.id for row in rows])
    return [
        Paid(
            entry=LedgerEntry(
                id=row.id,
                key=row.key,
                kind=row.kind,
                run_id=row.run_id,
                contribution_id=row.contribution_id,
                memo=row.memo,
                at=row.at,
                moves=tuple(moves[row.id]),
            ),
            run=row.run,
            version=row.version,
            place=row.place,
        )
        for row in rows
    ]


def check(conn: Connection) -> Iterator[str]:
    """Recompute the tree from the rows; yield its differences, up to the first wrong row."""
    tree = head(conn)
    edge = merkle.Frontier(_nodes(conn, ()), 0)
    while edge.size < tree.size:
        at = edge.size
        upto = min(at + BATCH, tree.size)
        leaves = conn.execute(
            select(merkle_leaves)
            .where(merkle_leaves.c.place >= at, merkle_leaves.c.place < upto)
            .order_by(merkle_leaves.c.place)
        ).all()
        if [leaf.place for leaf in leaves] != list(range(at, upto)):
            yield f"the tree of the record lacks one of the entries {at} to {upto - 1}"
            return
        rows = {
            name: _rows(conn, name, [leaf.row_id for leaf in leaves if leaf.log == name])
            for name in LOGS
        }
        hashes: dict[tuple[int, int], bytes] = {}
        for leaf in leaves:
            row = rows.get(leaf.log, {}).get(leaf.row_id)
            if row is None:
                yield f"{leaf.log} {leaf.row_id}: this row is in the tree, and was removed since"
                return
            for level, place, hashed in edge.append_leaf(leaf_hash(leaf.log, row)):
                hashes[level, place] = hashed
        hashes_stored = _stored(conn, list(hashes))
        for leaf in leaves:
            if hashes_stored.get((0, leaf.place)) != hashes[0, leaf.place]:
                yield f"{leaf.log} {leaf.row_id}: this row is not what the tree says it was"
                return
        if hashes_stored != hashes:
            yield f"the tree of the record is damaged between the entries {at} and {upto - 1}"
            return
    if edge.root().hex() != tree.root:
        yield f"the root of the record of {tree.size} entries is not that of its rows"
    last = {"events": tree.events, "record": tree.record}
    for name, (table, _) in LOGS.items():
        row_count = select(func.count()).select_from(table).where(table.c.id <= last[name])
        leaf_count = (
            select(func.count()).select_from(merkle_leaves).where(merkle_leaves.c.log == name)
        )
        if conn.execute(row_count).scalar_one() != conn.execute(leaf_count).scalar_one():
            yield f"{name}: up to row {last[name]} there are other rows than the tree has"


def _read(root: str | None) -> RecordRoot:
    return RecordRoot() if root is None else decode(root, RecordRoot)


def _check_size(conn: Connection, size: int) -> None:
    present = head(conn).size
    if not 0 < size <= present:
        raise NotFound(f"the record has {present} entries now, so there is no proof for {size}")


def _has_more(conn: Connection, table: Table, after: int) -> bool:
    return conn.execute(select(table.c.id).where(table.c.id > after).limit(1)).first() is not None


def _settled(conn: Connection, table: Table) -> int:
    """Return the id up to which no row can appear any more, 0 for an empty table.

    PostgreSQL gives numbers before a transaction commits, so a lower one could still appear. The
    function waits for the present writers and locks the table against new ones while it reads;
    rolling back to the savepoint unlocks it.
    """
    newest = select(func.coalesce(func.max(table.c.id), 0))
    if conn.dialect.name != "postgresql":
        return int(conn.execute(newest).scalar_one())
    point = conn.begin_nested()
    conn.execute(text(f'LOCK TABLE "{table.name}" IN SHARE ROW EXCLUSIVE MODE'))
    settled = int(conn.execute(newest).scalar_one())
    point.rollback()
    return settled


def _next(conn: Connection, name: str, after: int, limit: int) -> list[list[Any]]:
    """Return the next rows of a log with the columns that are hashed; lock the log only if there
    are new rows.
    """
    table, columns = LOGS[name]
    if limit < 1 or not _has_more(conn, table, after):
        return []
    query = (
        select(table.c.id, *columns)
        .where(table.c.id > after, table.c.id <= _settled(conn, table))
        .order_by(table.c.id)
        .limit(limit)
    )
    return [list(row) for row in conn.execute(query)]


def _rows(conn: Connection, name: str, ids: Sequence[int]) -> dict[int, list[Any]]:
    table, columns = LOGS[name]
    rows_by_id: dict[int, list[Any]] = {}
    for start in range(0, len(ids), 500):
        part = ids[start : start + 500]
        query = select(table.c.id, *columns).where(table.c.id.in_(part))
        rows_by_id |= {row[0]: list(row) for row in conn.execute(query)}
    return rows_by_id


def _moves(conn: Connection, ids: Sequence[int]) -> dict[int, list[tuple[str, str, int]]]:
    query = (
        select(postings.c.event_id, accounts.c.owner, accounts.c.kind, postings.c.amount_micro)
        .join(accounts, accounts.c.id == postings.c.account_id)
        .where(postings.c.event_id.in_(ids))
        .order_by(postings.c.id)
    )
    moves_by_event: dict[int, list[tuple[str, str, int]]] = {number: [] for number in ids}
    for number, owner, kind, amount in conn.execute(query) if ids else ():
        moves_by_event[number].append((owner, kind, int(amount)))
    return moves_by_event


def _stored(
    conn: Connection, places_read: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], bytes]:
    """Return the hashes of nodes by level and place, with one query a level: a condition on pairs
    would read the whole table.
    """
    levels: dict[int, list[int]] = {}
    for level, place in places_read:
        levels.setdefault(level, []).append(place)
    hashes: dict[tuple[int, int], bytes] = {}
    for level, places in levels.items():
        for start in range(0, len(places), 500):
            values = {"where_level": level, "places": places[start : start + 500]}
            rows = conn.execute(_AT_LEVEL, values)
            hashes |= {(level, row.place): bytes(row.hash) for row in rows}
    return hashes


def _nodes(conn: Connection, places_read: Sequence[tuple[int, int]]) -> merkle.Nodes:
    """Return a reader of these nodes, all fetched before. The reader raises Internal for a missing
    node.
    """
    hashes = _stored(conn, places_read)

    def read(level: int, place: int) -> bytes:
        try:
            return hashes[level, place]
        except KeyError:
            raise Internal(
                "the tree of the record is damaged: `coordinator record verify`"
            ) from None

    return read


def _proofs(
    conn: Connection, makers: Sequence[Callable[[merkle.Nodes], list[bytes]]]
) -> list[list[bytes]]:
    """Return proofs: a first pass finds the nodes that they need, a second pass reads these
    nodes.
    """
    places_needed: dict[tuple[int, int], None] = {}

    def note(level: int, place: int) -> bytes:
        places_needed[level, place] = None
        return merkle.EMPTY

    for make in makers:
        make(note)
    nodes = _nodes(conn, list(places_needed))
    return [make(nodes) for make in makers]
