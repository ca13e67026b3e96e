"""The gomoku workload as a whole: config, version 0, tactics, strength, and that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shared.errors import InvalidRunFile
from shared.workloads.base import RunDraft, TrainSettings, load
from shared.workloads.elo import MatchScore, Meeting, ratings
from shared.workloads.gomoku.config import GomokuConfig
from shared.workloads.gomoku.network import GomokuNet, NetEvaluator, build
from shared.workloads.gomoku.records import decode, score
from shared.workloads.gomoku.rules import BoardRules, Position
from shared.workloads.gomoku.tactics import EACH, KINDS, completing, forking, kind_of, suite
from shared.workloads.gomoku.workload import GomokuWorkload
from tests.support.tensor_samples import count
from tests.support.workloads.tiny_gomoku import (
    WORKLOAD,
    Window,
    config,
    finish,
    job,
    lively,
    options,
)

STEPS = WORKLOAD.defaults(RunDraft())["task"]["local_steps"]  # of a task, whose optimiser is fresh

# ------------------------------------------------------------------------------------------- model


def test_it_is_installed_under_its_name() -> None:
    assert isinstance(load("gomoku"), GomokuWorkload)


@pytest.mark.parametrize("changes", [{}, {"preset": "medium"}, {"blocks": 3, "channels": 8}])
def test_the_schema_is_that_of_the_model(changes: dict[str, Any]) -> None:
    model = WORKLOAD.config(changes, None)
    schema = WORKLOAD.schema(model)
    built = dict(GomokuNet(GomokuConfig.from_dict(model)).named_parameters())
    assert {s.name: s.shape for s in schema} == {n: tuple(p.shape) for n, p in built.items()}
    assert list(built) == [spec.name for spec in schema]
    assert WORKLOAD.config(model, None) == model


def test_presets_are_far_apart() -> None:
    sizes = [
        count(WORKLOAD.schema(WORKLOAD.config({"preset": preset}, None)))
        for preset in ("small", "medium", "large")
    ]
    assert sizes[0] < 1e5 < sizes[1] < 1e6 < sizes[2] < 5e6


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"sice": 15}, 'did you mean "size"'),
        ({"size": 19}, "a board of 19 is too large for the preset small"),
        ({"size": 26}, "size: expected a whole number of at most 25"),
        ({"win": 16}, "win must lie between 3 and 15"),
        ({"preset": "tiny"}, "preset: .tiny. is not one of .large., .medium., .small."),
        ({"channels": "many"}, "channels"),
    ],
)
def test_a_wrong_model_table_is_explained(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRunFile, match=sentence):
        WORKLOAD.config(table, None)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"simulation": 9}, 'did you mean "simulations"'),
        ({"noise": 2}, "noise: expected a number of at most 1"),
        ({"window_min": 99999}, "window_min must not be above window"),
    ],
)
def test_wrong_options_are_explained(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRunFile, match=sentence):
        WORKLOAD.options(table)


def test_version_0_knows_nothing_and_is_always_the_same() -> None:
    model = config()
    one, again, other = (WORKLOAD.init(model, seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["stem.weight"], other["stem.weight"])
    boards = np.zeros((2, 36), np.int8)
    boards[1, 5] = 1
    logits, values = NetEvaluator(GomokuConfig.from_dict(model), one, "cpu")(boards)
    assert np.ptp(logits) == 0
    assert not values.any()


def test_positions_are_judged_the_same_alone_and_in_a_batch() -> None:
    player = NetEvaluator(GomokuConfig.from_dict(config()), lively(), "cpu")
    boards = np.random.default_rng(0).integers(-1, 2, (300, 36)).astype(np.int8)
    logits, values = player(boards)
    for row in (0, 150, 299):
        alone = player(boards[row : row + 1])
        assert np.allclose(alone[0][0], logits[row], atol=1e-5)
        assert np.allclose(alone[1][0], values[row], atol=1e-5)


def test_gradients_are_those_of_the_layers(tmp_path: Path) -> None:
    weights = lively()
    model = build(GomokuConfig.from_dict(config()), weights, "cpu")
    logits, values = model(torch.zeros((3, 36), dtype=torch.int8))
    (logits.logsumexp(1).sum() + values.sum()).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not missing


# ----------------------------------------------------------------------------------------- tactics


def naive_completing(rules: BoardRules, moves: list[int], player: int) -> set[int]:
    found = set()
    for move in range(rules.cells):
        if move in moves:
            continue
        position = Position(rules, moves)
        if position.player != player:
            continue
        position.play(move)
        if position.winner == player:
            found.add(move)
    return found


def test_completing_moves_are_those_that_win() -> None:
    rules = BoardRules(6, 4)
    seen = 0
    for seed in range(60):
        moves = np.random.default_rng(seed).permutation(36)[: 8 + seed % 8].tolist()
        position = Position(rules)
        for move in moves:
            if not position.over:
                position.play(move)
        if position.over:
            continue
        board = position.board[:, :-1]
        found = set(np.flatnonzero(completing(rules, board, position.player)[0]).tolist())
        assert found == naive_completing(rules, position.moves, position.player)
        seen += bool(found)
    assert seen > 5


@pytest.mark.parametrize("rules", [BoardRules(6, 4), BoardRules(15, 5)], ids=str)
def test_answers_of_the_suite_hold(rules: BoardRules) -> None:
    found = suite(rules)
    assert np.bincount(found.kinds).tolist() == [EACH] * len(KINDS)
    for board, answers, kind in zip(found.boards, found.answers, found.kinds, strict=True):
        assert kind_of(rules, board)[0] == KINDS[kind]
        assert not (board[answers] != 0).any()
        assert int((board == 1).sum()) - int((board == -1).sum()) in (0, -1)
        for move in np.flatnonzero(answers):
            after = board.copy()
            after[move] = 1
            if KINDS[kind] == "attack":  # whatever the other does, the next move wins
                replies = np.flatnonzero(after == 0)
                boards = np.repeat(after[None], len(replies), axis=0)
                boards[np.arange(len(replies)), replies] = -1
                assert completing(rules, boards, 1).any(axis=1).all()
            if KINDS[kind] == "block":
                assert not completing(rules, after[None], -1).any()
            if KINDS[kind] == "defend":
                assert not forking(rules, after[None], -1).any()


def test_version_0_scores_like_somebody_who_guesses() -> None:
    model = config()
    found = WORKLOAD.evaluate(model, WORKLOAD.init(model, 0), None, 1.0, lambda: False)
    assert found["tactics"] < 0.25
    assert found["loss"] > 2
    assert found == WORKLOAD.evaluate(model, WORKLOAD.init(model, 0), None, 1.0, lambda: False)


# ---------------------------------------------------------------------------------------- strength


def test_ratings_come_from_all_games_together() -> None:
    def met(one: int, other: int, wins: int, losses: int, draws: int = 0) -> Meeting:
        return Meeting(
            one=one, other=other, score=MatchScore(wins=wins, draws=draws, losses=losses)
        )

    found = ratings([met(1, 0, 300, 100), met(2, 1, 300, 100)], anchor=0)
    assert found[0].elo == found[0].error == 0
    assert found[1].elo == pytest.approx(191, abs=12)  # 400 log10(3)
    assert found[2].elo == pytest.approx(382, abs=24)
    assert found[2].error > found[1].error > 20
    more = ratings([met(1, 0, 30, 10)], anchor=0)
    assert more[1].error > found[1].error
    assert ratings([met(1, 0, 8, 8, 16)], anchor=0)[1].elo == pytest.approx(0, abs=1e-6)


def test_ratings_stay_finite_and_leave_out_who_met_nobody() -> None:
    found = ratings(
        [
            Meeting(one=1, other=0, score=MatchScore(wins=100)),
            Meeting(one=8, other=7, score=MatchScore(wins=1)),
            Meeting(one=3, other=3, score=MatchScore(wins=1)),
        ],
        anchor=0,
    )
    assert set(found) == {0, 1}
    assert 400 < found[1].elo < 3000
    assert ratings([], anchor=0)[0].elo == 0


@pytest.mark.parametrize(
    ("won", "lost", "likelihood"), [(0, 0, 0.5), (5, 5, 0.5), (16, 0, 1.0), (12, 4, 0.977)]
)
def test_superiority_is_a_likelihood(won: int, lost: int, likelihood: float) -> None:
    found = MatchScore(wins=won, losses=lost, draws=3).superiority
    assert found == pytest.approx(likelihood, abs=2e-3)


# ---------------------------------------------------------------------------------------- learning


@pytest.mark.slow
def test_a_sample_is_a_game_that_people_can_read() -> None:
    shown = WORKLOAD.sample(config(), lively(), None, "", 3)
    assert shown.kind == "text"
    assert shown.text.startswith("1. ")
    assert "a b c d e f" in shown.text
    assert shown == WORKLOAD.sample(config(), lively(), None, "", 3)


@pytest.mark.slow
def test_it_becomes_stronger_than_version_0(tmp_path: Path) -> None:
    """Four rounds of self-play and learning on 6 x 6, four in a row, in tasks of the default
    length; `make experiments` has the long run.
    """
    model, how = config(channels=32), options(simulations=64, slots=48, opening_plies=4)
    first = WORKLOAD.init(model, 1)
    weights, window = first, Window(tmp_path, opponent=first)
    train = TrainSettings(lr=2e-3, warmup_steps=20, beta2=0.99, weight_decay=0.01)
    for turn in range(4):
        games = job("selfplay", model, 40, seed=turn, options=how)
        played = finish(WORKLOAD.begin(games, weights, window, "cpu"))[0].experience
        window.seal(decode(played))
        learn = job("learn", model, STEPS, seed=turn, train=train, global_step=STEPS * turn)
        learn = msgspec.structs.replace(learn, batch_size=128, stop=STEPS * 128)
        weights = finish(WORKLOAD.begin(learn, weights, window, "cpu"))[1]
    match = job("evaluate", model, 40, options=how)
    found = score(decode(finish(WORKLOAD.begin(match, weights, window, "cpu"))[0].experience))
    assert found.points >= 0.65, found
    before = WORKLOAD.evaluate(model, first, None, 1.0, lambda: False)
    after = WORKLOAD.evaluate(model, weights, None, 1.0, lambda: False)
    assert after["tactics"] > before["tactics"]
    assert after["loss"] < before["loss"]
