"""Records of games: submitted by players, and checkable without a network.

A record has the moves, the raw visits of every search, and the seed of its random numbers. Each
move can thus be checked against the visits it was drawn from, and any position can be searched
again (`verification`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import BadRequest
from shared.workloads.data.jsonl_zst import pack, unpack
from shared.workloads.elo import MatchScore
from shared.workloads.games import cell_name
from shared.workloads.gomoku.openings import drawn, fixed
from shared.workloads.gomoku.randomness import draw
from shared.workloads.gomoku.rules import BoardRules, IllegalMove, Position

FILE_BYTES_MAX = 256 << 20
GAMES_MAX = 4096


class InvalidGame(BadRequest):
    """Raised for a game that its task cannot have produced."""


class GameRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One game. `visits` has a row for each searched move: cell, count, cell, count ..."""

    game: int  # number of the game among all games of the run
    seed: int
    version: int  # version that played the game, from its first move to its last
    weights: str  # SHA-256 of the published weights of that version
    moves: tuple[int, ...]
    visits: tuple[tuple[int, ...], ...]
    outcome: int  # +1 the first player won, -1 the second, 0 a draw
    opening: int = 0  # number of given first moves, which were not searched
    against: int = -1  # in a match: the version of the other player
    device: str = "cpu"  # kind of device


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of play for the games of a task, shared by players and checkers."""

    simulations: int
    temperature_plies: int
    noise: float
    opening_plies: int = 0  # most random moves before the first search
    match: bool = False  # two versions, fixed openings


def encode(records: Iterable[GameRecord]) -> bytes:
    """Encode records for a submission, or for a sealed chunk."""
    return pack(records)


def decode(data: bytes) -> list[GameRecord]:
    """Return the games of a file. Raises InvalidGame, naming the line."""
    try:
        return unpack(data, GameRecord, FILE_BYTES_MAX, GAMES_MAX)
    except BadRequest as error:
        raise InvalidGame(error.message) from error


def flat(visits: NDArray[np.int32]) -> tuple[int, ...]:
    """Convert the visits of all cells (A,) to a row of a record: cell, count, cell, count ..."""
    cells = np.flatnonzero(visits)
    return tuple(np.stack([cells, visits[cells]], axis=1).reshape(-1).tolist())


def counts(row: Sequence[int], cells: int) -> NDArray[np.int32]:
    """Convert a row of a record to the visits of all cells (A,). Raises InvalidGame unless the row
    is a distribution over the board.
    """
    try:
        pairs = np.asarray(row, np.int64).reshape(-1)
    except OverflowError as error:
        raise InvalidGame("a number of the visits has more than 64 bits") from error
    if not pairs.size or pairs.size % 2:
        raise InvalidGame("the visits of a move are pairs of a cell and a count")
    at, many = pairs[0::2], pairs[1::2]
    if (at < 0).any() or (at >= cells).any() or (np.diff(at) <= 0).any():
        raise InvalidGame("the visited cells are not in order, or not on the board")
    if (many < 1).any() or (many > 1 << 20).any():
        raise InvalidGame("a count of visits is not a positive number")
    row_counts = np.zeros(cells, np.int32)
    row_counts[at] = many
    return row_counts


def check(record: GameRecord, rules: BoardRules, manner: Manner) -> None:
    """Replay the game and check each move by its visits. Raises InvalidGame with game and fault."""
    try:
        _check(record, rules, manner)
    except (InvalidGame, IllegalMove) as error:
        raise InvalidGame(f"game {record.game}: {error.message}") from error


def _check(record: GameRecord, rules: BoardRules, manner: Manner) -> None:
    if record.outcome not in (-1, 0, 1):
        raise InvalidGame(f"its outcome is {record.outcome}")
    _check_length(record, rules)
    if manner.match:
        opening = fixed(rules, record.game // 2)
    else:
        opening = drawn(rules, record.seed, manner.opening_plies)
    if record.moves[: record.opening] != opening:
        raise InvalidGame("it does not begin with the opening that it was given")
    position = Position(rules)
    for ply, move in enumerate(record.moves):
        if ply >= record.opening:
            _check_draw(position, record, ply, manner)
        position.play(move)
    if not position.over:
        raise InvalidGame(f"it stops after move {len(record.moves)}, before its end")
    if position.winner != record.outcome:
        raise InvalidGame(
            f"its outcome is {record.outcome}, but the moves end with {position.winner}"
        )


def _check_length(record: GameRecord, rules: BoardRules) -> None:
    if not 0 <= record.opening <= len(record.moves) <= rules.cells:
        raise InvalidGame(f"{len(record.moves)} moves do not make a game")
    if len(record.visits) != len(record.moves) - record.opening:
        raise InvalidGame(f"{len(record.moves)} moves, but {len(record.visits)} searches")


def _check_draw(position: Position, record: GameRecord, ply: int, manner: Manner) -> None:
    """Check the search of a move: its sum, its cells, and the drawn move. Raises InvalidGame."""
    visits = counts(record.visits[ply - record.opening], position.rules.cells)
    if int(visits.sum()) != manner.simulations:
        raise InvalidGame(
            f"move {ply + 1} shows {int(visits.sum())} visits instead of {manner.simulations}"
        )
    if position.board[0, :-1][visits > 0].any():
        raise InvalidGame(f"the search of move {ply + 1} visited a cell where a stone lies")
    drawn = draw(visits, record.seed, ply, manner.temperature_plies)
    if drawn != record.moves[ply]:
        size = position.rules.size
        raise InvalidGame(
            f"move {ply + 1} should be {cell_name(drawn, size)} by its visits and its seed, not"
            f" {_move_name(record.moves[ply], size)}"
        )


def _move_name(move: int, size: int) -> str:
    return cell_name(move, size) if 0 <= move < size * size else str(move)


def score(records: Sequence[GameRecord]) -> MatchScore:
    """Return a match's result from its records: the measured version begins the even games."""
    ends = [record.outcome if record.game % 2 == 0 else -record.outcome for record in records]
    return MatchScore(wins=ends.count(1), draws=ends.count(0), losses=ends.count(-1))


class Positions(msgspec.Struct, frozen=True, kw_only=True):
    """Training positions: boards (P, A) of the player to move, visits (P, A), results (P,)."""

    boards: NDArray[np.int8]
    visits: NDArray[np.uint16]
    results: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.results)


def positions(records: Sequence[GameRecord], rules: BoardRules) -> Positions:
    """Return all searched positions of `records` in order.

    The records were checked on arrival, and their lengths again before memory is allocated.
    Raises InvalidGame.
    """
    for record in records:
        _check_length(record, rules)
    total = sum(len(record.visits) for record in records)
    boards = np.zeros((total, rules.cells), np.int8)
    visits = np.zeros((total, rules.cells), np.uint16)
    results = np.zeros(total, np.int8)
    at = 0
    for record in records:
        board = np.zeros(rules.cells, np.int8)
        for ply, move in enumerate(record.moves):
            player = 1 if ply % 2 == 0 else -1
            if ply >= record.opening:
                boards[at] = board * player
                visits[at] = counts(record.visits[ply - record.opening], rules.cells)
                results[at] = record.outcome * player
                at += 1
            if not 0 <= move < rules.cells:
                raise InvalidGame(f"game {record.game}: move {ply + 1} lies outside the board")
            board[move] = player
    return Positions(boards=boards, visits=visits, results=results)
