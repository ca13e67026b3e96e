"""Runs with experience in virtual time: machines play and learn, and one judge checks."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.simulate import loop
from coordinator.simulate.prediction import PlayFigures, Prediction, predict, prediction_text
from coordinator.simulate.scenario import from_table
from coordinator.simulate.simulation import SimulationResult, simulate
from shared.errors import InvalidRunFile

GAMES: dict[str, Any] = {
    "workload": "gomoku",
    "model": {"size": 5, "win": 4, "blocks": 1, "channels": 8},
    "task": {
        "local_steps": 10,
        "batch_size": 64,
        "options": {"games": 8, "window": 64, "window_min": 8, "chunk": 8, "match_every": 0},
    },
}
PROBLEMS: dict[str, Any] = {
    "workload": "rollouts",
    "model": {"n_layer": 1, "n_head": 1, "n_embd": 8},
    "task": {
        "local_steps": 2,
        "batch_size": 64,
        "by_speed": False,
        "options": {"problems": 8, "window_min": 8, "chunk": 8, "lag": 8},
    },
}
LINK = {"up_mbit": 1e4, "down_mbit": 1e4, "latency_ms": 1.0, "jitter": 0.0, "overhead_s": 0.0}
LEARNER = {"name": "learner", "roles": ["learn"], "steps_per_s": 10.0, **LINK}
PLAYER = {"name": "player", "roles": ["play"], "episodes_per_s": 1.0, **LINK, "jitter": 0.2}


def outcome(run: dict[str, Any] = GAMES, **more: Any) -> SimulationResult:
    table = {"hours": 0.03, "run": run, "workers": [LEARNER, {**PLAYER, "count": 2}], **more}
    return loop.run(simulate(from_table(table)))


def played(found: Prediction) -> PlayFigures:
    assert found.play is not None
    return found.play


def with_options(run: dict[str, Any], **options: Any) -> dict[str, Any]:
    return run | {"task": run["task"] | {"options": run["task"]["options"] | options}}


@pytest.mark.parametrize(("run", "unit"), [(GAMES, "game"), (PROBLEMS, "problem")])
def test_machines_that_play_set_the_pace_and_versions_follow(
    run: dict[str, Any], unit: str
) -> None:
    result = outcome(run, hours=0.05)
    found = predict(result)
    assert played(found).unit == unit
    assert played(found).per_hour == pytest.approx(7200, rel=0.05)  # two, one a second each
    assert "that play" in found.bottleneck
    # reuse x samples an hour / (steps x batch), of which an episode has 20 by default
    size = run["task"]["local_steps"] * run["task"]["batch_size"]
    taught = 7200 * 20 * (4.0 if unit == "game" else 2.0)
    assert found.versions_per_hour == pytest.approx(taught / size, rel=0.15)
    assert sum(trace.verdicts["accepted"] for trace in result.traces[1:]) > 40
    assert f"{unit}s per hour" in prediction_text(found)


def test_one_judge_bounds_many_players() -> None:
    many = {**PLAYER, "count": 8}
    slow = {"judge_s": 0.25}
    learner = {**LEARNER, "steps_per_s": 1000.0}
    run = with_options(GAMES, queue=100_000)
    found = predict(outcome(run, workers=[learner, many], server=slow, hours=0.008))
    assert played(found).per_hour == pytest.approx(4 * 3600, rel=0.05)
    assert played(found).judge_busy_share > 0.95
    assert found.bottleneck.startswith("the judge")
    assert found.cause == "judge"
    free = predict(outcome(run, workers=[learner, many], hours=0.015))
    assert played(free).per_hour == pytest.approx(8 * 3600, rel=0.05)
    assert played(free).judge_busy_share == 0


def test_a_learner_that_is_too_slow_holds_the_players_back() -> None:
    learner = {**LEARNER, "steps_per_s": 0.5}
    run = with_options(GAMES, queue=32)
    found = predict(outcome(run, workers=[learner, {**PLAYER, "count": 4}]))
    assert found.bottleneck.startswith("on machines that learn, the devices")
    assert played(found).per_hour < 0.5 * 4 * 3600
    assert next(row for row in found.machines if row.name == "learner").busy_share > 0.9


def test_the_same_seed_plays_the_same_and_another_one_does_not() -> None:
    workers = [LEARNER, {**PLAYER, "count": 3, "spread": 0.3, "jitter": 0.1, "lost_per_hour": 20.0}]
    one, two = (outcome(workers=workers, hours=0.012, seed=4) for _ in range(2))
    assert one.merged_at == two.merged_at
    assert [trace.segments for trace in one.traces] == [trace.segments for trace in two.traces]
    assert predict(one) == predict(two)
    assert outcome(workers=workers, hours=0.012, seed=5).merged_at != one.merged_at


def test_a_machine_that_vanishes_during_a_game_leaves_it_to_others() -> None:
    weak = {**PLAYER, "name": "weak", "lost_per_hour": 60.0, "back_after_minutes": 2.0}
    result = outcome(workers=[LEARNER, PLAYER, weak], hours=0.07)
    _, firm, lost = result.traces
    assert lost.seconds()["away"] > 100
    assert firm.verdicts["accepted"] > lost.verdicts["accepted"] > 0
    assert len(result.merged_at) > 5


@pytest.mark.parametrize("down_mbit", [1e4, 2e-3])
def test_long_tasks_go_on_with_newer_versions_and_all_their_answers_count(
    down_mbit: float,
) -> None:
    """A task takes minutes and a version seconds: machines hear of versions at their heartbeats, at
    least once a minute.
    """
    slow = {**PLAYER, "count": 10, "episodes_per_s": 0.05, "spread": 0.5, "down_mbit": down_mbit}
    run = with_options(PROBLEMS, reuse=8, lag=1)
    result = outcome(run, workers=[LEARNER, slow], hours=0.1)
    assert result.play is not None
    assert result.play.episodes == 8 * len(result.play.judged_at)
    assert len(result.merged_at) > 5
    assert 0 < played(predict(result)).behind <= played(predict(result)).behind_most


def test_two_roles_fit_one_machine() -> None:
    both = {**LEARNER, "name": "both", "roles": ["play", "learn"], "episodes_per_s": 1.0}
    found = predict(outcome(workers=[both]))
    assert played(found).per_hour > 1800
    assert found.versions > 3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"workers": [LEARNER]}, 'would play, .* add roles = \\["play"\\]'),
        ({"workers": [PLAYER]}, 'would learn, .* add roles = \\["learn"\\]'),
        ({"run": {"workload": "gpt"}, "workers": [PLAYER]}, "would train"),
        ({"workers": [{"episodes_per_s": 0}]}, "episodes_per_s"),
        ({"workers": [{"roles": ["judge"]}]}, "judge"),
        ({"workers": [{"roles": []}]}, "roles"),
        ({"server": {"judge_s": -1}}, "judge_s"),
    ],
)
def test_a_scenario_that_cannot_play_is_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRunFile, match=sentence):
        outcome(**change)
