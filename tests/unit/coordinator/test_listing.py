"""Tables of the organiser's commands: aligned for every script, and honest about the best."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from coordinator.cli import runs
from coordinator.cli.listing import table
from coordinator.cli.runs import best_note, print_versions
from coordinator.runs.queries import ends_at
from shared.protocol.versions import VersionInfo
from shared.text import cells
from volunteer.tui.text import percent


class Row(msgspec.Struct):
    name: str
    credits: int


def test_columns_stand_below_each_other_whatever_a_name_is_written_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [Row("ada", 1), Row("李小龙", 2), Row("कि", 3)]
    table(rows, {"name": lambda r: r.name, "credits": lambda r: r.credits}, "none")
    lines = capsys.readouterr().out.splitlines()
    assert {cells(line.rstrip()) for line in lines} == {cells(lines[0].rstrip())}


@pytest.mark.parametrize(("share", "said"), [(0.036, "3 %"), (0.999, "99 %"), (1.0, "100 %")])
def test_progress_is_told_as_the_volunteers_program_tells_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], share: float, said: str
) -> None:
    row = SimpleNamespace(
        name="r", state="running", workload="gpt", version=1, loss=None, workers=1, progress=share
    )
    monkeypatch.setattr(runs, "call", lambda where, command, ask: [row])
    runs.listing()
    assert said == percent(share)
    assert capsys.readouterr().out.rstrip().endswith(said)


@pytest.mark.parametrize(
    ("started_at", "idle_s", "progress", "end"),
    [
        (0.0, 0.0, 0.25, 400.0),
        (50.0, 0.0, 0.5, 150.0),
        (0.0, 60.0, 0.25, 220.0),  # paused for a minute
        (None, 0.0, 0.5, None),  # a draft
        (0.0, 0.0, None, None),  # it ends by a date or a loss
        (0.0, 0.0, 0.001, None),  # too little to say
        (0.0, 0.0, 1.0, None),
    ],
)
def test_the_end_of_a_run_is_estimated_by_its_pace(
    started_at: float | None, idle_s: float, progress: float | None, end: float | None
) -> None:
    assert ends_at(started_at, idle_s, progress, 100.0) == end


def version(number: int, loss: float | None, **more: Any) -> VersionInfo:
    return VersionInfo(
        version=number,
        kind="merge",
        created_at=0,
        contributions=1,
        global_step=0,
        tokens=0,
        published_sha256="",
        loss=loss,
        **more,
    )


def test_a_lower_loss_than_that_of_the_best_is_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    best = version(6, 2.063, best=True)
    print_versions([best, version(8, 2.002)])
    assert "difference is significant" in capsys.readouterr().out
    assert "difference is significant" in best_note([best, version(8, 2.002)])
    assert best_note([best, version(8, 2.1), version(9, None)]) == ""
    assert best_note([version(8, 2.0)]) == ""
