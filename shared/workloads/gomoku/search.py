"""Monte Carlo tree search for many games at once: PUCT over flat arrays, one network batch for the
leaves of all.

    start ──> waiting: boards to evaluate ──> receive: logits, values ──> (simulations / leaves rounds) ──> visits

Every game has a block of rows, one row a node. A row holds for each move: `q`, its mean value for
the player to move there; `n`, its visits; `u`, its prior / (1 + n); and the row that it leads to. A
move is chosen by q + c sqrt(N + 1) u (Silver et al. 2017). The q of an unvisited move is the
network's value of the position, minus `fpu` times the square root of the visited priors' sum: the
more of the likely moves were tried, the lower the value of the others. Only a visit changes a row's
best move, so each row caches its best move and the row below it. A visit updates these caches for
all rows of all paths together, and the descent takes one look-up a level.

A running simulation counts as a lost visit until its value arrives (virtual loss), so that one
batch can hold several leaves of one game. The search of a game depends only on its own position,
noise and evaluator, not on the other games of the batch. Legend: G games, R rows, A cells.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.workloads.gomoku.rules import BoardRules, Boards, empty, wins

Floats = NDArray[np.float32]
Rows = NDArray[np.intp]

_NONE = -1
_PENDING, _OPEN, _ENDED = 0, 1, 2  # states of a row
_SCORED = 256  # rows whose moves are compared at once, so that they fit a core's cache


class Evaluator(Protocol):
    """Function of boards (B, A), +1 the player to move, that gives logits (B, A), values (B,)."""

    def __call__(self, boards: Boards, /) -> tuple[Floats, Floats]: ...


class SearchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the search for a move."""

    simulations: int = 100
    leaves: int = 1  # leaves of one game in one batch
    exploration: float = 1.5  # c
    fpu: float = 0.2
    noise: float = 0.0  # share of the noise in the priors of the root


class _Paths(msgspec.Struct, frozen=True, kw_only=True):
    """Paths from root to leaf, one in each game, in flat arrays; no row appears twice."""

    rows: Rows
    moves: Rows
    leaves: Rows
    signs: Floats  # 1 if the player to move at the leaf also moves here, else -1
    fresh: Rows  # leaves to evaluate, once each


class Search:
    """Search of `games` games that advance together."""

    def __init__(self, rules: BoardRules, settings: SearchSettings, games: int) -> None:
        self.rules = rules
        self.settings = settings
        self.simulated = 0  # finished simulations of each game
        self._per_game = settings.simulations + 1
        rows, cells = games * self._per_game, rules.cells
        self._q = np.empty((rows, cells), np.float32)
        self._u = np.empty((rows, cells), np.float32)
        self._n = np.empty((rows, cells), np.int32)
        self._next = np.empty((rows, cells), np.int32)
        self._total = np.empty(rows, np.float32)  # N
        self._tried = np.empty(rows, np.float32)  # sum of the priors of visited moves
        self._value = np.empty(rows, np.float32)  # value of the position for the player to move
        self._end = rows  # index of the extra row that stands for "none"
        self._best = np.empty(rows, np.intp)  # the move with the highest score
        # row that the best move leads to, if the row is open
        self._below = np.full(rows + 1, self._end, np.intp)
        self._state = np.full(rows + 1, _PENDING, np.int8)
        self._mover = np.empty(rows, np.int8)
        self._stones = np.empty(rows, np.int32)
        self._boards = empty(rules, rows)
        self._used = np.zeros(games, np.intp)  # used rows of each game
        self._scores = np.empty((2, _SCORED, cells), np.float32)
        self._roots: Rows = np.empty(0, np.intp)
        self._noise: Floats | None = None
        self._waiting: Rows = np.empty(0, np.intp)
        self._paths: list[_Paths] = []

    def start(self, boards: Boards, movers: NDArray[np.int8], noise: Floats | None = None) -> None:
        """Begin to search positions (G, A + 1); `noise` (G, A) is mixed into the roots' priors."""
        games = len(boards)
        self._roots = np.arange(games, dtype=np.intp) * self._per_game
        self._noise = noise if self.settings.noise > 0 else None
        self._used[:games] = 1
        self._boards[self._roots] = boards
        self._mover[self._roots] = movers
        self._stones[self._roots] = (boards[:, :-1] != 0).sum(axis=1)
        self._state[self._roots] = _PENDING
        self._waiting = self._roots
        self._paths = []
        self.simulated = 0

    @property
    def done(self) -> bool:
        return self.simulated >= self.settings.simulations

    def waiting(self) -> Boards:
        """Return the boards (B, A) to evaluate, of the player to move; B = 0 at the end."""
        while not len(self._waiting) and not self.done:
            self._descend()
            if not len(self._waiting):  # every leaf was the end of a game
                self._ascend()
        rows = self._waiting
        boards: Boards = self._boards[rows, :-1] * self._mover[rows, None]
        return boards

    def waiting_games(self) -> Rows:
        """Return the game of each board of `waiting`, as a number in the order of `start`."""
        return self._waiting // self._per_game

    def receive(self, logits: Floats, values: Floats) -> None:
        """Apply the evaluator's answer to the waiting boards."""
        rows = self._waiting
        self._waiting = np.empty(0, np.intp)
        self._open(rows, logits, values)
        if self._paths:
            self._ascend()
        elif self._noise is not None:
            self._mix_noise(self._noise)

    def run(self, evaluator: Evaluator) -> None:
        """Run all simulations, with `evaluator` for the waiting boards."""
        while len(boards := self.waiting()):
            self.receive(*evaluator(boards))

    def visits(self) -> NDArray[np.int32]:
        """Return how often each move of each root was visited, (G, A): the raw distribution."""
        return self._n[self._roots]

    def values(self) -> Floats:
        """Return the mean value of each root for the player to move, (G,)."""
        n = self._n[self._roots]
        total = (np.where(n > 0, self._q[self._roots], 0) * n).sum(axis=1)
        mean: Floats = ((total + self._value[self._roots]) / (n.sum(axis=1) + 1)).astype(np.float32)
        return mean

    def _open(self, rows: Rows, logits: Floats, values: Floats) -> None:
        """Fill rows with the priors and the value of their positions, without visits."""
        occupied = self._boards[rows, :-1] != 0
        logits = np.where(occupied, np.float32(-np.inf), logits)
        logits -= logits.max(axis=1, keepdims=True)
        priors = np.exp(logits, out=logits)
        priors /= priors.sum(axis=1, keepdims=True)
        self._u[rows] = priors
        self._q[rows] = np.where(occupied, np.float32(-np.inf), values[:, None])
        self._n[rows] = 0
        self._next[rows] = _NONE
        self._total[rows] = 0
        self._tried[rows] = 0
        self._value[rows] = values
        self._state[rows] = _OPEN
        self._choose(rows)

    def _mix_noise(self, noise: Floats) -> None:
        """Mix the noise into the priors of the roots."""
        share = np.float32(self.settings.noise)
        legal = self._boards[self._roots, :-1] == 0
        noise = np.where(legal, noise, np.float32(0))
        noise /= np.maximum(noise.sum(axis=1, keepdims=True), np.float32(1e-12))
        self._u[self._roots] = (1 - share) * self._u[self._roots] + share * noise
        self._choose(self._roots)

    def _choose(self, rows: Rows) -> None:
        """Recompute the best move of each row."""
        c = np.float32(self.settings.exploration)
        for start in range(0, len(rows), _SCORED):
            some = rows[start : start + _SCORED]
            scores, q = self._scores[:, : len(some)]
            # "clip" spares a check of bounds and a copy; all indices are valid.
            np.take(self._u, some, axis=0, out=scores, mode="clip")
            np.take(self._q, some, axis=0, out=q, mode="clip")
            scores *= c * np.sqrt(self._total[some, None] + np.float32(1))
            scores += q
            best = scores.argmax(axis=1)
            below = self._next[some, best]  # _NONE is the last row: never open
            self._best[some] = best
            self._below[some] = np.where(self._state[below] == _OPEN, below, self._end)

    def _descend(self) -> None:
        """Descend to one leaf of each game, `leaves` times; leaves to evaluate are put into
        `_waiting`.
        """
        self._paths = []
        for _ in range(min(self.settings.leaves, self.settings.simulations - self.simulated)):
            if self._paths:
                self._choose(self._paths[-1].rows)
            path = self._select()
            self._add_virtual_loss(path)
            self._paths.append(path)
        self._waiting = np.concatenate([path.fresh for path in self._paths])

    def _select(self) -> _Paths:
        """Descend from each root to a new or finished position, making a row for a new position;
        return the paths.
        """
        levels, rows = list[Rows](), self._roots
        while int(rows.min()) < self._end:
            levels.append(rows)
            rows = self._below.take(rows)
        way = np.stack(levels)  # (levels, G)
        level, game = np.nonzero(way < self._end)
        steps = np.bincount(game)
        leaves, fresh = self._leaves(way[steps - 1, np.arange(len(steps))])
        rows = way[level, game]
        return _Paths(
            rows=rows,
            moves=self._best[rows],
            leaves=leaves[game],
            signs=np.where((steps[game] - level) % 2 == 0, np.float32(1), np.float32(-1)),
            fresh=fresh,
        )

    def _leaves(self, last: Rows) -> tuple[Rows, Rows]:
        """Return each game's leaf below its last row, and the new leaves that do not end a game."""
        moves = self._best[last]
        leaves = self._next[last, moves].astype(np.intp)
        new = np.flatnonzero(leaves == _NONE)
        children = self._make(new, last[new], moves[new])
        leaves[new] = children
        return leaves, children[self._state[children] == _PENDING]

    def _make(self, games: Rows, parents: Rows, moves: Rows) -> Rows:
        """Make rows for the positions after `moves`; finished games get their value at once."""
        rows = self._roots[games] + self._used[games]
        self._used[games] += 1
        self._next[parents, moves] = rows
        movers = self._mover[parents]
        boards = self._boards[parents]
        boards[np.arange(len(rows)), moves] = movers
        stones = self._stones[parents] + 1
        won = wins(self.rules, boards, moves)
        self._boards[rows] = boards
        self._mover[rows] = -movers
        self._stones[rows] = stones
        self._value[rows] = np.where(won, np.float32(-1), np.float32(0))
        self._state[rows] = np.where(won | (stones == self.rules.cells), _ENDED, _PENDING)
        return rows

    def _ascend(self) -> None:
        """Replace the virtual losses by the values of the leaves."""
        for path in self._paths:
            gain = self._value[path.leaves] * path.signs + 1
            self._q[path.rows, path.moves] += gain / self._n[path.rows, path.moves]
            self.simulated += 1
        self._choose(np.concatenate([path.rows for path in self._paths]))
        self._paths = []

    def _add_virtual_loss(self, path: _Paths) -> None:
        """Count a visit as a virtual loss until its value is known."""
        rows, moves = path.rows, path.moves
        n = self._n[rows, moves]
        first = n == 0
        self._lower_unvisited(rows[first], moves[first])
        more = n + 1
        self._u[rows, moves] *= more / (more + np.float32(1))
        self._q[rows, moves] = (self._q[rows, moves] * n - 1) / more
        self._n[rows, moves] = more
        self._total[rows] += 1

    def _lower_unvisited(self, rows: Rows, moves: Rows) -> None:
        """Lower the value of a row's unvisited moves, by `fpu`, when one more move gets its first
        visit.
        """
        before = self._tried[rows]
        after = before + self._u[rows, moves]
        drop = np.float32(self.settings.fpu) * (np.sqrt(after) - np.sqrt(before))
        q = self._q[rows]
        np.subtract(q, drop[:, None], out=q, where=self._n[rows] == 0)
        self._q[rows] = q
        self._tried[rows] = after
