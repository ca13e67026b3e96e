"""The notebook that lends a hosted machine: its cells are run as they stand, with a program that
says what a volunteer says.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import ROOT

NOTEBOOK = ROOT / "packaging" / "join.ipynb"
# A stand-in for what draws in a notebook: it writes every state of the one place that is drawn
# anew.
DISPLAY = """
import json
class Handle:
    def update(self, data, raw):
        print(json.dumps(data["text/plain"]), flush=True)
def display(data, raw, display_id):
    return Handle()
"""
# A stand-in for the program: it trains until it is told to end, and then gives its task back.
PROGRAM = """
import json, os, signal, sys
def tell(**event):
    print(json.dumps(event), flush=True)
def end(number, frame):
    tell(type="TaskEnded", message="the volunteer ends")
    tell(type="Stopped", message="ended")
    sys.exit(int(os.environ["ENDS_WITH"]))
signal.signal(signal.SIGTERM, end)
assert sys.argv[1:] == ["--no-ui", "--json"], sys.argv
tell(type="Started", nickname="ann", server=os.environ["VOLUNTEER_JOIN"], fingerprint="ab12")
print("volunteer: a complaint in words", flush=True)
tell(type="Connection", message="")
tell(type="Judged", verdict={"task": 6, "state": "rejected", "message": "too large\\x1b[2J"})
tell(type="LossMeasured", run="tiny", version=3, loss=4.25)
tell(type="Credits", me={"earned_micro": 2_500_000, "pending_micro": 500_000})
tell(type="Training", task=7, run="tiny", step=5, steps=10, loss=None)
tell(type="Training", task=7, run="tiny", step=10, steps=10, loss=3.5)
signal.pause()
"""


@pytest.fixture
def cells() -> list[str]:
    """The code of the notebook, cell by cell."""
    found: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    return ["".join(c["source"]) for c in found["cells"] if c["cell_type"] == "code"]


def test_it_is_saved_without_output_and_its_rules_come_first(cells: list[str]) -> None:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert "First the rules of whoever gives you this machine" in "".join(
        found["cells"][0]["source"]
    )
    for cell in found["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    for cell in cells:
        ast.parse(cell)


def worked(tmp_path: Path, cells: list[str], ends_with: int) -> tuple[int, list[str], str]:
    """Run the cells behind the installation; interrupt when the task has trained.

    Exit code, what was drawn, last words.
    """
    (tmp_path / "IPython").mkdir()
    (tmp_path / "IPython" / "__init__.py").write_text("")
    (tmp_path / "IPython" / "display.py").write_text(DISPLAY)
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [sys.executable, str(tmp_path / "program.py")]
    head = f"import json, os, subprocess, sys\nPROGRAM = {program!r}\n"
    (tmp_path / "cells.py").write_text("\n".join([head, cells[0], cells[2]]))
    child = subprocess.Popen(
        [sys.executable, str(tmp_path / "cells.py")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": str(tmp_path),
            "VOLUNTEER_JOIN": " https://lab ",
            "ENDS_WITH": str(ends_with),
        },
    )
    assert child.stdout is not None
    drawn: list[str] = []
    with child:
        for line in child.stdout:
            if not line.startswith('"'):
                return child.wait(60), drawn, line.strip()
            trained = any("100%" in text for text in drawn)
            drawn.append(json.loads(line))
            if "100%" in drawn[-1] and not trained:
                child.send_signal(signal.SIGINT)
    raise AssertionError(drawn)


def test_progress_is_drawn_and_an_interrupt_gives_the_task_back(
    tmp_path: Path, cells: list[str]
) -> None:
    code, drawn, last = worked(tmp_path, cells, 0)
    assert (code, last) == (0, "ended")
    said = drawn[-1].splitlines()
    assert said[0] == "ann helps https://lab, key ab12"
    assert said[1] == f"task 7 of tiny  [{'#' * 40}] 100%  loss 3.500"
    assert said[2] == "tiny is at version 3, loss 4.250"
    assert said[3] == "2.50 credits, 0.50 pending"
    assert said[5:] == [
        "volunteer: a complaint in words",
        "task 6: rejected too large [2J",
        "ending: what is quick is finished, the rest is given back; once more ends at once",
        "the volunteer ends",
        "ended",
    ]
    assert any(f"[{'#' * 20}{'.' * 20}] 50%" in text for text in drawn)


def test_a_bad_end_is_told(tmp_path: Path, cells: list[str]) -> None:
    code, _, last = worked(tmp_path, cells, 78)
    assert (code, last) == (0, "ended with status 78: see the last lines above")


def test_torch_is_kept_and_the_link_is_never_written(cells: list[str]) -> None:
    secret, install, work = cells
    assert '"--system-site-packages"' in install
    assert "torch==" in install
    assert "--constraint" in install
    assert "getpass" in secret
    assert "print(LINK" not in secret + work
