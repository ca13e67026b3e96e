"""What the demo says at its end, for workloads that play."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from coordinator.cli.serve import Demo
from coordinator.demo.demo import DemoOptions, child_environment, demo, program
from coordinator.demo.demo_report import Report, traffic_of
from coordinator.demo.demo_view import hints, summary, table
from coordinator.demo.runs import DEMOS
from shared.errors import Configuration, InvalidRunFile
from shared.protocol.versions import VersionInfo
from shared.text import measure_word, measured
from shared.workloads import base
from shared.workloads.declaration import Measure


def version(number: int, **metrics: float) -> VersionInfo:
    return VersionInfo(
        version=number,
        kind="merge",
        created_at=0.0,
        contributions=1,
        global_step=number,
        tokens=0,
        published_sha256="",
        loss=3.0 - number / 10,
        metrics=metrics,
    )


def report(**more: Any) -> Report:
    values = {
        "workload": "gomoku",
        "run": "demo-gomoku",
        "seconds": 190.0,
        "versions": 9,
        "loss_first": 3.0,
        "loss_last": 2.1,
        "sample_prompt": "",
        "sample_first": "",
        "sample_last": "",
        "tokens": 90_000,
        "items": "positions",
        "measure": "matches",
        "accepted": 40,
        "rejected": 0,
        "credits": {"ann": 12.5},
        "ledger": "balanced",
        "sent_bytes": 1_500_000,
        "received_bytes": 900,
        "data_dir": "",
    }
    return Report(**{**values, **more})


def test_the_command_line_takes_every_demo_by_its_name() -> None:
    assert {*get_args(Demo)} == {*DEMOS}


def test_a_workload_that_plays_ends_in_rating_and_tactics() -> None:
    history = (
        version(0, tactics=0.05, tactics_block=0.0, elo=0.0, elo_error=0.0),
        version(6, tactics=0.4, tactics_block=0.25),
        version(9, tactics=0.6, tactics_block=0.5, elo=300.0, elo_error=120.0),
    )
    lines = summary(report(history=history))
    text = "\n".join(lines)
    assert "tactical loss    3 -> 2.1" in text
    assert "\n".join(table(history)) in text
    assert "trained          90,000 positions" in text
    assert "ledger           balanced" in text
    assert "1.5 MB sent, 900 B received" in text
    rows = [line.split() for line in table(history)]
    assert rows[0] == ["version", "Elo", "tactics", "block"]
    assert rows[1] == ["0", "+0", "±", "0", "5", "%", "0", "%"]
    assert rows[2] == ["6", "40", "%", "25", "%"]
    assert rows[3] == ["9", "+300", "±", "120", "60", "%", "50", "%"]
    assert len({len(line) for line in table(history)}) == 1
    assert max(map(len, lines)) < 120


def test_a_run_of_problems_says_how_many_are_solved() -> None:
    measures: tuple[Measure, ...] = ("share solved", "loss")
    assert [measured(0.543, measure) for measure in measures] == ["45 %", "0.543"]
    assert [measure_word(measure) for measure in measures] == ["solved", "loss"]


def test_a_long_history_is_a_short_table_with_both_ends() -> None:
    rows = table([version(n, tactics=n / 100) for n in range(50)])
    numbers = [int(row.split()[0]) for row in rows[1:]]
    assert (numbers[0], numbers[-1], len(numbers)) == (0, 49, 8)
    assert table([version(0)]) == []


def test_whether_it_got_better_is_told_by_the_loss() -> None:
    assert report().improved
    worse = report(loss_last=3.5)
    assert not worse.improved
    assert "The tactical loss did not improve" in hints(worse)[-1]


def test_traffic_is_what_a_volunteer_said_last(tmp_path: Any) -> None:
    log = tmp_path / "volunteer.jsonl"
    log.write_text(
        '{"type":"Traffic","sent_bytes":1,"received_bytes":2}\nnot json\n'
        '{"type":"Stopped","sent_bytes":10,"received_bytes":20,"tasks":3}\n'
    )
    found = traffic_of(log)
    assert (found.sent_bytes, found.received_bytes, found.tasks) == (10, 20, 3)


def test_a_demo_of_which_nothing_came_tells_what_a_volunteer_complained_of(tmp_path: Any) -> None:
    log = tmp_path / "volunteer.jsonl"
    log.write_text(
        '{"type":"Idle","reason":"failing","message":"a task failed on cpu: no extra"}\n'
        '{"type":"Stopped","sent_bytes":10,"received_bytes":20,"tasks":0}\n'
    )
    complaint = traffic_of(log).complaint
    failed = report(loss_last=3.5, accepted=0, complaint=complaint)
    assert hints(failed)[-1] == "  No contribution came: a task failed on cpu: no extra"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"workload": "chess"}, 'no demo of "chess"'),
        ({"volunteers": 0}, "--volunteers must be between 1 and 64"),
        ({"volunteers": -1}, "--volunteers"),
        ({"volunteers": 10**6}, "--volunteers"),
        ({"minutes": -1.0}, "--minutes must be between 0 and"),
        ({"minutes": float("nan")}, "--minutes"),
        ({"minutes": float("inf")}, "--minutes"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_anything_is_made(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRunFile, match=said):
        demo(DemoOptions(**values))


def test_a_demo_leaves_the_data_directory_of_a_coordinator_alone(tmp_path: Path) -> None:
    (tmp_path / "coordinator.sqlite3").write_bytes(b"")
    with pytest.raises(InvalidRunFile, match="names a new folder"):
        demo(DemoOptions(data_dir=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["coordinator.sqlite3"]


def test_a_demo_leaves_the_folder_of_an_earlier_demo_alone(tmp_path: Path) -> None:
    kept = tmp_path / "coordinator" / "coordinator.sqlite3"
    kept.parent.mkdir()
    kept.write_bytes(b"")
    with pytest.raises(InvalidRunFile, match="names a new folder"):
        demo(DemoOptions(data_dir=str(tmp_path)))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]


def test_the_processes_of_a_demo_know_nothing_of_a_real_coordinator() -> None:
    real = {
        "COORDINATOR_DATABASE": "postgresql://production/db",
        "COORDINATOR_HOST": "0.0.0.0",
        "VOLUNTEER_JOIN": "https://train.example.org/join#key=y",
        "VOLUNTEER_HOME": "/home/ann",
    }
    environment = child_environment(real | {"PATH": "/bin", "HF_ENDPOINT": "https://mirror"})
    assert environment == {"OMP_NUM_THREADS": "1", "PATH": "/bin", "HF_ENDPOINT": "https://mirror"}
    assert child_environment({"OMP_NUM_THREADS": "3"}) == {"OMP_NUM_THREADS": "3"}


def test_a_missing_extra_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return importlib.metadata.distribution(name)

    monkeypatch.setattr(base, "distribution", distribution)
    monkeypatch.syspath_prepend(str(tmp_path))  # another path, looked through anew
    with pytest.raises(Configuration, match=r'the demo of "causal-lm" needs .*install .*"peft>='):
        demo(DemoOptions(workload="causal-lm", data_dir=str(tmp_path / "demo")))
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("name", ["coordinator", "volunteer"])
def test_programs_start_where_no_script_lies_beside_the_interpreter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where scripts end in .exe, and after an install into a folder."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*program(name), "--version"], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert importlib.metadata.version("volunteer") in done.stdout
