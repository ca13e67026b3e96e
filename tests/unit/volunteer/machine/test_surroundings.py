"""What a machine can tell of itself, and that what it cannot tell is unknown and never an error."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from volunteer.machine.policy import MachineFacts
from volunteer.machine.presence import run_command, terminals_unused_s, unused_s
from volunteer.machine.surroundings import SurroundingsReader, metered
from volunteer.settings.work_rules import WorkRules

SAYS = Callable[[Sequence[str]], str]


def saying(text: str) -> SAYS:
    return lambda command: text


@pytest.fixture(autouse=True)
def no_desktop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("system", "said", "means"),
    [
        ("linux", "u 1\n", True),
        ("linux", "u 3\n", True),
        ("linux", "u 2\n", False),
        ("linux", "u 4\n", False),
        ("linux", "u 0\n", None),
        ("linux", "", None),
        ("win32", "Variable\r\n", True),
        ("win32", "Unrestricted\r\n", False),
        ("win32", "", None),
        ("darwin", "anything", None),
    ],
)
def test_a_metered_connection(system: str, said: str, means: bool | None) -> None:
    assert metered(system, saying(said)) is means


def test_the_desktop_knows_when_it_was_last_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unused_s("darwin", saying('  | "HIDIdleTime" = 2500000000')) == 2.5
    assert unused_s("darwin", saying("")) is None
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nowhere")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    told = unused_s("linux", saying("(uint64 1500,)"))
    assert told is not None
    assert told <= 1.5


def test_a_desktop_that_does_not_tell_is_not_taken_for_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert unused_s("linux", saying("")) is not None  # no desktop: the terminals say it
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert unused_s("linux", saying("")) is None


def test_typing_into_any_terminal_counts(tmp_path: Path) -> None:
    (tmp_path / "pts").mkdir()
    old, new = tmp_path / "pts" / "0", tmp_path / "tty1"
    now = time.time()
    for path, age in ((old, 600), (new, 42)):
        path.touch()
        os.utime(path, (now - age, now - age))
    assert terminals_unused_s(tmp_path) == pytest.approx(42, abs=5)
    old.touch()
    os.utime(old, (now + 7200, now + 7200))  # before the clock was set back by two hours
    assert terminals_unused_s(tmp_path) == pytest.approx(42, abs=5)


def test_only_what_a_rule_needs_is_asked(tmp_path: Path) -> None:
    asked: list[str] = []

    def run(command: Sequence[str]) -> str:
        asked.append(command[0])
        return ""

    senses = SurroundingsReader(tmp_path, system="linux", run=run)
    nothing = WorkRules(on_battery=True, metered="work", disk_free_gb=0)
    assert senses.read(nothing, ["cpu"]) == MachineFacts()
    assert not asked
    everything = WorkRules(in_use="pause", programs=("x",), temperature_max=80)
    found = senses.read(everything, ["cpu", "cuda:0", "mps"])
    assert "busctl" in asked
    assert found.disk_free_bytes is not None
    assert found.programs


def test_what_costs_is_asked_again_only_after_a_while(tmp_path: Path) -> None:
    now, asked = [0.0], [0]

    def run(command: Sequence[str]) -> str:
        asked[0] += command[0] == "busctl"
        return "u 1"

    senses = SurroundingsReader(tmp_path, system="linux", run=run, monotonic=lambda: now[0])
    for now[0] in (0, 5, 59):
        assert senses.read(WorkRules(), []).metered is True
    assert asked[0] == 1
    now[0] = 60
    senses.read(WorkRules(), [])
    assert asked[0] == 2


def test_a_missing_program_or_disk_is_unknown(tmp_path: Path) -> None:
    assert run_command(["no-such-program-anywhere"]) == ""
    assert run_command(["false"]) == ""
    assert (
        SurroundingsReader(tmp_path / "gone").read(WorkRules(metered="work"), []).disk_free_bytes
        is None
    )
