"""The check that runs failed tests again: names them, knows reasons, and hides nothing."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import ci
from tests.support.sources import ROOT, tree

FLAKY = "tests/a.py::test_waits[sqlite]"
BROKEN = "tests/a.py::test_is_wrong"


@dataclass
class FakeMake:
    """Stands for make: writes what pytest would have written after each turn."""

    path: Path
    turns: list[list[str]]  # tests that fail in each turn
    calls: list[bool] = field(default_factory=list)

    def __call__(self, arguments: str, alone: bool) -> int:
        failed = self.turns[len(self.calls)]
        self.calls.append(alone)
        self.path.joinpath("lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
        cases = "<testcase/><testcase><skipped/></testcase>"
        cases += "<testcase><failure/></testcase>" * len(failed)
        self.path.joinpath("results").write_text(f"<testsuites>{cases}</testsuites>")
        return int(bool(failed))

    def run(self) -> ci.Result:
        return ci.run(self, self.path / "lastfailed", self.path / "results")


def test_what_passes_is_not_run_again(tmp_path: Path) -> None:
    make = FakeMake(tmp_path, [[]])
    assert make.run() == ci.Result(passed=1)
    assert make.calls == [False]


def test_what_failed_runs_alone_and_is_named(tmp_path: Path) -> None:
    make = FakeMake(tmp_path, [[FLAKY], []])
    result = make.run()
    assert result == ci.Result(passed=2, again=[FLAKY])
    assert make.calls == [False, True]
    known = ci.summary(result, {"tests/a.py::test_waits": "it waits"})
    assert known == [f"run again: 1\n  {FLAKY}", f"known: {FLAKY}: it waits"]
    assert any("!!! UNEXPLAINED" in line for line in ci.summary(result, {}))


def test_what_fails_to_the_end_fails_the_check(tmp_path: Path) -> None:
    make = FakeMake(tmp_path, [[BROKEN, FLAKY], [BROKEN], [BROKEN]])
    result = make.run()
    assert result.status
    assert result.failed == [BROKEN]
    assert result.again == [BROKEN, FLAKY]
    assert f"FAILED 2 more times alone: {BROKEN}" in ci.summary(result, {})


def test_an_error_of_pytest_itself_is_not_run_again(tmp_path: Path) -> None:
    crash = ci.run(lambda *_: 3, tmp_path / "lastfailed", tmp_path / "results")
    assert crash == ci.Result(status=3)


@pytest.mark.parametrize("test", ci.reasons())
def test_the_list_of_timing_sensitive_tests_names_tests_and_reasons(test: str) -> None:
    path, _, function = test.partition("::")
    names = {
        node.name
        for node in ast.walk(tree(ROOT / path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert function in names
    assert len(ci.reasons()[test]) > 20
