"""Arena of games that advance together: in each round one network batch serves all searches.

    plans ──> seats (a game each) ──> one search for all seats ──> a move each ──> records

A key names the network of each player, so that a game keeps the network it began with while others
begin with a newer one, and two networks can meet. The composition of a batch does not change any
game.

Each move is searched from its beginning, so that anyone can search it again without the moves
before. Most positions below the move just made were evaluated in the search before; a cache has
their evaluations, which are functions of the position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import msgspec
import numpy as np

from shared.workloads.gomoku.randomness import dirichlet, draw
from shared.workloads.gomoku.records import GameRecord, Manner, flat
from shared.workloads.gomoku.rules import BoardRules, Boards, Position
from shared.workloads.gomoku.search import Evaluator, Floats, Search, SearchSettings


class GamePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Game to be played: its players, and its given moves."""

    game: int
    seed: int
    players: tuple[str, str]  # keys of evaluators
    opening: tuple[int, ...] = ()


class FinishedGame(msgspec.Struct, frozen=True, kw_only=True):
    """Finished game: its plan, its moves, a row of visits for each searched move, its outcome."""

    plan: GamePlan
    moves: tuple[int, ...]
    visits: tuple[tuple[int, ...], ...]
    outcome: int

    def record(self, version: int, weights: str, device: str, against: int = -1) -> GameRecord:
        """Return the game's record for a submission: `version` and the hash `weights` are of the
        player that the task measures or trains, `against` is the other player's version in a match.
        """
        return GameRecord(
            game=self.plan.game,
            seed=self.plan.seed,
            moves=self.moves,
            visits=self.visits,
            outcome=self.outcome,
            version=version,
            weights=weights,
            opening=len(self.plan.opening),
            against=against,
            device=device,
        )


Evaluation = tuple[Floats, np.float32]  # logits (A,) and the value of a position


class EvaluationCache:
    """Evaluations of one network in a game: of the running search and of the search before."""

    def __init__(self) -> None:
        self._running: dict[bytes, Evaluation] = {}
        self._last: dict[bytes, Evaluation] = {}

    def get(self, position: bytes) -> Evaluation | None:
        evaluation = self._running.get(position)
        if evaluation is None and (evaluation := self._last.get(position)) is not None:
            self._running[position] = evaluation
        return evaluation

    def put(self, position: bytes, evaluation: Evaluation) -> None:
        self._running[position] = evaluation

    def next_search(self) -> None:
        """Keep the evaluations of the search that ended, and drop older ones."""
        self._running, self._last = {}, self._running


class Seat:
    """Game in progress."""

    def __init__(self, rules: BoardRules, plan: GamePlan) -> None:
        self.plan = plan
        self.position = Position(rules, plan.opening)
        self.visits: list[tuple[int, ...]] = []
        self._caches = {key: EvaluationCache() for key in plan.players}

    @property
    def cache(self) -> EvaluationCache:
        """Return the evaluations of the player to move."""
        return self._caches[self.player]

    @property
    def player(self) -> str:
        """Return the key of the player to move."""
        return self.plan.players[len(self.position.moves) % 2]

    def played(self) -> FinishedGame:
        return FinishedGame(
            plan=self.plan,
            moves=tuple(self.position.moves),
            visits=tuple(self.visits),
            outcome=self.position.winner,
        )


class Arena:
    """Games in `slots` seats, filled from `following` while it has plans; `players` may change."""

    def __init__(
        self,
        rules: BoardRules,
        manner: Manner,
        slots: int,
        players: Mapping[str, Evaluator],
        following: Callable[[], GamePlan | None],
    ) -> None:
        settings = SearchSettings(simulations=manner.simulations, noise=manner.noise)
        self.seats: list[Seat] = []
        self.plies = 0  # moves searched so far
        self._rules = rules
        self._manner = manner
        self._slots = slots
        self._players = players
        self._following = following
        self._search = Search(rules, settings, slots)
        self._searching = False

    def advance(self, limit_s: float) -> list[FinishedGame]:
        """Play for about this long, at least one batch; return the finished games."""
        began, ended = perf_counter(), list[FinishedGame]()
        while True:
            if not self._searching and not self._begin():
                return ended
            boards = self._search.waiting()
            if len(boards):
                self._search.receive(*self._ask(boards))
            if self._search.done:
                ended += self._move()
            if perf_counter() - began >= limit_s:
                return ended

    def keys(self) -> set[str]:
        """Return the players of the games in progress."""
        return {key for seat in self.seats for key in seat.plan.players}

    def again(self) -> None:
        """Drop the running search; it is repeated from its beginning with the same result."""
        self._searching = False

    def _begin(self) -> bool:
        """Fill the seats and start a search in each; return False when no game is left."""
        while len(self.seats) < self._slots:
            plan = self._following()
            if plan is None:
                break
            self.seats.append(Seat(self._rules, plan))
        if not self.seats:
            return False
        boards = np.concatenate([seat.position.board for seat in self.seats])
        movers = np.array([seat.position.player for seat in self.seats], np.int8)
        self._search.start(boards, movers, self._noise(boards))
        self._searching = True
        return True

    def _noise(self, boards: Boards) -> Floats | None:
        if self._manner.noise <= 0:
            return None
        return np.stack(
            [
                dirichlet(seat.plan.seed, len(seat.position.moves), board[:-1] == 0)
                for seat, board in zip(self.seats, boards, strict=True)
            ]
        )

    def _ask(self, boards: Boards) -> tuple[Floats, Floats]:
        """Return logits and value of each board, from the cache or by the network of the board's
        player.
        """
        logits = np.empty(boards.shape, np.float32)
        values = np.empty(len(boards), np.float32)
        seats = [self.seats[game] for game in self._search.waiting_games()]
        missing: dict[str, list[int]] = {}
        for row, (seat, board) in enumerate(zip(seats, boards, strict=True)):
            evaluation = seat.cache.get(board.tobytes())
            if evaluation is None:
                missing.setdefault(seat.player, []).append(row)
            else:
                logits[row], values[row] = evaluation
        for key, rows in sorted(missing.items()):
            logits[rows], values[rows] = self._players[key](boards[rows])
            for row in rows:
                evaluation = (logits[row].copy(), values[row])
                seats[row].cache.put(boards[row].tobytes(), evaluation)
        return logits, values

    def _move(self) -> list[FinishedGame]:
        """Make one move in every game; finished games leave their seats."""
        self._searching = False
        visits = self._search.visits()
        for seat, row in zip(self.seats, visits, strict=True):
            ply = len(seat.position.moves)
            seat.visits.append(flat(row))
            seat.cache.next_search()
            seat.position.play(draw(row, seat.plan.seed, ply, self._manner.temperature_plies))
        self.plies += len(self.seats)
        ended = [seat.played() for seat in self.seats if seat.position.over]
        self.seats = [seat for seat in self.seats if not seat.position.over]
        return ended
