"""One person who would be paid for more than it computes: a policy, and one life of it."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from typing import Literal

import msgspec

from coordinator.rules import draws, recompute_result, standing
from coordinator.rules.audits import PAY_PER_AUDIT
from coordinator.rules.draws import Redone, Result
from tests.support.trust_books import Account, Books, Draw

SECRET = b"of the server"
MICRO = 1000  # of one second of computing
CHEAP = 10 * MICRO  # price of a cheap task
REGISTER_S = 2.0
SPEED = 4e10  # operations a second, of machines and of the server
LEAST_S = 0.5  # to submit what was not computed
# Difference of a recompute by the share of the work that was done: the nearest that any task came
# (EXPERIMENT=arithmetic: nine tenths of the steps, a half and a quarter of each batch, a fifth of
# the steps, noise).
TRAINED = (0.0, 0.2, 0.25, 0.5, 0.9, 1.0)
DIFFERENCE = (1.4, 0.38, 0.18, 0.11, 0.04, 0.0)
When = Literal[
    "by chance",
    "right behind a draw",
    "little at stake",
    "much at stake",
    "cheap",
    "dear",
    "a draw is open",
    "no draw is open",
    "rarely drawn",
    "vetted",
    "a verdict is out of reach",
]
WHENS: tuple[When, ...] = (
    "by chance", "right behind a draw", "little at stake", "much at stake", "cheap", "dear",
    "a draw is open", "no draw is open", "rarely drawn", "vetted", "a verdict is out of reach",
)  # fmt: skip


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of a person, for as long as an episode lasts."""

    tasks: int = 300
    trained: float = 0.0  # share of the steps of a fake
    honest: int = 0  # tasks of an account before its first fake
    when: tuple[tuple[When, float], ...] = ()  # all must hold for a fake, with a number for each
    compared: bool = True  # names a class of device that the server compares
    machines: int = 1
    accounts: int = 1
    dear: float = 0.0  # share of dear tasks
    rounding: float = 0.0  # difference that its device makes by itself
    times: float = 1.0  # price of those by that of cheap ones
    auditor: bool = False  # an honest account of its own audits what is faked
    patient: bool = False  # others work only where that may audit
    audited: float = 1.0  # share of its draws that the lot gives to that
    leave: int = 0  # draws that passed, after which an account is left for a new one
    sleep: float = 0.0  # seconds without work before each task where `sleeps` holds
    sleeps: tuple[When, float] = ("by chance", 0.5)
    busy: float = 1.0  # time that the server takes by that of the work
    drift: float = 0.0  # drift of its first tasks, which it asks to be as long as they may be
    junk: float = 0.0  # share of fakes that are refused at once: copies, NaN, norms
    liar: float = 0.0  # share of honest tasks with a reported loss that is refused


HONEST = Policy(honest=10**9)
# What was found, and what closed it: the share of a pass; the stake that no later draw frees after
# one without a verdict; the bound of an account's pay for audits.
FOUND = (
    Policy(trained=0.91, compared=False, tasks=800),
    Policy(trained=0.5, compared=False, tasks=800),
    Policy(trained=0.25, compared=False, tasks=800),
    Policy(
        tasks=300, honest=10, machines=3, drift=1.5, busy=10.0, compared=False,
        when=(("a verdict is out of reach", 1.0), ("little at stake", 0.135)),
    ),
    Policy(tasks=300, honest=10, drift=1.5, when=(("a verdict is out of reach", 1.0),)),
    Policy(tasks=400, trained=0.99, dear=0.02, times=100.0, auditor=True, busy=10.0),
)  # fmt: skip


def elsewhere(rounding: float) -> Policy:
    """Return an honest account whose device the server cannot compare."""
    return Policy(trained=1.0, compared=False, rounding=rounding, tasks=HONEST.tasks)


class Score(msgspec.Struct, frozen=True):
    """Seconds of computing; freed pay and merged ranges in the same unit."""

    freed: float
    spent: float
    merged: float = 0.0


def without_work(policy: Policy) -> Policy:
    """Return a policy of who computes nothing."""
    return msgspec.structs.replace(policy, trained=0.0, when=(), honest=0, auditor=False)


def some(rng: random.Random) -> Policy:
    """Return a policy by chance."""
    conditions = tuple((rng.choice(WHENS), rng.random()) for _ in range(rng.choice((0, 1, 1, 2))))
    return Policy(
        tasks=rng.choice((30, 100, 300, 800)),
        trained=rng.choice((0.0, 0.0, rng.random(), 0.97, 0.99)),
        honest=rng.choice((0, 0, 1, 3, 10, 40, 150)),
        when=conditions,
        compared=rng.random() < 0.5,
        machines=rng.choice((1, 1, 2, 3)),
        accounts=rng.choice((1, 1, 2, 8)),
        dear=rng.choice((0.0, 0.02, 0.1, 0.5, 0.9)),
        times=rng.choice((1.0, 3.0, 10.0, 100.0)),
        auditor=rng.random() < 0.3,
        patient=rng.random() < 0.3,
        audited=rng.choice((0.1, 0.5, 1.0)),
        leave=rng.choice((0, 0, 2, 5, 20, 40)),
        sleep=rng.choice((0.0, 0.0, 0.0, 300.0, 5000.0, 100_000.0)),
        sleeps=(rng.choice(WHENS), rng.random()),
        busy=rng.choice((1.0, 1.0, 10.0, 100.0)),
        drift=rng.choice((0.0, 0.0, 0.02, 0.05, 0.15, 0.3, 1.5, 50.0)),
        junk=rng.choice((0.0, 0.0, 0.0, 0.1, 1.0)),
        liar=rng.choice((0.0, 0.0, 0.0, 0.1, 0.5)),
    )


def varied(one: Policy, other: Policy, rng: random.Random) -> Policy:
    """Return a policy with parts of two others, and a little chance."""
    found = {}
    fresh = some(rng)
    for name in Policy.__struct_fields__:
        source = rng.choices((one, other, fresh), (0.5, 0.35, 0.15))[0]
        found[name] = getattr(source, name)
    found["when"] = tuple(
        (name, min(1.0, max(0.0, value + rng.gauss(0.0, 0.1)))) for name, value in found["when"]
    )
    return Policy(**found)


def _between(at: float, values: tuple[float, ...]) -> float:
    for n in range(len(TRAINED) - 1):
        low, high = TRAINED[n], TRAINED[n + 1]
        if at <= high:
            return values[n] + (values[n + 1] - values[n]) * (at - low) / (high - low)
    return values[-1]


def redone(trained: float, rounding: float = 0.0, drift: float = 0.0) -> Redone:
    """Return the figures of a recompute of a fake."""
    apart = math.hypot(_between(trained, DIFFERENCE), rounding)
    return Redone(cosine=1.0 - apart**2 / 2.0, norm_ratio=1.0, drift=drift or None)


class Life:
    """One episode of a policy."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.seed = policy, seed
        self.rng = random.Random(seed)
        self.books = Books()
        self.spent, self.now, self.number, self.done = 0.0, 0.0, 0, 0
        self.since: dict[str, int] = {}  # tasks since a draw of an account passed
        self.faked: set[int] = set()
        self.by: dict[int, tuple[str, int]] = {}  # (auditor, answer) of a draw that is compared
        self.audits: dict[str, int] = {}  # pay of the audits that an account was given
        self.slept: dict[str, int] = {}
        self.merged = 0  # pay of the ranges that count, since their updates were merged
        self.drift = policy.drift  # of the tasks that are handed out
        self.drifts: dict[int, float] = {}  # of the tasks that were drawn
        self.resting: dict[str, tuple[int, float]] = {}  # recomputes that proved nothing, and rest
        self.questions: list[tuple[str, bool]] = []  # refused tasks: account, whether it was done
        self.slots: list[tuple[float, int, int, str]] = []
        self.serving: tuple[float, int] | None = None
        self._names = 0
        for _ in range(policy.accounts):
            self._register()
        self.auditor = self._register() if policy.auditor else ""

    def _register(self) -> str:
        self._names += 1
        name = f"a{self._names}"
        self.books.accounts[name] = Account(network=name, spends=True)
        self.spent += REGISTER_S
        self.since[name] = 0
        for machine in range(self.policy.machines):
            heapq.heappush(self.slots, (self.now, self._names, machine, name))
        return name

    def play(self) -> Score:
        while self.done < self.policy.tasks and self.slots:
            at, order, machine, name = self.slots[0]
            if self._server(at):
                continue
            heapq.heappop(self.slots)
            self.now = max(self.now, at)
            self._machine(order, machine, name)
        while self._server(float("inf")):  # what is in the line is done, whoever left
            pass
        freed = sum(account.freed for account in self.books.accounts.values())
        return Score(freed / MICRO, self.spent, self.merged / MICRO)

    # --- machines ---

    def _machine(self, order: int, machine: int, name: str) -> None:
        account = self.books.accounts[name]
        self._answer_questions()
        rest = self.resting.get(name, (0, 0.0))[1]
        if rest > self.now:
            heapq.heappush(self.slots, (rest, order, machine, name))
            return
        if account.suspended or self._leaves(name, account):
            for slot in [slot for slot in self.slots if slot[3] == name]:
                self.slots.remove(slot)
            heapq.heapify(self.slots)
            fresh = self._register()
            self.auditor = fresh if name == self.auditor else self.auditor
            return
        if self.policy.patient and self.auditor not in ("", name) and not self._may_audit(CHEAP):
            heapq.heappush(self.slots, (self.now + 10.0, order, machine, name))
            return
        seconds = self._slept(name, account) or self._work(machine, name, account)
        heapq.heappush(self.slots, (self.now + seconds, order, machine, name))

    def _slept(self, name: str, account: Account) -> float:
        """Return the seconds that an account waits before its next task, once for each."""
        waits = bool(self.policy.sleep) and self.slept.get(name) != account.accepted
        if not waits or not self._holds(account, name, self.policy.sleeps, MICRO * 10):
            return 0.0
        self.slept[name] = account.accepted
        return self.policy.sleep

    def _leaves(self, name: str, account: Account) -> bool:
        leave = self.policy.leave
        if not leave or name == self.auditor:
            return False
        return sum(draw.result == "passed" for draw in account.drawn.values()) >= leave

    def _work(self, machine: int, name: str, account: Account) -> float:
        """Do a task or not, and submit it; the seconds that this took."""
        policy = self.policy
        dear = name != self.auditor and self.rng.random() < policy.dear
        seconds = CHEAP / MICRO * (policy.times if dear else 1.0)
        price = round(MICRO * seconds)
        fake = name != self.auditor and self._fakes(account, name, price, dear)
        took = seconds * (policy.trained if fake else 1.0)
        self.spent += took
        self.number, self.done = self.number + 1, self.done + 1
        self.since[name] += 1
        number, chance = self.number, account.chance(price)
        if name != self.auditor and self.rng.random() < (policy.junk if fake else policy.liar):
            self.questions.append((name, not fake))  # its range goes back to the queue
            return max(took, LEAST_S)
        draw = None
        if draws.drawn(SECRET, "recompute", number, str(self.seed), chance):
            flops = min(draws.RECOMPUTE_FLOPS_MAX, seconds * SPEED)
            draw = Draw(number=number, who=name, flops=flops, drawn_at=self.now)
            self.drifts[number] = self.drift
        if fake:
            self.faked.add(number)
        self.books.submit(name, number, price, draw)
        self._merge(name)
        if draw is not None and fake and self._audited(name, price):
            self._audit(draw, price)
        return max(took, LEAST_S)

    def _fakes(self, account: Account, name: str, price: int, dear: bool) -> bool:
        honest = account.accepted < self.policy.honest
        when = self.policy.when
        return not honest and all(self._holds(account, name, one, price, dear) for one in when)

    def _holds(
        self, account: Account, name: str, one: tuple[When, float], price: int, dear: bool = False
    ) -> bool:
        when, x = one
        holds: dict[str, Callable[[], bool]] = {
            "by chance": lambda: self.rng.random() < x,
            "right behind a draw": lambda: self.since[name] <= 10.0 * x,
            "little at stake": lambda: sum(account.provable.values()) < 2.0 * x * account.bond,
            "much at stake": lambda: sum(account.provable.values()) > 2.0 * x * account.bond,
            "cheap": lambda: not dear,
            "dear": lambda: dear,
            "a draw is open": lambda: account.is_open,
            "no draw is open": lambda: not account.is_open,
            "rarely drawn": lambda: account.chance(price) < x,
            "vetted": lambda: account.vetted,
            "a verdict is out of reach": lambda: self.drift > recompute_result.DRIFT_MAX,
        }
        return bool(holds[when]())

    def _merge(self, name: str) -> None:
        """Merge what waits for no proof."""
        account = self.books.accounts[name]
        for number in account.pending.keys() - account.waiting:
            self.merged += account.pending[number]
            self.books.merge(name, number)
        self.books.free_proven_pay(name)

    def _answer_questions(self) -> None:
        """Do the refused tasks again: who made one up is suspended, and a lie proves nothing."""
        for name, honest in self.questions:
            account = self.books.accounts[name]
            if honest or not self.policy.compared:
                self._rest(name)
            elif not account.suspended:
                self.books.suspend(account, self.now)
        self.questions.clear()

    def _rest(self, name: str) -> None:
        count = self.resting.get(name, (0, 0.0))[0] + 1
        self.resting[name] = count, self.now + standing.proof_rest_s(count)

    # --- auditors of its own ---

    def _audited(self, name: str, price: int) -> bool:
        """Return True if the lot gives the audit of a fake to an account of the same person."""
        policy = self.policy
        if name == self.auditor or not policy.compared or self.rng.random() >= policy.audited:
            return False
        return self._may_audit(price)

    def _may_audit(self, price: int) -> bool:
        if not self.auditor:
            return False
        auditor = self.books.accounts[self.auditor]
        audited = self.audits.get(self.auditor, 0) + price
        return auditor.vetted and auditor.accepted_micro >= PAY_PER_AUDIT * audited

    def _audit(self, draw: Draw, price: int) -> None:
        self.number += 1
        self.audits[self.auditor] = self.audits.get(self.auditor, 0) + price
        chance = self.books.confirmed(draw, self.auditor, price)
        compared = self.rng.random() < chance
        self.books.answer(self.auditor, self.number, price, compared=compared)
        if compared:
            self.by[draw.number] = self.auditor, self.number
        else:
            self._settle(draw.number, "passed", computed=False)

    # --- the server ---

    def _server(self, until: float) -> bool:
        """Do the next thing that the server does before an instant; False where it does none."""
        ends = self.serving[0] if self.serving else float("inf")
        if ends > until or ends == float("inf"):
            return self._begin() if until == float("inf") or not self.serving else False
        assert self.serving is not None
        self.now, number = max(self.now, ends), self.serving[1]
        self.serving = None
        if number not in self.books.open:
            return True
        if number in self.faked and recompute_result.drifts_too_far(self._redone(number)):
            self._end_without_verdict(number)
        else:
            self._settle(number, self._judged(number), self._share(number), computed=True)
        return True

    def _begin(self) -> bool:
        draw = None if self.serving else self.books.first(self.now)
        if draw is None:
            return False
        self.serving = self.now + draw.flops / SPEED * self.policy.busy, draw.number
        return True

    def _redone(self, number: int) -> Redone:
        return redone(self.policy.trained, self.policy.rounding, self.drifts[number])

    def _judged(self, number: int) -> Result:
        if number not in self.faked:
            return "passed"
        return recompute_result.judge(self._redone(number), comparable=self.policy.compared)

    def _share(self, number: int) -> float:
        if number not in self.faked:
            return 1.0
        return recompute_result.share(self._redone(number), comparable=self.policy.compared)

    def _end_without_verdict(self, number: int) -> None:
        """End a draw of a task that drifts too far; later tasks are half as long."""
        draw = self.books.open[number]
        self.drift = min(self.drift, self.drifts[number] / 2)
        self.books.end_without_verdict(number, self.now)
        self._merge(draw.who)
        if number in self.by:
            who, answer = self.by.pop(number)
            self.books.accounts[who].answers.discard(answer)
            self.books.release(self.books.accounts[who])

    def _settle(self, number: int, result: Result, share: float = 1.0, *, computed: bool) -> None:
        draw = self.books.open[number]
        if result == "passed":
            self.since[draw.who] = 0
            self.resting.pop(draw.who, None)
        elif result == "unproven":
            self._rest(draw.who)
        self.books.settle(number, result, self.now, share, computed=computed)
        self._merge(draw.who)
        if number in self.by:
            who, answer = self.by.pop(number)
            auditor = self.books.accounts[who]
            auditor.answers.discard(answer)
            if result == "passed":
                self.books.release(auditor)
                self._merge(who)
            else:
                self.books.suspend(auditor, self.now)


def play(policy: Policy, seed: int) -> Score:
    """Return what a policy had in one episode."""
    return Life(policy, seed).play()
