"""Remedies of a bottleneck: changes of a scenario, each tried by a simulation of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from coordinator.rules.task_size import steps_that_learn
from coordinator.simulate.machine import State
from coordinator.simulate.scenario import Scenario

if TYPE_CHECKING:
    from coordinator.simulate.simulation import SimulationResult

MORE_DATA = 4
WIDE = ("float32", "bf16", "int8")  # codecs that int4 makes smaller

Cause = State | Literal["devices", "nobody", "judge", "players", "apart"]


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """Change of a scenario."""

    words: str  # the change, as an instruction
    scenario: Scenario


def remedies(outcome: SimulationResult, cause: Cause) -> Iterator[Remedy]:
    """Yield the changes that may help against the cause of idle machines, likeliest first."""
    for make in _REMEDIES.get(cause, ()):
        if (remedy := make(outcome)) is not None:
            yield remedy


def _with(scenario: Scenario, table: str, **values: object) -> Scenario:
    of_run = dict(scenario.run)
    of_run[table] = {**of_run.get(table, {}), **values}
    return msgspec.structs.replace(scenario, run=of_run)


def _by_speed(outcome: SimulationResult) -> Remedy | None:
    if outcome.about.file.task.by_speed:
        return None
    changed = _with(outcome.scenario, "task", by_speed=True)
    return Remedy(words="set [run.task] by_speed = true", scenario=changed)


def _overlap(outcome: SimulationResult) -> Remedy | None:
    plan = outcome.about.plan
    if plan.overlap or plan.update != "delta":
        return None
    changed = _with(outcome.scenario, "plan", overlap=True)
    words = "set [run.plan] overlap = true, which costs some of what each version learns"
    return Remedy(words=words, scenario=changed)


def _longer(outcome: SimulationResult) -> Remedy | None:
    """Return tasks of twice the steps, but no more than one update can learn from."""
    if outcome.about.plan.update != "delta":
        return None
    now = _steps(outcome)
    steps = min(2 * now, steps_that_learn(outcome.parameters))
    return _task_of(outcome, "raise", steps) if steps > now else None


def _shorter(outcome: SimulationResult) -> Remedy | None:
    steps = _steps(outcome) // 2
    task = outcome.about.file.task
    return _task_of(outcome, "lower", steps) if steps >= task.min_steps else None


def _task_of(outcome: SimulationResult, verb: str, steps: int) -> Remedy:
    changed = _with(outcome.scenario, "task", local_steps=steps)
    return Remedy(words=f"{verb} [run.task] local_steps to {steps}", scenario=changed)


def _steps(outcome: SimulationResult) -> int:
    """Return the steps of a task: of the run file, or the mean of the finished tasks."""
    done = sum(sum(trace.verdicts.values()) for trace in outcome.traces)
    mean = round(sum(trace.steps for trace in outcome.traces) / max(1, done))
    return outcome.about.file.task.local_steps or mean


def _smaller_codec(outcome: SimulationResult) -> Remedy | None:
    plan = outcome.about.plan
    if plan.codec not in WIDE or plan.update != "delta":
        return None
    changed = _with(outcome.scenario, "plan", codec="int4")
    return Remedy(words='set [run.plan] codec = "int4"', scenario=changed)


def _more_data(outcome: SimulationResult) -> Remedy:
    data = outcome.scenario.data
    larger = msgspec.structs.replace(data, items=MORE_DATA * data.items)
    changed = msgspec.structs.replace(outcome.scenario, data=larger)
    return Remedy(words=f"use {MORE_DATA} times the data ([data] items)", scenario=changed)


def _another_replica(outcome: SimulationResult) -> Remedy:
    server = outcome.scenario.server
    shared = msgspec.structs.replace(server, judge_s=server.judge_s / 2)
    changed = msgspec.structs.replace(outcome.scenario, server=shared)
    words = "start another replica of the server, whose judge does half of the work"
    return Remedy(words=words, scenario=changed)


def _longer_play(outcome: SimulationResult) -> Remedy | None:
    pacing = outcome.about.pacing
    return _option(outcome, f"{pacing.unit}s", 2 * pacing.episodes) if pacing else None


def _longer_queue(outcome: SimulationResult) -> Remedy | None:
    pacing = outcome.about.pacing
    return _option(outcome, "queue", 2 * pacing.replay.queue) if pacing else None


def _option(outcome: SimulationResult, name: str, value: int) -> Remedy:
    task = outcome.scenario.run.get("task", {})
    options = {**task.get("options", {}), name: value}
    changed = _with(outcome.scenario, "task", options=options)
    return Remedy(words=f"set [run.task.options] {name} = {value}", scenario=changed)


_REMEDIES: dict[Cause, tuple[Callable[[SimulationResult], Remedy | None], ...]] = {
    "wait": (_by_speed, _overlap),
    "down": (_longer, _overlap),
    "up": (_smaller_codec, _longer, _overlap),
    "claim": (_more_data, _shorter),
    "prepare": (_longer,),
    "judge": (_another_replica,),
    "players": (_longer_play,),
    "apart": (_longer_queue,),
}
