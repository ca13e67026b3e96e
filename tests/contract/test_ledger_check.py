"""The check of the ledger: each forbidden state with the sentence that it gets, and no other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, insert, update

from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import debts, ledger_check, payments, record_tree
from coordinator.database.ledger.payments import Payment
from coordinator.database.ledger.postings import EventDraft, Move, post
from coordinator.database.tables.inference import answer_stakes
from coordinator.database.tables.ledger import accounts
from coordinator.database.tables.trust import escrow
from shared.errors import NotFound
from shared.proofs import merkle
from tests.contract.test_ledger_entries import BOB, MIA, MINT, person
from tests.support.account_rows import add_contribution, add_run, breaches, earn, pay

FOLLOW = "its steps cannot follow from each other"
AMOUNTS = "its steps are of different amounts"


def event(kind: str, amount: int = 5, name: str = "", **values: Any) -> EventDraft:
    """Return an event from the mint to an account of its own, whatever its kind would need."""
    moves = (Move(*MINT, -amount), Move("volunteer-x", "burn", amount))
    return EventDraft(key=name or f"{kind}:5", kind=kind, moves=moves, **values)


async def told(db: Database, *drafts: EventDraft) -> list[str]:
    await db.write(lambda conn: post(conn, drafts, 1.0))
    return await breaches(db)


WAYS = [  # of a credit, and what is wrong with them
    (("pending",), ""),
    (("pending", "earn"), ""),
    (("pending", "void"), ""),
    (("pending", "escrow"), ""),
    (("pending", "forfeit"), ""),
    (("pending", "escrow", "vest"), ""),
    (("pending", "escrow", "forfeit"), ""),
    (("pending", "escrow", "vest", "reverse"), ""),
    (("pending", "earn", "reverse"), ""),
    (("earn",), FOLLOW),
    (("pending", "earn", "void"), FOLLOW),
    (("pending", "earn", "escrow"), FOLLOW),
    (("pending", "void", "escrow"), FOLLOW),
    (("pending", "earn", "forfeit"), FOLLOW),
    (("pending", "void", "forfeit"), FOLLOW),
    (("pending", "vest"), FOLLOW),
    (("pending", "escrow", "vest", "forfeit"), FOLLOW),
    (("pending", "reverse"), FOLLOW),
    (("pending", "escrow", "reverse"), FOLLOW),
    (("pending", "give"), FOLLOW),
]


async def test_steps_of_a_contribution_follow_from_each_other(database: Database) -> None:
    drafts, wanted = [], set()
    for number, (kinds, sentence) in enumerate(WAYS, start=1):
        drafts += [event(kind, 5, f"{kind}:{number}", contribution_id=number) for kind in kinds]
        if sentence:
            wanted.add(f"contribution {number} (not stored): {sentence}")
    said = await told(database, *drafts)
    assert (len(said), {*said}) == (len(wanted), wanted)


async def test_steps_of_one_contribution_have_one_amount(database: Database) -> None:
    found = await told(
        database,
        event("pending", 5, contribution_id=5),
        event("earn", 6, contribution_id=5),
        event("pending", 9, name="pending:6", contribution_id=6),
    )
    assert found == [f"contribution 5 (not stored): {AMOUNTS}"]


STATES: list[tuple[str, tuple[str, ...], int, list[str]]] = [
    ("accepted", ("pending",), 5, []),
    ("accepted", (), 5, ["but no credit was posted for it"]),
    ("superseded", (), 5, ["but no credit was posted for it"]),
    ("rejected", (), 5, []),
    ("accepted", ("pending", "earn"), 5, []),
    ("merged", ("pending", "earn", "reverse"), 5, []),
    ("rejected", ("pending", "earn"), 5, ["its credit was kept"]),
    ("checking", (), 5, []),
    ("accepted", ("pending",), 6, ["another price was posted than it has"]),
    ("merged", ("pending",), 5, ["its credit was not paid"]),
    ("superseded", ("pending",), 5, ["its credit was not paid"]),
    ("superseded", ("pending", "earn"), 5, []),
    ("merged", ("pending", "escrow"), 5, []),
    ("merged", ("pending", "void"), 5, []),
    ("merged", ("pending", "forfeit"), 5, []),
    ("accepted", ("pending", "void"), 5, ["its credit was taken back"]),
    ("rejected", ("pending",), 5, ["its credit was kept"]),
    ("rejected", ("pending", "void"), 5, []),
    ("rejected", ("pending", "forfeit"), 5, []),
    ("rejected", ("pending", "earn", "reverse"), 5, []),
    ("checking", ("pending",), 5, ["its credit was posted too early"]),
    ("received", ("pending",), 5, ["its credit was posted too early"]),
]


async def test_credit_follows_the_state_of_its_contribution(database: Database) -> None:
    def write(conn: Connection) -> list[str]:
        run, drafts, wanted = add_run(conn), [], []
        add_contribution(conn, run, MIA, "accepted", 0)  # a task without a price has no event
        for state, kinds, amount, sentences in STATES:
            number = add_contribution(conn, run, MIA, state, 5)
            drafts += [event(k, amount, f"{k}:{number}", contribution_id=number) for k in kinds]
            for sentence in sentences:
                first = f"contribution {number}"
                but = sentence.startswith("but")
                wanted.append(
                    f"{first} is {state}, {sentence}" if but else f"{first} ({state}): {sentence}"
                )
        post(conn, drafts, 1.0)
        return wanted

    wanted = await database.write(write)
    assert sorted(await breaches(database)) == sorted(wanted)


async def test_a_hold_ends_once_and_was_made_before(database: Database) -> None:
    assert (
        await told(database, event("hold", name="hold:a"), event("settle", name="settle:a")) == []
    )
    assert (
        await told(database, event("hold", name="hold:b"), event("release", name="release:b")) == []
    )
    assert await told(database, event("release", name="release:a")) == ['hold "a" ended 2 times']
    found = await told(
        database, event("settle", name="settle:c"), event("release", name="release:d")
    )
    assert sorted(found) == [
        'hold "a" ended 2 times',
        'hold "c" was never made',
        'hold "d" was never made',
    ]


async def test_escrow_is_what_rows_say_is_at_stake(database: Database) -> None:
    def write(conn: Connection) -> None:
        run = add_run(conn)
        number = add_contribution(conn, run, person(conn, MIA), "merged", 5)
        row = {"contribution_id": number, "volunteer_id": MIA, "run_id": run, "amount_micro": 5}
        conn.execute(insert(escrow).values(**row))
        moves = (Move(*MINT, -5), Move(MIA, "escrow", 5))
        step = EventDraft(
            key=f"pending:{number}", kind="pending", moves=moves, contribution_id=number
        )
        given = event("escrow", 5, f"escrow:{number}", contribution_id=number)
        post(conn, [step, given], 1.0)

    await database.write(write)
    assert await breaches(database) == []
    more = EventDraft(key="x", kind="grant", moves=(Move(*MINT, -3), Move(MIA, "escrow", 3)))
    less = EventDraft(key="y", kind="grant", moves=(Move(*MINT, -2), Move(BOB, "escrow", 2)))
    assert await told(database, more, less) == [
        f"account {BOB}/escrow says 2, 0 are at stake",
        f"account {MIA}/escrow says 8, 5 are at stake",
    ]


ENDS: list[tuple[tuple[str, ...], bool, bool]] = [
    ((), False, False),
    ((), True, True),
    (("answered",), False, True),
    (("answered",), True, False),
    (("unanswer",), False, False),
    (("refund",), True, False),
    (("unanswer", "refund"), False, True),
    (("unanswer", "refund"), True, False),
    (("answered", "unanswer", "refund"), False, False),
]


async def test_the_pay_of_an_answer_ends_once(database: Database) -> None:
    row = {"volunteer_id": MIA, "asker_id": BOB, "run_id": 1, "amount_micro": 0, "state": ""}
    row |= {"replica": "", "beat_at": 0.0}
    stakes, drafts, wanted = [], [], []
    for number, (ends, stake, right) in enumerate(ENDS):
        name = f"q{number}:{MIA}"
        drafts += [event(kind, name=f"{kind}:{name}") for kind in ("answer", *ends)]
        if stake:
            stakes.append(row | {"request_id": f"q{number}"})
        if not right:
            wanted.append(
                f'the pay of "answer:{name}" is not once at stake, earned, or taken and paid back'
            )

    def hold(conn: Connection) -> None:
        person(conn, MIA)
        person(conn, BOB)
        conn.execute(insert(answer_stakes), stakes)

    await database.write(hold)
    assert sorted(await told(database, *drafts)) == wanted


async def test_who_owes_has_nothing_to_spend(database: Database) -> None:
    def write(conn: Connection) -> None:
        debts.charge(conn, MIA, 1, 3, "", 1.0)
        earn(conn, pay(2, 7, BOB))

    await database.write(write)
    assert await breaches(database) == []
    given = EventDraft(key="g", kind="grant", moves=(Move(*MINT, -5), Move(MIA, "earned", 5)))
    assert await told(database, given) == [f"account {MIA} owes 3 and has 5 to spend"]


async def test_a_balance_is_the_sum_of_its_postings(database: Database) -> None:
    await database.write(lambda conn: earn(conn, pay(1, 5)))
    more = update(accounts).where(accounts.c.owner == MIA, accounts.c.kind == "earned")
    await database.write(lambda conn: conn.execute(more.values(balance_micro=6)))
    assert await breaches(database) == [f"account {MIA}/earned says 6, its postings sum to 5"]


async def test_no_more_breaches_are_told_than_a_person_reads(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_check, "BREACHES_MAX", 2)
    drafts = [event("settle", name=f"settle:{n}") for n in range(3)]
    assert len(await told(database, *drafts)) == 2


async def test_every_leaf_and_every_older_tree_is_proved(database: Database) -> None:
    def write(conn: Connection) -> None:
        payments.post_step(conn, "pending", [pay(n, n) for n in range(1, 8)], 1.0)

    await database.write(write)
    assert await database.read(record_tree.has_backlog)
    assert await database.read(record_tree.counts) == (7, 0)
    assert await database.write(lambda conn: record_tree.extend(conn, 3)) == 3
    three = await database.read(record_tree.head)
    assert await database.read(record_tree.has_backlog)
    assert await database.write(record_tree.extend) == 4
    assert not await database.read(record_tree.has_backlog)
    assert await database.write(record_tree.extend) == 0
    tree = await database.read(lambda conn: record_tree.tree_head(conn, 9.0))
    head = await database.read(record_tree.head)
    assert (head.size, head.events, head.record) == (7, 7, 0)
    assert (tree.size, tree.root, tree.at) == (7, head.root, 9.0)
    assert await database.read(lambda conn: list(record_tree.check(conn))) == []

    async def consistency(old: int, new: int) -> list[bytes]:
        return await database.read(lambda conn: record_tree.consistency(conn, old, new))

    roots = bytes.fromhex(three.root), bytes.fromhex(head.root)
    proof = await consistency(3, 7)
    assert merkle.proves_consistency(3, 7, proof, *roots)
    assert await consistency(7, 7) == []
    proofs = await database.read(partial(record_tree.inclusions, places=range(7), size=7))
    assert [len(proof) for proof in proofs] == [3] * 6 + [2]
    for wrong in ((0, 3), (4, 3), (3, 8), (-1, 3)):
        with pytest.raises(NotFound):
            await consistency(*wrong)


async def test_paid_entries_of_a_volunteer_are_listed_with_their_leaves(
    database: Database,
) -> None:
    def write(conn: Connection) -> tuple[int, int]:
        run = add_run(conn)
        mine = add_contribution(conn, run, MIA, "merged", 5, version=4)
        other = add_contribution(conn, run, BOB, "merged", 6, version=4)
        for number, who, price in ((mine, MIA, 5), (other, BOB, 6)):
            one = Payment(volunteer_id=who, contribution_id=number, run_id=run, amount_micro=price)
            payments.post_step(conn, "pending", [one], 1.0)
            payments.post_step(conn, "earn", [one], 2.0)
        record_tree.extend(conn)
        return run, mine

    run, mine = await database.write(write)
    [paid] = await database.read(lambda conn: record_tree.payments(conn, MIA, 0, 10))
    assert (paid.run, paid.version, paid.place) == ("alpha", 4, 1)
    entry = paid.entry
    assert (entry.id, entry.key, entry.kind, entry.at) == (2, f"earn:{mine}", "earn", 2.0)
    assert (entry.run_id, entry.contribution_id, entry.memo) == (run, mine, "")
    assert entry.moves == ((MIA, "pending", -5), (MIA, "earned", 5))
    assert await database.read(lambda conn: record_tree.payments(conn, MIA, 2, 10)) == []
    assert await database.read(lambda conn: record_tree.payments(conn, MIA, 1, 10)) == [paid]
