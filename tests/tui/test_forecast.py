"""Forecasts come from the work of this machine as soon as there are three tasks of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from msgspec.structs import replace

from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import RunBeat
from shared.protocol.listings import LeaderRow
from tests.tui import scenes
from volunteer.control import events
from volunteer.control.event_sentences import words
from volunteer.control.events import AnyEvent
from volunteer.control.model_step import ModelStep
from volunteer.control.shortage import Shortage, memory_properties
from volunteer.control.status import Status, fold
from volunteer.tui.agent_view import AgentView
from volunteer.tui.run_estimate import estimate
from volunteer.tui.screens.ranking import place_line
from volunteer.tui.widgets.panel import Scene

GUESS = 3600 / (scenes.RUN.step_flops / scenes.BENCHMARK.step_flops)  # credits an hour
PERIOD_S, TRAIN_S = 300.0, 250.0  # from the end of a task to the end of the next; of it training


def folded(told: Iterable[AnyEvent], status: Status | None = None) -> Status:
    status = status or Status()
    for event in told:
        status = fold(status, event)
    return status


def worked(tasks: int, *, pause_after: int = 0) -> Status:
    """Return the status after some tasks of 50 steps, each paid 50 credits."""
    status, now = folded(scenes.started()), scenes.NOW
    for number in range(1, tasks + 1):
        now += PERIOD_S
        trained = events.Trained(
            at=now,
            task=number,
            run=scenes.RUN.name,
            steps=50,
            samples=800,
            loss_first=None,
            loss_last=None,
            train_s=TRAIN_S,
        )
        status = folded((*scenes.claimed(number), trained), status)
        if number == pause_after:
            now += 7200.0
            stop = events.Paused(at=now - 7100, device="", by="you", message="by you")
            status = folded((stop, events.Resumed(at=now, device="")), status)
    return status


def test_a_real_step_of_the_model_counts_more_than_the_benchmark_until_three_tasks() -> None:
    step = ModelStep(
        run=scenes.RUN.name,
        device=scenes.CPU.id,
        key="",
        step_s=0.5,
        steps=3,
        peak_bytes=0,
        micro_batch=4,
        batch_size=16,
        halved=False,
        at=scenes.NOW,
    )
    told = events.StepMeasured(at=scenes.NOW, step=step)
    able = estimate(scenes.RUN, folded([told], worked(2)), ("gpt",))
    assert able.step_s == 0.5
    assert able.credits_per_hour == pytest.approx(scenes.RUN.credits_per_step * 7200)
    assert able.basis == "its first steps here"
    assert estimate(scenes.RUN, folded([told], worked(3)), ("gpt",)).tasks == 3


def test_the_benchmark_counts_until_three_tasks_were_trained() -> None:
    for tasks in range(3):
        able = estimate(scenes.RUN, worked(tasks), ("gpt",))
        assert able.credits_per_hour == pytest.approx(GUESS)
        assert able.basis == "estimate"


@pytest.mark.parametrize("tasks", [4, 12, 40])
def test_then_the_last_tasks_of_this_machine_do(tasks: int) -> None:
    able = estimate(scenes.RUN, worked(tasks), ("gpt",))
    assert able.credits_per_hour == pytest.approx(50 * 3600 / PERIOD_S, rel=0.2)
    assert able.step_s == pytest.approx(TRAIN_S / 50)
    assert able.basis == f"your last {min(tasks, 20)} tasks"


def test_a_pause_is_no_time_of_a_task() -> None:
    able = estimate(scenes.RUN, worked(8, pause_after=4), ("gpt",))
    assert able.credits_per_hour == pytest.approx(50 * 3600 / PERIOD_S, rel=0.2)


def test_another_run_keeps_its_guess() -> None:
    other = replace(scenes.RUN, name="other")
    assert estimate(other, worked(8), ("gpt",)).basis == "estimate"


def test_the_share_of_memory_that_the_owner_lends_is_the_limit() -> None:
    lent = events.DevicesFound(devices=(scenes.CPU,), lent_bytes={"cpu": 500_000_000})
    able = estimate(scenes.RUN, folded((*scenes.started(), lent)), ("gpt",))
    assert not able.fits
    assert "a task may use 500 MB here" in able.sentence


@pytest.mark.parametrize(
    ("host_bytes", "streamed_bytes", "fits"),
    [
        (64_000_000_000, 2_000_000_000, True),
        (8_000_000_000, 2_000_000_000, False),
        (64_000_000_000, 0, False),
        (64_000_000_000, 20_000_000_000, False),
    ],
)
def test_a_card_streams_a_model_that_the_memory_of_the_host_holds(
    host_bytes: int, streamed_bytes: int, fits: bool
) -> None:
    run = replace(scenes.RUN, memory_bytes=22_000_000_000, streamed_bytes=streamed_bytes)
    lent = {scenes.GPU.id: scenes.GPU.memory_bytes}
    card = events.DevicesFound(devices=(scenes.GPU,), lent_bytes=lent, host_bytes=host_bytes)
    assert estimate(run, folded((*scenes.started(), card)), ("gpt",)).fits is fits


def test_a_run_that_ran_out_of_memory_here_is_none_for_this_device() -> None:
    short = Shortage(
        run=scenes.RUN.name,
        device=scenes.CPU.id,
        model=memory_properties(scenes.RUN),
        torch="2.9",
        needed_bytes=40_000_000_000,
        had_bytes=scenes.CPU.memory_bytes,
        fitted=False,
        at=scenes.NOW,
    )
    told = events.ShortOfMemory(at=scenes.NOW, shortage=short)
    able = estimate(scenes.RUN, folded((*scenes.started(), told)), ("gpt",), scenes.CPU.id)
    assert not able.fits
    assert "needs more than 40 GB of memory, and cpu has 33.5 GB for it" in able.sentence
    assert words(told) == able.sentence


def test_the_next_place_says_when_it_is_reached() -> None:
    status = replace(worked(8), me=scenes.ME)
    scene = Scene(view=AgentView(status=status), now=scenes.NOW)
    mine = leader("ada", 2, 1_240_500_000, me=True)
    line = place_line((leader("bob", 1, 1_840_500_000), mine), scene, 90)
    assert "600.00 to the next place (about " in "".join(text for text, _ in line)


def leader(name: str, rank: int, micro: int, *, me: bool = False) -> LeaderRow:
    return LeaderRow(
        rank=rank, nickname=name, earned_micro=micro, accepted=1, device_s=1.0, workers=1, me=me
    )


# Tasks of self-play as one machine did them: kind, steps, credits as claimed and as paid, seconds.
RECORDED = (
    ("selfplay", 16, 2.55, 2.23, 1.31),
    ("selfplay", 16, 2.55, 2.08, 1.48),
    ("selfplay", 16, 2.55, 1.62, 1.20),
    ("selfplay", 16, 2.55, 1.92, 1.20),
    ("selfplay", 16, 2.55, 2.28, 1.38),
    ("learn", 40, 4.24, 4.24, 1.03),
    ("selfplay", 16, 2.55, 2.28, 1.23),
    ("selfplay", 16, 2.55, 2.05, 1.08),
    ("selfplay", 16, 2.55, 1.65, 1.51),
    ("selfplay", 16, 2.55, 1.92, 1.38),
    ("learn", 40, 4.24, 4.24, 1.27),
    ("evaluate", 16, 2.55, 2.50, 2.36),
    ("selfplay", 16, 2.55, 2.30, 2.31),
    ("selfplay", 16, 2.55, 2.07, 1.22),
    ("selfplay", 16, 2.55, 2.12, 1.32),
    ("selfplay", 16, 2.55, 2.12, 3.30),
    ("selfplay", 16, 2.55, 2.21, 1.18),
    ("learn", 40, 4.24, 4.24, 1.27),
)
PER_STEP = 4.24 / 40  # credits


def played(tasks: Sequence[tuple[str, int, float, float, float]]) -> Status:
    """Return the status after tasks of a run of games; those that pay nothing are not judged."""
    info = replace(scenes.RUN, credits_per_step=PER_STEP, step_flops=1.06e9)
    speed = replace(scenes.BENCHMARK, step_flops=37.3e9)
    beat = RunBeat(
        run=info.name,
        state="running",
        version=4,
        loss=2.0,
        needs=1,
        merge_in_s=None,
        workers=1,
    )
    told: list[AnyEvent] = [
        *scenes.started(),
        events.RunsListed(runs=(info,)),
        events.Benchmarked(benchmark=speed),
        events.RunProgress(beat=beat, message=""),
    ]
    now = scenes.NOW
    for number, (kind, steps, price, paid, seconds) in enumerate(tasks, start=1):
        now += seconds
        told += [
            events.Claimed(
                task=number,
                attempt=1,
                run=info.name,
                workload="gomoku",
                device="cpu",
                steps=steps,
                samples=steps,
                price_micro=round(price * 1e6),
                finish_by=now + 60,
                kind=kind,
            ),
            events.Trained(
                at=now,
                task=number,
                run=info.name,
                steps=steps,
                samples=steps,
                loss_first=None,
                loss_last=None,
                train_s=seconds,
            ),
        ]
        if paid:
            verdict = Verdict(
                contribution=number,
                task=number,
                run=info.name,
                state="accepted",
                credits_micro=round(paid * 1e6),
                at=now,
            )
            told.append(events.Judged(verdict=verdict))
    return folded(told)


def promised(tasks: Sequence[tuple[str, int, float, float, float]]) -> float:
    status = played(tasks)
    return estimate(status.runs[0], status, ("gpt", "gomoku")).credits_per_hour or 0.0


CAME = 3600 * sum(t[3] for t in RECORDED) / sum(t[4] for t in RECORDED)


@pytest.mark.parametrize("first", range(len(RECORDED)))
def test_a_few_tasks_of_a_run_of_games_are_no_forecast(first: int) -> None:
    """From any of the recorded tasks on, what is forecast is an estimate, or near what came."""
    stream = RECORDED[first:] + RECORDED[:first]
    for tasks in range(1, len(stream) + 1):
        status = played(stream[:tasks])
        able = estimate(status.runs[0], status, ("gpt", "gomoku"))
        if able.tasks:
            assert able.credits_per_hour == pytest.approx(CAME, rel=0.35), tasks
        assert bool(able.tasks) == (tasks >= 8)


def test_later_what_was_paid_counts_and_no_plan() -> None:
    assert promised(RECORDED) == pytest.approx(CAME, rel=0.01)


def test_a_task_that_waited_says_little_among_three() -> None:
    status = worked(3)
    slow = replace(status.work[1], seconds=4 * PERIOD_S)
    disturbed = replace(status, work=(status.work[0], slow, status.work[2]))
    able = estimate(scenes.RUN, disturbed, ("gpt",))
    assert able.credits_per_hour == pytest.approx(50 * 3600 / PERIOD_S, rel=0.01)
