"""An honest newcomer on a server whose line others fill."""

from __future__ import annotations

import heapq
import random

import msgspec

from coordinator.rules import draws
from coordinator.rules.draws import RECOMPUTE_FLOPS_MAX
from tests.experiments.adversary import LEAST_S, MICRO, REGISTER_S, SECRET, SPEED
from tests.support.trust_books import Account, Books, Draw

TASK_S = 60.0
LIMIT_S = 7 * 86_400.0
LEASES = 3  # tasks in the line of an account that fakes, before it waits for a result


class Jam(msgspec.Struct, frozen=True, kw_only=True):
    """Accounts that submit what they did not compute, reveal it all, and come again."""

    accounts: int = 8
    networks: int = 8  # 0: none is known
    seconds: float = TASK_S  # that doing a task of theirs again takes
    honest: int = 0  # tasks of each account before its first fake
    ahead_s: float = 300.0  # that they come before the newcomer


class Server:
    """One newcomer and the others."""

    def __init__(self, jam: Jam, seed: int) -> None:
        self.jam, self.seed = jam, seed
        self.rng = random.Random(seed)
        self.books = Books()
        self.now, self.number, self.names = 0.0, 0, 0
        self.real: set[int] = set()  # contributions that were computed
        self.events: list[tuple[float, int, str, int]] = []  # (at, order, name, its place)
        self.serving: list[tuple[float, Draw]] = []  # and what overtook it
        for place in range(jam.accounts):
            self._register(place, self.rng.random())
        self.books.accounts["honest"] = Account(network="honest")
        self._push(self.jam.ahead_s + TASK_S, "honest", -1)

    def _push(self, at: float, name: str, place: int) -> None:
        self.names += 1
        heapq.heappush(self.events, (at, self.names, name, place))

    def _register(self, place: int, at: float) -> None:
        network = f"n{place % self.jam.networks}" if self.jam.networks else ""
        name = f"jam{self.names}"
        self.books.accounts[name] = Account(network=network)
        computed = self.jam.seconds if self.jam.honest else 0.0
        self._push(at + REGISTER_S + computed, name, place)

    def run(self) -> float:
        honest = self.books.accounts["honest"]
        while not honest.freed and self.now < LIMIT_S:
            at = self.events[0][0]
            if self.serving and self.serving[-1][0] <= at:
                self._end()
                continue
            if (draw := self._next()) is not None:
                took = draw.flops / SPEED
                self.serving = [(end + took, one) for end, one in self.serving]
                self.serving.append((max(self.now, draw.drawn_at) + took, draw))
                continue
            self.now, _, name, place = heapq.heappop(self.events)
            if name == "honest":
                self._submit(name, TASK_S)
                self._push(self.now + TASK_S, name, place)
            elif self.books.accounts[name].suspended:
                self._register(place, self.now)
            else:
                mine = self.books.accounts[name]
                if sum(draw.result is None for draw in mine.drawn.values()) < LEASES:
                    self._submit(name, self.jam.seconds)
                computes = mine.accepted < self.jam.honest
                self._push(self.now + (self.jam.seconds if computes else LEAST_S), name, place)
        return self.now - self.jam.ahead_s

    def _next(self) -> Draw | None:
        """Return the draw that is begun now, if there is one."""
        under_way = self.serving[0][1] if self.serving else None
        return self.books.first(self.now, under_way) if len(self.serving) < 2 else None

    def _submit(self, name: str, seconds: float) -> None:
        account, price = self.books.accounts[name], round(MICRO * seconds)
        self.number += 1
        draw, chance = None, account.chance(price)
        if draws.drawn(SECRET, "recompute", self.number, str(self.seed), chance):
            flops = min(RECOMPUTE_FLOPS_MAX, seconds * SPEED)
            draw = Draw(number=self.number, who=name, flops=flops, drawn_at=self.now)
        if name == "honest" or account.accepted < self.jam.honest:
            self.real.add(self.number)
        self.books.submit(name, self.number, price, draw)
        if draw is None or account.vetted:
            self.books.merge(name, self.number)

    def _end(self) -> None:
        at, draw = self.serving.pop()
        self.now = max(self.now, at)
        if draw.result is None:
            real = draw.number in self.real
            self.books.settle(draw.number, "passed" if real else "failed", self.now)
            if real:
                self.books.merge(draw.who, draw.number)


def first_freed(jam: Jam, seed: int) -> float:
    """Return the seconds until the newcomer's first pay is free."""
    return Server(jam, seed).run()
