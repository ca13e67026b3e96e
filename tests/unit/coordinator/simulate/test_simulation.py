"""`coordinator simulate`: the same services in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.cli.main import app
from coordinator.database import runs, versions
from coordinator.rules import task_size
from coordinator.services import Coordinator
from coordinator.simulate import loop
from coordinator.simulate.prediction import Prediction, predict, prediction_text
from coordinator.simulate.scenario import example, from_table, parse
from coordinator.simulate.simulation import Hooks, MergedHead, SimulationResult, simulate
from shared.errors import BadRequest, Internal, InvalidRunFile
from shared.tensors.frame import open_frame

RUN: dict[str, Any] = {
    "workload": "gpt",
    "model": {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 32},
    "task": {"local_steps": 60, "batch_size": 4},
    "plan": {"preset": "fedavg", "quorum": 2},
}
QUICK = {"steps_per_s": 1.0, "jitter": 0.0, "overhead_s": 0.0, "latency_ms": 10.0}
DATA = {"items": 4_000_000, "vocab_size": 300, "chunk_bytes": 65536}


def table(**more: Any) -> dict[str, Any]:
    return {"hours": 0.12, "run": RUN, "data": DATA, "workers": [{"count": 2, **QUICK}], **more}


def played(**more: Any) -> SimulationResult:
    return loop.run(simulate(from_table(table(**more))))


def predicted(**more: Any) -> Prediction:
    return predict(played(**more))


def test_two_machines_that_train_a_minute_a_task_make_sixty_versions_an_hour() -> None:
    found = predicted()
    assert found.versions_per_hour == pytest.approx(60, rel=0.03)
    assert found.contributions_per_version == 2
    assert found.device_idle_share < 0.03
    assert "devices" in found.bottleneck
    assert found.steps_per_hour == pytest.approx(7200, rel=0.2)


def test_a_model_too_large_to_move_about_is_played_by_a_small_one_and_its_bytes_are_counted() -> (
    None
):
    found = predicted(model={"parameters": 10_000_000}, server={"up_mbit": 1e6, "down_mbit": 1e6})
    # int8 with a scale for every 256: 1.016 bytes a parameter up; down whole versions of at most 4
    a_version = found.up_mb_per_hour / found.versions_per_hour
    assert a_version == pytest.approx(10.16, rel=0.1)
    assert found.parameters == 10_000_000


def test_a_shared_momentum_doubles_the_bytes_and_nothing_is_refused() -> None:
    train = {"train": {"lr": 0.05}}
    alone, shared = (
        predicted(run=RUN | train | {"model": RUN["model"] | {"shared_momentum": is_shared}})
        for is_shared in (False, True)
    )
    assert shared.versions_per_hour == pytest.approx(alone.versions_per_hour, rel=0.01)
    assert shared.contributions_per_version == alone.contributions_per_version == 2
    assert shared.up_mb_per_hour == pytest.approx(2 * alone.up_mb_per_hour, rel=0.1)
    assert shared.parameters == alone.parameters


@pytest.mark.parametrize(
    ("downlink", "megabytes"),
    [
        pytest.param("float32", 40.0, marks=pytest.mark.slow),
        pytest.param("chain", 10.1, marks=pytest.mark.slow),
        ("auto", 10.1),
    ],
)
def test_new_versions_come_down_by_the_way_that_is_the_fewest_bytes(
    downlink: str, megabytes: float
) -> None:
    run = RUN | {"plan": RUN["plan"] | {"downlink": downlink}}
    fast = {"up_mbit": 1e6, "down_mbit": 1e6}
    found = predicted(hours=0.5, run=run, model={"parameters": 10_000_000}, server=fast)
    assert found.down_mb_per_hour / found.versions_per_hour == pytest.approx(megabytes, rel=0.15)


def test_a_thin_uplink_is_named_as_what_limits_the_run() -> None:
    thin = {"count": 2, **QUICK, "up_mbit": 1.0, "down_mbit": 1000.0}
    found = predicted(model={"parameters": 10_000_000}, workers=[thin])
    assert found.bottleneck.startswith("the upload")
    assert found.device_idle_share > 0.5


@pytest.mark.slow
def test_waiting_for_a_slow_volunteer_is_named_and_speed_sized_tasks_mend_it() -> None:
    workers = [{"name": "fast", **QUICK}, {"name": "slow", **QUICK, "steps_per_s": 0.1}]
    plan = {"preset": "fedavg", "quorum": 2, "deadline_seconds": 3600}
    same = {"plan": plan, "task": {**RUN["task"], "by_speed": False}}
    waiting = predicted(workers=workers, run=RUN | same, hours=0.2)
    assert "slower volunteers" in waiting.bottleneck
    sized = RUN | {"task": {"target_seconds": 60.0, "batch_size": 4, "min_steps": 1}}
    mended = predicted(workers=workers, run=sized, hours=0.2)
    assert mended.device_idle_share < 0.1
    assert mended.versions_per_hour > 2 * waiting.versions_per_hour
    assert mended.contributions_per_version > 1.9
    unasked = predicted(workers=workers, run=RUN | {"plan": plan}, hours=0.6)
    # Of two volunteers the run's pace is the mean: tasks are sized halfway between them.
    assert unasked.versions_per_hour > 1.25 * waiting.versions_per_hour
    assert all(row.lost == 0 for row in unasked.machines)  # short tasks are no hostile ones


@pytest.mark.parametrize(
    "preset", ["async-diloco", pytest.param("fedbuff", marks=pytest.mark.slow)]
)
def test_asynchronous_merges_bring_a_crowd_into_step(preset: str) -> None:
    """Merged one by one, machines stay a round apart, and each trains from a base without the
    newest work of all others.
    """
    workers = [
        {"name": "fast", "count": 3, **QUICK},
        {"name": "slow", **QUICK, "steps_per_s": 0.2},
    ]
    task = {"local_steps": 60, "batch_size": 4, "min_steps": 1}
    run = RUN | {"plan": {"preset": preset}, "task": task}
    found = predicted(workers=workers, run=run, hours=0.25)
    assert found.contributions_per_version > 3.3
    assert found.device_idle_share < 0.1


@pytest.mark.parametrize("preset", ["async-diloco", "fedbuff"])
def test_two_pairs_of_four_machines_come_into_step(preset: str) -> None:
    workers = [
        {"name": "early", "count": 2, **QUICK},
        {"name": "late", "count": 2, **QUICK, "join_after_minutes": 0.4},
    ]
    task = {"local_steps": 60, "batch_size": 4, "min_steps": 1}
    run = RUN | {"plan": {"preset": preset}, "task": task}
    found = predicted(workers=workers, run=run, hours=0.15)
    assert found.contributions_per_version > 3
    assert found.device_idle_share < 0.15


@pytest.mark.slow
def test_a_machine_may_get_a_task_again_that_it_is_still_handing_in() -> None:
    """What came too late for its version goes back into the queue while its upload is still being
    answered.
    """
    plan = {"preset": "gradient-average", "codec": "float32"}
    run = RUN | {"task": {"local_steps": 1, "batch_size": 4}, "plan": plan}
    outcome = played(workers=[{"count": 4, **QUICK}], run=run, hours=0.02)
    assert len(outcome.merged_at) > 20


def test_an_update_that_is_long_on_its_way_outlives_the_sweeps_of_the_coordinator() -> None:
    """Files of today are older than anything in virtual time, and a machine's are its own."""
    slow = {"count": 2, **QUICK, "up_mbit": 0.2, "down_mbit": 1000.0}
    outcome = played(model={"parameters": 10_000_000}, workers=[slow], hours=0.5)
    assert len(outcome.merged_at) == 3  # after each eight minutes; a sweep comes every five
    assert sum(trace.verdicts["accepted"] for trace in outcome.traces) >= 3


def test_machines_that_wait_hand_in_one_task_for_each_version() -> None:
    fast, slow = {**QUICK, "waits": True}, {**QUICK, "waits": True, "steps_per_s": 0.1}
    plan = {"preset": "fedavg", "quorum": 4, "deadline_seconds": 36_000}
    workers = [{"name": "fast", "count": 3, **fast}, {"name": "slow", **slow}]
    run = RUN | {"plan": plan, "task": {**RUN["task"], "by_speed": False}}
    outcome = played(workers=workers, run=run, hours=1.0)
    assert len(outcome.merged_at) > 1
    assert outcome.merged == 4 * len(outcome.merged_at)
    assert {trace.verdicts["accepted"] // len(outcome.merged_at) for trace in outcome.traces} == {1}


def test_kinds_without_a_name_are_numbered_on() -> None:
    found = predicted(workers=[{"count": 2, **QUICK}, {**QUICK}, {**QUICK, "name": "old"}])
    names = [machine.name for machine in found.machines]
    assert names == ["volunteer-1", "volunteer-2", "volunteer-3", "old"]
    assert all(machine.steps for machine in found.machines)


def test_machines_that_vanish_lose_their_tasks_to_others() -> None:
    weak = {"name": "weak", **QUICK, "lost_per_hour": 40.0, "back_after_minutes": 2.0}
    outcome = played(workers=[{"name": "firm", **QUICK}, weak], hours=0.3)
    firm, lost = outcome.traces
    assert lost.seconds()["away"] > 60
    assert firm.verdicts["accepted"] > lost.verdicts["accepted"] > 0
    assert len(outcome.merged_at) > 5


def test_a_machine_comes_and_goes_when_the_scenario_says() -> None:
    guest = {"name": "guest", **QUICK, "join_after_minutes": 2.0, "leave_after_minutes": 5.0}
    outcome = played(workers=[{"count": 1, **QUICK}, guest])
    away = [(start, stop) for start, stop, state in outcome.traces[1].segments if state == "away"]
    assert away[0] == pytest.approx((0, 120), abs=1)
    assert outcome.traces[1].verdicts["accepted"] == 3


def test_the_same_seed_plays_the_same_and_another_one_does_not() -> None:
    workers = [{"count": 3, "steps_per_s": 0.5, "spread": 0.3, "lost_per_hour": 3.0}]
    one, two = (played(workers=workers, seed=4, hours=0.08) for _ in range(2))
    assert one.merged_at == two.merged_at
    assert [t.segments for t in one.traces] == [t.segments for t in two.traces]
    assert played(workers=workers, seed=5, hours=0.08).merged_at != one.merged_at


def test_a_run_that_reaches_its_end_ends_the_simulation() -> None:
    outcome = played(run=RUN | {"stop": {"versions": 3}})
    assert len(outcome.merged_at) == 3
    assert "version 3 of 3" in outcome.finished
    assert outcome.seconds < 300


def test_people_get_figures_and_a_line_for_each_machine() -> None:
    outcome = played()
    text = prediction_text(predict(outcome))
    assert "versions per hour" in text
    assert "bottleneck" in text
    assert len(text.partition("in vain\n")[2].splitlines()) == 2


@pytest.mark.parametrize(("quorum", "least"), [(1, 1), (2, 1), (2, 2)])
def test_people_are_warned_of_versions_that_are_one_members_alone(quorum: int, least: int) -> None:
    plan = RUN["plan"] | {"quorum": quorum, "min_contributions": least}
    text = prediction_text(
        predict(played(run=RUN | {"data": {"at": "members"}, "plan": plan}, hours=0.02))
    )
    assert ("one member's change alone" in text) == (least == 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"wrokers": []}, 'did you mean "workers"'),
        ({"workers": [{"steps_per_sec": 1}]}, 'did you mean "steps_per_s"'),
        ({"workers": []}, "at least 1 entry"),
        ({"run": 1}, "needs a table"),
        ({"server": {"up_mbit": 0}}, "up_mbit"),
    ],
)
def test_a_mistake_in_a_scenario_is_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRunFile, match=sentence):
        from_table(table(**change))


def test_a_scenario_may_name_a_run_file_and_change_some_of_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "mine"\nworkload = "gpt"\nseed = 9\n')
    found = parse('[run]\nfile = "run.toml"\nseed = 3\n', tmp_path)
    assert found.run == {"name": "mine", "workload": "gpt", "seed": 3}
    with pytest.raises(InvalidRunFile, match=r"other\.toml cannot be read"):
        parse('[run]\nfile = "other.toml"\n', tmp_path)


def test_the_command_prints_an_example_that_it_can_play(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app(["simulate", "--example"]) == 0
    assert capsys.readouterr().out == example()
    file = tmp_path / "scenario.toml"
    file.write_text(example())
    assert app(["simulate", str(file), "--hours", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"] > 0
    assert len(found["machines"]) == 4


def test_the_command_says_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(example())
    with pytest.raises(BadRequest, match="--example"):
        app(["simulate"])
    for hours in ("0", "-1"):
        with pytest.raises(BadRequest, match="--hours must be above 0"):
            app(["simulate", "--hours", hours, str(file)])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: x\n", "scenario.toml: line 1: this is YAML"),
        ('{"run": 1}', "scenario.toml: line 1: this is JSON"),
        ("[run]\nworkload = gpt\n", 'scenario.toml: line 2: a text stands in quotes: "gpt"'),
        ('name = "x"\n', "scenario.toml: a scenario needs a table"),
    ],
)
def test_a_file_that_is_no_scenario_is_named_with_its_fault(
    tmp_path: Path, text: str, sentence: str
) -> None:
    (tmp_path / "scenario.toml").write_text(text)
    with pytest.raises(InvalidRunFile) as refusal:
        app(["simulate", str(tmp_path / "scenario.toml")])
    assert sentence in str(refusal.value)


def test_virtual_time_jumps_and_a_deadlock_is_an_error() -> None:
    async def nap() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    assert loop.run(nap()) == pytest.approx(86_400, abs=1e-3)
    with pytest.raises(Internal, match="stop"):
        loop.run(stuck())


@pytest.mark.slow
def test_outer_momentum_steps_by_less_towards_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_size, "LONG", 24)
    plan = {"preset": "diloco", "quorum": 2, "shards": 2}
    found: list[np.ndarray[Any, Any]] = []

    def see(head: MergedHead) -> None:
        with open_frame(head.weights, head.about.schema) as frame:
            found.append(np.concatenate([frame.array(name).ravel() for name in frame]))

    run = RUN | {"plan": plan, "stop": {"versions": 24}}
    loop.run(simulate(from_table(table(run=run, hours=1.0)), Hooks(on_version=see)))
    steps = [float(np.linalg.norm(b - a)) for a, b in itertools.pairwise(found)]
    assert sum(steps[-2:]) < 0.6 * sum(steps[-10:-8])


def test_a_version_whose_weights_are_deleted_already_is_not_reported() -> None:
    reported: list[int] = []

    async def delete_weights(coordinator: Coordinator, run: str) -> None:
        row = await coordinator.db.read(lambda conn: runs.by_name(conn, run))

        async def delete_first() -> None:
            watch = coordinator.signals.watch("versions", f"run:{row.id}")
            while True:  # the simulation reads each new version after this task
                await watch.wait(600.0)
                new = await coordinator.db.read(lambda conn: versions.listing(conn, row.id, 0, 1))
                if new:
                    await coordinator.blobs.delete(new[0][0].published_sha256, "let go")
                    return

        deletions.append(asyncio.create_task(delete_first()))

    deletions: list[asyncio.Task[None]] = []
    hooks = Hooks(
        on_start=delete_weights, on_version=lambda head: reported.append(head.row.version)
    )
    run = RUN | {"stop": {"versions": 1}}
    outcome = loop.run(simulate(from_table(table(run=run)), hooks))
    assert deletions[0].done()
    assert outcome.merged == 2
    assert reported == []


HOME = {"up_mbit": 20.0, "down_mbit": 50.0}
GONE = {"lost_per_hour": 0.3, "back_after_minutes": 10.0}


def at_home(workers: list[dict[str, Any]], seed: int) -> Prediction:
    """Return the figures of 124 M parameters behind home lines, with every default."""
    return predicted(
        seed=seed,
        hours=2.5,
        run={"workload": "gpt"},
        model={"parameters": 124_000_000},
        data={"items": 100_000_000},
        server={"up_mbit": 1e4, "down_mbit": 1e4},
        workers=workers,
    )


@pytest.mark.slow
def test_machines_in_step_are_at_work_nine_tenths_of_the_time() -> None:
    prediction = at_home([{"count": 8, "steps_per_s": 1.0, **HOME}], seed=1)
    assert prediction.device_idle_share < 0.11


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_machines_that_come_and_go_come_into_step_again(seed: int) -> None:
    """A machine that came back in the middle of a round stayed a part of a round apart for ever;
    four fifths of the work was merged.
    """
    quick = {"name": "quick", "count": 5, "steps_per_s": 1.0, **HOME, **GONE}
    slow = {"name": "slow", "count": 3, "steps_per_s": 0.2, **HOME, **GONE}
    prediction = at_home([quick, slow], seed)
    assert prediction.goodput > 0.83
