"""The record as a Merkle tree, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, delete, text, update
from sqlalchemy.exc import DBAPIError

from coordinator.accounts.accounts import Principal
from coordinator.accounts.ledger import Ledger
from coordinator.accounts.transparency import Transparency
from coordinator.database import record as lines
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import record_tree
from coordinator.database.tables.ledger import events
from coordinator.database.tables.record import meta
from coordinator.database.tables.transparency import merkle_leaves, merkle_nodes
from shared.decoding import decode
from shared.errors import BadRequest, NotFound
from shared.proofs import merkle
from shared.proofs.signing import SigningKey, verify
from shared.protocol.transparency import (
    HeadPayload,
    Receipt,
    SignedReceipt,
    TreeHead,
    continues,
    includes,
)
from tests.contract.test_escrow import FRIEND, NEW, PRICE, merged, setting
from tests.support.account_rows import earn, pay
from tests.support.virtual_clock import VirtualClock


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.load_or_create(tmp_path / "signing.key")


@pytest.fixture
def record(database: Database, key: SigningKey) -> Transparency:
    return Transparency(database, VirtualClock(), key)


def line(number: int) -> Callable[[Connection], None]:
    return lambda conn: lines.append(conn, "organiser", "test", f"line {number}", {}, 1.0)


def paying(number: int) -> Callable[[Connection], None]:
    return lambda conn: earn(conn, pay(number))


def running(statement: str) -> Callable[[Connection], object]:
    return lambda conn: conn.execute(text(statement))


async def head(record: Transparency, key: SigningKey) -> TreeHead:
    signed = await record.head()
    verify(key.public_key, signed.payload.encode(), bytes.fromhex(signed.signature))
    return decode(signed.payload, HeadPayload).tree


def receipts_of(found: tuple[SignedReceipt, ...], key: SigningKey) -> list[Receipt]:
    for each in found:
        verify(key.public_key, each.payload.encode(), bytes.fromhex(each.signature))
    return [decode(each.payload, Receipt) for each in found]


async def test_the_tree_grows_and_every_head_is_proved(
    database: Database, record: Transparency, key: SigningKey
) -> None:
    assert (await head(record, key)).root == merkle.EMPTY.hex()
    heads = []
    for step in range(1, 8):
        for number in range(step):
            await database.write(paying(10 * step + number))
            await database.write(line(number))
        gained = await record.seal()
        assert gained == 3 * step
        heads.append(await head(record, key))
    assert await record.seal() == 0
    assert await database.read(lambda conn: list(record_tree.check(conn))) == []
    for old in heads:
        for new in heads[heads.index(old) :]:
            proof = await record.consistency(old.size, new.size)
            assert continues(old, new, proof)
            assert not continues(old, heads[0], proof) or old == new == heads[0]


async def test_a_long_history_becomes_leaves_in_batches(database: Database) -> None:
    for number in range(1, 12):
        await database.write(paying(number))
        await database.write(line(number))
    sizes = []
    while await database.read(record_tree.has_backlog):
        await database.write(lambda conn: record_tree.extend(conn, 5))
        sizes.append((await database.read(record_tree.head)).size)
    assert sizes == [5, 10, 15, 20, 25, 30, 33]
    assert await database.read(lambda conn: list(record_tree.check(conn))) == []


async def test_writers_and_several_sealers_at_once_leave_no_gap(
    database: Database, record: Transparency, key: SigningKey
) -> None:
    twin = Transparency(database, VirtualClock(), key)
    jobs = [database.write(paying(n)) for n in range(1, 31)]
    jobs += [database.write(line(n)) for n in range(10)]
    await asyncio.gather(*jobs[:20], record.seal(), twin.seal(), *jobs[20:], twin.seal())
    await record.seal()
    assert (await database.read(record_tree.head)).size == 2 * 30 + 10
    assert await database.read(lambda conn: list(record_tree.check(conn))) == []
    assert await Ledger(database).check() == ()


async def test_each_payment_has_a_receipt_that_stands_alone(
    database: Database, record: Transparency, key: SigningKey
) -> None:
    run = await setting(database)
    for at in range(3):
        await database.write(partial(merged, run=run, who=FRIEND, now=float(at)))
    await database.write(lambda conn: merged(conn, run, NEW, 4.0))
    friend = Principal(worker_id="w", volunteer_id=FRIEND, nickname="F")
    assert await record.receipts(friend) == ()  # not sealed yet
    await record.seal()
    found = receipts_of(await record.receipts(friend), key)
    assert [(r.entry.kind, r.credits_micro, r.volunteer) for r in found] == [
        ("earn", PRICE, FRIEND)
    ] * 3
    assert all(includes(receipt) for receipt in found)
    assert {receipt.version for receipt in found} != set()
    behind = await record.receipts(friend, found[1].entry.id)
    assert [r.entry.id for r in receipts_of(behind, key)] == [found[2].entry.id]
    new = Principal(worker_id="w", volunteer_id=NEW, nickname="N")
    (waiting,) = receipts_of(await record.receipts(new), key)
    assert waiting.entry.kind == "escrow"
    assert includes(waiting)


async def test_there_is_no_proof_of_what_is_not_there(
    database: Database, record: Transparency
) -> None:
    await database.write(lambda conn: earn(conn, pay(1)))
    await record.seal()
    with pytest.raises(NotFound, match="does not begin with one of 0"):
        await record.consistency(0, 2)
    with pytest.raises(NotFound, match="has 2 entries now"):
        await record.consistency(2, 2**63 - 1)
    with pytest.raises(BadRequest, match="two sizes"):
        await record.consistency(1, None)


def unguarded(conn: Connection) -> None:
    """Take the guards off the record, as a person with the database in hands would."""
    for name in ("events", "postings", "record", "merkle_leaves", "merkle_nodes"):
        if conn.dialect.name == "postgresql":
            conn.execute(text(f"ALTER TABLE {name} DISABLE TRIGGER USER"))
        else:
            conn.execute(text(f"DROP TRIGGER {name}_no_update"))
            conn.execute(text(f"DROP TRIGGER {name}_no_delete"))


async def test_a_history_sealed_anew_contradicts_the_head_that_was_kept(
    database: Database, record: Transparency, key: SigningKey
) -> None:
    for number in range(1, 6):
        await database.write(paying(number))
    await record.seal()
    kept = await head(record, key)

    def rewrite(conn: Connection) -> None:
        unguarded(conn)
        conn.execute(update(events).where(events.c.id == 2).values(at=77.0))
        conn.execute(delete(meta).where(meta.c.key == "tree"))
        conn.execute(delete(merkle_leaves))
        conn.execute(delete(merkle_nodes))

    await database.write(rewrite)
    await database.write(line(1))
    await record.seal()
    now = await head(record, key)
    assert await Ledger(database).check() == ()  # the rows alone do not tell
    assert now.size == kept.size + 1
    assert not continues(kept, now, await record.consistency(kept.size, now.size))


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE events SET at = 5 WHERE id = 2", "not what the tree says"),
        ("UPDATE merkle_leaves SET row_id = 900 WHERE place = 1", "was removed since"),
        ("DELETE FROM merkle_leaves WHERE place = 1", "lacks one of the entries"),
        ("DELETE FROM merkle_nodes WHERE level = 1 AND place = 0", "is damaged"),
        ("UPDATE meta SET value = replace(value, '\"root\":\"', '\"root\":\"0') "
         "WHERE key = 'tree'", "not that of its rows"),
    ],
)  # fmt: skip
async def test_a_damaged_tree_is_found(
    database: Database, record: Transparency, statement: str, sentence: str
) -> None:
    await database.write(lambda conn: earn(conn, pay(1), pay(2)))
    await record.seal()

    def damage(conn: Connection) -> None:
        unguarded(conn)
        conn.execute(text(statement))

    await database.write(damage)
    found = await database.read(lambda conn: list(record_tree.check(conn)))
    assert [sentence in said for said in found] == [True]


async def test_the_database_refuses_changes_of_the_tree(
    database: Database, record: Transparency
) -> None:
    await database.write(lambda conn: earn(conn, pay(1)))
    await record.seal()
    for table in ("merkle_leaves", "merkle_nodes"):
        for statement in (f"DELETE FROM {table}", f"UPDATE {table} SET place = 9"):
            with pytest.raises(DBAPIError, match="never change"):
                await database.write(running(statement))
