"""Stakes, draws and the line of recomputes as a pure model, over the real rules: experiments play
it in virtual time, and a test holds it equal to the database.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from coordinator.rules import draws, standing
from coordinator.rules.audits import confirmed_chance
from coordinator.rules.draws import CORE_FLOPS, FLOOR, OVERTAKES_FROM, SHARED_S, Result

NEVER = 2**62
PROBATION = standing.Account(state="probation", invited=False)


@dataclass(kw_only=True)
class Draw:
    """A contribution that is done again."""

    number: int
    who: str
    flops: float
    drawn_at: float
    result: Result | None = None
    ended_at: float = 0.0
    computed: bool = False  # it was done again here


@dataclass(kw_only=True)
class Account:
    """Account: its standing by draws, and the place of its pay, by contribution."""

    network: str = ""
    state: standing.Account = PROBATION
    draws: int = 0
    accepted: int = 0
    accepted_micro: int = 0
    unproved_to: int = 0
    newest: int = 0
    prices: dict[int, int] = field(default_factory=dict)  # of what is drawn
    pending: dict[int, int] = field(default_factory=dict)  # what waits for a merge
    waiting: set[int] = field(default_factory=set)  # of these, for a proof before it
    stake: dict[int, int] = field(default_factory=dict)
    freed: int = 0
    debt: int = 0  # what draws did not prove; later pay settles it
    spends: bool = False  # what is free at once, so that only later pay settles a debt
    passed: int = NEVER  # its first draw that did
    drawn: dict[int, Draw] = field(default_factory=dict)
    answers: set[int] = field(default_factory=set)  # to audits, which are compared

    @property
    def mean(self) -> float:
        return self.accepted_micro / max(1, self.accepted)

    @property
    def suspended(self) -> bool:
        return self.state.state == "suspended"

    @property
    def vetted(self) -> bool:
        return self.state.state == "vetted"

    def proven(self, number: int) -> bool:
        """Return True if a draw before this one passed."""
        return self.vetted or self.passed < number

    @property
    def is_open(self) -> bool:
        """Return True if one of its draws has no result."""
        return any(draw.result is None for draw in self.drawn.values())

    @property
    def proven_to(self) -> tuple[int, int]:
        """Return the newest passed draw before every open one, or 0; and the oldest open one."""
        ended = {number: draw.result for number, draw in self.drawn.items()}
        first = min([*(n for n, result in ended.items() if result is None), *self.answers, NEVER])
        passed = [n for n, result in ended.items() if result == "passed"]
        return max((n for n in passed if self.unproved_to < n < first), default=0), first

    @property
    def at_stake(self) -> int:
        return sum(self.stake.values())

    @property
    def provable(self) -> dict[int, int]:
        """Return the stake that a later draw may free, by contribution."""
        return {number: pay for number, pay in self.stake.items() if number > self.unproved_to}

    @property
    def bond(self) -> int:
        return draws.bond(self.draws, self.mean)

    def chance(self, price: int, floor: float = FLOOR) -> float:
        """Return the probability that its next contribution is drawn."""
        mean = self.mean if self.accepted else float(price)
        return draws.chance(self.draws, price, mean, floor)


class Books:
    """All accounts of one server, and its line."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.open: dict[int, Draw] = {}
        self._done: list[Draw] = []  # again here, within `SHARED_S`

    def submit(
        self, who: str, number: int, price: int, draw: Draw | None = None
    ) -> tuple[int, int]:
        """Accept a contribution; its pay waits for a merge. (number, price)"""
        account = self.accounts[who]
        if draw is not None:
            account.draws += 1
            account.drawn[number] = self.open[number] = draw
            account.prices[number] = price
        account.accepted, account.newest = account.accepted + 1, number
        account.accepted_micro += price
        account.pending[number] = price
        if account.is_open and not account.vetted:
            account.waiting.add(number)
        return number, price

    def merge(self, who: str, number: int) -> None:
        """Put the pay of a contribution at stake."""
        account = self.accounts[who]
        account.waiting.discard(number)
        price = account.pending.pop(number, None)
        if price is not None:
            account.stake[number] = price

    def free_proven_pay(self, who: str) -> None:
        """Free pay that was put at stake after the draws that prove it had passed."""
        account = self.accounts[who]
        last, _ = account.proven_to
        if not account.suspended:
            self._free(account, last, last + 1)

    def answer(self, who: str, number: int, price: int, *, compared: bool) -> None:
        """Put the pay of an answer to an audit at stake."""
        account = self.accounts[who]
        account.stake[number], account.newest = price, number
        if compared:
            account.answers.add(number)

    def confirmed(self, draw: Draw, auditor: str, price: int) -> float:
        """Return the probability that an answer which agrees is done again all the same."""
        account = self.accounts[draw.who]
        freed = sum(pay for number, pay in account.stake.items() if number <= draw.number)
        other = self.accounts[auditor]
        return confirmed_chance(freed + 2 * price, min(other.at_stake, other.bond))

    def settle(
        self, number: int, result: Result, now: float, share: float = 1.0, *, computed: bool = True
    ) -> bool:
        """End a draw that shows a share of its work; False where it has ended before."""
        draw = self.open.pop(number, None)
        if draw is None:
            return False
        draw.result, draw.ended_at, draw.computed = result, now, computed
        if computed:
            self._done.append(draw)
        account = self.accounts[draw.who]
        if result == "passed":
            account.passed = min(account.passed, number)
        if account.suspended:
            return True
        account.state = standing.after_draw(account.state, result)
        if result == "passed":
            self.charge(account, number, share)
            self.release(account)
        elif result == "failed":
            self.forfeit(account, now)
        else:
            self.leave_at_stake(account)
        return True

    def end_without_verdict(self, number: int, now: float) -> bool:
        """End a draw that proves nothing through no fault of its account, whose standing stays;
        False where it has ended before.
        """
        draw = self.open.pop(number, None)
        if draw is None:
            return False
        draw.result, draw.ended_at, draw.computed = "unproven", now, True
        self._done.append(draw)
        if not self.accounts[draw.who].suspended:
            self.leave_at_stake(self.accounts[draw.who])
        return True

    def charge(self, account: Account, number: int, share: float) -> None:
        """Charge an account for what a draw did not show."""
        stake = sum(account.provable.values()) + sum(account.pending.values()) - account.debt
        price = account.prices[number]
        account.debt += draws.shortfall(share, min(stake, max(account.bond, price)))
        self._repay(account, 0)

    def _repay(self, account: Account, fresh: int) -> None:
        repaid = min(account.debt, fresh if account.spends else account.freed)
        account.debt -= repaid
        account.freed -= repaid

    def suspend(self, account: Account, now: float) -> None:
        """Suspend an account whose answer to an audit was made up."""
        account.state = standing.after_draw(account.state, "failed")
        self.forfeit(account, now)

    def leave_at_stake(self, account: Account) -> None:
        """Leave the pay so far at stake for good."""
        account.stake |= account.pending
        account.pending.clear()
        account.waiting.clear()
        account.draws, account.unproved_to = 0, account.newest

    def forfeit(self, account: Account, now: float) -> None:
        """Take all that is at stake, and end the open draws."""
        account.pending.clear()
        account.waiting.clear()
        account.stake.clear()
        for draw in account.drawn.values():
            if draw.result is None:
                self.open.pop(draw.number, None)
                draw.result, draw.ended_at = "unproven", now
        account.draws, account.unproved_to = 0, account.newest

    def release(self, account: Account) -> None:
        """Free the pay that draws prove, the oldest first, up to the bond; updates before every
        open draw may be merged.
        """
        last, first = account.proven_to
        self._free(account, last, first)
        account.waiting = {number for number in account.waiting if number >= first}

    def _free(self, account: Account, last: int, first: int) -> None:
        """Free the pay up to `last`, the oldest first, up to the bond, of work before `first`."""
        open_draws = sum(draw.result is None for draw in account.drawn.values())
        left = sum(pay for n, pay in account.provable.items() if n < first) - account.debt
        left -= draws.bond(account.draws - open_draws, account.mean)
        before = account.freed
        for number in sorted(account.provable):
            left -= account.stake[number]
            if number > last or left < 0:
                break
            account.freed += account.stake.pop(number)
        self._repay(account, account.freed - before)

    # --- the line ---

    def lot(self, who: str) -> str:
        return self.accounts[who].network or who

    def _proven(self, draw: Draw) -> bool:
        return self.accounts[draw.who].proven(draw.number)

    def first(self, now: float, under_way: Draw | None = None) -> Draw | None:
        """Return the next draw that the server does again."""
        most = inf if under_way is None else under_way.flops / OVERTAKES_FROM
        waiting = [draw for draw in self.open.values() if draw.flops <= most]
        if not waiting:
            return None
        self._done = [draw for draw in self._done if draw.ended_at > now - SHARED_S]
        spent: dict[str, float] = defaultdict(float)
        shares = {True: 0.0, False: 0.0}  # by whether a draw before passed
        if under_way is not None:
            shares[self._proven(under_way)] += under_way.flops
        for draw in self._done:
            spent[self.lot(draw.who)] += draw.flops
            shares[self._proven(draw)] += draw.flops
        turn = shares[False] >= shares[True]  # of the proven

        def place(draw: Draw) -> tuple[bool, float, int]:
            at = draw.drawn_at + (spent[self.lot(draw.who)] + draw.flops) / CORE_FLOPS
            return self._proven(draw) is not turn, at, draw.number

        return min(waiting, key=place)
