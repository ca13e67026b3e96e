"""Tactical positions with known answers: they measure a network without search.

    win      complete the row now
    block    the opponent would complete a row next: one cell prevents it
    attack   make two threats at once (the open three of five in a row): only one can be blocked
    defend   the opponent could make two threats next: moves that prevent it

The positions are generated from a fixed seed for any board and verified by checking every move.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.workloads.gomoku.randomness import words
from shared.workloads.gomoku.rules import BoardRules, Boards, rays
from shared.workloads.gomoku.search import Evaluator

KINDS = ("win", "block", "attack", "defend")
EACH = 32  # default number of positions of a kind
_SEED = 0x60_40_B0
_TRIES = 125  # boards tried for each position; on the smallest boards some kinds are rare


class TacticsSuite(msgspec.Struct, frozen=True, kw_only=True):
    """Boards (P, A) of the player to move, right cells (P, A), and kinds as numbers in KINDS."""

    boards: Boards
    answers: NDArray[np.bool_]
    kinds: NDArray[np.intp]


@lru_cache(maxsize=8)
def windows(rules: BoardRules) -> NDArray[np.intp]:
    """Return the cells of every winning row, (W, win)."""
    along = rays(rules)[:, 0::2]  # one direction of each line: (A, 4, win - 1)
    start = np.broadcast_to(np.arange(rules.cells)[:, None, None], (*along.shape[:2], 1))
    rows = np.concatenate([start, along], axis=2).reshape(-1, rules.win)
    lines: NDArray[np.intp] = rows[rows[:, -1] < rules.cells]
    return lines


def completing(rules: BoardRules, boards: Boards, player: int) -> NDArray[np.bool_]:
    """Return the empty cells of each board (B, A) where `player` would complete a row at once."""
    gaps_found = np.zeros(boards.shape, np.bool_)
    board, rows = _short_of(rules, boards, player, 1)
    cells = windows(rules)[rows]
    gaps = boards[board[:, None], cells] == 0
    gaps_found[board, cells[gaps]] = True
    return gaps_found


def forking(rules: BoardRules, boards: Boards, player: int) -> NDArray[np.bool_]:
    """Return the empty cells (B, A) where a stone lets `player` complete a row in two ways next,
    and the opponent in none.

    On the boards `player` cannot complete a row now, and the opponent in one cell at most.
    """
    board, rows = _short_of(rules, boards, player, 2)
    cells = windows(rules)[rows]
    gaps = cells[boards[board[:, None], cells] == 0].reshape(-1, 2)
    ways = np.concatenate([np.stack([board, *pair], axis=1) for pair in (gaps.T, gaps.T[::-1])])
    ways = np.unique(ways, axis=0)  # board, move, cell that it threatens
    count = np.zeros(boards.shape, np.intp)
    np.add.at(count, (ways[:, 0], ways[:, 1]), 1)
    threats = completing(rules, boards, -player)
    many = threats.sum(axis=1, keepdims=True)
    forks: NDArray[np.bool_] = (count >= 2) & ((many == 0) | ((many == 1) & threats))
    return forks


def kind_of(rules: BoardRules, board: NDArray[np.int8]) -> tuple[str, NDArray[np.bool_]]:
    """Return the kind of a board (A,) of the player to move, and its correct cells (A,), boolean;
    the kind is "" for a board that asks for no particular move.
    """
    no_answers = np.zeros(len(board), np.bool_)
    if any(len(_short_of(rules, board[None], player, 0)[0]) for player in (1, -1)):
        return "", no_answers  # the game is already won
    wins, threats = (completing(rules, board[None], player)[0] for player in (1, -1))
    if wins.any():
        return "win", wins
    if threats.any():
        # otherwise the game is lost
        return ("block", threats) if threats.sum() == 1 else ("", no_answers)
    attack = forking(rules, board[None], 1)[0]
    if attack.any():
        return "attack", attack
    if not forking(rules, board[None], -1).any():
        return "", no_answers
    moves = np.flatnonzero(board == 0)
    after = np.repeat(board[None], len(moves), axis=0)
    after[np.arange(len(moves)), moves] = 1
    defences = moves[~forking(rules, after, -1).any(axis=1)]
    no_answers[defences] = True
    return ("defend" if 0 < len(defences) <= len(moves) // 2 else ""), no_answers


@lru_cache(maxsize=8)
def suite(rules: BoardRules, per_kind: int = EACH) -> TacticsSuite:
    """Return up to `per_kind` positions of every kind for this board, always the same."""
    positions: dict[str, list[tuple[NDArray[np.int8], NDArray[np.bool_]]]] = {
        kind: [] for kind in KINDS
    }
    for number in range(_TRIES * per_kind):
        board = _scene(rules, number)
        kind, answers = kind_of(rules, board)
        if kind and len(positions[kind]) < per_kind:
            positions[kind].append((board, answers))
        if all(len(rows) == per_kind for rows in positions.values()):
            break
    rows = [(KINDS.index(kind), *row) for kind in KINDS for row in positions[kind]]
    return TacticsSuite(
        boards=np.array([row[1] for row in rows], np.int8).reshape(-1, rules.cells),
        answers=np.array([row[2] for row in rows], np.bool_).reshape(-1, rules.cells),
        kinds=np.array([row[0] for row in rows], np.intp),
    )


def score(rules: BoardRules, evaluator: Evaluator, per_kind: int = EACH) -> dict[str, float]:
    """Return the share of positions whose likeliest move is correct, in all and for each kind;
    "loss" is the mean of -log of the policy's total for the correct moves.
    """
    tactics = suite(rules, per_kind)
    logits, _ = evaluator(tactics.boards)
    logits = np.where(tactics.boards == 0, logits.astype(np.float64), -np.inf)
    logits -= logits.max(axis=1, keepdims=True)
    policy = np.exp(logits)
    policy /= policy.sum(axis=1, keepdims=True)
    right = tactics.answers[np.arange(len(policy)), policy.argmax(axis=1)]
    mass = np.maximum((policy * tactics.answers).sum(axis=1), 1e-12)
    figures = {"loss": float(-np.log(mass).mean()), "tactics": float(right.mean())}
    for number, kind in enumerate(KINDS):
        if (tactics.kinds == number).any():
            figures[f"tactics_{kind}"] = float(right[tactics.kinds == number].mean())
    return figures


def _short_of(
    rules: BoardRules, boards: Boards, player: int, missing: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return (boards, windows) that have all but `missing` stones of `player`, no other stone."""
    stones = boards[:, windows(rules)]  # (B, W, win)
    player_stones = (stones == player).sum(axis=2, dtype=np.int8)
    other = (stones == -player).any(axis=2)
    board, window = np.nonzero((player_stones == rules.win - missing) & ~other)
    return board, window


def _scene(rules: BoardRules, number: int) -> NDArray[np.int8]:
    """Return a board with the beginning of a row and stones around it; both players have equally
    many stones, or the opponent (-1) has one more.
    """
    raw = iter(words(_SEED + rules.size * 64 + rules.win, number, 512).tolist())
    board = np.zeros(rules.cells, np.int8)
    owner = 1 if next(raw) % 2 else -1
    line: list[int] = []
    while not line:
        cell, direction = next(raw) % rules.cells, next(raw) % 8
        along = [cell, *rays(rules)[cell, direction].tolist()]
        line = along if along[-1] < rules.cells else []
    missing = 1 + next(raw) % 2
    for _ in range(missing):
        line.pop(next(raw) % len(line))
    board[line] = owner
    count_of_owner = rules.win - missing + next(raw) % 3
    count_of_other = count_of_owner + (next(raw) % 2) * owner
    for player, count in ((owner, count_of_owner), (-owner, count_of_other)):
        for _ in range(count - int((board == player).sum())):
            near = _near(rules, board)
            if len(near):
                board[near[next(raw) % len(near)]] = player
    return board


def _near(rules: BoardRules, board: NDArray[np.int8]) -> NDArray[np.intp]:
    """Return the empty cells within two of a stone."""
    stones = np.flatnonzero(board)
    around = rays(rules)[stones][:, :, :2].reshape(-1)
    cells = np.unique(around[around < rules.cells])
    near_cells: NDArray[np.intp] = cells[board[cells] == 0]
    return near_cells
