"""Any sequence of answers, draws, lost processes and suspensions, with kills between: no pay is free
before a draw of its account, this answer or a later one, agreed; who asked is paid back once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import Connection, select
from typing_extensions import override

from coordinator.accounts.suspension import suspend, unsuspend
from coordinator.database.engine.open_database import Database
from coordinator.database.inference import api_key_rows, request_rows
from coordinator.database.inference.request_rows import Ending, OpenRow, StreamProgress
from coordinator.database.ledger import answer_pay, gifts, payments
from coordinator.database.ledger.ledger_check import check_ledger
from coordinator.database.tables.inference import answer_stakes, api_keys
from coordinator.database.tables.ledger import events
from tests.contract.test_escrow import add
from tests.support.account_rows import add_run
from tests.support.examples import try_on_database

ASKERS, ANSWERERS = ("ann", "bob"), ("cid", "dee")
CREDITS = 1_000_000
HERE, THERE = "replica-a", "replica-b"
_examples = itertools.count(1)
answerer = st.sampled_from(ANSWERERS)
RIGHT, NEARLY, SHORT, OTHER = (20, 0), (20, 1), (2, 2), (40, 40)  # tokens compared, and wrong ones
FOUND = [RIGHT, RIGHT, RIGHT, RIGHT, NEARLY, SHORT, SHORT, OTHER]
asked = st.tuples(
    st.sampled_from(ASKERS),
    st.sampled_from([*((name,) for name in ANSWERERS), ANSWERERS]),
    st.sampled_from([1, 4, 4, 4, 40]),  # tokens each
    st.sampled_from([0.0, 0.0, 0.3, 0.6, 0.99]),
    st.sampled_from([HERE, HERE, HERE, THERE, ""]),
)


class Killed(Exception):
    """The process ends before its transaction does."""


class Answer:
    """Part of a request that one account made, in the model."""

    def __init__(self, request: str, asker: str, who: str, amount: int) -> None:
        self.request, self.asker, self.who, self.amount = request, asker, who, amount
        self.state = ""  # "", drawn, untold, agreed: at stake; free, taken


class Books(RuleBasedStateMachine):
    """Does everything in the model and in the database: there it is killed once, and repeated."""

    def __init__(self, runner: asyncio.Runner, db: Database) -> None:
        super().__init__()
        self.runner, self.db = runner, db
        self.example = next(_examples)
        self.answers: list[Answer] = []
        self.requests = 0
        self.paid = dict.fromkeys(ASKERS, 0)
        self.agreed = dict.fromkeys(ANSWERERS, 0)
        self.tally = dict.fromkeys(ANSWERERS, (0, 0))
        self.suspended: set[str] = set()
        self.newest = dict.fromkeys(ANSWERERS, 0)  # answers up to the newest draw that agreed

    def id(self, name: str) -> str:
        return f"volunteer-{name}-{self.example:06}"

    def stakes(self, who: str) -> list[Answer]:
        return [a for a in self.answers if a.who == who and a.state not in ("free", "taken")]

    def write(self, change: Callable[[Connection], Any]) -> Any:
        """Kill a transaction at its end, write it, and do the same again; what came first."""

        def killed(conn: Connection) -> None:
            change(conn)
            raise Killed

        with pytest.raises(Killed):
            self.runner.run(self.db.write(killed))
        done = self.runner.run(self.db.write(change))
        self.runner.run(self.db.write(change))
        return done

    @initialize()
    def accounts(self) -> None:
        def new(conn: Connection) -> tuple[int, dict[str, int]]:
            for name in (*ASKERS, *ANSWERERS):
                add(conn, self.id(name), invited=False)
            made = {}
            for name in ASKERS:
                gifts.grant(conn, self.id(name), f"g-{self.id(name)}", CREDITS, "", 1.0)
                key = {
                    "volunteer_id": self.id(name), "name": "k", "key_hash": self.id(name),
                    "prefix": "k", "spent_micro": 0, "runs": "[]",
                    "organiser": False, "created_at": 1.0,
                }  # fmt: skip
                made[name] = api_key_rows.add(conn, key).id
            return add_run(conn, f"run-{self.example}"), made

        self.run, self.keys = self.runner.run(self.db.write(new))

    @rule(asked=st.lists(asked, min_size=1, max_size=5))
    def ask(self, asked: list[tuple[str, tuple[str, ...], int, float, str]]) -> None:
        """Requests that one account or two answer, drawn by a roll."""
        for one in asked:
            self.request(*one)

    def request(
        self, asker: str, whose: tuple[str, ...], tokens: int, roll: float, replica: str
    ) -> None:
        self.requests += 1
        request, cost = f"{self.example:06}-{self.requests:04}", tokens * len(whose)
        row = OpenRow(
            id=request, volunteer_id=self.id(asker), key_id=self.keys[asker], run_id=self.run,
            version=0, model="alpha", kind="completion", free=False, unit_nano=1000, tokens_in=0,
            tokens_max=cost, held_micro=cost, replica=replica, at=1.0, house_share=0.25,
        )  # fmt: skip
        self.runner.run(self.db.write(lambda conn: request_rows.begin(conn, row, "asked")))
        sent = StreamProgress(out=cost, answered={self.id(name): tokens for name in whose})
        ending = Ending(now=2.0, roll=lambda: roll, replica=replica)
        self.write(lambda conn: request_rows.end(conn, request, sent, ending))
        self.paid[asker] += cost
        for name in whose:
            amount = cost * 3 // 4 * tokens // cost
            if not amount:
                continue
            one, stakes = Answer(request, asker, name, amount), self.stakes(name)
            before = [a.amount for a in self.answers if a.who == name]
            mean = sum(before) / len(before) if before else amount
            share = amount / mean * max(0.1, 1 / max(1, self.agreed[name] - 1))
            share = share if self.agreed[name] >= 3 else 1.0  # the first three draws are certain
            if roll < share or any(a.state == "untold" for a in stakes):
                one.state = "drawn" if replica else "untold"
            self.answers.append(one)
            if name in self.suspended:
                self.take(name)

    @rule(found=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(FOUND)), max_size=5))
    def compare(self, found: list[tuple[int, tuple[int, int]]]) -> None:
        """Draws are compared, in any order: replicas do not wait for each other."""
        for which, each in found:
            drawn = [a for a in self.answers if a.state == "drawn"]
            if drawn:
                one = drawn[which % len(drawn)]
                self.told(one.request, one.who, each, one)

    @rule(
        what=st.sampled_from(["unpaid", "lose", "suspend", "forgive", "revoke"]),
        name=answerer,
        asker=st.sampled_from(ASKERS),
        found=st.sampled_from([RIGHT, SHORT]),
    )
    def happen(self, what: str, name: str, asker: str, found: tuple[int, int]) -> None:
        """An answer that nobody paid is compared: it takes like others, and frees nothing. Or a
        process is lost, an account suspended or forgiven, a key revoked.
        """
        if what == "unpaid":
            self.told("unpaid", name, found, None)
        elif what == "lose":
            self.lose(*(HERE, THERE) if name == ANSWERERS[0] else (THERE, HERE))
        elif what == "suspend":
            self.shut_out(name)
        elif what == "forgive" and name in self.suspended:
            who = self.id(name)
            self.runner.run(self.db.write(lambda conn: unsuspend(conn, who, "forgiven", 6.0)))
            self.suspended.discard(name)
        elif what == "revoke":
            self.write(lambda conn: api_key_rows.revoke(conn, self.keys[asker], 7.0))

    def told(self, request: str, name: str, found: tuple[int, int], one: Answer | None) -> None:
        who = self.id(name)

        def change(conn: Connection) -> bool:
            return answer_pay.record_comparison(conn, request, who, found, "not the model's", 3.0)

        other = self.write(change)
        looked, wrong = (a + b for a, b in zip(self.tally[name], found, strict=True))
        self.tally[name] = looked + found[0], wrong + found[1]  # it was repeated
        if self.tally[name][0] > 500:  # far from where the tally is halved
            self.tally[name] = 0, 0
            self.runner.run(self.db.write(lambda conn: self.forget_tally(conn, who)))
        misses = found in (SHORT, OTHER)
        assert other == (misses and (found == OTHER or (wrong >= 3 and wrong > looked / 20)))
        if misses:
            self.take(name)
        elif one is not None:
            one.state = "agreed"
            self.newest[name] = max(self.newest[name], self.answers.index(one) + 1)
            self.agreed[name] += 1
            self.free(name)
        if other:
            self.shut_out(name)

    def forget_tally(self, conn: Connection, who: str) -> None:
        conn.execute(answer_pay._SET_TALLY, {"where_volunteer_id": who, "looked": 0, "wrong": 0})

    def lose(self, replica: str, other: str) -> None:
        """A process is gone with its prompts; the other one finds its draws."""

        def beaten(conn: Connection) -> list[tuple[str, str]]:
            answer_pay.beat(conn, other, 50.0)
            return answer_pay.abandoned(conn, 50.0, other)

        for request, who in self.runner.run(self.db.write(beaten)):
            if not request.startswith(f"{self.example:06}-"):
                continue  # of an example before
            self.write(partial(answer_pay.mark_untold, request_id=request, who=who, now=4.0))
            for one in self.answers:
                if (one.request, self.id(one.who)) == (request, who):
                    assert one.state == "drawn"
                    one.state = "untold"
                    self.free(one.who)

    def shut_out(self, name: str) -> None:
        self.write(lambda conn: suspend(conn, self.id(name), "seen", 5.0))
        self.suspended.add(name)
        self.take(name)

    def take(self, name: str) -> None:
        for one in self.stakes(name):
            one.state = "taken"
            self.paid[one.asker] -= one.amount
        self.agreed[name] = 0

    def free(self, name: str) -> None:
        """Free what an agreed draw stands behind, and nothing behind a draw that waits."""
        stakes = self.stakes(name)
        upto = max((n for n, one in enumerate(stakes) if one.state == "agreed"), default=-1)
        for n, one in enumerate(stakes):
            if n > upto or one.state == "drawn":
                return
            one.state = "free"

    @invariant()
    def the_books_are_those_of_the_model(self) -> None:
        def read(conn: Connection) -> Any:
            mine = answer_stakes.c.request_id.startswith(f"{self.example:06}-")
            rows = conn.execute(select(answer_stakes).where(mine)).all()
            key = api_keys.c.volunteer_id.in_([self.id(name) for name in ASKERS])
            spent = conn.execute(
                select(api_keys.c.volunteer_id, api_keys.c.spent_micro).where(key)
            ).all()
            back = select(events.c.key).where(events.c.key.startswith(f"refund:{self.example:06}-"))
            everybody = (*ASKERS, *ANSWERERS)
            has = {name: payments.balances(conn, self.id(name)) for name in everybody}
            return rows, dict(map(tuple, spent)), conn.execute(back).scalars().all(), has

        rows, spent, back, has = self.runner.run(self.db.read(read))
        stakes = [a for who in ANSWERERS for a in self.stakes(who)]
        found = {(row.request_id, row.volunteer_id, row.state) for row in rows}
        assert found == {(a.request, self.id(a.who), a.state) for a in stakes}  # and every draw
        taken = [a for a in self.answers if a.state == "taken"]
        assert sorted(back) == sorted(f"refund:{a.request}:{self.id(a.who)}" for a in taken)
        for name in ASKERS:
            assert (has[name].earned_micro, has[name].spent_micro) == (
                CREDITS - self.paid[name],
                self.paid[name],
            )
            assert spent[self.id(name)] == self.paid[name]
        for name in ANSWERERS:
            of = [a for a in self.answers if a.who == name]
            free = sum(a.amount for a in of if a.state == "free")
            before = [a for a in self.answers[: self.newest[name]] if a.who == name]
            assert has[name].earned_micro <= sum(a.amount for a in before)
            assert has[name] == payments.Balances(
                earned_micro=free, escrow_micro=sum(a.amount for a in self.stakes(name))
            )

    @override
    def teardown(self) -> None:
        assert self.runner.run(self.db.read(check_ledger)) == []


@pytest.mark.hypothesis
def test_pay_of_answers_is_free_by_draws_and_askers_are_paid_back(database_url: str) -> None:
    try_on_database(database_url, Books)
