"""Tables of the organiser's commands: aligned for every script, and honest about the best."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.cli.listing import table
from coordinator.cli.runs import best_note, print_versions
from shared.protocol.versions import VersionInfo
from shared.text import cells


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
    assert "beyond doubt" in capsys.readouterr().out
    assert "beyond doubt" in best_note([best, version(8, 2.002)])
    assert best_note([best, version(8, 2.1), version(9, None)]) == ""
    assert best_note([version(8, 2.0)]) == ""
