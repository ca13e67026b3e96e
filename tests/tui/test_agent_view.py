"""The view is a fold over events: what is told is seen, in whatever order it comes, and nothing
grows without end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.protocol.contributions import Verdict
from tests.tui import scenes
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.control.status import Status, fold
from volunteer.tui.agent_view import (
    CURVES_MAX,
    ENTRIES_MAX,
    POINTS_MAX,
    AgentView,
    Point,
    add_past_loss,
    append_point,
    initial_view,
    insert_point,
    reduce,
    thin,
)
from volunteer.tui.status_line import activity, merge_sentence, outage_line
from volunteer.tui.text import UNICODE

NOW = scenes.NOW


def seen(told: Iterable[AnyEvent], view: AgentView | None = None) -> AgentView:
    view = view or AgentView()
    for event in told:
        view = reduce(view, event, fold(view.status, event))
    return view


def step(number: int, loss: float | None, task: int = 1, **metrics: float) -> events.Training:
    return events.Training(
        at=NOW,
        task=task,
        run="r",
        device="cpu",
        step=number,
        steps=100,
        samples=number,
        loss=loss,
        steps_per_s=2.0,
        tokens_per_s=0.0,
        eta_s=None,
        version=1,
        metrics=metrics,
    )


def test_a_curve_grows_with_the_steps_of_its_task() -> None:
    view = seen([step(1, 3.0), step(2, None), step(3, 2.5), step(1, 9.0, task=2)])
    first, second = view.curve(1), view.curve(2)
    assert first is not None
    assert second is not None
    assert first.points == ((1.0, 3.0), (3.0, 2.5))
    assert second.points == ((1.0, 9.0),)
    assert view.curve(None) is second
    assert view.curve(7) is None


def test_a_task_that_was_resumed_replaces_what_it_does_again() -> None:
    view = seen([step(1, 3.0), step(2, 2.0), step(3, 1.0), step(2, 2.2)])
    curve = view.curve(1)
    assert curve is not None
    assert curve.points == ((1.0, 3.0), (2.0, 2.2))


def test_a_generator_and_its_critic_have_a_curve_each() -> None:
    view = seen([step(1, 1.0, loss_g=1.2, loss_d=0.7)])
    curve = view.curve(1)
    assert curve is not None
    assert (curve.points, curve.second) == (((1.0, 1.2),), ((1.0, 0.7),))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300))
def test_thinning_keeps_the_extremes_and_the_newest(values: list[float]) -> None:
    points = tuple((float(i), value) for i, value in enumerate(values))
    kept = thin(points) if points else ()
    finite = [v for v in values if math.isfinite(v)]
    if finite:
        assert {min(finite), max(finite)} <= {v for _, v in kept}
    assert len(kept) <= len(points) // 2 + 2
    assert list(kept) == sorted(kept, key=lambda p: p[0])
    if points:
        assert kept[-1] is points[-1]


def test_no_curve_grows_without_end() -> None:
    points: tuple[Point, ...] = ()
    for number in range(3 * POINTS_MAX):
        points = append_point(points, (float(number), 1.0))
    assert len(points) <= POINTS_MAX
    assert points[-1][0] == 3 * POINTS_MAX - 1
    view = seen(step(1, 1.0, task=task) for task in range(3 * CURVES_MAX))
    assert len(view.curves) == CURVES_MAX


@given(st.permutations(range(12)))
def test_versions_may_be_told_in_any_order(order: list[int]) -> None:
    points: tuple[Point, ...] = ()
    for version in order:
        points = insert_point(points, (float(version), 10.0 - version))
    assert [p[0] for p in points] == [float(v) for v in range(12)]
    assert insert_point(points, (3.0, 99.0))[3] == (3.0, 99.0)


def test_merged_contributions_mark_the_model_and_samples_keep_first_and_newest() -> None:
    view = seen(scenes.filled())
    model = view.models["stdlib-gpt"]
    assert {3, 10, 17, 24, 31, 38} <= model.mine  # told with the versions
    assert {36, 40} <= model.mine  # told with the verdicts
    assert model.first_sample == (0, scenes.BEFORE)
    assert model.last_sample == (41, scenes.AFTER)
    rejected = Verdict(contribution=1, task=1, run="stdlib-gpt", state="rejected", version=41)
    assert 41 not in seen([events.Judged(verdict=rejected)], view).models["stdlib-gpt"].mine


def test_who_attaches_late_sees_what_the_snapshot_knows() -> None:
    status = Status()
    for event in scenes.filled():
        status = fold(status, event)
    late, early = initial_view(status), seen(scenes.filled())
    assert late.status == early.status
    assert late.run() == "stdlib-gpt"
    assert late.models["stdlib-gpt"].points == ((0.0, 8.318), (41.0, 3.412))
    assert {36, 38, 40} <= late.models["stdlib-gpt"].mine
    assert [type(e.event) for e in late.entries] == [events.Judged] * 7


def test_after_a_restart_the_run_is_the_one_that_was_helped_last() -> None:
    other = replace(scenes.RUN, name="five-in-a-row")
    helped = Verdict(contribution=1, task=1, run="five-in-a-row", state="merged", version=1)
    view = initial_view(Status(runs=(scenes.RUN, other), verdicts=(helped,)))
    assert view.run() == "five-in-a-row"


def test_what_was_before_is_in_the_curve_and_not_in_the_log() -> None:
    told = events.LossMeasured(at=NOW - 900, run="stdlib-gpt", version=7, loss=4.5, mine=1)
    view = add_past_loss(seen(scenes.started()), told)
    assert (7.0, 4.5) in view.models["stdlib-gpt"].points
    assert not [entry for entry in view.entries if isinstance(entry.event, events.LossMeasured)]


def test_the_log_keeps_what_is_worth_reading_and_no_more() -> None:
    view = seen(scenes.filled())
    told = {type(entry.event) for entry in view.entries}
    assert events.Training not in told
    assert {events.Started, events.Claimed, events.Judged} <= told
    view = seen((events.Notice(level="info", message=str(n)) for n in range(2 * ENTRIES_MAX)), view)
    assert len(view.entries) == ENTRIES_MAX
    ids = [entry.id for entry in view.entries]
    assert ids == list(range(ids[0], ids[0] + ENTRIES_MAX))


def test_reducing_changes_nothing_that_was_there() -> None:
    before = seen(scenes.started())
    copy = before
    seen(scenes.filled(), before)
    assert before == copy
    assert seen(scenes.filled()) == seen(scenes.filled())


def words(view: AgentView, now: float = NOW) -> tuple[str, str]:
    state = activity(view, now, UNICODE)
    return state.word, state.sentence


def test_the_state_always_says_why() -> None:
    assert words(AgentView())[0] == "starting"
    assert words(seen(scenes.filled())) == ("training", "stdlib-gpt · task 4711")
    assert words(seen(scenes.paused())) == ("paused", "on battery (64 %), until it is plugged in")
    assert words(seen(scenes.empty())) == (
        "waiting",
        "all tasks of stdlib-gpt are being done by others (0:12)",
    )
    assert words(seen(scenes.error()))[0] == "stopped"
    assert words(seen([*scenes.started(), events.Finishing(message="")]))[0] == "finished"
    measuring = events.BenchmarkProgress(stage="matrix products", done=0.3)
    assert words(seen([measuring])) == ("measuring", "matrix products")
    assert words(seen([measuring, events.Benchmarked(benchmark=scenes.BENCHMARK)]))[0] == "starting"


def test_a_pause_for_a_time_names_its_end() -> None:
    pause = events.Paused(device="", by="you", message="paused", until="22:00")
    assert words(seen([pause])) == ("paused", "by you until 22:00; press space to resume")


def test_only_the_device_that_is_measured_is_shown_as_measuring() -> None:
    view = seen([events.BenchmarkProgress(stage="step", done=0.3, device="cpu")])
    assert activity(view, NOW, UNICODE, "cpu").word == "measuring"
    assert activity(view, NOW, UNICODE, "cuda:0").word == "starting"


def test_a_result_that_cannot_be_sent_waits_and_no_address_takes_the_room_of_the_reason() -> None:
    away = events.Connection(
        online=False,
        message="https://train.example.org cannot be reached: connection refused; is the "
        "coordinator running?",
        retry_at=NOW + 30,
        queued=1,
    )
    sent = events.Uploading(task=4711, done_bytes=5, total_bytes=5)
    view = seen([*scenes.filled(), sent, away])
    assert words(view)[0] == "waiting"
    assert outage_line(view, NOW, 80) == (
        "cannot be reached: connection refused; next try in 30 s; 1 result queued"
    )


def test_a_task_that_waits_for_its_turn_does_not_hide_why() -> None:
    full = events.Idle(reason="disk_full", message="no space is left", until=NOW + 60)
    view = seen([*scenes.started(), *scenes.claimed(7, "cpu"), full])
    assert words(view) == ("waiting", "no space is left (1:00)")


def test_an_end_without_a_reason_says_how_to_leave() -> None:
    ended = events.Stopped(
        code=0, message="ended", tasks=0, credits_micro=0, sent_bytes=0, received_bytes=0, seconds=1
    )
    assert words(seen([*scenes.filled(), ended])) == (
        "stopped",
        "the volunteer has ended; q quits",
    )


def test_a_pause_by_hand_names_the_key_that_ends_it() -> None:
    pause = events.Paused(device="", by="you", message="paused", until="you resume")
    assert words(seen([*scenes.filled(), pause]))[1] == "by you; press space to resume"
    start = events.Paused(device="", by="you", message="press space to start", until="you start")
    assert words(seen([start]))[1] == "press space to start"
    both = [*scenes.paused(), pause, events.Resumed(device="")]
    assert words(seen(both))[0] == "training"


def test_the_merge_counts_down_and_says_what_it_waits_for() -> None:
    view = seen(
        events.RunProgress(at=NOW, beat=e.beat, message=e.message)
        for e in scenes.merging()
        if isinstance(e, events.RunProgress)
    )
    assert merge_sentence(view, "stdlib-gpt", NOW) == "next version in 2 contributions or 3:12"
    assert merge_sentence(view, "stdlib-gpt", NOW + 60) == "next version in 2 contributions or 2:12"
    assert (
        merge_sentence(view, "stdlib-gpt", NOW + 6000) == "next version in 2 contributions or 0:00"
    )
    assert merge_sentence(view, "unknown", NOW) == ""
    told = replace(scenes.RUN, merging="merging after 1 more contribution")
    before = seen([events.RunsListed(runs=(told,))])  # a heartbeat has not come yet
    assert merge_sentence(before, "stdlib-gpt", NOW) == "next version after 1 more contribution"


def test_offline_says_the_reason_the_next_try_and_what_still_works() -> None:
    view = seen(scenes.offline())
    said = outage_line(view, NOW, 200)
    assert said == (
        "Little Lab does not answer: connection refused; next try in 42 s; 2 results queued; "
        "training goes on"
    )
    assert outage_line(view, NOW + 12, 70).endswith("next try in 30 s")
    assert outage_line(seen(scenes.filled()), NOW, 200) == ""
    assert len(outage_line(view, NOW, 10)) <= 10
