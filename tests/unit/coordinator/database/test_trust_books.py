"""The model that the search for adversaries plays in is what the database does, over any history of
submissions, refusals, merges, draws and results; what counts was merged, and no standing moves
without a recompute.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import Connection, select, update

from coordinator.checking import draw_effects
from coordinator.database import contributions, recomputes, verdicts, volunteers
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import escrow, payments
from coordinator.database.ledger.payments import Payment
from coordinator.database.recomputes import DrawTerms
from coordinator.database.tables import trust as tables
from coordinator.database.tables.contributions import contributions as rows
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.rules.draws import Result
from coordinator.rules.validation import PAID
from shared.protocol.base import Reason
from tests.contract.test_escrow import add
from tests.support.account_rows import add_contribution, add_run
from tests.support.examples import try_on_database
from tests.support.recompute_rows import first
from tests.support.run_rows import add_version
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
            run = add_run(conn, f"books-{self.example}")
            add_version(conn, run, 0)
            return run

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
            self._range(conn, number, "accepted")
            if drawn:
                order = DrawTerms(work="{}", flops=flops, kind="cpu")
                recomputes.add(conn, row, order)
                volunteers.count_draw(conn, row.volunteer_id)
            volunteers.count_accepted(conn, [(row.volunteer_id, price)])
            payments.post_step(conn, "pending", [Payment.of(row)], self.now)
            if waits:
                contributions.wait_for_proof(conn, number)
            return number

        waits = not account.vetted and (drawn or account.is_open)
        number = self.write(change)
        draw = Draw(number=number, who=self.id(name), flops=flops, drawn_at=self.now)
        self.books.submit(self.id(name), number, price, draw if drawn else None)

    @rule()
    def merge(self) -> None:
        due = [n for one in self.books.accounts.values() for n in one.pending.keys() - one.waiting]

        def change(conn: Connection) -> None:
            merged = contributions.by_ids(conn, due)
            assert not due or verdicts.merge_all(conn, merged, 1, self.now)
            escrow.pay(conn, merged, self.now)

        self.write(change)
        for name, account in self.books.accounts.items():
            due_of = account.pending.keys() - account.waiting
            for number in due_of:
                self.books.merge(name, number)
            if due_of:
                self.books.free_proven_pay(name)

    @rule(name=who, result=results)
    def refuse(self, name: str, result: Result) -> None:
        """An update is refused, its range goes back, and its task is done again."""
        account = self.books.accounts[self.id(name)]
        if account.suspended:
            return

        def change(conn: Connection) -> None:
            conn.execute(update(runs).where(runs.c.id == self.run).values(state="running"))
            number = add_contribution(conn, self.run, self.id(name), "rejected", 5)
            row = contributions.by_id(conn, number)
            self._range(conn, number, "todo")
            terms = DrawTerms(work="{}", flops=1e9, kind="cpu", refusal=Reason.NORM)
            question = recomputes.add(conn, row, terms)
            assert draw_effects.settle(conn, question, result, ("", "{}"), self.now)

        self.write(change)
        account.newest = self.runner.run(
            self.db.read(lambda conn: contributions.newest_of(conn, self.id(name)))
        )
        if result == "failed":
            self.books.suspend(account, self.now)

    @rule(name=who)
    def give_up(self, name: str) -> None:
        """What waits for a merge is superseded, for example since it is too old by then."""
        account = self.books.accounts[self.id(name)]
        drawn = {number for number, draw in account.drawn.items() if draw.result is None}
        late = [number for number in account.pending if number not in drawn]

        def change(conn: Connection) -> None:
            waiting = contributions.by_ids(conn, late)
            for row in waiting:
                verdicts.decide(conn, row, "superseded", now=self.now, message=PAID)
            escrow.pay(conn, waiting, self.now)

        self.write(change)
        for number in late:
            self.books.merge(self.id(name), number)
        if late:
            self.books.free_proven_pay(self.id(name))

    def _range(self, conn: Connection, number: int, state: str) -> None:
        """Put the range of a contribution into a state."""
        task = contributions.by_id(conn, number).task_id
        named = {"state": state, "contribution_id": None if state == "todo" else number}
        conn.execute(update(tasks).where(tasks.c.id == task).values(**named))

    @rule(which=st.integers(0, 30), result=results, computed=st.booleans(), share=shares)
    def settle(self, which: int, result: Result, computed: bool, share: float) -> None:
        if not self.books.open:
            return
        number = sorted(self.books.open)[which % len(self.books.open)]
        told = ("", '{"cosine":1.0,"norm_ratio":1.0}' if computed else "{}")

        def change(conn: Connection) -> None:
            row = recomputes.get(conn, number)
            assert row is not None
            draw_effects.settle(conn, row, result, told, self.now, share)

        self.write(change)
        self.books.settle(number, result, self.now, share, computed=computed)

    @rule(which=st.integers(0, 30))
    def drift(self, which: int) -> None:
        """A recompute says nothing, since its task drifts too far: that is nobody's fault."""
        if not self.books.open:
            return
        number = sorted(self.books.open)[which % len(self.books.open)]

        def change(conn: Connection) -> None:
            row = recomputes.get(conn, number)
            assert row is not None
            figures = ("", '{"cosine":1.0,"norm_ratio":1.0,"drift":0.3}')
            assert draw_effects.end_without_verdict(conn, row, figures, self.now)

        self.write(change)
        self.books.end_without_verdict(number, self.now)

    @rule(which=st.integers(0, 30), result=results, judged=st.booleans())
    def die(self, which: int, result: Result, judged: bool) -> None:
        """The coordinator is killed when a result is written, but not committed."""
        if not self.books.open:
            return
        number = sorted(self.books.open)[which % len(self.books.open)]

        def change(conn: Connection) -> None:
            row = recomputes.get(conn, number)
            assert row is not None
            told = ("", "{}")
            if judged:
                assert draw_effects.settle(conn, row, result, told, self.now)
            else:
                assert draw_effects.end_without_verdict(conn, row, told, self.now)
            raise KeyError(number)

        with pytest.raises(KeyError):
            self.write(change)

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
            assert (row.draws, row.unproved_to) == (account.draws, account.unproved_to)
            assert found.pending_micro == sum(account.pending.values())
            assert found.escrow_micro == account.at_stake
            assert (found.earned_micro, found.debt_micro) == (account.freed, account.debt)

    @invariant()
    def what_waits_for_a_proof_is_what_waits_in_the_model(self) -> None:
        def read(conn: Connection) -> set[int]:
            query = select(rows.c.id).where(rows.c.unproven, rows.c.state == "accepted")
            return set(conn.execute(query.where(rows.c.run_id == self.run)).scalars())

        ours = set[int]().union(*(account.waiting for account in self.books.accounts.values()))
        assert self.runner.run(self.db.read(read)) == ours

    @invariant()
    def samples_that_count_are_samples_that_were_merged(self) -> None:
        def read(conn: Connection) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
            named = select(tasks.c.contribution_id, tasks.c.state)
            held = named.where(tasks.c.run_id == self.run, tasks.c.contribution_id.is_not(None))
            states = {"accepted": "accepted", "merged": "done"}
            own = select(rows.c.id, rows.c.state).where(rows.c.run_id == self.run)
            counted = own.where(rows.c.state.in_(states))
            ranges = {(number, state) for number, state in conn.execute(held)}
            return ranges, {(number, states[state]) for number, state in conn.execute(counted)}

        ranges, updates = self.runner.run(self.db.read(read))
        assert ranges == updates  # all others are in the queue again

    @invariant()
    def no_standing_moved_without_a_recompute(self) -> None:
        def read(conn: Connection) -> list[tuple[str, int, list[tuple[str, str, int]]]]:
            found: list[tuple[str, int, list[tuple[str, str, int]]]] = []
            r = tables.recomputes.c
            for name in self.books.accounts:
                ended = select(r.result, r.refusal, r.contribution_id).where(
                    r.volunteer_id == name, r.state == "done"
                )
                earned = payments.balances(conn, name).earned_micro
                standing = volunteers.existing(conn, name).standing
                found.append(
                    (standing, earned, [(row[0], row[1], row[2]) for row in conn.execute(ended)])
                )
            return found

        for standing, earned, ended in self.runner.run(self.db.read(read)):
            if standing == "suspended":
                assert "failed" in {result for result, _, _ in ended}
            proven = [number for result, why, number in ended if result == "passed" and not why]
            assert earned == 0 or proven

    @invariant()
    def the_line_is_that_of_the_model(self) -> None:
        found = self.runner.run(self.db.write(lambda conn: first(conn, self.now)))
        ours = self.books.first(self.now)
        assert (found and found.contribution_id) == (ours and ours.number)


@pytest.mark.hypothesis
def test_the_model_is_the_database(database_url: str) -> None:
    try_on_database(database_url, Histories)
