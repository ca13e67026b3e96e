"""Advice of `coordinator simulate`: tried by a simulation of its own, or not given."""

from __future__ import annotations

import re
from typing import Any

import pytest

from coordinator.simulate import loop
from coordinator.simulate.prediction import Prediction, helpful_remedy, predict
from coordinator.simulate.remedies import remedies
from coordinator.simulate.scenario import from_table
from coordinator.simulate.simulation import Hooks, SimulationResult, simulate

MODEL = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 32}
DATA = {"items": 4_000_000, "vocab_size": 300, "chunk_bytes": 65536}
QUICK = {"steps_per_s": 1.0, "jitter": 0.0, "overhead_s": 0.0, "latency_ms": 10.0}
PLAN = {"preset": "fedavg", "quorum": 2}
TASK = {"local_steps": 20, "batch_size": 4}


def played(plan: dict[str, Any], task: dict[str, Any], **more: Any) -> SimulationResult:
    run = {"workload": "gpt", "model": MODEL, "plan": PLAN | plan, "task": TASK | task}
    table = {"hours": 0.05, "run": run, "data": DATA, "workers": [{"count": 2, **QUICK}], **more}
    return loop.run(simulate(from_table(table)))


SLOW = [{"name": "fast", **QUICK}, {"name": "slow", **QUICK, "steps_per_s": 0.2}]
THIN_UP = [{"count": 2, **QUICK, "up_mbit": 4.0, "down_mbit": 1000.0}]
THIN_DOWN = [{"count": 2, **QUICK, "up_mbit": 1000.0, "down_mbit": 4.0}]
LARGE = {"parameters": 10_000_000}
FEW = {"items": 60_000, "vocab_size": 300, "chunk_bytes": 65536}
STEADY = {"by_speed": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "task", "more", "key"),
    [
        ({"deadline_seconds": 3600}, STEADY, {"workers": SLOW, "hours": 0.1}, "by_speed"),
        ({}, {}, {"workers": THIN_UP, "model": LARGE}, "codec"),
        ({"codec": "int4"}, {}, {"workers": THIN_UP, "model": LARGE}, "local_steps"),
        ({}, {}, {"workers": THIN_DOWN, "model": LARGE}, "local_steps"),
    ],
)
def test_advice_changes_the_figure_that_it_names(
    plan: dict[str, Any], task: dict[str, Any], more: dict[str, Any], key: str
) -> None:
    outcome = played(plan, task, **more)
    before = predict(outcome)
    names: list[str] = []

    def hooks(remedy: str) -> Hooks:
        return Hooks(on_version=lambda head: names.append(remedy))

    advice = helpful_remedy(outcome, before, hooks)
    assert key in advice
    assert advice.startswith(names[-1])  # a person sees which change is being tried
    figures = re.search(r"at work (\d+)%, not (\d+)%", advice)
    assert figures is not None
    with_change, without = (int(figure) for figure in figures.groups())
    assert with_change > without == busy(before)


def busy(prediction: Prediction) -> int:
    return round(100 * (1 - prediction.device_idle_share))


def test_devices_that_are_the_limit_get_no_advice() -> None:
    outcome = played({}, {"local_steps": 60})
    assert helpful_remedy(outcome, predict(outcome), lambda remedy: Hooks()) == ""


def test_no_advice_asks_for_more_steps_than_learn() -> None:
    outcome = played({"codec": "int4", "overlap": True}, {"local_steps": 60}, workers=THIN_UP)
    assert not list(remedies(outcome, "up"))


@pytest.mark.slow
def test_goodput_counts_what_was_merged_of_what_machines_could_have_done_alone() -> None:
    steady = predict(played({}, {}))
    assert 0.85 < steady.goodput <= 1.0
    weak = [{"count": 4, **QUICK, "lost_per_hour": 30.0, "back_after_minutes": 0.2}]
    churned = predict(played({}, {}, workers=weak))
    assert churned.goodput < steady.goodput - 0.1
    assert churned.goodput < 1 - churned.device_idle_share  # work of vanished machines is lost
