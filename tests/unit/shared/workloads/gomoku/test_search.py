"""The search: held against an exact solver, and indifferent to whatever shares its batch."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.workloads.gomoku.randomness import dirichlet, draw
from shared.workloads.gomoku.rules import (
    OUTSIDE,
    BoardRules,
    Boards,
    Position,
    empty,
    symmetries,
    wins,
)
from shared.workloads.gomoku.search import Evaluator, Search, SearchSettings
from tests.support.workloads.tiny_gomoku import opinion, scattered, uniform

GOLDEN_DRAWS = [4, 1, 1, 1, 1, 1, 1, 1, 4, 1, 1, 1]
GOLDEN_NOISE = [0.22180869, 0.1953264, 0.37875482, 0.20411009]


@cache
def solve(rules: BoardRules, cells: tuple[int, ...], player: int) -> int:
    """The value of a board for `player`, who is to move, by looking at everything."""
    if wins(rules, np.array([[*cells, OUTSIDE]] * len(cells), np.int8), np.arange(len(cells)))[
        [cell == -player for cell in cells]
    ].any():
        return -1
    free = [at for at, cell in enumerate(cells) if cell == 0]
    return max((-solve(rules, after(cells, at, player), -player) for at in free), default=0)


def after(cells: tuple[int, ...], move: int, player: int) -> tuple[int, ...]:
    return (*cells[:move], player, *cells[move + 1 :])


def is_best(position: Position, move: int) -> bool:
    """Return True if a move keeps the value of the position."""
    cells, player = tuple(position.board[0, :-1].tolist()), position.player
    worth = solve(position.rules, cells, player)
    return -solve(position.rules, after(cells, move, player), -player) == worth


def positions(rules: BoardRules, count: int, stones: range) -> list[Position]:
    found: list[Position] = []
    seed = 0
    while len(found) < count:
        seed += 1
        position = Position(rules)
        for move in scattered(rules, seed, stones[seed % len(stones)]):
            if not position.over:
                position.play(move)
        if not position.over:
            found.append(position)
    return found


def search(
    found: list[Position],
    simulations: int,
    evaluator: Evaluator = uniform,
    stir: NDArray[np.float32] | None = None,
    **settings: float,
) -> Search:
    how = SearchSettings(simulations=simulations, **settings)  # type: ignore[arg-type]
    done = Search(found[0].rules, how, len(found))
    done.start(
        np.concatenate([p.board for p in found]), np.array([p.player for p in found], np.int8), stir
    )
    done.run(evaluator)
    return done


@pytest.mark.parametrize(
    ("rules", "stones", "simulations"),
    [
        (BoardRules(3, 3), range(0, 7), 3000),
        (BoardRules(4, 3), range(7, 12), 2000),
        (BoardRules(4, 4), range(9, 14), 2000),
    ],
    ids=str,
)
def test_it_finds_the_moves_of_an_exact_solver(
    rules: BoardRules, stones: range, simulations: int
) -> None:
    found = positions(rules, 40, stones)
    visits = search(found, simulations).visits()
    wrong = [p.moves for p, row in zip(found, visits, strict=True) if not is_best(p, row.argmax())]
    assert not wrong


def test_a_won_game_is_known_to_be_won() -> None:
    position = Position(BoardRules(6, 4), [0, 6, 1, 7, 2, 8])
    done = search([position], 64)
    assert done.visits()[0].argmax() == 3
    assert done.values()[0] > 0.5
    position.play(35)  # misses it; now the other wins
    assert search([position], 64).visits()[0].argmax() in (9,)


@pytest.mark.parametrize("leaves", [1, 4, 7])
def test_every_simulation_is_a_visit_of_a_legal_move(leaves: int) -> None:
    found = positions(BoardRules(5, 4), 12, range(0, 20))
    visits = search(found, 50, opinion, leaves=leaves).visits()
    assert visits.sum(axis=1).tolist() == [50] * 12
    taken = np.concatenate([p.board[:, :-1] for p in found]) != 0
    assert not visits[taken].any()


@pytest.mark.parametrize("leaves", [1, 5])
def test_what_shares_the_batch_changes_nothing(leaves: int) -> None:
    found = positions(BoardRules(5, 4), 9, range(0, 20))
    together = search(found, 60, opinion, leaves=leaves)
    alone = [search([one], 60, opinion, leaves=leaves) for one in found]
    assert np.array_equal(together.visits(), np.concatenate([one.visits() for one in alone]))
    assert np.array_equal(together.values(), np.concatenate([one.values() for one in alone]))


def test_a_search_can_be_used_again() -> None:
    found = positions(BoardRules(5, 4), 4, range(0, 20))
    done = search(found, 40, opinion)
    first = done.visits()
    done.start(found[1].board, np.array([found[1].player], np.int8))
    done.run(opinion)
    assert np.array_equal(done.visits()[0], first[1])


@pytest.mark.parametrize("turn", range(8))
def test_a_turned_position_is_searched_the_same(turn: int) -> None:
    rules = BoardRules(5, 4)
    there = symmetries(5)[turn]
    back = np.argsort(there)

    def turned(boards: Boards) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        logits, values = opinion(boards[:, back])
        return logits[:, there], values

    plain = Position(rules, [12, 7, 6])
    other = Position(rules, [int(back[move]) for move in plain.moves])
    one = search([plain], 80, opinion).visits()[0]
    two = search([other], 80, turned).visits()[0]
    assert np.array_equal(one[there], two)


def test_several_leaves_at_once_search_nearly_as_well() -> None:
    found = positions(BoardRules(3, 3), 30, range(0, 6))
    visits = search(found, 3000, leaves=8).visits()
    wrong = [p.moves for p, row in zip(found, visits, strict=True) if not is_best(p, row.argmax())]
    assert not wrong


def test_noise_at_the_root_makes_searches_differ() -> None:
    rules = BoardRules(5, 4)
    legal = empty(rules, 1)[0, :-1] == 0
    stir = np.stack([dirichlet(seed, 0, legal) for seed in range(20)])
    found = [Position(rules)] * 20
    quiet = search(found, 50, opinion).visits()
    loud = search(found, 50, opinion, stir, noise=0.5).visits()
    assert (quiet == quiet[0]).all()
    assert len({row.tobytes() for row in loud}) > 10
    assert ((loud > 0).any(axis=0)).sum() > (quiet[0] > 0).sum()


def test_noise_is_a_distribution_over_the_legal_moves_with_the_right_spread() -> None:
    legal = np.ones(36, np.bool_)
    legal[:6] = False
    rows = np.stack([dirichlet(seed, 3, legal) for seed in range(2000)])
    assert rows[:, :6].max() == 0
    assert rows.sum(axis=1) == pytest.approx(1)
    assert rows[:, 6:].mean() == pytest.approx(1 / 30, rel=0.01)
    # The variance of a Dirichlet distribution whose 30 parameters add up to 10.
    assert rows[:, 6:].var() == pytest.approx((1 / 30) * (29 / 30) / 11, rel=0.05)


def test_chance_is_fixed_for_all_time() -> None:
    visits = np.array([0, 5, 0, 3, 2], np.int32)
    drawn = [draw(visits, seed, 0, 1) for seed in range(3000)]
    shares = np.bincount(drawn, minlength=5) / 3000
    assert shares == pytest.approx([0, 0.5, 0, 0.3, 0.2], abs=0.03)
    assert [draw(visits, 7, ply, 9) for ply in range(12)] == GOLDEN_DRAWS
    assert dirichlet(7, 0, np.ones(4, np.bool_)).tolist() == pytest.approx(GOLDEN_NOISE, rel=1e-5)


@pytest.mark.parametrize("ply", range(5))
def test_after_the_beginning_the_most_visited_move_is_made(ply: int) -> None:
    assert draw(np.array([1, 9, 9, 1], np.int32), 3, 5 + ply, 5) == 1
