"""Any sequence of pay, draws, suspensions, reversals and spending, with kills between: the books
are those of a model that only knows where the credit of each contribution is, and freed pay never
exceeds what was accepted before the newest draw that passed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from sqlalchemy import Connection, update
from typing_extensions import override

from coordinator.accounts.ledger import Ledger
from coordinator.accounts.organiser_reversals import Reversals
from coordinator.accounts.suspension import suspend, unsuspend
from coordinator.checking import draw_effects
from coordinator.database import contributions, recomputes, volunteers
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import escrow, payments, spending
from coordinator.database.ledger.payments import Payment
from coordinator.database.tables.contributions import contributions as rows
from coordinator.rules.draws import Result, bond, shortfall
from shared.errors import Conflict, Forbidden
from tests.contract.test_escrow import add, draw
from tests.support.account_rows import add_contribution, add_run
from tests.support.examples import try_on_database
from tests.support.virtual_clock import VirtualClock

PEOPLE = ("friend", "stranger")
_examples = itertools.count(1)
who = st.sampled_from(PEOPLE)
results = st.sampled_from(["passed"] * 3 + ["failed", "unproven"])
prices = st.integers(0, 3)


class Killed(Exception):
    """The process ends before its transaction does."""


class Work:
    """A contribution in the model: its price, where its credit is, and what else decides it."""

    def __init__(self, who: str, price: int) -> None:
        self.who, self.price = who, price
        self.place = "pending"  # pending, escrow, earned, gone
        self.waits = True  # for a merge
        self.charged = 0  # by a draw that showed only a share of it
        self.draw: Result | Literal["", "open"] = ""


class Books(RuleBasedStateMachine):
    """Does everything in the model and in the database: there it is killed once, and repeated."""

    def __init__(self, runner: asyncio.Runner, db: Database) -> None:
        super().__init__()
        self.runner, self.db = runner, db
        self.example = next(_examples)
        self.work: dict[int, Work] = {}
        self.held: dict[str, tuple[str, int]] = {}
        self.spent = dict.fromkeys(PEOPLE, 0)
        self.short = dict.fromkeys(PEOPLE, 0)  # what passed draws did not show
        self.suspended: set[str] = set()
        self.clock = VirtualClock()
        self.reversals = Reversals(db, self.clock)

    def id(self, name: str) -> str:
        return f"volunteer-{name}-{self.example:06}"

    def of(self, name: str, *places: str) -> list[int]:
        """The numbers of a volunteer's contributions whose credit is in one of these places."""
        return [n for n, w in self.work.items() if w.who == name and w.place in places]

    def total(self, name: str, place: str) -> int:
        return sum(self.work[number].price for number in self.of(name, place))

    def net(self, name: str) -> int:
        """Return how much a volunteer has to spend; below zero it owes."""
        held = sum(amount for owner, amount in self.held.values() if owner == name)
        return self.total(name, "earned") - held - self.spent[name] - self.short[name]

    def write(self, change: Callable[[Connection], Any], *, again: bool = True) -> Any:
        """Kill a transaction at its end, write it, and do the same again."""

        def killed(conn: Connection) -> None:
            change(conn)
            raise Killed

        with pytest.raises(Killed):
            self.runner.run(self.db.write(killed))
        done = self.runner.run(self.db.write(change))
        if again:
            self.runner.run(self.db.write(change))
        return done

    @initialize()
    def accounts(self) -> None:
        def new(conn: Connection) -> int:
            for name in PEOPLE:
                add(conn, self.id(name), invited=name == "friend")
            return add_run(conn, f"run-{self.example}")

        self.run = self.runner.run(self.db.write(new))

    @rule(name=who, price=prices, drawn=st.booleans())
    def accept(self, name: str, price: int, drawn: bool) -> None:
        if name in self.suspended:
            return

        def change(conn: Connection) -> int:
            number = add_contribution(
                conn, self.run, self.id(name), "accepted", price, weight=1.0,
                received_at=self.clock.now(),
            )  # fmt: skip
            row = contributions.by_id(conn, number)
            volunteers.count_accepted(conn, [(row.volunteer_id, price)])
            payments.post_step(conn, "pending", [Payment.of(row)], self.clock.now())
            if drawn:
                draw(conn, number)
            return number

        number = self.write(change, again=False)
        self.work[number] = Work(name, price)
        self.work[number].draw = "open" if drawn else ""

    def account(self, name: str) -> volunteers.VolunteerRow:
        return self.runner.run(self.db.read(lambda conn: volunteers.existing(conn, self.id(name))))

    @rule(which=st.integers(0, 30), result=results, share=st.sampled_from([1.0, 1.0, 0.7, 0.0]))
    def settle(self, which: int, result: Result, share: float) -> None:
        """Settle an open draw; in any order."""
        drawn = sorted(number for number, work in self.work.items() if work.draw == "open")
        if not drawn:
            return
        number = drawn[which % len(drawn)]
        name = self.work[number].who

        def change(conn: Connection) -> None:
            row = recomputes.get(conn, number)
            assert row is not None
            told = ("", '{"cosine":1.0,"norm_ratio":1.0}')
            draw_effects.settle(conn, row, result, told, self.clock.now(), share)

        self.write(change)
        self.work[number].draw = result
        if name in self.suspended:
            return
        if result == "passed" and name == "stranger":
            provable = sum(self.work[n].price for n in self.provable(name))
            stake = provable + self.total(name, "pending") - self.debt(name)
            lost = max(self.bond(name), self.work[number].price)
            self.work[number].charged = shortfall(share, min(stake, lost))
            self.short[name] += self.work[number].charged
            self.free(name)
        elif result == "failed":
            self.suspended.add(name)
            self.lose(name)
            self.take_back([number])
        elif result == "unproven" and name == "stranger":
            for waiting in self.of(name, "pending"):
                self.work[waiting].place, self.work[waiting].waits = "escrow", False

    def provable(self, name: str) -> list[int]:
        """Return the contributions at stake whose pay a later draw may free."""
        account = self.account(name)
        return [number for number in self.of(name, "escrow") if number > account.unproved_to]

    def debt(self, name: str) -> int:
        return max(0, -self.net(name))

    def bond(self, name: str, waiting: int = 0) -> int:
        account = self.account(name)
        return bond(account.draws - waiting, account.accepted_micro / max(1, account.accepted))

    def free(self, name: str) -> None:
        """Earn the stake up to the newest draw that passed before any open one, the oldest
        first, but for the bond before that.
        """
        mine = {number: work for number, work in self.work.items() if work.who == name}
        waiting = [number for number, work in mine.items() if work.draw == "open"]
        first = min(waiting, default=10**9)
        account = self.account(name)
        last = max(
            (n for n, w in mine.items() if w.draw == "passed" and account.unproved_to < n < first),
            default=0,
        )
        left = -self.bond(name, len(waiting)) - self.debt(name)
        left += sum(self.work[n].price for n in self.provable(name) if n < first)
        for number in sorted(self.provable(name)):
            left -= self.work[number].price
            if number > last or left < 0:
                break
            self.work[number].place = "earned"

    def take_back(self, numbers: list[int]) -> None:
        """Let the pay of work go, and the charge with it: the charge was a part of that pay."""
        for work in (self.work[number] for number in numbers):
            if work.place != "gone":
                self.short[work.who] -= min(work.charged, work.price)
            work.place, work.waits = "gone", False

    def lose(self, name: str) -> None:
        self.take_back(self.of(name, "pending", "escrow"))
        for work in self.work.values():
            if work.who == name and work.draw == "open":
                work.draw = "unproven"

    @rule(weightless=st.sampled_from([False, False, False, True]))
    def merge(self, weightless: bool) -> None:
        """Merge every waiting contribution of both; now and then one counts nothing."""
        due = [number for number, work in self.work.items() if work.waits]

        def change(conn: Connection) -> None:
            values = {"state": "merged", "weight": 0.0 if weightless else 1.0}
            conn.execute(update(rows).where(rows.c.id.in_(due)).values(**values))
            escrow.pay(conn, contributions.by_ids(conn, due), self.clock.now())

        self.write(change)
        for work in (self.work[number] for number in due):
            work.waits = False
            kept = "earned" if work.who == "friend" else "escrow"
            work.place = "gone" if weightless else kept

    @rule(name=who)
    def suspend(self, name: str) -> None:
        self.write(lambda conn: suspend(conn, self.id(name), "made up", self.clock.now()))
        self.suspended.add(name)
        self.lose(name)

    @rule(name=who)
    def unsuspend(self, name: str) -> None:
        if name in self.suspended:
            self.write(
                lambda conn: unsuspend(conn, self.id(name), "a mistake", self.clock.now()),
                again=False,
            )
            self.suspended.remove(name)

    @rule(name=who)
    def reverse_all(self, name: str) -> None:
        for _ in range(2):
            self.runner.run(self.reversals.of_volunteer(self.id(name), 0.0, "made up"))
        self.take_back(self.of(name, "pending", "escrow", "earned"))

    @rule(which=st.integers(0, 30))
    def reverse_one(self, which: int) -> None:
        if not self.work:
            return
        number = sorted(self.work)[which % len(self.work)]
        work = self.work[number]
        reversal = self.reversals.of_contribution(number, "wrong")
        if work.place in ("escrow", "earned") and work.price:
            self.runner.run(reversal)
            self.take_back([number])
        else:
            with pytest.raises(Conflict):
                self.runner.run(reversal)

    @rule(name=who, amount=st.integers(1, 4))
    def hold(self, name: str, amount: int) -> None:
        hold_id = f"escrow-{self.example}.{len(self.held)}"

        def change(conn: Connection) -> None:
            spending.hold(conn, self.id(name), hold_id, amount, "", self.clock.now())

        if amount > self.net(name):
            with pytest.raises(Forbidden):
                self.runner.run(self.db.write(change))
        else:
            self.write(change)
            self.held[hold_id] = name, amount

    @rule(which=st.integers(0, 5), cost=st.none() | st.integers(1, 4))
    def end(self, which: int, cost: int | None) -> None:
        """Settle a hold for what it cost, or release it."""
        live = sorted(key for key, (_, amount) in self.held.items() if amount)
        if not live:
            return
        hold_id = live[which % len(live)]
        name, amount = self.held[hold_id]
        paid = min(amount, cost or 0)

        def change(conn: Connection) -> None:
            if cost is None:
                spending.release(conn, self.id(name), hold_id, self.clock.now())
            else:
                spending.settle(conn, self.id(name), hold_id, paid, self.clock.now())

        self.write(change)
        self.held[hold_id] = name, 0
        self.spent[name] += paid

    @invariant()
    def the_books_are_those_of_the_model(self) -> None:
        def read(conn: Connection) -> list[payments.Balances]:
            return [payments.balances(conn, self.id(name)) for name in PEOPLE]

        for name, found in zip(PEOPLE, self.runner.run(self.db.read(read)), strict=True):
            net = self.net(name)
            held = sum(amount for owner, amount in self.held.values() if owner == name)
            assert found == payments.Balances(
                pending_micro=self.total(name, "pending"),
                escrow_micro=self.total(name, "escrow"),
                earned_micro=max(0, net),
                debt_micro=max(0, -net),
                held_micro=held,
                spent_micro=self.spent[name],
            )
            assert found.total_micro == self.total(name, "earned") - self.short[name]

    @invariant()
    def nothing_is_free_but_by_a_later_draw_that_passed(self) -> None:
        passed = [n for n, w in self.work.items() if w.who == "stranger" and w.draw == "passed"]
        before = sum(
            w.price
            for n, w in self.work.items()
            if w.who == "stranger" and passed and n <= max(passed)
        )
        assert self.total("stranger", "earned") <= before

    @override
    def teardown(self) -> None:
        assert self.runner.run(Ledger(self.db).check()) == ()


@pytest.mark.hypothesis
def test_escrow_and_debts_do_what_the_model_does(database_url: str) -> None:
    try_on_database(database_url, Books)
