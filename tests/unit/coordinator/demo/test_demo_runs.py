"""Runs of the demo."""

from __future__ import annotations

import pytest

from coordinator.demo.runs import DEMOS, demo_run
from coordinator.rules.run_file import parse
from shared.errors import InvalidRunFile
from shared.workloads.base import load


@pytest.mark.parametrize("workload", DEMOS)
@pytest.mark.parametrize("volunteers", [0, 1, 2, 5])
def test_the_demos_are_valid_run_files(workload: str, volunteers: int) -> None:
    plan = demo_run(workload, volunteers)
    run = parse(plan.toml, load(workload).defaults({}))
    assert (run.name, run.workload) == (plan.name, workload)
    assert plan.preparing


def test_a_demo_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(InvalidRunFile, match="one of: gpt, dcgan"):
        demo_run("chess", 2)
