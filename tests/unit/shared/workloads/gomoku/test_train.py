"""Tasks of the gomoku workload: self-play, learning and matches, however often they are
interrupted.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shared.errors import BadRequest, InvalidFrame, InvalidRunFile
from shared.workloads.base import TrainSettings
from shared.workloads.experience import Actor
from shared.workloads.gomoku.config import GomokuConfig, GomokuOptions
from shared.workloads.gomoku.network import NetEvaluator, build
from shared.workloads.gomoku.play import PlayWork
from shared.workloads.gomoku.records import check, decode, positions, score
from shared.workloads.gomoku.rules import symmetries
from shared.workloads.gomoku.train import Batches
from shared.workloads.gomoku.verification import Bench, examine
from tests.support.workloads.tiny_gomoku import (
    WORKLOAD,
    Weights,
    Window,
    config,
    finish,
    job,
    lively,
    options,
    play,
)

CONFIG = GomokuConfig.from_dict(config())


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# --------------------------------------------------------------------------------------- self-play


@pytest.mark.slow
def test_the_same_task_plays_the_same_games_whatever_shares_the_batch(tmp_path: Path) -> None:
    weights = lively()
    first = play(weights, 8, tmp_path)
    again = play(weights, 8, tmp_path)
    narrow = play(weights, 8, tmp_path, options=options(slots=3))
    other = play(weights, 8, tmp_path, seed=6)
    assert first == again == narrow
    assert other != first


def test_a_restart_goes_on_with_every_game(tmp_path: Path) -> None:
    weights = lively()
    task = job("selfplay", config(), 6)
    straight = play(weights, 6, tmp_path)
    work = WORKLOAD.begin(task, weights, Window(tmp_path), "cpu")
    for batches in (1, 20, 70, 150):  # before the first move, and in the middle of later searches
        assert isinstance(work, PlayWork)
        work.advance_s = 0.0  # one batch at a time
        for _ in range(batches):
            work.advance()
        assert not work.done
        snapshot = work.snapshot()
        work = WORKLOAD.begin(task, lively(seed=2), Window(tmp_path), "cpu")
        work.restore(snapshot)
        work.suspend()
        work.resume()
    assert decode(finish(work)[0].experience) == straight


@pytest.mark.slow
def test_a_newer_version_plays_the_games_that_begin_after_it(tmp_path: Path) -> None:
    task = job("selfplay", config(), 12, options=options(slots=4, simulations=100))
    old, new = lively(1), lively(2)
    work = WORKLOAD.begin(task, old, Window(tmp_path), "cpu")
    assert isinstance(work, Actor)
    work.advance()
    work.swap(new, 3, "33")
    work.swap(old, 1, "11")  # an older one changes nothing
    records = decode(finish(work)[0].experience)
    by_version = [record.version for record in records]
    assert set(by_version) == {0, 3}
    assert by_version == sorted(by_version)
    players = {0: NetEvaluator(CONFIG, old, "cpu"), 3: NetEvaluator(CONFIG, new, "cpu")}
    bench = Bench(
        rules=CONFIG.rules,
        manner=GomokuOptions.from_dict(task.options).manner(),
        hashes={0: "00", 3: "33"},
        player=lambda version: players[version],
        seed=4,
    )
    assert examine(records, bench) == {}


def test_out_of_memory_asks_in_smaller_batches_and_changes_no_game(tmp_path: Path) -> None:
    weights = lively()
    work = WORKLOAD.begin(job("selfplay", config(), 4), weights, Window(tmp_path), "cpu")
    work.advance()
    batch = work.halve()
    assert work.halve() == batch // 2
    assert decode(finish(work)[0].experience) == play(weights, 4, tmp_path)
    while batch > 1:
        batch = work.halve()
    with pytest.raises(MemoryError):
        work.halve()


def test_progress_says_how_far_and_shows_a_board(tmp_path: Path) -> None:
    work = WORKLOAD.begin(job("selfplay", config(), 3), lively(), Window(tmp_path), "cpu")
    first = work.advance()
    assert (first.steps, first.samples) == (3, first.step)
    assert first.metrics["positions_per_s"] > 0
    assert "a b c d e f" in first.preview or work.done
    assert first.counted == "games"
    report, tensors = finish(work)
    assert (report.steps, report.samples, tensors) == (3, 3, {})
    with pytest.raises(RuntimeError):
        work.advance()


# ---------------------------------------------------------------------------------------- learning


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Window:
    path = tmp_path_factory.mktemp("window")
    found = Window(path)
    records = play(lively(), 24, path)
    found.seal(records[:16])
    found.seal(records[16:])
    return found


def test_it_learns_what_the_games_show(tmp_path: Path) -> None:
    weights, window = WORKLOAD.init(config(), 0), Window(tmp_path)
    shown = [
        msgspec.structs.replace(record, visits=[(at, 32) for at in record.moves[record.opening :]])
        for record in play(weights, 24, tmp_path)
    ]
    window.seal(shown)
    report, learnt = finish(WORKLOAD.begin(job("learn", config(), 60), weights, window, "cpu"))
    assert (report.steps, report.samples) == (60, 60 * 64)
    assert report.loss_first is not None
    assert report.loss_last is not None
    assert report.loss_last < report.loss_first - 0.08
    assert report.metrics["policy_loss"] + report.metrics["value_loss"] == pytest.approx(
        report.loss_last
    )
    assert not same(learnt, weights)


def test_the_loss_is_that_of_the_policy_and_the_value(window: Window) -> None:
    weights, task = lively(3), job("learn", config(), 1)
    work = WORKLOAD.begin(task, weights, window, "cpu")
    shown = finish(work)[0].loss_first
    found = positions(
        [r for chunk in range(2) for r in decode(window.chunk(chunk).read_bytes())], CONFIG.rules
    )
    boards, policies, results = Batches(found, 6, task).read(0, 0, 64)
    logits, values = build(CONFIG, weights, "cpu")(boards)
    masked = logits.masked_fill(boards != 0, -1e9)
    policy = -(policies * F.log_softmax(masked, dim=1)).sum(1).mean()
    expected = (policy + F.mse_loss(values, results)).item()
    assert shown == pytest.approx(expected, rel=1e-4)


def test_every_drawn_position_is_a_turned_one_of_the_window(window: Window) -> None:
    records = [r for chunk in range(2) for r in decode(window.chunk(chunk).read_bytes())]
    found = positions(records, CONFIG.rules)
    known = {
        (found.boards[row, turn].tobytes(), found.visits[row, turn].tobytes())
        for row in range(len(found))
        for turn in np.argsort(symmetries(6), axis=1)
    }
    boards, policies, _ = Batches(found, 6, job("learn", config(), 1)).read(0, 0, 64)
    visits = (policies * 32).round().numpy().astype(np.uint16)
    drawn = {(b.numpy().tobytes(), v.tobytes()) for b, v in zip(boards, visits, strict=True)}
    assert drawn <= known
    assert len(drawn) > 50


def test_the_micro_batch_changes_nothing_that_matters(window: Window) -> None:
    # Without Adam, which makes a whole step of a gradient that is nothing but rounding.
    plain = TrainSettings(optimizer="sgd", lr=0.02, warmup_steps=0)
    weights, task = lively(3), job("learn", config(), 4, train=plain)
    whole = finish(WORKLOAD.begin(task, weights, window, "cpu"))[1]
    work = WORKLOAD.begin(task, weights, window, "cpu")
    while work.halve() > 8:
        pass
    parts = finish(work)[1]
    for name, value in whole.items():
        assert torch.allclose(value, parts[name], atol=1e-5), name


def test_a_restart_between_steps_goes_on_exactly(window: Window) -> None:
    weights, task = lively(3), job("learn", config(), 6)
    straight = WORKLOAD.begin(task, weights, window, "cpu")
    learnt = finish(straight)[1]
    work = WORKLOAD.begin(task, weights, window, "cpu")
    for _ in range(3):
        work.advance()
    snapshot = work.snapshot()
    work = WORKLOAD.begin(task, weights, window, "cpu")
    work.restore(snapshot)
    work.suspend()
    work.resume()
    assert same(finish(work)[1], learnt)


def test_learners_with_other_seeds_learn_from_other_positions(window: Window) -> None:
    weights = lively(3)
    one = finish(WORKLOAD.begin(job("learn", config(), 2), weights, window, "cpu"))[1]
    two = finish(WORKLOAD.begin(job("learn", config(), 2, seed=9), weights, window, "cpu"))[1]
    assert not same(one, two)


def test_a_window_smaller_than_a_batch_is_named(tmp_path: Path) -> None:
    window = Window(tmp_path)
    window.seal(play(lively(), 1, tmp_path))
    task = job("learn", config(), 1, batch_size=1000, stop=1000)
    with pytest.raises(InvalidRunFile, match=r"holds \d+ positions, fewer than a batch of 1000"):
        WORKLOAD.begin(task, lively(), window, "cpu")


def test_a_loss_that_is_no_number_is_named(window: Window) -> None:
    task = job("learn", config(), 30, train=TrainSettings(optimizer="sgd", lr=1e12, clip_norm=0))
    work = WORKLOAD.begin(task, lively(), window, "cpu")
    with pytest.raises(InvalidRunFile, match="lower \\[train\\] lr"):
        finish(work)


def test_weights_of_another_network_are_refused(window: Window) -> None:
    other = lively(blocks=3)
    with pytest.raises(InvalidFrame, match=r"another network: blocks\.2\.one\.weight"):
        WORKLOAD.begin(job("learn", config(), 1), other, window, "cpu")
    with pytest.raises(InvalidFrame, match="another network"):
        WORKLOAD.begin(job("selfplay", config(), 1), other, window, "cpu")


# ----------------------------------------------------------------------------------------- matches


def test_a_match_of_a_version_against_itself_is_even(tmp_path: Path) -> None:
    weights = lively()
    window = Window(tmp_path, opponent=weights)
    task = job("evaluate", config(), 12)
    records = decode(finish(WORKLOAD.begin(task, weights, window, "cpu"))[0].experience)
    found = score(records)
    assert found.games == 12
    assert found.points == 0.5  # each opening is played with both colours
    for one, two in zip(records[0::2], records[1::2], strict=True):
        assert one.moves == two.moves
    manner = GomokuOptions.from_dict(task.options).match_manner()
    player = NetEvaluator(CONFIG, weights, "cpu")
    for record in records:
        check(record, CONFIG.rules, manner)
    bench = Bench(
        rules=CONFIG.rules,
        manner=manner,
        hashes={0: "00"},
        player=lambda _: player,
        seed=1,
    )
    assert examine(records, bench) == {}


def test_a_match_without_an_opponent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFrame, match="another version"):
        WORKLOAD.begin(job("evaluate", config(), 2), lively(), Window(tmp_path), "cpu")


def test_other_kinds_of_work_are_refused(tmp_path: Path) -> None:
    task = msgspec.structs.replace(job("learn", config(), 1), kind="train")
    with pytest.raises(BadRequest, match="no task of the kind train"):
        WORKLOAD.begin(task, lively(), Window(tmp_path), "cpu")
