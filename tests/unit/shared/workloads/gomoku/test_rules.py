"""The rules, held against an implementation that anybody can read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.workloads.games import cell_name
from shared.workloads.gomoku.rules import (
    BoardRules,
    IllegalMove,
    Position,
    drawing,
    empty,
    symmetries,
    wins,
)


class Naive:
    """A board as a dictionary; a win is looked for everywhere after each move."""

    def __init__(self, size: int, win: int) -> None:
        self.size, self.win = size, win
        self.stones: dict[tuple[int, int], int] = {}

    def winner(self) -> int:
        for (row, column), player in self.stones.items():
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                line = [(row + step * down, column + step * right) for step in range(self.win)]
                if all(self.stones.get(cell) == player for cell in line):
                    return player
        return 0


boards = st.integers(3, 8).flatmap(lambda size: st.tuples(st.just(size), st.integers(3, size)))


@given(boards, st.randoms(use_true_random=False))
def test_a_game_goes_as_the_naive_rules_say(shape: tuple[int, int], random: object) -> None:
    size, win = shape
    position, naive = Position(BoardRules(size, win)), Naive(size, win)
    cells = list(range(size * size))
    random.shuffle(cells)  # type: ignore[attr-defined]
    for move in cells:
        player = position.player
        assert player == (1 if len(position.moves) % 2 == 0 else -1)
        position.play(move)
        naive.stones[divmod(move, size)] = player
        assert position.winner == naive.winner()
        if position.winner:
            break
    assert position.over
    assert {divmod(int(c), size): int(position.board[0, c]) for c in position.moves} == naive.stones


@given(boards, st.integers(0, 7), st.integers(0, 2**32))
def test_a_turned_game_is_the_same_game(shape: tuple[int, int], turn: int, seed: int) -> None:
    rules = BoardRules(*shape)
    moves = np.random.default_rng(seed).permutation(rules.cells)
    there = np.argsort(symmetries(rules.size)[turn])
    one, other = Position(rules), Position(rules)
    for move in moves:
        one.play(int(move))
        other.play(int(there[move]))
        assert (one.winner, one.over) == (other.winner, other.over)
        if one.over:
            break
    turned = one.board[0, symmetries(rules.size)[turn]]
    assert np.array_equal(turned, other.board[0, :-1])


@pytest.mark.parametrize("size", [3, 4, 6, 15])
def test_there_are_eight_different_symmetries(size: int) -> None:
    rows = {tuple(row) for row in symmetries(size).tolist()}
    assert len(rows) == 8
    assert all(sorted(row) == list(range(size * size)) for row in rows)


LINES = {
    "along a row": [112, 113, 114, 115, 116],
    "along a column": [7, 22, 37, 52, 67],
    "down to the right": [0, 16, 32, 48, 64],
    "down to the left": [14, 28, 42, 56, 70],
    "in the last corner": [164, 179, 194, 209, 224],
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
@pytest.mark.parametrize("last", range(5))
def test_five_in_a_row_win_whichever_stone_comes_last(line: list[int], last: int) -> None:
    rules = BoardRules(15, 5)
    board = empty(rules, 1)
    board[0, line] = -1
    assert wins(rules, board, np.array([line[last]]))[0]
    board[0, line[(last + 1) % 5]] = 1
    assert not wins(rules, board, np.array([line[last]]))[0]


def test_six_in_a_row_win_too_and_rows_do_not_run_over_the_border() -> None:
    rules = BoardRules(15, 5)
    board = empty(rules, 1)
    board[0, [30, 31, 32, 34, 35, 33]] = 1
    assert wins(rules, board, np.array([33]))[0]
    board = empty(rules, 1)
    board[0, [12, 13, 14, 15, 16]] = 1  # the end of one row and the beginning of the next
    assert not wins(rules, board, np.array([14]))[0]


def test_a_full_board_without_a_row_is_a_draw() -> None:
    position = Position(BoardRules(3, 3), [0, 1, 2, 4, 3, 5, 7, 6, 8])
    assert position.over
    assert position.winner == 0


@pytest.mark.parametrize(
    ("moves", "sentence"),
    [
        ([0, 0], "move 2 goes to a3, where a stone lies"),
        ([9], "move 1 lies outside the board"),
        ([-1], "move 1 lies outside the board"),
        ([0, 3, 1, 4, 2, 5], "move 6 comes after the end of the game"),
    ],
)
def test_an_illegal_move_is_named(moves: list[int], sentence: str) -> None:
    with pytest.raises(IllegalMove, match=sentence):
        Position(BoardRules(3, 3), moves)


def test_cells_have_names() -> None:
    names = [cell_name(cell, 15) for cell in range(225)]
    assert len(set(names)) == 225
    assert (names[0], names[112], names[224]) == ("a15", "h8", "o1")


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
@pytest.mark.parametrize("last", range(5))
def test_the_row_that_won_is_known(line: list[int], last: int) -> None:
    mine, others = [*line[:last], *line[last + 1 :], line[last]], [1, 3, 5, 8]
    moves = [move for pair in zip(mine, others, strict=False) for move in pair]
    position = Position(BoardRules(15, 5), [*moves, mine[-1]])
    assert position.winner == 1
    assert position.row() == tuple(sorted(line))
    assert Position(BoardRules(15, 5), moves).row() == ()


def test_a_drawing_shows_who_lies_where() -> None:
    position = Position(BoardRules(3, 3), [4, 0])
    assert drawing(position.rules, position.board[0], last=0) == (
        " 3 o · ·\n 2 · X ·\n 1 · · ·\n   a b c"
    )
