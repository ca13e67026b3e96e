"""Any sequence of steps: the ledger does what a model of forty lines does, on both databases."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from sqlalchemy import Connection
from typing_extensions import override

from coordinator.accounts.ledger import Ledger
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import payments, record_tree, spending
from coordinator.database.ledger.payments import Payment
from shared.errors import BadRequest, Conflict, Forbidden, NotFound
from tests.support.examples import try_on_database

REFUSED = (BadRequest, Conflict, Forbidden, NotFound)
PEOPLE = ("mia", "bob")
_examples = itertools.count(1)


TAKEN = ("forfeit", "withdraw")  # steps that are events "forfeit"
STEPS = ("pending", "earn", "void", "escrow", "vest", "forfeit", "withdraw", "reverse")
KINDS = ("pending", "earned", "held", "burn", "escrow")


class Killed(Exception):
    """The process ends before its transaction does."""


class Refusal(Exception):
    """Raised by the model for a step that it refuses."""


@dataclass
class Model:
    """What the books should say: an account is a number, an event is a key that was used."""

    accounts: Counter[tuple[str, str]] = field(default_factory=Counter)
    used: dict[str, Any] = field(default_factory=dict)

    def step(
        self, key: str, said: object, befores: list[str], nevers: list[str], moves: dict[Any, int]
    ) -> bool:
        """Move credit once for a key; False if it was used so before.

        One of `befores` must have been said the same, `nevers` not at all.
        """
        if key in self.used:
            if self.used[key] != said:
                raise Refusal
            return False
        if befores and not any(self.used.get(before) == said for before in befores):
            raise Refusal
        if any(never in self.used for never in nevers):
            raise Refusal
        after = self.accounts.copy()
        for account, amount in moves.items():
            after[account] += amount
        if any(amount < 0 for (_, kind), amount in after.items() if kind != "mint"):
            raise Refusal
        self.accounts, self.used[key] = after, said
        return True

    def contribution(self, step: str, number: int, who: str, amount: int) -> None:
        source, target, befores, nevers = {
            "pending": (("", "mint"), (who, "pending"), [], []),
            "earn": ((who, "pending"), (who, "earned"), ["pending"], ["void", "escrow", "forfeit"]),
            "void": ((who, "pending"), ("", "mint"), ["pending"], ["earn", "escrow", "forfeit"]),
            "escrow": ((who, "pending"), (who, "escrow"), ["pending"], ["earn", "void", "forfeit"]),
            "vest": ((who, "escrow"), (who, "earned"), ["escrow"], ["forfeit"]),
            "forfeit": ((who, "escrow"), ("", "mint"), ["escrow"], ["vest"]),
            "withdraw": ((who, "pending"), ("", "mint"), ["pending"], ["earn", "void", "escrow"]),
            "reverse": ((who, "earned"), ("", "mint"), ["earn", "vest"], []),
        }[step]
        # An event "forfeit" says where it takes from: the other one is another event.
        name, said = ("forfeit", (who, amount, step)) if step in TAKEN else (step, (who, amount))
        if step in TAKEN and f"forfeit:{number}" not in self.used:
            if not any(self.used.get(f"{before}:{number}") == said[:2] for before in befores):
                raise Refusal
            befores = []
        self.step(
            f"{name}:{number}",
            said,
            [f"{before}:{number}" for before in befores],
            [f"{never}:{number}" for never in nevers],
            {source: -amount, target: amount},
        )

    def many(self, rows: list[tuple[int, str, int]]) -> None:
        """Make all steps, or none."""
        kept = Model(self.accounts.copy(), dict(self.used))
        for row in rows:
            kept.contribution("earn", *row)
        self.accounts, self.used = kept.accounts, kept.used

    def hold(self, name: str, who: str, amount: int) -> None:
        self.step(
            f"hold:{name}",
            (who, amount),
            [],
            [],
            {(who, "earned"): -amount, (who, "held"): amount},
        )

    def end(self, name: str, who: str, cost: int | None) -> None:
        """Settle for `cost`, or release."""
        owner, held = self.used.get(f"hold:{name}", ("", 0))
        if owner != who or (cost is not None and cost > held):
            raise Refusal
        key, never = ("release", "settle") if cost is None else ("settle", "release")
        spent = cost or 0
        moves = {(who, "held"): -held, (who, "burn"): spent, (who, "earned"): held - spent}
        self.step(f"{key}:{name}", (who, cost), [], [f"{never}:{name}"], moves)


def _killed(conn: Connection, stored: Callable[[Connection], None]) -> None:
    stored(conn)
    raise Killed


def _row(number: int, lie: str) -> tuple[int, str, int]:
    """A contribution always belongs to the same person for the same amount, unless somebody
    lies.
    """
    who = PEOPLE[(number + (lie == "who")) % len(PEOPLE)]
    return number, who, number % 3 + (lie == "amount")


lies = st.sampled_from(["", "", "", "", "", "", "who", "amount"])
contributions = st.builds(_row, st.integers(1, 4), lies)
rows = st.lists(contributions, min_size=1, max_size=4)
held = st.tuples(
    st.integers(1, 3), st.sampled_from([0, 0, 0, 1])
)  # whose, and whether somebody else tries
steps = st.sampled_from(STEPS)


class Books(RuleBasedStateMachine):
    """Does everything twice: in the model and in the database.

    Ids are fresh for every example, the database is not.
    """

    def __init__(self, runner: asyncio.Runner, db: Database) -> None:
        super().__init__()
        self.runner, self.db, self.model = runner, db, Model()
        self.example = next(_examples)

    def who(self, name: str) -> str:
        return f"{name}-{self.example}"

    def pay(self, number: int, name: str, amount: int) -> Payment:
        return Payment(
            volunteer_id=self.who(name),
            contribution_id=self.example * 1000 + number,
            run_id=1,
            amount_micro=amount,
        )

    def both(self, modelled: Callable[[], None], stored: Callable[[Connection], None]) -> None:
        try:
            modelled()
        except Refusal:
            with pytest.raises(REFUSED):
                self.runner.run(self.db.write(stored))
        else:
            with pytest.raises(Killed):
                self.runner.run(self.db.write(lambda conn: _killed(conn, stored)))
            self.runner.run(self.db.write(stored))

    @initialize()
    def begin_with_something_to_spend(self) -> None:
        for number, name in enumerate(PEOPLE, start=90):
            self.accepted_and_merged((number, name, 1))

    @rule(step=steps, row=contributions)
    def contribution(self, step: str, row: tuple[int, str, int]) -> None:
        number, name, amount = row
        one = self.pay(number, name, amount)
        write: dict[str, Callable[[Connection], None]] = {
            "pending": lambda conn: payments.post_step(conn, "pending", [one], 1.0),
            "earn": lambda conn: payments.post_step(conn, "earn", [one], 2.0),
            "void": lambda conn: payments.post_step(conn, "void", [one], 2.0),
            "escrow": lambda conn: payments.post_step(conn, "escrow", [one], 2.0),
            "vest": lambda conn: payments.post_step(conn, "vest", [one], 3.0),
            "forfeit": lambda conn: payments.post_step(conn, "forfeit", [one], 3.0),
            "withdraw": lambda conn: payments.post_step(conn, "withdraw", [one], 3.0),
            "reverse": lambda conn: payments.post_step(conn, "reverse", [one], 3.0),
        }
        self.both(lambda: self.model.contribution(step, number, name, amount), write[step])

    @rule(row=contributions)
    def accepted_and_merged(self, row: tuple[int, str, int]) -> None:
        for step in ("pending", "earn"):
            self.contribution(step, row)

    @rule(wanted=rows)
    def merge(self, wanted: list[tuple[int, str, int]]) -> None:
        pays = [self.pay(*row) for row in wanted]
        self.both(
            lambda: self.model.many(wanted),
            lambda conn: payments.post_step(conn, "earn", pays, 2.0),
        )

    @rule(which=held, amount=st.integers(1, 2))
    def hold(self, which: tuple[int, int], amount: int) -> None:
        number, name = which[0], PEOPLE[sum(which) % 2]
        hold_id, who = f"{self.example}.{number}", self.who(name)
        self.both(
            lambda: self.model.hold(str(number), name, amount),
            lambda conn: spending.hold(conn, who, hold_id, amount, "", 3.0),
        )

    @rule(which=held, cost=st.none() | st.integers(0, 3))
    def end(self, which: tuple[int, int], cost: int | None) -> None:
        made = [key[5:] for key in self.model.used if key.startswith("hold:")] or ["1"]
        number = made[which[0] % len(made)]
        name = PEOPLE[(int(number) + which[1]) % 2]
        hold_id, who = f"{self.example}.{number}", self.who(name)

        def write(conn: Connection) -> None:
            if cost is None:
                spending.release(conn, who, hold_id, 4.0)
            else:
                spending.settle(conn, who, hold_id, cost, 4.0)

        self.both(lambda: self.model.end(number, name, cost), write)

    @rule()
    def seal(self) -> None:
        self.runner.run(self.db.write(record_tree.extend))

    @invariant()
    def balances_are_those_of_the_model(self) -> None:
        def read(conn: Connection) -> list[payments.Balances]:
            return [payments.balances(conn, self.who(name)) for name in PEOPLE]

        for name, found in zip(PEOPLE, self.runner.run(self.db.read(read)), strict=True):
            expected = [self.model.accounts[name, kind] for kind in KINDS]
            assert [
                found.pending_micro, found.earned_micro, found.held_micro, found.spent_micro,
                found.escrow_micro,
            ] == expected  # fmt: skip

    @override
    def teardown(self) -> None:
        # Of escrow there are events only: its rows belong to contributions that are stored.
        found = self.runner.run(Ledger(self.db).check())
        assert not [said for said in found if "at stake" not in said]
        assert sum(self.model.accounts.values()) == 0


@pytest.mark.hypothesis
def test_the_ledger_does_what_the_model_does(database_url: str) -> None:
    try_on_database(database_url, Books)
