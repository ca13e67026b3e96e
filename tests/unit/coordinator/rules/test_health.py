"""Verdict on a coordinator: alerts that stand, and what only the monitor says, worst first."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from msgspec.structs import replace

from coordinator.rules import health
from coordinator.rules.health import AlertKind, StandingAlert
from coordinator.rules.overview import (
    ContributionWindow,
    DatabaseFigures,
    DrawCounts,
    Flow,
    Level,
    Overview,
    ReplicaFigures,
    ReplicaLine,
    RunLine,
    Trouble,
)
from coordinator.rules.standstill_causes import HANDLING
from shared.protocol.base import Cause, Standstill
from shared.units import DAY_S

NOW = 1_800_000_000.0
GIB = 1 << 30
RUN = RunLine(
    name="gpt", state="running", workload="gpt", version=7, versions_an_hour=4.0, loss=2.0,
    started_at=NOW - 7200, head_at=NOW - 120, workers=2, pushed=Flow(), pulled=Flow(),
)  # fmt: skip
FIGURES = ReplicaFigures(
    where="https://house", disk_free=50.0 * GIB, disk_total=100.0 * GIB,
    requests=10_000, certificate_ends_at=NOW + 100 * DAY_S,
)  # fmt: skip
REPLICA = ReplicaLine(id="r1" * 8, started_at=NOW - 7200, beat_at=NOW - 5, figures=FIGURES)
WELL = Overview(
    at=NOW, server="house", runs=(RUN,), runs_total=1, tasks=(), failed=(), queues={}, merges=(),
    replicas=(REPLICA,), workers={"training": 2, "online": 1, "offline": 9},
    machines=(), volunteers={}, window=ContributionWindow(since=NOW - 3600, contributions=0),
    refusals=(), recompute=DrawCounts(), database=DatabaseFigures(kind="sqlite", bytes=1),
    backup_at=NOW - DAY_S,
)  # fmt: skip
NO_BACKUP = StandingAlert(
    kind="backup", about="gpt", message="no backup was ever made", todo="look", since=NOW,
    seen_at=NOW, said_at=NOW,
)  # fmt: skip


def seen(**changes: Any) -> Overview:
    return replace(WELL, **changes)


def run(**changes: Any) -> Overview:
    return seen(runs=(replace(RUN, **changes),))


def troubles(picture: Overview, *standing: StandingAlert) -> list[tuple[Level, str, str, str]]:
    _, found = health.judge(picture, standing)
    return [(each.level, each.subject, each.text, each.todo) for each in found]


def only(picture: Overview, *standing: StandingAlert) -> tuple[Level, str, str, str]:
    (found,) = troubles(picture, *standing)
    return found


def test_all_is_well() -> None:
    verdict, found = health.judge(WELL)
    assert found == ()
    assert verdict == Trouble(
        level="good",
        subject="",
        text="all is well: 3 workers on 1 running run, a version 2:00 min ago",
    )


@pytest.mark.parametrize(
    ("picture", "says"),
    [
        (seen(workers={}), "all is well: 0 workers on 1 running run, a version 2:00 min ago"),
        (run(version=0), "all is well: 3 workers on 1 running run"),
        (run(version=1), "all is well: 3 workers on 1 running run, a version 2:00 min ago"),
        (
            seen(runs=(RUN, replace(RUN, name="b", head_at=NOW - 60), replace(RUN, state="draft"))),
            "all is well: 3 workers on 2 running runs, a version 1:00 min ago",
        ),
        (
            seen(runs=(RUN, replace(RUN, name="b", head_at=None))),
            "all is well: 3 workers on 2 running runs, a version 2:00 min ago",
        ),
    ],
)
def test_what_goes_well_is_said_in_figures(picture: Overview, says: str) -> None:
    assert health.judge(picture)[0].text == says


def test_the_verdict_is_the_worst_and_counts_the_others() -> None:
    picture = replace(run(failed=2), queues={"verdicts": 201})
    verdict, found = health.judge(picture, (NO_BACKUP,))
    assert [(each.level, each.subject) for each in found] == [
        ("bad", "backup"),
        ("watch", "verdicts"),
        ("watch", "gpt"),
    ]
    assert verdict.level == "bad"
    assert verdict.subject == ""
    assert verdict.text == "backup: no backup was ever made (and 2 more)"
    assert verdict.todo == found[0].todo == "look"
    assert health.judge(WELL, (NO_BACKUP,))[0].text == "backup: no backup was ever made"
    bare = health.judge(seen(database=DatabaseFigures(kind="sqlite", bytes=1, failed="full")))[0]
    assert bare == Trouble(level="bad", subject="", text="database: full")


@pytest.mark.parametrize("kind", sorted({*get_args(AlertKind)} - health.OF_RUNS))
def test_each_alert_that_stands_is_a_trouble(kind: AlertKind) -> None:
    for level in ("watch", "bad"):
        assert only(WELL, replace(NO_BACKUP, kind=kind, level=level))[0] == level
    _, subject, text, todo = only(WELL, replace(NO_BACKUP, kind=kind))
    assert subject == kind
    assert (text, todo) == (NO_BACKUP.message, NO_BACKUP.todo)
    old = replace(WELL, replicas=())  # nobody looks any more
    assert [each[1] for each in troubles(old, replace(NO_BACKUP, kind=kind))] == ["server"]


def test_a_run_that_stands_still_comes_before_what_stops_nothing_yet() -> None:
    still = Standstill(cause=Cause.NOBODY, message="nobody is here", todo="invite somebody")
    old_backup = replace(NO_BACKUP, level="watch")
    verdict, troubles = health.judge(run(standstill=still), (old_backup,))
    assert verdict.text == "gpt: nobody is here (and 1 more)"
    assert [trouble.subject for trouble in troubles] == ["gpt", "backup"]


@pytest.mark.parametrize(
    ("ahead_s", "said"), [(7200.0, "2:00 h ahead of"), (-90.0, "1:30 min behind"), (59.0, "")]
)
def test_a_clock_that_was_ahead_is_said(ahead_s: float, said: str) -> None:
    times = DatabaseFigures(kind="sqlite", bytes=1, ahead_s=ahead_s)
    _, found = health.judge(replace(WELL, database=times))
    assert [each.subject for each in found] == (["clock"] if said else [])
    assert all(said in each.text for each in found)


# ----------------------------------------------------------------------------------------- servers


def test_no_server_runs() -> None:
    todo = "start it with `coordinator serve`"
    assert only(seen(replicas=())) == ("bad", "server", "no server is running", todo)
    silent = "no server is running, the last one was seen 5:00 min ago"
    older = replace(REPLICA, beat_at=NOW - 900)
    newer = replace(REPLICA, beat_at=NOW - 300)
    assert only(seen(replicas=(older, newer))) == ("bad", "server", silent, todo)


def test_silence_on_a_full_disk_is_the_disks() -> None:
    closed = Standstill(cause=Cause.CLOSED, message="accepts nothing new: 1 kB free", todo="free")
    full = replace(run(standstill=closed), replicas=(replace(REPLICA, beat_at=NOW - 300),))
    assert only(full) == ("bad", "server", closed.message, closed.todo)


def test_one_server_of_two_is_silent() -> None:
    other = ReplicaLine(id="0123456789ab", started_at=0.0, beat_at=NOW - 21, figures=FIGURES)
    assert troubles(seen(replicas=(REPLICA, other))) == []  # that is an alert
    just = replace(other, beat_at=NOW - 20)
    assert health.alive(just, NOW)
    assert not health.alive(other, NOW)


# ---------------------------------------------------------------------------------------- database


def test_a_database_that_failed() -> None:
    failed = DatabaseFigures(kind="sqlite", bytes=1, failed="the disk is gone")
    assert only(seen(database=failed)) == ("bad", "database", "the disk is gone", "")


# -------------------------------------------------------------------------------------------- work


@pytest.mark.parametrize(
    ("states", "todo"),
    [
        ((), "`coordinator run create --example` makes one"),
        (("completed",), "`coordinator run create --example` makes one"),
        (("draft", "draft"), "`coordinator run start run-0` begins"),
        (("draft", "paused"), "`coordinator run resume run-1` hands out its tasks again"),
    ],
)
def test_no_run_is_running(states: tuple[str, ...], todo: str) -> None:
    runs = tuple(replace(RUN, name=f"run-{n}", state=state) for n, state in enumerate(states))
    assert only(seen(runs=runs)) == ("watch", "runs", "no run is running", todo)


def test_contributions_wait_for_their_verdicts() -> None:
    assert troubles(seen(queues={"verdicts": 200, "other": 900})) == []
    assert only(seen(queues={"verdicts": 201})) == (
        "watch", "verdicts", "201 contributions wait for a verdict",
        "the server has too few cores for its checks: lower `[trust]` rates, or add some",
    )  # fmt: skip


def test_tasks_that_failed_for_good() -> None:
    todo = (
        "`coordinator task list --failed` shows why, `coordinator task requeue --all` tries again"
    )
    assert only(run(failed=1)) == ("watch", "gpt", "1 task failed for good", todo)
    assert troubles(run(failed=2, state="paused"))[-1][2] == "2 tasks failed for good"
    assert [each[1] for each in troubles(run(failed=2, state="completed"))] == ["runs"]


@pytest.mark.parametrize("cause", Cause)
def test_a_standstill_is_the_trouble_of_its_run_once(cause: Cause) -> None:
    still = Standstill(cause=cause, message="it stands", todo="push")
    level = HANDLING[cause].level
    said = [] if level == "good" else [(level, "gpt", "it stands", "push")]
    alert = replace(NO_BACKUP, kind="standstill", message="gpt does not go on: it stands")
    assert troubles(run(standstill=still)) == said
    assert troubles(run(standstill=still), alert) == said
    unserved = replace(run(standstill=still), replicas=())
    assert [subject for _, subject, _, _ in troubles(unserved)] == ["server"]
