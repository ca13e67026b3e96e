"""Verdict on a coordinator: each trouble from its bound on, in words, the worst first."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.rules import health
from coordinator.rules.overview import (
    CheckCounts,
    ContributionWindow,
    DatabaseFigures,
    Flow,
    Level,
    MergeLine,
    Overview,
    RefusalCount,
    ReplicaFigures,
    ReplicaLine,
    RunLine,
    Trouble,
)
from coordinator.rules.thresholds import Thresholds
from shared.units import DAY_S

NOW = 1_800_000_000.0
GIB = 1 << 30
RUN = RunLine(
    name="gpt", state="running", workload="gpt", version=7, versions_an_hour=4.0, loss=2.0,
    started_at=NOW - 7200, head_at=NOW - 120, workers=2, pushed=Flow(), pulled=Flow(),
)  # fmt: skip
FIGURES = ReplicaFigures(
    where="https://house", disk_free=50.0 * GIB, disk_total=100.0 * GIB, disk_floor=1.0 * GIB,
    requests=10_000, certificate_ends_at=NOW + 100 * DAY_S,
)  # fmt: skip
REPLICA = ReplicaLine(id="r1" * 8, started_at=NOW - 7200, beat_at=NOW - 5, figures=FIGURES)
WELL = Overview(
    at=NOW, server="house", runs=(RUN,), runs_total=1, tasks=(), failed=(), queues={}, merges=(),
    replicas=(REPLICA,), workers={"training": 2, "online": 1, "offline": 9},
    machines=(), volunteers={}, window=ContributionWindow(since=NOW - 3600, contributions=0),
    newest_refused=0, newest_decided=0, refusals=(),
    recompute=CheckCounts(), database=DatabaseFigures(kind="sqlite", bytes=1),
    backup_at=NOW - DAY_S,
)  # fmt: skip
FAILED = MergeLine(
    run="gpt", version=8, state="failed", at=NOW, seconds=1.0, contributions=3, message="no\x1bluck"
)  # fmt: skip


def seen(**changes: Any) -> Overview:
    return replace(WELL, **changes)


def run(**changes: Any) -> Overview:
    return seen(runs=(replace(RUN, **changes),))


def served(beat_at: float = NOW - 5, **figures: Any) -> Overview:
    return seen(replicas=(replace(REPLICA, beat_at=beat_at, figures=replace(FIGURES, **figures)),))


def troubles(picture: Overview, **limits: float) -> list[tuple[Level, str, str, str]]:
    _, found = health.judge(picture, Thresholds(**limits))
    return [(each.level, each.subject, each.text, each.todo) for each in found]


def only(picture: Overview, **limits: float) -> tuple[Level, str, str, str]:
    (found,) = troubles(picture, **limits)
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
    picture = replace(run(failed=2), queues={"verdicts": 201}, merges=(FAILED,))
    verdict, found = health.judge(picture)
    assert [(each.level, each.subject) for each in found] == [
        ("bad", "gpt"),
        ("watch", "verdicts"),
        ("watch", "gpt"),
    ]
    assert verdict.level == "bad"
    assert verdict.subject == ""
    assert verdict.text == "gpt: the merge to version 8 failed: no luck (and 2 more)"
    assert verdict.todo == found[0].todo
    verdict, found = health.judge(replace(WELL, merges=(FAILED,), queues={"verdicts": 201}))
    assert verdict.text == "gpt: the merge to version 8 failed: no luck (and 1 more)"
    verdict, found = health.judge(replace(WELL, merges=(FAILED,)))
    assert verdict.text == "gpt: the merge to version 8 failed: no luck"
    bare = health.judge(seen(database=DatabaseFigures(kind="sqlite", bytes=1, failed="full")))[0]
    assert bare == Trouble(level="bad", subject="", text="database: full")


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


def test_one_server_of_two_is_silent() -> None:
    other = ReplicaLine(id="0123456789ab", started_at=0.0, beat_at=NOW - 21, figures=FIGURES)
    nameless = replace(other, figures=replace(FIGURES, where=""))
    todo = "look at its log, and start it again"
    said = "https://house has been silent for 21 s"
    assert only(seen(replicas=(REPLICA, other))) == ("bad", "server", said, todo)
    said = "01234567 has been silent for 21 s"
    assert only(seen(replicas=(REPLICA, nameless))) == ("bad", "server", said, todo)
    gone = replace(other, beat_at=NOW - 3600)  # stopped for good: it outranks nothing
    assert only(seen(replicas=(REPLICA, gone)))[0] == "watch"
    just = replace(other, beat_at=NOW - 20)
    assert troubles(seen(replicas=(REPLICA, just))) == []
    assert health.alive(just, NOW)
    assert not health.alive(other, NOW)


def test_a_long_address_is_cut() -> None:
    said = only(served(where="https://" + "a" * 200, certificate_ends_at=NOW - 1))[2]
    assert said.startswith("the certificate of https://aaa")
    assert len(said) == len("the certificate of  has ended") + 80
    said = only(served(where="https://" + "a" * 200, errors=101))[2]
    assert len(said) == len(" failed 101 of 10,000 requests") + 80


def test_requests_that_failed() -> None:
    assert only(served(errors=101)) == (
        "watch", "server", "https://house failed 101 of 10,000 requests", "its log says why",
    )  # fmt: skip
    assert troubles(served(errors=100)) == []  # one in a hundred is not yet many
    assert len(troubles(served(errors=10, requests=900))) == 1
    assert troubles(served(errors=9, requests=10)) == []  # too few to tell


# ----------------------------------------------------------------------------------------- storage


def test_disk() -> None:
    low = served(disk_free=3.5 * GIB)
    assert only(low) == (
        "watch", "disk", "3.76 GB are free, at 1.07 GB nothing new is accepted",
        "free space, or give the blobs another disk",
    )  # fmt: skip
    assert only(served(disk_free=0.5 * GIB, read_only=True)) == (
        "bad", "disk", "537 MB are free: nothing new is accepted",
        "free space; work then continues",
    )  # fmt: skip
    assert troubles(served(disk_free=4.0 * GIB)) == []
    assert troubles(served(disk_free=0.0, disk_total=0.0, read_only=True)) == []  # in a store
    silent = replace(low.replicas[0], beat_at=NOW - 60)
    assert [each[1] for each in troubles(seen(replicas=(REPLICA, silent)))] == ["server"]
    nowhere = replace(REPLICA, figures=replace(FIGURES, disk_total=0.0))
    assert [each[1] for each in troubles(seen(replicas=(nowhere, low.replicas[0])))] == ["disk"]


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


def test_the_newest_merge_of_a_running_run_failed() -> None:
    good = replace(FAILED, state="committed")
    elsewhere = replace(FAILED, run="another")
    said = ("bad", "gpt", "the merge to version 8 failed: no luck")
    todo = "`coordinator run show gpt`; the log says more"
    assert only(seen(merges=(elsewhere, FAILED, good))) == (*said, todo)
    assert troubles(seen(merges=(good, FAILED))) == []
    long = replace(FAILED, message="x" * 300)
    assert only(seen(merges=(long,)))[2] == f"the merge to version 8 failed: {'x' * 89}…"
    two = seen(runs=(RUN, replace(RUN, name="b")), merges=(good, replace(FAILED, run="b")))
    assert only(two)[1] == "b"


def test_tasks_that_failed_for_good() -> None:
    todo = (
        "`coordinator task list --failed` shows why, `coordinator task requeue --all` tries again"
    )
    assert only(run(failed=1)) == ("watch", "gpt", "1 task failed for good", todo)
    assert troubles(run(failed=2, state="paused"))[-1][2] == "2 tasks failed for good"
    assert [each[1] for each in troubles(run(failed=2, state="completed"))] == ["runs"]


def test_nobody_works_on_a_run() -> None:
    alone = {"workers": 0, "accepted": 0}
    said = ("watch", "gpt", "nobody works on it, its newest version is 2:00 min old")
    todo = "`coordinator invite create` lets somebody in"
    assert only(run(**alone)) == (*said, todo)
    assert troubles(run(**alone, head_at=NOW - 20)) == []
    assert len(troubles(run(**alone, head_at=NOW - 20.5))) == 1
    assert troubles(run(workers=0, accepted=1)) == []
    assert troubles(run(**alone, head_at=None)) == []
    assert only(run(**alone, head_at=NOW - 1799))[0] == "watch"
    assert only(run(**alone, head_at=NOW - 1800))[0] == "bad"


def test_a_run_at_work_makes_no_version() -> None:
    silent = run(head_at=NOW - 4500, accepted=1)
    assert only(silent) == (
        "bad", "gpt", "no new version for 1:15 h, with 2 workers at it and 1 update to merge",
        "`coordinator run show gpt`; refusals and merges say why",
    )  # fmt: skip
    assert troubles(run(head_at=NOW - 4499)) == []  # five times its pace of a quarter of an hour
    assert len(troubles(run(head_at=NOW - 4500, workers=0, accepted=1))) == 1
    assert len(troubles(run(head_at=NOW - 3600, versions_an_hour=0.0))) == 1
    assert troubles(run(head_at=NOW - 3599, versions_an_hour=0.0)) == []
    assert troubles(silent, stalled_s=0.0) == []
    assert [each[1] for each in troubles(run(head_at=NOW - 4500, state="paused"))] == ["runs"]


# ------------------------------------------------------------------------------- trust and records


def test_too_many_of_the_newest_contributions_were_refused() -> None:
    refusal = RefusalCount(reason="norm", count=11, newest="too long", at=NOW)
    other = replace(refusal, reason="shape", count=1)
    todo = "the workers with refusals say whose they are"
    many = seen(newest_refused=1011, newest_decided=3030, refusals=(refusal, other))
    said = "1,011 of the newest 3,030 contributions were refused, most for norm"
    assert only(many) == ("bad", "refusals", said, todo)
    few = seen(newest_refused=10, newest_decided=30, refusals=(refusal,))
    assert troubles(few) == []
    assert only(seen(newest_refused=30, newest_decided=30))[2].endswith("most for other")


def test_a_check_that_failed_is_told_for_a_day() -> None:
    late = seen(recompute=CheckCounts(newest_failed_at=NOW - DAY_S))
    assert troubles(late) == []
    said = only(seen(recompute=CheckCounts(newest_failed_at=NOW - 7200)))
    assert said[:2] == ("watch", "checks")
    assert said[2].startswith("2:00 h ago a recompute proved that work was made up")
    assert said[3] == "`coordinator trust` shows whose"


def test_backups_are_old_or_missing() -> None:
    todo = "`coordinator backup FOLDER` makes one while the server works"
    never = ("watch", "backup", "no backup was ever made", todo)
    old = ("watch", "backup", "the last backup is 8 days old", todo)
    assert only(replace(run(started_at=NOW - 7 * DAY_S), backup_at=None)) == never
    assert troubles(replace(run(started_at=NOW - 7 * DAY_S + 1), backup_at=None)) == []
    paused = replace(run(started_at=NOW - 7 * DAY_S, state="paused"), backup_at=None)
    assert never in troubles(paused)
    assert troubles(replace(run(started_at=None), backup_at=None)) == []
    done = replace(run(started_at=NOW - 7 * DAY_S, state="completed"), backup_at=None)
    assert never not in troubles(done)
    assert only(seen(backup_at=NOW - 8 * DAY_S)) == old
    assert troubles(seen(backup_at=NOW - 7 * DAY_S + 1)) == []
    assert len(troubles(seen(backup_at=NOW - 7 * DAY_S))) == 1
    assert troubles(seen(backup_at=NOW - 8 * DAY_S), backup_s=0.0) == []
    assert old not in troubles(replace(seen(backup_at=NOW - 8 * DAY_S), runs=()))
    two = seen(runs=(RUN, replace(RUN, started_at=NOW - 9 * DAY_S)), backup_at=None)
    assert only(two) == never


@pytest.mark.parametrize(
    ("left", "level", "says"),
    [
        (21 * DAY_S, None, ""),
        (21 * DAY_S - 1, "watch", "ends in 21 days"),
        (7 * DAY_S, "watch", "ends in 7 days"),
        (7 * DAY_S - 1, "bad", "ends in 7 days"),
        (1.0, "bad", "ends in 0 days"),
        (0.0, "bad", "has ended"),
        (-DAY_S, "bad", "has ended"),
    ],
)
def test_certificates_end(left: float, level: Level | None, says: str) -> None:
    found = troubles(served(certificate_ends_at=NOW + left))
    todo = "renew the files of tls_cert and tls_key, and start the server again"
    expected = ("certificate", f"the certificate of https://house {says}", todo)
    assert found == ([] if level is None else [(level, *expected)])
    assert troubles(served(certificate_ends_at=None)) == []
