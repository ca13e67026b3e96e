"""The model that the search for adversaries plays in is what the database does, over any history of
submissions, merges, draws and results.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import Connection, update

from coordinator.checking import proof
from coordinator.database import contributions, recomputes, volunteers
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import escrow, payments
from coordinator.database.ledger.payments import Payment
from coordinator.database.recomputes import DrawTerms
from coordinator.database.tables import trust as tables
from coordinator.database.tables.contributions import contributions as rows
from coordinator.rules.checks import Result
from tests.contract.test_escrow import add
from tests.support.account_rows import add_contribution, add_run
from tests.support.examples import try_on_database
from tests.support.trust_books import Account, Books, Draw

PEOPLE = {"one": "10.0.0.0/24", "two": "10.0.0.0/24", "three": ""}
_examples = itertools.count(1)
who = st.sampled_from(sorted(PEOPLE))
shares = st.sampled_from([1.0] * 3 + [0.9, 0.5, 0.0])
results = st.sampled_from(["passed"] * 6 + ["failed", "unproven"])


class Histories(RuleBasedStateMachine):
    """Does everything in the model and in the database."""

    def __init__(self, runner: asyncio.Runner, db: Database) -> None:
        super().__init__()
        self.runner, self.db, self.example = runner, db, next(_examples)
        self.books, self.now = Books(), 0.0

    def id(self, name: str) -> str:
        return f"volunteer-{name}-{self.example:06}"

    def write(self, change: Callable[[Connection], Any]) -> Any:
        return self.runner.run(self.db.write(change))

    @initialize()
    def accounts(self) -> None:
        def new(conn: Connection) -> int:
            conn.execute(tables.recomputes.delete())  # one line on one server
            for name, network in PEOPLE.items():
                add(conn, self.id(name), network=network)
            return add_run(conn, f"books-{self.example}")

        self.run = self.write(new)
        self.books.accounts = {
            self.id(name): Account(network=network) for name, network in PEOPLE.items()
        }

    @rule(name=who, price=st.integers(1, 20), drawn=st.booleans(), cost=st.integers(1, 500))
    def submit(self, name: str, price: int, drawn: bool, cost: int) -> None:
        account = self.books.accounts[self.id(name)]
        if account.suspended:
            return
        flops = cost * 1e10

        def change(conn: Connection) -> int:
            number = add_contribution(
                conn, self.run, self.id(name), "accepted", price, weight=1.0, received_at=self.now
            )
            row = contributions.by_id(conn, number)
            if drawn:
                order = DrawTerms(work="{}", flops=flops, kind="cpu")
                recomputes.add(conn, row, order)
                volunteers.count_draw(conn, row.volunteer_id)
            volunteers.count_accepted(conn, [(row.volunteer_id, price)])
            payments.post_step(conn, "pending", [Payment.of(row)], self.now)
            return number

        number = self.write(change)
        draw = Draw(number=number, who=self.id(name), flops=flops, drawn_at=self.now)
        self.books.submit(self.id(name), number, price, draw if drawn else None)

    @rule()
    def merge(self) -> None:
        due = [n for account in self.books.accounts.values() for n in account.pending]

        def change(conn: Connection) -> None:
            conn.execute(update(rows).where(rows.c.id.in_(due)).values(state="merged"))
            escrow.pay(conn, contributions.by_ids(conn, due), self.now)

        self.write(change)
        for name, account in self.books.accounts.items():
            for number in list(account.pending):
                self.books.merge(name, number)

    @rule(which=st.integers(0, 30))
    def reveal(self, which: int) -> None:
        asked = sorted(n for n, draw in self.books.open.items() if not draw.revealed)
        if asked:
            number = asked[which % len(asked)]
            at = tables.recomputes.c.contribution_id == number
            self.write(
                lambda conn: conn.execute(
                    update(tables.recomputes).where(at).values(state="waiting")
                )
            )
            self.books.open[number].revealed = True

    @rule(which=st.integers(0, 30), result=results, computed=st.booleans(), share=shares)
    def settle(self, which: int, result: Result, computed: bool, share: float) -> None:
        if not self.books.open:
            return
        number = sorted(self.books.open)[which % len(self.books.open)]
        told = ("", '{"cosine":1.0,"norm_ratio":1.0}' if computed else "{}")

        def change(conn: Connection) -> None:
            row = recomputes.get(conn, number)
            assert row is not None
            proof.settle(conn, row, result, told, self.now, share)

        self.write(change)
        self.books.settle(number, result, self.now, share, computed=computed)

    @rule(seconds=st.sampled_from([1.0, 600.0, 50_000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_account_is_as_in_the_model(self) -> None:
        def read(conn: Connection) -> list[Any]:
            return [
                (volunteers.existing(conn, name), payments.balances(conn, name))
                for name in self.books.accounts
            ]

        pairs = zip(self.books.accounts.values(), self.runner.run(self.db.read(read)), strict=True)
        for account, (row, found) in pairs:
            assert (row.standing, row.proofs) == (account.state.state, account.state.proofs)
            assert (row.draws, row.lost_to) == (account.draws, account.lost_to)
            assert found.pending_micro == sum(account.pending.values())
            assert found.escrow_micro == account.at_stake
            assert (found.earned_micro, found.debt_micro) == (account.freed, account.debt)

    @invariant()
    def the_line_is_that_of_the_model(self) -> None:
        found = self.runner.run(self.db.read(lambda conn: recomputes.first(conn, self.now)))
        ours = self.books.first(self.now)
        assert (found and found.contribution_id) == (ours and ours.number)


@pytest.mark.hypothesis
def test_the_model_is_the_database(database_url: str) -> None:
    try_on_database(database_url, Histories)
